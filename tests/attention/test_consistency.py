"""The consistency report: what it finds where the answer is known, and that planted faults are found."""

import dataclasses
import functools
import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from flamia_ref.attention import (
    RECIPES,
    consistency,
    float64,
    gradient_cases,
    invariance,
    measures,
    samples,
)
from flamia_ref.attention.description import data_differences, evidence_differences, summary
from flamia_ref.attention.findings import TITLES, Verdict
from flamia_ref.attention.product import Guard, Scope
from flamia_ref.formats import dequantize, quantize
from tests.attention.samples import BF16
from tests.independent import nvfp4

ROOT = Path(__file__).resolve().parent.parent.parent
FA4, CUDNN, PV_BF16 = (RECIPES[name] for name in ("bf16-fa4", "cudnn-mxfp8", "cudnn-mxfp8-pv-bf16"))
GUARDED, FOLDED, UNGUARDED = (
    RECIPES[f"flamia-mxfp8{end}"] for end in ("", "-folded", "-unguarded")
)
FP4, UE4M3 = (RECIPES[f"flamia-nvfp4-fp8{end}"] for end in ("", "-ue4m3"))
# With e4m3(2^-20 x 448) = 0 one descale of a document does what one scale of 32 tokens does. In NVFP4 without a power
# of two above its scales 2^-20 is 0 alone, too, as it is in e4m3 without a scale.
LEAKS = {CUDNN.name, UNGUARDED.name, "cudnn-mxfp8-reference", "fp8-fa3", "fp8-fa4"}
SHAPE = (2, 1, 64)
SMALL = (45, 1, 33)
OTHERS = (33, 0, 50)


@functools.cache
def run(name: str, make=samples.bell, lengths=SMALL, causal: bool = True) -> measures.Run:
    return measures.traced(RECIPES[name], make(lengths, *SHAPE), causal=causal)


def with_gradient(recipe, **changes):
    return replace(recipe, name="mine", gradient=replace(recipe.gradient, **changes))


@functools.cache
def report(name: str):
    return consistency.check(name)


def test_samples_are_the_same_everywhere() -> None:
    # The first values of PCG64 with seed 0, from numpy's documentation of its raw stream, by hand.
    first = np.random.PCG64(0).random_raw(1)[0]
    value = (sum(int(first).to_bytes(8, "little")) - 1020) * 4 / 256
    sample = samples.bell((3,), 1, 1, 1)
    assert sample.q[0, 0, 0] == np.float32(value).astype(BF16)
    wide = samples.wide((200,), *SHAPE)
    exponents = np.frexp(wide.k.astype(np.float64))[1]
    assert exponents.min() < -20
    assert exponents.max() > 0


def test_c1_sees_a_score_that_is_one_bit_off() -> None:
    for name in ("bf16-fa4", "flamia-mxfp8"):
        found = run(name)
        assert measures.recomputed_scores(found)[0] == 0
        s = [x.copy() for x in found.forward.trace["s"]]
        s[0].view(np.uint32)[1, 40, 3] ^= 1 << 20
        s[0].view(np.uint32)[1, 3, 40] ^= 1 << 20  # masked
        trace = {**found.forward.trace, "s": s}
        wrong = found._replace(forward=replace(found.forward, trace=trace))
        assert measures.recomputed_scores(wrong)[0] == 1


@pytest.mark.parametrize("recipe", [FA4, CUDNN, FOLDED, FP4], ids=lambda recipe: recipe.name)
def test_c1_under_a_window_a_soft_cap_and_a_sink(recipe) -> None:
    sink = np.array([0.5, -np.inf], dtype=np.float32)
    sample = samples.bell(SMALL, *SHAPE)
    found = measures.traced(recipe, sample, window=(10, 0), softcap=3.0, sink=sink)
    count = measures.recomputed_scores(found)
    pairs = sum(min(row, 10) + 1 for length in SMALL for row in range(length))
    assert (count.differing, count.elements) == (0, 2 * pairs)
    other = found._replace(forward=replace(found.forward, softcap=3.5))
    assert measures.recomputed_scores(other).differing > pairs


def blocks(x, block, documents):
    """x quantized by te-mx-e4m3, each document and head on its own."""
    heads = np.moveaxis(x.astype(np.float32), 1, 0)
    parts = [
        dequantize(quantize(heads[:, document], "te-mx-e4m3", block=block), np.float64)
        for document in documents
        if document.stop > document.start
    ]
    return np.moveaxis(np.concatenate(parts, axis=1), 0, 1)


@pytest.mark.parametrize("tensor", ["q", "k", "v", "do"])
def test_c2_counts_the_elements_that_two_quantizations_change(tensor: str) -> None:
    found = run("cudnn-mxfp8", samples.wide)
    x = getattr(found.sample, "dout" if tensor == "do" else tensor)
    along_channels, along_tokens = (
        blocks(x, block, found.sample.documents) for block in ((1, 32), (32, 1))
    )
    count = measures.two_values(found, tensor)
    assert count.differing == (along_channels != along_tokens).sum() > 0
    assert count.elements == x.size

    found = run("cudnn-mxfp8-pv-bf16")
    along_channels = blocks(
        getattr(found.sample, "dout" if tensor == "do" else tensor),
        (1, 32),
        found.sample.documents,
    )
    x = getattr(found.sample, "dout" if tensor == "do" else tensor).astype(np.float64)
    count = measures.two_values(found, tensor)
    assert count.differing == (along_channels != x).sum() > 0
    by_use = x if tensor == "v" else along_channels  # the first product of v is O, in bfloat16
    expected = np.linalg.norm(along_channels - x) / np.linalg.norm(by_use)
    assert count.relative == pytest.approx(expected, rel=1e-12)


E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def test_c2_reads_static_scales_and_those_of_the_block_before() -> None:
    static = replace(CUDNN.s.left, format="e4m3", block=None, scope=Scope.STATIC, static_scale=124)
    before = replace(CUDNN.s.right, block=(32, 32), scope=Scope.PREVIOUS_BLOCK, static_scale=126)
    mine = replace(CUDNN, name="mine", s=replace(CUDNN.s, left=static, right=before))
    sample = samples.wide(SMALL, *SHAPE)
    found = measures.traced(mine, sample, causal=True)
    along_tokens = blocks(sample.q, (32, 1), sample.documents)
    q = (sample.q.astype(np.float32) * 8).clip(-448, 448).astype(E4M3).astype(np.float64) / 8
    assert measures.two_values(found, "q").differing == (q != along_tokens).sum() > 0

    # k has one head. The amax of 32 tokens and 32 channels, over 448 and rounded up to a power of two.
    k, along_tokens = sample.k[:, 0], blocks(sample.k, (32, 1), sample.documents)[:, 0]
    expected = np.zeros(k.shape)
    for document in sample.documents:
        for first in (0, 32):
            scale = 2.0**-1
            for start in range(document.start, document.stop, 32):
                part = (slice(start, min(start + 32, document.stop)), slice(first, first + 32))
                x = k[part].astype(np.float64)
                codes = (x / scale).clip(-448, 448).astype(np.float32).astype(E4M3)
                expected[part] = codes.astype(np.float64) * scale
                scale = 2.0 ** np.ceil(np.log2(np.abs(x).max() / 448))
    assert measures.two_values(found, "k").differing == (expected != along_tokens).sum() > 0


@pytest.mark.parametrize(("tensor", "later"), [("q", "dk"), ("k", "dq")])
@pytest.mark.parametrize("name", [FP4.name, UE4M3.name])
def test_c2_counts_what_promotion_changes(name: str, tensor: str, later: str) -> None:
    """The values of both copies by the types of ml_dtypes, and powers of two."""
    found = run(name, samples.wide)
    trace = {**found.forward.trace, **found.backward.trace}

    def powers(name: str) -> np.ndarray:
        return np.exp2(trace[name].astype(np.float64) - 127)

    in_s = trace[f"{tensor}.s.codes"].view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    if name == FP4.name:
        in_s *= np.repeat(powers(f"{tensor}.s.scales"), 16, axis=2)
    else:
        scales = trace[f"{tensor}.s.scales"].view(E4M3).astype(np.float64)
        in_s *= np.repeat(scales, 16, axis=2) * powers(f"{tensor}.s.token_scales")
    promoted = trace[f"{tensor}.{later}.codes"].view(E4M3).astype(np.float64)
    promoted *= powers(f"{tensor}.{later}.scales")
    count = measures.two_values(found, tensor)
    assert count.elements == in_s.size
    assert count.differing == (in_s != promoted).sum()
    assert count.relative == pytest.approx(np.linalg.norm(in_s - promoted) / np.linalg.norm(in_s))
    assert (count.differing == 0) == (name == FP4.name)
    for stage in (f"{tensor}.{later}.codes", f"{tensor}.s.codes"):
        changed = trace[stage].copy()
        same = np.argwhere((in_s == promoted) & (in_s != 0))[-1]
        changed[tuple(same)] ^= 8 if stage.endswith("s.codes") else 128
        wrong = replace(found.backward, trace={**trace, stage: changed})
        assert measures.two_values(found._replace(backward=wrong), tensor).differing == (
            count.differing + 1
        )


@pytest.mark.parametrize("name", ["flamia-mxfp8-folded", "flamia-mxfp8", "flamia-mxfp8-unguarded"])
def test_c3_where_both_bases_are_integers(name: str) -> None:
    """With one key tile and integer bases, both roundings of P are read off the codes exactly."""
    found = run(name)
    trace = {**found.forward.trace, **found.backward.trace}
    differing = pairs = 0
    for index, document in enumerate(found.sample.documents):
        length = document.stop - document.start
        seen = np.tril(np.ones((length, length), bool))

        def exponents(name: str, blocks, index=index, length=length) -> np.ndarray:
            scales = trace[name][index].astype(np.int32) - 127
            for axis, extent in zip((1, 2), blocks, strict=True):
                scales = np.repeat(scales, extent, axis=axis)
            return scales[:, :length, :length]

        p_o, p_dv = (
            trace[f"p.{use}.codes"][index].view(E4M3).astype(np.float64) for use in ("o", "dv")
        )
        m = found.forward.trace["row_max"][:, document, None].astype(np.int32)
        b = np.floor(found.forward.lse[:, document, None] * np.float32(np.log2(np.e)))
        b = b.astype(np.int32)
        if name == "flamia-mxfp8-folded":
            of_v = trace["v.scales"][document, 0, 0].astype(np.int32) - 127
            p_o = np.ldexp(p_o, exponents("p.o.scales", (1, 32)) - of_v)
        else:
            m = m - 8
        if name == "flamia-mxfp8":  # one diagonal block and the last
            block = np.arange(length) // 32
            p = trace["p"][index].astype(BF16).astype(np.float64)
            p_o = np.where(block[:, None] == block, p, p_o)
        blocks = (32, 32) if name == "flamia-mxfp8-unguarded" else (32, 1)
        p_dv = np.ldexp(p_dv, exponents("p.dv.scales", blocks))
        if name != "flamia-mxfp8-unguarded":
            of_do = trace["do.scales"][document, :, 0].T.astype(np.int32) - 127
            p_dv = np.ldexp(p_dv, -of_do[:, :, None])
        differing += int((np.ldexp(p_o, m - b) != p_dv)[:, seen].sum())
        pairs += 2 * int(seen.sum())
    count = measures.two_roundings(found)
    assert (count.differing, count.elements) == (differing, pairs)
    assert 0 < differing < pairs


@pytest.mark.parametrize("name", ["bf16-fa4", "cudnn-mxfp8", "flamia-mxfp8"])
def test_c4_tells_the_returned_output_from_the_one_before_rounding(name: str) -> None:
    found = run(name)
    delta = measures.delta(found)
    assert delta.halved
    assert delta.returned < 2**-18 < 2**-13 < delta.unrounded
    # A forward whose out is not rounded: then the traced delta is of something else.
    other = replace(found.forward, out=found.forward.trace["o"])
    assert measures.delta(found._replace(forward=other)).returned == delta.unrounded


@pytest.mark.parametrize("recipe", [FA4, CUDNN, FOLDED], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        ("returned_out", Verdict.HOLDS),
        ("quantized_dout", Verdict.HOLDS),
        ("unrounded_out", Verdict.BROKEN),
        ("p_dp", Verdict.BROKEN),
    ],
)
def test_c4_by_the_source_of_delta(recipe, source: str, verdict: Verdict) -> None:
    mine = with_gradient(recipe, delta_source=source)
    found = measures.traced(mine, samples.bell(SMALL, *SHAPE), causal=True)
    assert consistency._c4(found).verdict is verdict
    assert measures.delta(found).halved == (verdict is Verdict.HOLDS)


def test_c4_of_an_o_of_high_precision() -> None:
    """It is none of the two: P in bfloat16 is more than a rounding of O away."""
    found = measures.traced(RECIPES["attn-qat-nvfp4"], samples.bell(SMALL, *SHAPE), causal=True)
    one = consistency._c4(found)
    assert one.verdict is Verdict.BROKEN
    assert (
        "delta takes high_precision_out, the O of P in bfloat16 that the forward keeps"
        in one.details
    )
    delta = measures.delta(found)
    assert not delta.halved
    assert min(delta.returned, delta.unrounded) > 2**-9


def test_c3_of_scales_that_are_no_powers_of_two() -> None:
    """P of both passes by the codes and scales that exact rationals give, brought to one base."""
    sample = samples.bell((20,), 1, 1, 16)
    found = measures.traced(RECIPES["attn-qat-nvfp4"], sample, causal=True)
    seen = np.tril(np.ones((20, 20), bool))
    relative = []
    for p in (found.forward.trace["p"][0], found.backward.trace["p.dv"][0]):
        values = nvfp4.values(nvfp4.rows(p[0].view(np.uint32).tolist()))
        rounded = (np.array(values, np.uint32) << 16).view(np.float32).astype(np.float64)
        relative.append(np.where(seen, rounded / np.where(seen, p[0], 1), 0))
    differing = int((np.abs(relative[0] - relative[1]) > 2.0**-12 * np.maximum(*relative)).sum())
    count = measures.two_roundings(found)
    assert (count.differing, count.elements) == (differing, int(seen.sum()))
    assert 0 < differing < seen.sum()


def test_c3_where_dv_takes_the_rounded_p_of_the_forward() -> None:
    """In bfloat16 with integer bases it is moved exactly, so that nothing is rounded a second time."""
    mine = replace(FA4, name="mine", softmax=FOLDED.softmax, gradient=FOLDED.gradient)
    sample = samples.bell(SMALL, *SHAPE)
    again, kept = (
        measures.two_roundings(measures.traced(recipe, sample))
        for recipe in (mine, with_gradient(mine, p_for_dv="forward"))
    )
    assert kept.differing == 0
    assert again.differing == 0  # with an integer base both round the same significand
    raw = replace(FA4, name="mine", gradient=replace(FA4.gradient, p_for_dv="forward"))
    assert measures.two_roundings(measures.traced(raw, sample)).differing > 0


def test_c5_of_rows_that_are_known() -> None:
    found = run("bf16-fa4", lengths=(3,))
    ds = np.zeros((2, 3, 3), np.float32)
    ds[:, 0, 0] = 7  # sees one key: not counted
    ds[:, 1, :2] = [1, -1]
    ds[:, 2] = [3, -1, -1]
    trace = {**found.backward.trace, "ds": [ds]}
    sums = measures.row_sums(found._replace(backward=replace(found.backward, trace=trace)))
    assert sums.largest == pytest.approx(0.2)
    assert sums.root_mean_square == pytest.approx((0.2**2 / 2) ** 0.5)
    assert sums.together == pytest.approx(1 / 7)


def test_a_gradient_that_does_not_fit_is_broken() -> None:
    wrong = replace(CUDNN, gradient=replace(CUDNN.gradient, p_offset=7))
    found = run("cudnn-mxfp8")
    one = consistency._gradient(found._replace(recipe=wrong))
    assert one.verdict is Verdict.BROKEN
    assert one.figures["dv"] == pytest.approx(0.5, abs=1e-9)
    assert one.figures["dq"] < 1e-12
    assert consistency._gradient(found).verdict is Verdict.HOLDS


def gradient_case(name: str) -> gradient_cases.Case:
    sample, other = (samples.bell(lengths, *SHAPE) for lengths in (SMALL, OTHERS))
    (found,) = (case for case in gradient_cases.cases(sample, other) if case.name == name)
    return found


CASES = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "window to the left": {"window": (40, 0)},
    "window to both sides": {"causal": False, "window": (30, 20)},
    "other keys, bottom right": {"other": True},
    "other keys, top left": {"other": True, "alignment": "top_left"},
    "soft cap": {"softcap": 5.0},
    "sink": {"sink": np.array([1.5, -0.25], dtype=np.float32)},
    "other keys, window, soft cap and sink": {
        "other": True,
        "causal": False,
        "window": (30, 20),
        "alignment": "top_left",
        "softcap": 5.0,
        "sink": np.array([1.5, -0.25], dtype=np.float32),
    },
}


def test_the_gradient_is_tried_with_every_mask() -> None:
    sample, other = (samples.bell(lengths, *SHAPE) for lengths in (SMALL, OTHERS))
    assert [case.name for case in gradient_cases.cases(sample, other)] == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_case_of_the_gradient_is_what_its_name_says(name: str) -> None:
    """Its gradient without quantizers is that of attention in float64, which is held to torch and to differences."""
    given = dict(CASES[name])
    queries = samples.bell(SMALL, *SHAPE)
    keys = samples.bell(OTHERS, *SHAPE) if given.pop("other", False) else queries
    scale = 0.125
    expected = float64.backward(
        queries.q,
        keys.k,
        keys.v,
        queries.dout,
        cu_seqlens=np.array(queries.documents.offsets, dtype=np.int32),
        cu_seqlens_k=np.array(keys.documents.offsets, dtype=np.int32),
        softmax_scale=scale,
        **given,
    )
    found = gradient_case(name).gradient(FOLDED, scale, quantized=False)
    for result, other in zip(found, expected, strict=True):
        if other is None:
            assert result is None
        else:
            assert np.abs(result - other).max() <= 1e-13 * np.abs(other).max()


def _alignment(mask):
    swapped = {"top_left": "bottom_right", "bottom_right": "top_left"}[mask.alignment]
    return replace(mask, alignment=swapped)


FAULTS = {
    "window a key short": (
        lambda mask, more: (replace(mask, window=(mask.window[0] - 1, mask.window[1])), more),
        "window to the left",
    ),
    "alignment swapped": (lambda mask, more: (_alignment(mask), more), "other keys, top left"),
    "no soft cap": (lambda mask, more: (mask, more | {"softcap": None}), "soft cap"),
    "sink twice": (
        lambda mask, more: (mask, more | {"sink": more["sink"] + np.log(2)}),
        "sink",
    ),
    "sink off by 1e-10": (
        lambda mask, more: (mask, more | {"sink": more["sink"] + 1e-10}),
        "other keys, window, soft cap and sink",
    ),
}


@pytest.mark.parametrize(("fault", "name"), FAULTS.values(), ids=FAULTS)
def test_a_backward_under_another_mask_is_found(
    fault, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, right = gradient_case(name), gradient_cases.exact.backward
    assert max(gradient_cases.deviations(FOLDED, case, 0.125).values()) < 1e-14

    def wrong(*arguments, softmax_scale, **more):
        *arrays, mask = arguments
        mask, more = fault(mask, more)
        return right(*arrays, mask, softmax_scale=softmax_scale, **more)

    monkeypatch.setattr(gradient_cases.exact, "backward", wrong)
    found = gradient_cases.deviations(FOLDED, case, 0.125)
    assert max(found.values()) > consistency._GRADIENT_TOLERANCE
    assert ("dsink" in found) == ("sink" in name)


def test_documents_that_see_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = samples.bell(SMALL, *SHAPE)
    assert invariance.packing(FA4, sample, causal=False) == []
    right = invariance.forward

    def wrong(q, k, v, recipe, **attended):
        lse = right(q, k, v, recipe, causal=attended["causal"]).lse
        return replace(right(q, k, v, recipe, **attended), lse=lse)

    monkeypatch.setattr(invariance, "forward", wrong)
    changes = invariance.packing(FA4, sample, causal=True)
    assert {change.result for change in changes} >= {"lse", "dq", "dv"}
    assert "out" not in {change.result for change in changes}
    assert "lse changes in " in str(changes[0])


@pytest.mark.parametrize("recipe", [FA4, GUARDED, UE4M3], ids=lambda recipe: recipe.name)
def test_documents_with_other_keys_are_those_of_each_alone(
    recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, other = (samples.wide(lengths, *SHAPE) for lengths in (SMALL, OTHERS))
    attended = {"causal": False, "window": (9, 4), "softcap": 4.0}
    attended["sink"] = np.array([0.5, -2], dtype=np.float32)
    assert invariance.packing(recipe, sample, other=other, **attended) == []
    right = invariance.forward

    def wrong(q, k, v, recipe, *, cu_seqlens_k, **more):
        cu_seqlens_k = cu_seqlens_k.copy()
        cu_seqlens_k[1:-1] += 1  # one key of the next document
        return right(q, k, v, recipe, cu_seqlens_k=cu_seqlens_k, **more)

    monkeypatch.setattr(invariance, "forward", wrong)
    changes = invariance.packing(recipe, sample, other=other, **attended)
    assert {change.result for change in changes} >= {"out", "lse", "dk", "dv"}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_prefixes_of_the_public_witness(recipe) -> None:
    leaks = recipe.name in LEAKS
    found = invariance.prefix(recipe, samples.public_witness(), (8,))[8]
    assert bool(found) == leaks
    if leaks:  # a share of 2^-20 for itself, nothing once the scale is that of 1
        assert (found[0].result, found[0].place) == ("out", (0, 0, 0))
        assert (found[0].alone, found[0].together) == (2.0**-20, 0)
        assert str(found[0]).endswith(
            "first at token 0, head 0, channel 0: 9.53674e-07 alone, 0 here"
        )


@pytest.mark.parametrize("recipe", [CUDNN, UNGUARDED], ids=lambda recipe: recipe.name)
def test_bell_shaped_values_hide_what_wide_ones_show(recipe) -> None:
    lengths = (1, 7, 20, 33)
    bell, wide = (make((45,), *SHAPE) for make in (samples.bell, samples.wide))
    changes = invariance.prefix(recipe, bell, lengths).values()
    # dq alone shows it now and then: dS shares its scales between queries.
    assert not any(change.result != "dq" for some in changes for change in some)
    assert any(invariance.prefix(recipe, wide, lengths).values())


def test_a_report() -> None:
    found = report("cudnn-mxfp8")
    assert found.broken == ("C2", "prefix")
    assert found.exit_code == 1
    assert [one.name for one in found.properties] == list(TITLES)
    text = str(found)
    assert text.startswith("recipe cudnn-mxfp8: evidence assumed\nC1        holds: ")
    assert "two values: q, k, v, dO" in text
    assert text.endswith("BROKEN: C2, prefix")
    data = json.loads(found.to_json())
    assert data["broken"] == ["C2", "prefix"]
    assert data["properties"][0]["name"] == "C1"
    assert data["properties"][1]["figures"]["q.wide.differing"] > 0
    with pytest.raises(ValueError, match="unknown property 'C6'"):
        found["C6"]


def test_a_recipe_whose_keys_are_split() -> None:
    split = replace(FA4, name="mine", tiles=replace(FA4.tiles, key=32, splits=2))
    runs = [measures.traced(split, samples.bell(SMALL, *SHAPE), causal=True)]
    assert consistency._c1(runs).verdict is Verdict.HOLDS
    assert consistency._c4(runs[0]).verdict is Verdict.HOLDS
    assert consistency._gradient(runs[0]).verdict is Verdict.HOLDS


def test_progress_and_recipes_that_are_not_computed() -> None:
    wrong = replace(FOLDED, dp=replace(FOLDED.dp, tile_order="descending"))
    with pytest.raises(ValueError, match=r"dp.tile_order = 'descending'; computed is 'ascending'"):
        consistency.check(wrong)
    with pytest.raises(ValueError, match="unknown recipe"):
        consistency.check("flamia")


def test_summaries() -> None:
    assert summary(FA4) == "q k v dO: bf16"
    assert summary(CUDNN) == "q k v dO: te-mx-e4m3 1x32 and te-mx-e4m3 32x1"
    assert summary(GUARDED) == ("q dO: te-mx-e4m3 1xall, folded; k v: te-mx-e4m3 32x32, guarded")
    assert summary(FP4) == (
        "q k: flamia-fp4-e8m0 1x16 and te-mx-e4m3 1xall, promoted, folded; v dO: te-mx-e4m3 1xall, folded"
    )


def test_differences() -> None:
    assert data_differences(FOLDED, FOLDED) == []
    assert evidence_differences(FOLDED, FOLDED) == []
    renamed = replace(FOLDED, name="mine", softmax=replace(FOLDED.softmax, exp2="correct"))
    assert data_differences(FOLDED, renamed) == [("softmax.exp2", "mufu.sm90", "correct")]
    assert evidence_differences(FOLDED, renamed) == []
    emulated = dict(data_differences_by_path(FOLDED, CUDNN))["softmax.emulated"]
    assert emulated[0] is None
    assert emulated[1]["period"] == 16
    step = dataclasses.replace(FOLDED.steps["tiles"], source="elsewhere")
    other = replace(FOLDED, steps={**FOLDED.steps, "tiles.query": step})
    assert data_differences(FOLDED, other) == []
    (found,) = evidence_differences(FOLDED, other)
    assert found.path == "tiles.query"
    assert found.one["source"] == FOLDED.steps["tiles"].source  # that of the whole covers the part
    assert found.other["source"] == "elsewhere"


def data_differences_by_path(one, other):
    return [(path, values) for path, *values in data_differences(one, other)]


@functools.cache
def tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")


def test_the_page_of_recipes_holds_their_data() -> None:
    assert PAGE.endswith(tables().data_sections(RECIPES))
    for name, recipe in RECIPES.items():
        assert f"| {recipe.label} |\n" in next(
            line + "\n" for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")
        )


def test_the_bytes_on_the_page_are_those_of_the_formats() -> None:
    after = "Bytes kept for the backward"
    e4m3, fp4 = 128, 64  # bytes of 128 channels
    # A scale for 32 channels, and one for 32 tokens and each channel; of k and q both, of v the first.
    cudnn = [e4m3 + 4 + e4m3 + 128 // 32, e4m3 + 4 + e4m3 + 4, e4m3 + 4]
    page = PAGE[: PAGE.index("## Cost of safeguards")]
    lines = page[page.index(after) :].splitlines()
    rows = {
        line.split("`")[1]: line.strip("| ").split(" | ")[1:] for line in lines if "| `" in line
    }
    assert list(rows) == [name for name in RECIPES if RECIPES[name].has_backward]

    def kept(name: str) -> list[float]:
        return [float(cell) for cell in rows[name][:3]]

    assert kept("cudnn-mxfp8") == cudnn
    assert kept("cudnn-mxfp8-reference") == cudnn
    assert (
        kept("bf16-fa4") == kept("attn-qat-nvfp4") == [256, 256, 256]
    )  # of its values in bfloat16
    assert kept("flamia-mxfp8-folded") == [e4m3 + 1] * 3
    assert kept("flamia-mxfp8") == [e4m3 + 1, *[e4m3 + 4 / 32] * 2]
    assert kept("flamia-nvfp4-fp8") == [fp4 + 8, fp4 + 8, e4m3 + 1]
    assert kept("flamia-nvfp4-fp8-ue4m3") == [fp4 + 8 + 1, fp4 + 8 + 1, e4m3 + 1]
    for name in rows:
        guards = 3 * 256 if name == "flamia-mxfp8" else 0
        assert [float(cell) for cell in rows[name][4:6]] == [sum(kept(name)), guards]
        assert rows[name][6] == f"{(sum(kept(name)) + guards) / sum(cudnn):.2f}"


def test_the_shares_on_the_page_are_those_of_the_diagonal() -> None:
    page = PAGE[PAGE.index("*Extra operands*") : PAGE.index("## Everything else")]
    rows = {
        line.split("`")[1]: line.strip("| ").split(" | ")[1:]
        for line in page.splitlines()
        if "| `" in line
    }
    assert list(rows) == list(RECIPES)
    # Guarded are the blocks on the diagonal, the last of which may be cut, in four of six products.
    blocks = [-(-length // 32) for length in (200, 2048, 8192, 32768)]
    shares = [f"{100 * 4 / 6 * 2 / (count + 1):.3g}%" for count in blocks]
    assert rows["flamia-mxfp8"] == ["q, k, v, dO", *shares]
    assert rows["cudnn-mxfp8-pv-bf16"] == ["-", *["66.7%"] * 4]
    high = ("bf16-fa4", "attn-qat-nvfp4")  # whose products are all of bfloat16
    for name in high:
        assert rows[name] == ["-", *["100%"] * 4]
    for name in set(RECIPES) - {"flamia-mxfp8", "cudnn-mxfp8-pv-bf16", *high}:
        assert rows[name] == ["-", *["0%"] * 4]


def test_the_page_of_recipes_holds_what_one_of_them_measures() -> None:
    # The rows of the others take too long here.
    found = report("cudnn-mxfp8")
    for row in (tables().properties_row, tables().prefix_row, tables().numbers_row):
        assert row(found) in PAGE


@pytest.mark.nightly
def test_the_page_of_recipes_is_what_is_measured() -> None:
    assert tables().page({name: report(name) for name in RECIPES}) == PAGE


@pytest.mark.parametrize("product", ["s", "o", "dp", "dq"])
def test_a_guard_taken_away_is_found(product: str) -> None:
    recipe = RECIPES["flamia-mxfp8"]
    guarded = getattr(recipe, product)
    unguarded = replace(
        guarded,
        right=replace(guarded.right, guard=Guard.NONE),
        guard_instruction=None,
    )
    leaky = replace(recipe, name="leaky", **{product: unguarded})
    samples_tried = (samples.public_witness(), samples.key_witness())
    assert any(invariance.prefix(leaky, sample, (8,))[8] for sample in samples_tried)
    assert not any(invariance.prefix(recipe, sample, (8,))[8] for sample in samples_tried)
