"""`sage3-nvfp4` against an implementation that shares no code with it, and faults that this must see.

It has a forward alone. Faults are looked for on one pack, whose first document has two key tiles.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from flamia_ref import _float32, attention
from flamia_ref.arithmetic import special
from flamia_ref.attention import (
    RECIPES,
    Recipe,
    exact,
    float64,
    forward,
    forward_stages,
    forward_tile,
    sides,
    smoothing,
    softmax,
)
from flamia_ref.attention.computed import check_computed
from flamia_ref.attention.inputs import score_factor
from flamia_ref.attention.product import Accumulation, Operand, Product, Scope, TileOrder, Use
from flamia_ref.formats import PRESETS, decode_bits, encode_bits
from flamia_ref.packing import Documents, Mask
from tests.attention.changes import changed
from tests.attention.samples import (
    BF16,
    any_bits,
    assert_same,
    bell,
    bits,
    edges,
    tiny,
    wide,
    with_specials,
)
from tests.independent import attention as independent
from tests.independent import factors, float32, sage

NAME = "sage3-nvfp4"
RECIPE = RECIPES[NAME]
STAGES = (*forward_stages(NAME), "out", "lse")


def results(recipe: Recipe, q, k, v, cu_seqlens, **options) -> dict[str, Any]:
    """Every stage of the package."""
    one = forward(q, k, v, recipe, cu_seqlens=cu_seqlens, trace=forward_stages(recipe), **options)
    return {**one.trace, "out": one.out, "lse": one.lse}


def departures(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """The stages that differ, in the order of the dataflow."""
    assert set(found) == set(wanted) == set(STAGES)
    return [name for name in STAGES if not _same(found[name], wanted[name])]


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(found, list):
        return all(_same(one, other) for one, other in zip(found, wanted, strict=True))
    if wanted.dtype == np.uint16:
        wanted = wanted.view(BF16).astype(np.float32)
    return bool((bits(found) == bits(wanted.view(found.dtype))).all())


@functools.cache
def given() -> tuple[list[Any], Any]:
    """Two documents, of two key tiles and of a part of one; no mean is near 0, and neighbouring blocks differ."""
    *arrays, cu_seqlens = bell(3, [140, 21], 1, 1, 24)
    rng = np.random.default_rng(3)
    made = []
    for x in arrays:
        powers = np.exp2(rng.integers(-2, 3, (len(x), 1, 3))).astype(np.float32)
        shifted = x.astype(np.float32) * np.repeat(powers, 8, axis=2) + np.float32(0.75)
        made.append(shifted.astype(BF16))
    return made, cu_seqlens


@functools.cache
def expected() -> dict[str, Any]:
    arrays, cu_seqlens = given()
    return independent.run(NAME, *(x.view(np.uint16) for x in arrays), None, cu_seqlens)


def faults(recipe: Recipe = RECIPE) -> list[str]:
    """What departs on the given pack."""
    arrays, cu_seqlens = given()
    return departures(results(recipe, *arrays, cu_seqlens), expected())


def test_every_stage_of_the_pack() -> None:
    assert faults() == []


@pytest.mark.parametrize(
    ("make", "lengths", "heads", "channels", "causal"),
    [
        pytest.param(bell, [40], (2, 1), 72, True, id="bell, grouped heads, 72 channels"),
        pytest.param(wide, [33, 7], (1, 1), 16, False, id="wide, full"),
        pytest.param(any_bits, [20], (1, 1), 16, True, id="any bits"),
        pytest.param(with_specials, [48], (1, 1), 8, True, id="specials"),
        *(
            pytest.param(make, [150, 0, 35], (2, 1), 40, causal, marks=pytest.mark.nightly)
            for make in (bell, wide, any_bits, with_specials, tiny, edges)
            for causal in (True, False)
        ),
    ],
)
def test_every_stage(make, lengths, heads, channels, causal) -> None:
    *arrays, cu_seqlens = make(7, lengths, *heads, channels)
    wanted = independent.run(
        NAME, *(x.view(np.uint16) for x in arrays), None, cu_seqlens, causal=causal
    )
    assert departures(results(RECIPE, *arrays, cu_seqlens, causal=causal), wanted) == []


WITHOUT_Q = replace(
    RECIPE.s, left=replace(RECIPE.s.left, smoothing="none"), correction_instruction=None
)


@pytest.mark.parametrize(
    ("path", "value", "first"),
    [
        ("s", WITHOUT_Q, "q.codes"),
        ("s.right.smoothing", "none", "k.codes"),
        ("s.correction_instruction", "sm100.tcgen05.f16", None),  # another name for the same chain
        ("o.tile_order", TileOrder.ASCENDING, "p"),
        ("o.accumulation", Accumulation.FLOAT32_PARTIALS, "o"),
        ("o.accumulation", Accumulation.CHAINED, "o"),
        ("tiles.query", 64, None),  # the mean is over 128 all the same
        ("tiles.key", 64, "p"),
        ("softmax.p_scale", 1344, "p"),
        ("softmax.p_scale", 1, "p"),
        ("softmax.row_sum", "ascending", "row_sum"),
        ("softmax.row_sum", "two_lanes", "row_sum"),
        ("softmax.normalisation", "quotient", "o"),
    ],
)
def test_a_changed_knob_shows(path, value, first) -> None:
    found = faults(changed(RECIPE, path, value))
    assert (found[0] if found else None) == first


def test_the_factor_of_the_scores() -> None:
    """The float64 product of the float32 scale: other ways to round differ at some scales, and then in P."""
    others = {"exact_product", "float64_product", "float32_product"}
    apart: dict[str, float] = {}
    for scale in (x**-0.5 for x in range(3, 200)):
        product = float(np.float32(scale)) * factors.LOG2_E_FLOAT64
        wanted = float32.nearest(Fraction(product))
        assert score_factor(scale, "float32_scale") == wanted
        apart |= {name: scale for name in others if score_factor(scale, name) != wanted}
    assert set(apart) == others
    *arrays, cu_seqlens = bell(2, [9], 1, 1, 8, spread=6.0)
    scale = apart["float64_product"]
    wanted = independent.run(
        NAME, *(x.view(np.uint16) for x in arrays), None, cu_seqlens, softmax_scale=scale
    )
    options = {"softmax_scale": scale}
    assert departures(results(RECIPE, *arrays, cu_seqlens, **options), wanted) == []
    other = changed(RECIPE, "softmax.score_factor", "float64_product")
    assert departures(results(other, *arrays, cu_seqlens, **options), wanted)[0] == "p"


def test_a_sum_that_is_no_number() -> None:
    """The row's o is then 0 times its accumulator, and times 1 by another knob.

    k less its mean is infinite in one token and channel, where the mean of q is 0: that score alone is NaN.
    """
    q, k, v, cu_seqlens = bell(4, [3], 1, 1, 4)
    q[:, :, 1], k[:, 0, 1] = 0, np.array([3.38e38, -3.38e38, -3.38e38]).astype(BF16)
    arrays = (q, k, v)
    wanted = independent.run(
        NAME, *(x.view(np.uint16) for x in arrays), None, cu_seqlens, causal=False
    )
    found = results(RECIPE, *arrays, cu_seqlens, causal=False)
    assert departures(found, wanted) == []
    assert np.isnan(found["row_sum"]).all()
    assert (found["out"] == 0).all()
    other = changed(RECIPE, "softmax.normalisation", "zero_safe_reciprocal")
    found = results(other, *arrays, cu_seqlens, causal=False)
    assert departures(found, wanted) == ["o", "out"]


def test_the_lanes_of_the_row_sum() -> None:
    """By hand: lane r has the columns 8 r to 8 r + 7 of each 32; its first one comes with the rescaled sum."""
    rng = np.random.default_rng(8)
    p, sums, factor = (
        np.exp2(rng.uniform(-20, 11, shape)).astype(np.float32).view(np.uint32)
        for shape in ((1, 40, 128), (1, 40, 4), (1, 40))
    )
    wanted = np.zeros((40, 4), np.uint32)
    for row in range(40):
        for lane in range(4):
            mine = [x for at, x in enumerate(p[0, row].tolist()) if at % 32 // 8 == lane]
            start = float32.fused_multiply_add(
                int(sums[0, row, lane]), int(factor[0, row]), mine[0]
            )
            wanted[row, lane] = functools.reduce(float32.add, mine[1:], start)
    found = softmax.summed(sums, factor, p, RECIPE.softmax)
    assert (found[0] == wanted).all()
    apart = _float32.multiply(sums, np.broadcast_to(factor[:, :, None], sums.shape))
    unfused = softmax.reductions.partial_sums(p, "sage3.row_sum", 2, apart)
    assert (unfused != found).any()
    a, b, c, d = (int(x) for x in found[0, 0])
    total = float32.add(float32.add(a, b), float32.add(c, d))
    assert softmax.total(found, RECIPE.softmax)[0, 0] == total


def _rounded_scales(x, divisors, operand, reciprocal):
    """P over the scale that is stored."""
    preset = PRESETS[operand.format]
    stored = decode_bits(encode_bits(divisors, preset.scale), preset.scale)
    inverse = special.reciprocal_bits(stored, model=reciprocal)
    codes = encode_bits(_float32.multiply(x, np.repeat(inverse, 16, axis=2)), preset.element)
    return sides.Pairs(codes, encode_bits(divisors, preset.scale))


def _masked_scores(s, visible, columns):
    """The largest of all scores, masked ones too."""
    return ORIGINALS["largest_scores"](s, np.ones_like(visible), columns)


def _two_roundings(o, factor, partial, first):
    """The accumulator rescaled, then added to."""
    scaled = _float32.multiply(o, np.broadcast_to(factor[:, :, None], o.shape))
    return np.where(first[:, None, None], partial, _float32.add(scaled, partial))


def _whole_correction(left, right, *, instruction):
    """The product of the mean and k in float32."""
    wide_left, wide_right = (x[:, :, :].astype(np.uint32) << np.uint32(16) for x in (left, right))
    values = [x.view(np.float32).astype(np.float64) for x in (wide_left[:, :1], wide_right)]
    return (values[0] @ values[1].swapaxes(1, 2)).astype(np.float32).view(np.uint32)


def _unrounded_base(base, c, knobs):
    """The base in two roundings."""
    scaled = _float32.multiply(base, np.broadcast_to(c, base.shape))
    lift = np.full(base.shape, softmax.log2_of(knobs.p_scale))
    return _float32.subtract(lift, scaled)


def _means_in_float32(x, tiles):
    """Sums of q in float32."""
    sums = np.add.reduce(smoothing._with_zero(x, tiles.tokens).view(np.float32), axis=1)
    return smoothing._with_zero((sums / np.float32(128)).view(np.uint32), tiles.tile)


def _means_of_what_is_there(x, tiles):
    """The mean of q over the tokens of the document in the tile, the rest not counted."""
    found = ORIGINALS["_tile_means"](x, tiles).view(np.float32)
    count = np.bincount(tiles.tile)[tiles.tile]
    return (found * np.float32(128) / count[:, None, None].astype(np.float32)).view(np.uint32)


def _unrounded_mean(x, tiles):
    """The mean of k in float32."""
    parts = smoothing._added(np.moveaxis(smoothing._with_zero(x, tiles.tokens), 1, 0))
    sums = smoothing._added(np.moveaxis(smoothing._with_zero(parts, tiles.documents), 1, 0))
    means = sums.view(np.float32) / tiles.lengths[:, None, None].astype(np.float32)
    return smoothing._with_zero(means.view(np.uint32), tiles.document)


def _mean_of_the_pack(x, tiles):
    """The mean of k over all documents."""
    mean = x.view(np.float32).mean(axis=0, keepdims=True)
    found = sides.rounded_bfloat16(mean.view(np.uint32))
    return np.broadcast_to(found, x.shape).copy()


ORIGINALS = {
    "largest_scores": softmax.largest_scores,
    "_tile_means": smoothing._tile_means,
}

MUTANTS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "P over the stored scale": (sides, "divided_pairs", _rounded_scales, "p.o.codes"),
    "masked scores count for a scale": (softmax, "largest_scores", _masked_scores, "p.o.codes"),
    "O rescaled, then added to": (forward_tile, "_fused", _two_roundings, "o"),
    "S from a float32 product": (sides, "_correction", _whole_correction, "s"),
    "the base rounded twice": (softmax, "offset_of", _unrounded_base, "p"),
    "the mean of q in float32": (smoothing, "_tile_means", _means_in_float32, "q.codes"),
    "the mean of q over a shorter tile": (
        smoothing,
        "_tile_means",
        _means_of_what_is_there,
        "q.codes",
    ),
    "the mean of k not rounded": (smoothing, "_document_means", _unrounded_mean, "k.codes"),
    "the mean of k over the pack": (smoothing, "_document_means", _mean_of_the_pack, "k.codes"),
}


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_fault_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, mutant, first = MUTANTS[fault]
    monkeypatch.setattr(module, name, mutant)
    assert faults()[0] == first


@pytest.mark.parametrize("channels", [64, 65])
def test_the_order_of_the_means_of_q(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both orders of bfloat16 additions, on numbers of which each addition rounds some."""
    x = wide(5, [200], 1, 1, channels)[0].astype(np.float32).view(np.uint32)
    operand, documents = RECIPE.s.left, Documents((0, 200))
    rows = x[:, 0].tolist()
    wanted = [sage.tile_mean(part, channels) for part in (rows[:128], rows[128:])]
    tiles = [wanted[0]] * 128 + [wanted[1]] * 72
    found = smoothing.means(x, operand, documents)[:, 0]
    assert (found == np.array(tiles, np.uint32)).all()
    swapped = {64: smoothing.BUTTERFLIES[128], 128: smoothing.BUTTERFLIES[64]}
    monkeypatch.setattr(smoothing, "BUTTERFLIES", swapped)
    assert (smoothing.means(x, operand, documents)[:, 0] != found).any()


def test_the_mean_of_k() -> None:
    """In float32, 128 tokens ascending, then their sums, over numbers of which each addition rounds some."""
    x = edges(5, [300, 0, 1], 1, 1, 12)[1].astype(np.float32)
    x *= np.exp2(np.arange(301) % 24, dtype=np.float32)[:, None, None]
    documents, given_bits = Documents((0, 300, 300, 301)), x.view(np.uint32)
    found = smoothing.means(given_bits, RECIPE.s.right, documents)[:, 0]
    first = sage.document_mean(given_bits[:300, 0].tolist(), 12)
    assert (found[:300] == np.array(first, np.uint32)).all()
    assert (found[300] == sides.rounded_bfloat16(given_bits[300, 0])).all()


def test_documents_do_not_know_of_each_other() -> None:
    """Means and blocks are those of a document, packed in any company."""
    arrays, cu_seqlens = given()
    together = results(RECIPE, *arrays, cu_seqlens)
    for document, (start, stop) in enumerate(itertools.pairwise(cu_seqlens)):
        others = [np.full_like(x[:5], np.nan) for x in arrays]
        packed = [
            np.concatenate([o, x[start:stop], o]) for o, x in zip(others, arrays, strict=True)
        ]
        length = stop - start
        found = results(RECIPE, *packed, np.int32([0, 5, 5 + length, 10 + length]))
        assert_same(found["out"][5:-5], together["out"][start:stop], "out")
        assert_same(found["lse"][:, 5:-5], together["lse"][:, start:stop], "lse")
        for name in ("s", "p.o.codes", "p.o.scales"):
            assert_same(found[name][1], together[name][document], name)


def test_the_stages_give_the_bits_of_the_forward() -> None:
    """From operands, whose guards are the means of q and the smoothed k."""
    arrays, cu_seqlens = given()
    prepared = attention.prepare(*arrays, RECIPE, cu_seqlens=cu_seqlens)
    found = attention.forward_from_operands(prepared, cu_seqlens=cu_seqlens)
    whole = forward(*arrays, RECIPE, cu_seqlens=cu_seqlens)
    assert_same(found.out, whole.out, "out")
    assert_same(found.lse, whole.lse, "lse")
    assert set(prepared.guards) == {"q", "k"}
    assert (np.ptp(prepared.guards["q"].codes[:128].astype(int), axis=0) == 0).all()
    assert prepared.operand("o.v").column_wise is None
    stages = {
        f"{name}.{part}": getattr(copy, part)
        for name, copy in prepared.operands.items()
        for part in ("codes", "scales")
    }
    guards = {name: copy.codes for name, copy in prepared.guards.items()}
    remade = attention.operands_from(stages, RECIPE, guards=guards, cu_seqlens=cu_seqlens)
    again = attention.forward_from_operands(remade, cu_seqlens=cu_seqlens)
    assert_same(again.out, whole.out, "out")
    with pytest.raises(ValueError, match="takes q, k in bfloat16"):
        attention.forward_from_operands(
            attention.operands_from(stages, RECIPE), cu_seqlens=cu_seqlens
        )


def test_against_float64() -> None:
    """Near the recipe's own float64 model, and that without quantizers is attention. k has a large mean."""
    q, k, v, cu_seqlens = bell(11, [140, 60], 2, 1, 32)
    k = (k.astype(np.float32) + np.float32(2)).astype(BF16)
    documents = Documents(tuple(int(x) for x in cu_seqlens))
    mask = Mask.of(documents, documents, causal=True, window=None, alignment="bottom_right")
    wide_arrays = [x.astype(np.float64) for x in (q, k, v)]
    options = {"softmax_scale": 32**-0.5}
    model = exact.forward(*wide_arrays, RECIPE, mask, **options)
    plain = exact.forward(*wide_arrays, RECIPE, mask, **options, quantized=False)
    truth = float64.forward(q, k, v, cu_seqlens=cu_seqlens)
    found = forward(q, k, v, RECIPE, cu_seqlens=cu_seqlens)
    size = np.linalg.norm(truth.out)
    assert np.linalg.norm(found.out - model.out) < 0.03 * size  # codes at a boundary
    assert np.linalg.norm(found.out - truth.out) < 0.25 * size
    np.testing.assert_allclose(found.lse, model.lse, atol=0.01)
    np.testing.assert_allclose(plain.out, truth.out, atol=1e-12)
    np.testing.assert_allclose(plain.lse, truth.lse, atol=1e-12)
    # Without the mean of k, which every score of a row loses alike, lse is that much less.
    mean = k.astype(np.float64)
    shift = np.concatenate(
        [np.broadcast_to(mean[d].mean(axis=0), mean[d].shape) for d in documents]
    )
    lost = np.einsum("nhc,nc->hn", wide_arrays[0], shift[:, 0]) * 32**-0.5
    assert np.abs(found.lse + lost - truth.lse).max() < 0.5
    assert np.abs(lost).max() > 2


def test_smoothing_pays() -> None:
    """With means that are large beside the rest, the error without smoothing is several times that with it."""
    q, k, v, cu_seqlens = bell(12, [128], 1, 1, 64)
    q, k = ((x.astype(np.float32) + np.float32(4)).astype(BF16) for x in (q, k))
    truth = float64.forward(q, k, v, cu_seqlens=cu_seqlens).out
    rough = replace(RECIPE, s=replace(WITHOUT_Q, right=WITHOUT_Q.left))
    errors = [
        np.linalg.norm(forward(q, k, v, recipe, cu_seqlens=cu_seqlens).out - truth)
        for recipe in (RECIPE, rough)
    ]
    assert errors[1] > 2 * errors[0]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("s.left.smoothing", "document_mean", "correction_instruction"),
        ("s.right.smoothing", "tile_mean", "s.right.smoothing"),
        ("o.right.smoothing", "document_mean", "o.right.smoothing"),
        ("s.left.scope", Scope.TOKEN, "smoothing"),
        ("o.left.scope", Scope.BLOCK, "largest_score"),
        ("o.left.format", "flamia-fp4-ue4m3", "alike"),
        ("softmax.row_sum_of", "codes", "softmax.row_sum_of"),
        ("tiles.query", 96, "tiles.query"),
        ("o.left.promoted_from", Use.S_Q, "o.left.promoted_from"),
        ("tiles.masked", "computed", "tiles.masked"),
        ("s.correction_instruction", "sm90.wgmma.bf16", "s.correction_instruction"),
    ],
)
def test_what_is_not_computed_is_refused(path, value, message) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        check_computed(changed(RECIPE, path, value))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p_scale": 0}, "p_scale"),
        ({"p_scale": 2.5}, "p_scale"),
        ({"p_scale": 1 << 21}, "p_scale"),
        ({"p_offset": 3}, "p_offset"),
        ({"exp2_argument": "unfused"}, "p_scale"),
        ({"row_sum": "octet"}, "row_sum"),
    ],
)
def test_softmax_is_refused(change, message) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        replace(RECIPE.softmax, **change)


def test_products_are_refused() -> None:
    operand = Operand(format="sage3-nvfp4", block=(1, 16))
    smooth = replace(operand, smoothing="tile_mean")
    for left, instruction in ((smooth, None), (operand, "sm120.mma.bf16")):
        with pytest.raises(ValueError, match="correction_instruction"):
            Product(
                left=left,
                right=operand,
                instruction="sm120.mma.mxf4nvf4",
                correction_instruction=instruction,
            )
