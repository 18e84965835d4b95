"""Descales as a way to leak: what the FP8 paths couple, by structure, proof, perturbation, against sets by hand."""

from dataclasses import replace

import numpy as np
import pytest

from flamia_ref.attention import RECIPES, Recipe
from flamia_ref.attention.product import Scope
from flamia_ref.leakage import Severity, hunt, prove, structure

FA4, FA3, CUTLASS = (RECIPES[name] for name in ("fp8-fa4", "fp8-fa3", "cutlass-fp8"))
UNIT = replace(FA4.o.right, scope=Scope.UNIT)
V_ALONE = replace(FA4, name="v alone", s=replace(FA4.s, left=UNIT, right=UNIT), o=FA4.o)
LENGTHS = (40, 20)


def by_hand(lengths, *, of_s: bool, of_v: bool) -> dict[tuple[str, str], np.ndarray]:
    """Which tokens of an input each row of an output depends on, [out, in]: loops over all pairs.

    With a descale a row depends on all tokens of the document.
    """
    total, start = sum(lengths), 0
    found = {
        (output, name): np.zeros((total, total), dtype=bool)
        for output in ("out", "lse")
        for name in ("q", "k", "v")
    }
    for length in lengths:
        for i in range(length):
            for j in range(length):
                row = {"q": of_s or i == j, "k": of_s or j <= i, "v": of_v or j <= i}
                for (output, name), pairs in found.items():
                    if (output, name) != ("lse", "v"):
                        pairs[start + i, start + j] = row[name]
        start += length
    return found


SHARING = [
    pytest.param(FA4, True, True, id="fp8-fa4"),
    pytest.param(FA3, True, True, id="fp8-fa3"),
    pytest.param(V_ALONE, False, True, id="v alone"),
    pytest.param(CUTLASS, False, False, id="cutlass-fp8"),
]


@pytest.mark.parametrize(("recipe", "of_s", "of_v"), SHARING)
@pytest.mark.parametrize("lengths", [LENGTHS, (16, 0, 250, 1)], ids=str)
def test_structure(recipe: Recipe, of_s: bool, of_v: bool, lengths) -> None:
    found, wanted = structure(recipe, lengths=lengths), by_hand(lengths, of_s=of_s, of_v=of_v)
    for output, name in wanted:
        given = np.asarray(found.pairs(output, name))
        assert (given == wanted[output, name]).all(), (output, name)
    assert found.legal == (not of_s and not of_v)
    assert not any(one.counts.get(Severity.CROSS_DOCUMENT) for one in found.illegal)


def test_each_use_says_what_it_couples() -> None:
    for recipe, words in ((FA3, "one document and key/value head"), (CUTLASS, "no scale")):
        uses = {str(one.use): one for one in structure(recipe, lengths=(64, 20)).uses}
        couples, where = ("none", "none") if recipe is CUTLASS else ("document", "every tile")
        for use in ("s.q", "s.k", "o.v"):
            assert (uses[use].couples, uses[use].shares) == (couples, words)
            assert uses[use].where == where
        assert uses["o.p"].shares == "no scale"


@pytest.mark.parametrize(
    ("recipe", "of_s", "of_v"),
    [
        SHARING[1],
        SHARING[3],
        *(pytest.param(*x.values, id=x.id, marks=pytest.mark.nightly) for x in SHARING[::2]),
    ],
)
def test_the_proof_agrees(recipe: Recipe, of_s: bool, of_v: bool) -> None:
    lengths = (12, 7)
    certificate = prove(recipe, lengths=lengths, head_dim=32)
    allowed = by_hand(lengths, of_s=False, of_v=False)
    wanted = {
        (output, i, name, j)
        for (output, name), pairs in by_hand(lengths, of_s=of_s, of_v=of_v).items()
        for i, j in np.argwhere(pairs & ~allowed[output, name]).tolist()
    }
    assert set(map(tuple, certificate.illegal)) == wanted
    assert certificate.legal == (not wanted)


@pytest.mark.parametrize("recipe", [FA4, FA3], ids=["fp8-fa4", "fp8-fa3"])
def test_a_leak_is_found(recipe: Recipe) -> None:
    report = hunt(recipe, lengths=(24, 9), head_dim=32, backward=False, calls=300)
    assert report.verdict == "leak"
    assert {witness.severity for witness in report.witnesses} <= {Severity.FORWARD, Severity.PAST}


def test_without_a_scale_none_is_found() -> None:
    report = hunt(CUTLASS, lengths=(24, 9), head_dim=32, backward=False, calls=100)
    assert report.verdict == "none_found"
