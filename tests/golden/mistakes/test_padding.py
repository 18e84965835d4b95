"""Rows behind a document's end that the last query tile of dK and dV takes in."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flamia_ref import attention
from flamia_ref.golden.mistakes import Name
from flamia_ref.packing import Documents
from tests.golden.mistakes.planting import FINAL, InMemory, case_of, diagnosed, inputs, recipe_of

FOLDED = "flamia-mxfp8-folded"
TILE = 128


def scales_by_hand(case: InMemory) -> dict[str, Any]:
    """p.dv.scales with the rows of the next documents in the last block, from float64 scores of codes and scales."""
    spec = case.spec
    group = spec.heads // spec.kv_heads

    def decoded(name: str) -> Any:
        codes = case.tensors[f"{name}.codes"].view(ml_dtypes.float8_e4m3fn).astype(float)
        return np.ldexp(codes, case.tensors[f"{name}.scales"].astype(int) - 127)

    q, k = decoded("q"), np.repeat(decoded("k"), group, axis=1)
    c = spec.softmax_scale * np.log2(np.e)
    given: dict[str, Any] = {}
    for document, (a, b) in enumerate(pairwise(spec.starts)):
        end = min(a + (b - a + TILE - 1) // TILE * TILE, spec.tokens)
        s = np.einsum("qhd,khd->hqk", q[a:end], k[a:b])
        base = np.floor(case.tensors["lse"][:, a:end] * np.log2(np.e))
        fold = case.tensors["do.scales"][a:end, :, 0].T.astype(int) - 127
        seen = np.arange(end - a)[:, None] >= np.arange(b - a)
        p = np.where(seen, np.exp2(s * c - base[:, :, None] + fold[:, :, None]), 0)
        right = case.tensors[f"p.dv.scales.{document}"]
        x = np.pad(p, ((0, 0), (0, 32 * right.shape[1]), (0, 0)))[:, : 32 * right.shape[1]]
        amax = x.reshape(len(x), -1, 32, b - a).max(axis=2)
        power = np.where(amax > 0, np.ceil(np.log2(np.maximum(amax, 1e-300) / 448)), -127)
        found = (power + 127).astype(np.uint8)
        whole = (b - a) // 32  # blocks without padding
        found[:, :whole] = right[:, :whole]
        given[f"p.dv.scales.{document}"] = found
    return given


def with_rows_of_the_next_document(case: InMemory) -> dict[str, Any]:
    """dK and dV of each document alone, its queries lengthened to whole tiles by the tokens that follow."""
    recipe, spec, given = recipe_of(case), case.spec, inputs(case)
    right = attention.forward(
        given["q"],
        given["k"],
        given["v"],
        recipe,
        cu_seqlens=spec.cu_seqlens,
        causal=spec.causal,
        softmax_scale=spec.softmax_scale,
    )
    dk, dv = [], []
    for a, b in pairwise(spec.starts):
        rows = slice(a, min(a + (b - a + TILE - 1) // TILE * TILE, spec.tokens))
        mask = replace(
            right.mask,
            queries=Documents((0, rows.stop - a)),
            keys=Documents((0, b - a)),
            alignment="top_left",
        )
        ahead = replace(right, out=right.out[rows], lse=right.lse[:, rows], mask=mask)
        prepared = attention.prepare(
            given["q"][rows],
            given["k"][a:b],
            given["v"][a:b],
            recipe,
            cu_seqlens=np.array([0, rows.stop - a], np.int32),
            cu_seqlens_k=np.array([0, b - a], np.int32),
        )
        before = attention.preprocess(given["dout"][rows], ahead)
        back = attention.backward_from_operands(prepared, before, ahead)
        dk.append(back.dk)
        dv.append(back.dv)
    found = {name: case.tensors[name] for name in FINAL}
    return found | {"dk": np.concatenate(dk), "dv": np.concatenate(dv)}


def test_rows_of_the_next_document_show_in_the_scales_of_the_last_block() -> None:
    case = case_of("documents", FOLDED)
    first, found = diagnosed(case, scales_by_hand(case), final=False)
    assert first == "p.dv.scales.0"
    assert [one.mistake for one in found] == [Name.STALE_PADDING], found
    assert "the next document's tokens" in found[0].sentence


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", [FOLDED, "bf16-fa4"])
def test_rows_of_the_next_document_show_in_the_gradients(recipe: str) -> None:
    case = case_of("stale", recipe)
    _, found = diagnosed(case, with_rows_of_the_next_document(case), final=True)
    assert [one.mistake for one in found] == [Name.STALE_PADDING], found
    assert "dK and dV" in found[0].sentence


@pytest.mark.nightly
def test_what_two_mistakes_give_has_both_names() -> None:
    """All tokens fit into one tile: the queries behind a document's end are those of every later document."""
    case = case_of("documents", FOLDED)
    _, found = diagnosed(case, with_rows_of_the_next_document(case), final=True)
    assert {one.mistake for one in found} == {Name.STALE_PADDING, Name.NO_ISOLATION}, found
