"""`attn-qat-nvfp4`: its quantizers leak nothing, its mask of -1e6 does. Structure, proof and the simulator agree."""

from dataclasses import replace

import ml_dtypes
import numpy as np

from flamia_ref.attention import RECIPES, forward
from flamia_ref.leakage import prove, structure

QAT = RECIPES["attn-qat-nvfp4"]
SELECTED = replace(QAT, softmax=replace(QAT.softmax, mask_value=None))
LENGTHS, TILE = [40, 7], 32

# A masked key reaches out, and with it delta and dQ, of the queries of its tile that come before it; so do the keys of
# the own document alone, up to its end.
LATER = sum(
    min(TILE * (query // TILE + 1), length) - 1 - query
    for length in LENGTHS
    for query in range(length)
)


def test_the_pairs_are_those_of_masked_keys_in_worked_tiles() -> None:
    found = structure(QAT, lengths=LENGTHS)
    assert [knob.knob for knob in found.knobs] == ["softmax.mask_value"]
    assert not any(use.illegal for use in found.uses)
    proof = prove(QAT, lengths=LENGTHS, head_dim=16)
    assert not proof.legal
    illegal = {
        (output, source): sum(one[0] == output and one[2] == source for one in proof.illegal)
        for output, source in {(one[0], one[2]) for one in proof.illegal}
    }
    assert illegal == dict.fromkeys([("out", "v"), ("delta", "v"), ("dq", "v")], LATER)


def test_with_a_select_it_is_proved() -> None:
    assert structure(SELECTED, lengths=LENGTHS).legal
    assert prove(SELECTED, lengths=LENGTHS, head_dim=16).legal


def test_the_witness_runs() -> None:
    """q[0] k[0] below -1e6: out[0] takes v[1]."""
    q, k, v = (np.zeros((2, 1, 16), np.float32) for _ in range(3))
    q[0, 0, 0], k[0, 0, 0] = 2048, -2048
    outs = []
    for value in (0, 2):
        v[1] = value
        outs.append(
            [
                forward(*(x.astype(ml_dtypes.bfloat16) for x in (q, k, v)), one).out[0]
                for one in (QAT, SELECTED)
            ]
        )
    assert (outs[0][0] != outs[1][0]).all()
    np.testing.assert_array_equal(outs[0][1], outs[1][1])
