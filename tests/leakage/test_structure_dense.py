"""`structure` against the dense analysis pair by pair, and what it says of long packs against the packs themselves."""

import random

import numpy as np
import pytest

from flamia_ref.leakage import Structure, structure
from flamia_ref.leakage.legal import LegalPairs
from flamia_ref.leakage.sharing import sampling
from flamia_ref.leakage.sharing.dependence import Dependence
from flamia_ref.leakage.sharing.illegal import Findings
from flamia_ref.leakage.sharing.placement import Grid, Placement
from tests.leakage.dense import Pack, dependencies
from tests.leakage.structure_recipes import TENSOR, at_random, pack_at_random

DAILY, NIGHTLY = 24, 800
HARD = (537,)  # a scale of all dO' brings in what dO' of later rows alone depends on


def found_for(recipe: object, pack: Pack) -> Structure:
    return structure(
        recipe,  # type: ignore[arg-type]
        lengths=pack.queries,
        lengths_k=pack.keys,
        causal=pack.causal,
        window=pack.window,
        alignment="top_left" if pack.top_left else "bottom_right",
        grid="pack" if pack.packed_blocks else "document",
    )


def compared(seed: int) -> None:
    """Nothing is missing; and nothing is there that the dense analysis has not, but where that is said to be so."""
    draw = random.Random(seed)
    recipe, pack = at_random(draw), pack_at_random(draw)
    found = found_for(recipe, pack)
    # The analysis by rows holds more than each pair does: where masked pairs have scores and P's blocks are guarded,
    # where a tensor shares a scale and some of its tokens are zeros or seen by nobody, where queries see no key and
    # blocks are the pack's, and where dV takes the forward's P.
    exact = (
        recipe.softmax.mask_value is None
        and recipe.gradient.p_for_dv == "recomputed"
        and not any(operand.block == TENSOR.block for _, operand in recipe.uses())
        and not pack.packed_blocks
    )
    for (output, given), dense in dependencies(recipe, pack).items():
        pairs = found.pairs(output, given)
        missing = dense & ~pairs
        assert not missing.any(), (seed, output, given, np.argwhere(missing)[0])
        if exact:
            more = pairs & ~dense
            assert not more.any(), (seed, output, given, np.argwhere(more)[0])


def test_random_recipes_and_masks() -> None:
    for seed in (*HARD, *range(DAILY)):
        compared(seed)


@pytest.mark.nightly
def test_many_random_recipes_and_masks() -> None:
    for seed in range(DAILY, NIGHTLY):
        compared(seed)


def long_pack(seed: int) -> None:
    """Counts and examples that are extrapolated from short documents are those of the documents themselves."""
    draw = random.Random(seed)
    recipe = at_random(draw)
    lengths = [draw.randint(0, 700) for _ in range(draw.choice([1, 2, 3]))]
    keys = list(lengths)
    if draw.random() < 0.4:
        keys = [
            max(0, length + draw.choice([-500, 0, 600]) + draw.randint(-90, 90))
            for length in lengths
        ]
    causal, window = draw.random() < 0.7, (None, None)
    if draw.random() < 0.5:
        right = None if causal else draw.choice([None, 0, 5, 33])
        window = (draw.choice([None, 0, 3, 20, 40, 100]), right)
    alignment = draw.choice(["top_left", "bottom_right"])
    found = structure(
        recipe, lengths=lengths, lengths_k=keys, causal=causal, window=window, alignment=alignment
    )
    placement = Placement(mask=found.mask, grid=Grid.DOCUMENT)
    whole = Dependence(coupling=found.coupling, placement=placement)
    assert found.illegal == tuple(Findings(whole, sampling.of_pack(found.mask)).all()), seed
    legal = LegalPairs(found.mask)
    kinds = {(one.output, one.input, severity) for one in found.illegal for severity in one.counts}
    assert {(one.output, one.input, one.severity) for one in found.examples} == kinds, seed
    for one in found.examples:
        spans = found.spans(one.output, one.input)
        at = one.out_token
        assert any(run.begin[at] <= one.in_token < run.end[at] for run in spans), (seed, one)
        may = legal.spans(one.output, one.input)
        assert not may.begin[at] <= one.in_token < may.end[at], (seed, one)
        severity = legal.severity(one.output, at, one.input, one.in_token)
        assert severity.item() == one.severity, (seed, one)


def test_long_packs() -> None:
    for seed in range(DAILY):
        long_pack(seed)


@pytest.mark.nightly
def test_many_long_packs() -> None:
    for seed in range(DAILY, NIGHTLY):
        long_pack(seed)


def test_counts_by_severity_are_those_of_the_pairs_one_by_one() -> None:
    for seed in range(100, 100 + DAILY):
        draw = random.Random(seed)
        recipe, pack = at_random(draw), pack_at_random(draw)
        found = found_for(recipe, pack)
        legal = LegalPairs(found.mask)
        by_name = {(one.output, one.input): one for one in found.illegal}
        for output in ("out", "lse", "delta", "dq", "dk", "dv"):
            for given in ("q", "k", "v", "dout"):
                pairs = np.argwhere(found.illegal_pairs(output, given))
                counted = dict(by_name[output, given].counts) if len(pairs) else {}
                assert ((output, given) in by_name) == bool(len(pairs)), (seed, output, given)
                severities = legal.severity(output, pairs[:, 0], given, pairs[:, 1])
                names, counts = np.unique(severities.astype(str), return_counts=True)
                assert counted == dict(zip(names, counts, strict=True)), (seed, output, given)
