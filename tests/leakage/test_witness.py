"""The witnesses: their data, and why a shared scale shows in them."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from flamia_ref.leakage import WITNESSES
from tests.leakage import by_hand


def test_the_public_witnesses() -> None:
    # NVIDIA/TransformerEngine issue 3248: S = D = 128; V[0] = 2^-20 and 1.0 at 16 or at 32; 2^-10 and 1024 at 64.
    assert {one.name: (one.first, one.token, one.value) for one in WITNESSES.values()} == {
        "same-block": (2.0**-20, 16, 1.0),
        "next-block": (2.0**-20, 32, 1.0),
        "whole-tensor": (2.0**-10, 64, 1024.0),
    }
    for one in WITNESSES.values():
        assert (one.tokens, one.head_dim) == (128, 128)
        assert one.source == "https://github.com/NVIDIA/TransformerEngine/issues/3248"


@pytest.mark.parametrize("name", WITNESSES)
def test_inputs(name: str) -> None:
    witness = WITNESSES[name]
    for changed in (False, True):
        q, k, v = witness.inputs(changed=changed)
        for x in (q, k, v):
            assert x.shape == (128, 1, 128)
            assert x.dtype == np.float32
            assert (x.astype(ml_dtypes.bfloat16).astype(np.float32) == x).all()
        assert (q == 1).all()
        assert (k == 1).all()
        assert (v == v[..., :1]).all()
        rows = {0: witness.first} | ({witness.token: witness.value} if changed else {})
        assert {int(i): float(v[i, 0, 0]) for i in np.flatnonzero(v[:, 0, 0])} == rows


@pytest.mark.parametrize(
    ("name", "block", "vanishes"),
    [
        ("same-block", 16, False),
        ("same-block", 32, True),
        ("next-block", 32, False),
        ("next-block", 64, True),
        ("whole-tensor", 64, False),
        ("whole-tensor", 128, True),
    ],
)
def test_the_first_value_vanishes_where_the_scale_is_shared(
    name: str, block: int, vanishes: bool
) -> None:
    witness = WITNESSES[name]
    first, value = Fraction(witness.first), Fraction(witness.value)
    assert by_hand.blocked(by_hand.values(first, None, value), block)[0] == first
    changed = by_hand.blocked(by_hand.values(first, witness.token, value), block)
    assert changed[witness.token] == value
    assert changed[0] == (0 if vanishes else first)


def test_an_unknown_name() -> None:
    with pytest.raises(ValueError, match="unknown witness 'same_block'; did you mean 'same-block'"):
        WITNESSES["same_block"]
