"""Means as a way to leak: what `sage3-nvfp4` couples, by structure, by proof, by perturbation, against sets by hand."""

from dataclasses import replace

import numpy as np
import pytest

from flamia_ref.attention import RECIPES
from flamia_ref.leakage import Severity, hunt, prove, structure

RECIPE = RECIPES["sage3-nvfp4"]
PLAIN = replace(RECIPE.s.left, smoothing="none")
OF_K = replace(RECIPE, name="k", s=replace(RECIPE.s, left=PLAIN, correction_instruction=None))
OF_NONE = replace(OF_K, name="none", s=replace(OF_K.s, right=PLAIN))
LENGTHS = (150, 20)


def by_hand(lengths, *, q: bool = True, k: bool = True) -> dict[tuple[str, str], np.ndarray]:
    """Which tokens of an input each row of an output depends on, [out, in]: loops over all pairs.

    A row takes the mean of q over its 128 queries, that of k over its document, and the scales of v of the 16 keys
    around each key that it sees.
    """
    total = sum(lengths)
    found = {
        (output, name): np.zeros((total, total), dtype=bool)
        for output in ("out", "lse")
        for name in ("q", "k", "v")
    }
    start = 0
    for length in lengths:
        for i in range(length):
            for j in range(length):
                seen = j <= i
                block = j // 16 * 16 <= i  # the first key of the block is seen
                row = {
                    "q": j // 128 == i // 128 if q else i == j,
                    "k": True if k else seen,
                    "v": block,
                }
                for (output, name), pairs in found.items():
                    if (output, name) != ("lse", "v"):
                        pairs[start + i, start + j] = row[name]
        start += length
    return found


def legal(lengths) -> dict[str, np.ndarray]:
    """Which tokens a row may depend on."""
    total, start = sum(lengths), 0
    causal, own = np.zeros((total, total), dtype=bool), np.eye(total, dtype=bool)
    for length in lengths:
        part = slice(start, start + length)
        causal[part, part] = np.tril(np.ones((length, length), dtype=bool))
        start += length
    return {"q": own, "k": causal, "v": causal}


@pytest.mark.parametrize(
    ("recipe", "q", "k"),
    [(RECIPE, True, True), (OF_K, False, True), (OF_NONE, False, False)],
    ids=["both", "k alone", "none"],
)
@pytest.mark.parametrize("lengths", [LENGTHS, (16, 129, 1)])
def test_structure(recipe, q, k, lengths) -> None:
    found, wanted = structure(recipe, lengths=lengths), by_hand(lengths, q=q, k=k)
    for output, name in wanted:
        given = np.asarray(found.pairs(output, name))
        assert (given == wanted[output, name]).all(), (output, name)
    assert not found.legal
    assert not any(one.counts.get(Severity.CROSS_DOCUMENT) for one in found.illegal)


def test_each_use_says_what_it_couples() -> None:
    uses = {one.use: one for one in structure(RECIPE, lengths=(64, 20)).uses}
    assert {use: (one.couples, one.where) for use, one in uses.items()} == {
        "s.q": ("block", "every tile"),
        "s.k": ("document", "every tile"),
        "o.p": ("block", "none"),
        "o.v": ("block", "diagonal"),
    }
    assert uses["s.q"].shares == "a mean of 128 tokens"
    assert uses["s.k"].shares == "a mean of all tokens of the document"
    assert uses["o.v"].shares == "16 tokens"


@pytest.mark.parametrize(
    "lengths", [(24, 9), pytest.param((140, 20), marks=pytest.mark.nightly)], ids=str
)
def test_the_proof_agrees(lengths) -> None:
    certificate = prove(RECIPE, lengths=lengths, head_dim=16)
    assert not certificate.legal
    assert not certificate.unknown
    allowed, wanted = legal(lengths), by_hand(lengths)
    found = {key: np.zeros_like(pairs) for key, pairs in wanted.items()}
    for output, row, name, token in certificate.illegal:
        found[output, name][row, token] = True
    for (output, name), pairs in wanted.items():
        assert (found[output, name] == pairs & ~allowed[name]).all(), (output, name)


def test_perturbations_find_each_and_no_other() -> None:
    report = hunt(RECIPE, lengths=(24, 9), head_dim=32, backward=False, calls=400)
    assert report.leaks
    found = {(one.operand, one.severity) for one in report.witnesses}
    assert found >= {(name, Severity.FORWARD) for name in ("q", "k", "v")}
    assert found <= {(name, Severity.FORWARD) for name in ("q", "k", "v")} | {("q", Severity.PAST)}
