"""The exact gradient of a recipe against automatic differentiation of forwards written out, and differences."""

import functools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from flamia_ref.attention import RECIPES, exact, exact_forward, float64
from flamia_ref.attention.copies import Maker
from flamia_ref.attention.exact_forward import ExactForward
from flamia_ref.attention.exact_tensor import tensor
from flamia_ref.attention.knobs import Tiles
from flamia_ref.attention.parts import parts
from flamia_ref.attention.product import Guard, Scope, TileOrder, Use
from flamia_ref.packing import Documents, Mask
from tests.attention import written_forwards as written
from tests.attention.masks import PLAIN, offsets, packed
from tests.attention.samples import BF16, any_bits, bell, tiny, wide, with_specials
from tests.attention.written_forwards import FORWARDS

QUERIES, KEYS = (167, 0, 3, 167), (150, 9, 0, 150)
SCALE = 48**-0.5
MASKS = {
    "causal": PLAIN,
    "full": PLAIN | {"causal": False},
    "left window, top-left": {"causal": True, "window": (40, 0), "alignment": "top_left"},
    "window, bottom-right": {"causal": False, "window": (70, 20), "alignment": "bottom_right"},
}
SINK = np.float32([0.5, -np.inf, 3.0, -2.0])


@functools.cache
def inputs(queries=QUERIES, keys=KEYS):
    """q, k, v, dout with 4 query heads and 2 key/value heads, v with fewer channels.

    Scores are spread enough that bases move. Exponents are too, inside every block and between them, so that what
    shares a scale matters.
    """
    q = bell(11, queries, 4, 2, 48, spread=2.0)[0]
    _, k, v, _ = bell(12, keys, 4, 2, 48, spread=2.0)
    rng = np.random.default_rng(12)
    arrays = []
    for x, last in ((q, 4), (k, 1), (v[:, :, :40], 1)):
        powers = np.exp2(rng.integers(-20, 1, x.shape) * rng.integers(0, 2, x.shape))
        tokens = np.exp2(rng.integers(-3, 2, (len(x), x.shape[1], 1)))
        growing = np.linspace(0.5 if last > 1 else 1, last, len(x))[:, None, None]
        arrays.append((x.astype(np.float32) * powers * tokens * growing).astype(BF16))
    dout = rng.standard_normal((*q.shape[:2], 40)).astype(np.float32).astype(BF16)
    return *arrays, dout


def arguments(recipe, mask=PLAIN, queries=QUERIES, keys=KEYS, **options):
    """Arguments of the functions in `exact`, in float64."""
    given = [x.astype(np.float64) for x in inputs(queries, keys)]
    of = Mask.of(packed(queries), packed(keys), **mask)
    return given, (recipe, of), {"softmax_scale": SCALE, **options}


def deviation(found, expected) -> float:
    """The largest difference of any gradient, relative to the largest element of that gradient."""
    pairs = [pair for pair in zip(found, expected, strict=True) if pair[0] is not None]
    worst = 0.0
    for a, b in pairs:
        assert (a[~np.isfinite(b)] == b[~np.isfinite(b)]).all()  # the lse of dead rows
        a, b = a[np.isfinite(b)], b[np.isfinite(b)]
        worst = np.maximum(worst, np.abs(a - b).max() / np.abs(b).max())  # a NaN stays
    return float(worst)


def check(recipe, forward, mask, queries=QUERIES, keys=KEYS, softcap=None, sink=None) -> None:
    tiles = (recipe.tiles.query, recipe.tiles.key)
    skips = recipe.tiles.masked == "skipped"
    masks = [
        written.dense_masks(n, m, tiles, skips, **mask) for n, m in zip(queries, keys, strict=True)
    ]
    wide = None if sink is None else sink.astype(np.float64)
    given, rest, options = arguments(recipe, mask, queries, keys, softcap=softcap, sink=wide)
    q, k, v, dout = given
    none = np.full(q.shape[1], -np.inf)
    expected = written.differentiated(
        forward, dout, q, k, v, none if wide is None else wide, SCALE, softcap or 0, masks
    )
    found = [
        *exact.forward(*given[:3], *rest, **options),
        *exact.gradient(*given, *rest, **options),
    ]
    assert (found[-1] is None) == (sink is None)
    assert {x.dtype for x in found if x is not None} == {np.dtype(np.float64)}
    assert deviation(found, expected) < 1e-12


# Compiling takes seconds each; the parts of the recipes that are not here are parts of these.
# A plain mask and a window for each recipe, all four over the recipes.
DAILY_MASKS = {
    "bf16-fa4": ("causal",),
    "cudnn-mxfp8": ("full",),
    "cudnn-mxfp8-reference": ("left window, top-left",),
    "fp8-fa3": ("window, bottom-right",),
    "attn-qat-nvfp4": ("causal",),
    "flamia-mxfp8": ("window, bottom-right",),
    "flamia-mxfp8-folded": ("left window, top-left",),
    "flamia-nvfp4-fp8-ue4m3": ("causal",),
}


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        pytest.param(
            name, mask, marks=[pytest.mark.nightly] * (mask not in DAILY_MASKS.get(name, ()))
        )
        for name in FORWARDS
        for mask in MASKS
    ],
)
def test_against_automatic_differentiation(name: str, mask: str) -> None:
    plain = mask in ("causal", "full")
    options = {} if plain else {"softcap": 3.0, "sink": SINK}
    check(RECIPES[name], FORWARDS[name], MASKS[mask], **options)


def test_every_recipe_is_differentiated_here() -> None:
    """But one: the means of smoothed operands are sums in bfloat16. test_sage3.py has what its forward computes."""
    assert set(FORWARDS) == set(RECIPES) - {"sage3-nvfp4"}


FOLDED, CUDNN, FA4 = (RECIPES[name] for name in ("flamia-mxfp8-folded", "cudnn-mxfp8", "bf16-fa4"))
GUARDED = RECIPES["flamia-mxfp8"]


UNGUARDED = RECIPES["flamia-mxfp8-unguarded"]


def operand(recipe, use, **changes):
    """The recipe with another operand in one use."""
    product, side = use.split(".")[0], "left" if use in (Use.S_Q, Use.O_P) else "right"
    old = getattr(recipe, product)
    new = replace(old, **{side: replace(getattr(old, side), **changes)})
    return replace(recipe, **{product: new})


def knobs(recipe, *, tiles=None, **softmax):
    changed = replace(recipe, softmax=replace(recipe.softmax, **softmax))
    return changed if tiles is None else replace(changed, tiles=Tiles(**tiles))


# Each is a recipe with a knob that no registered one turns, the recipe without it, and the forward written out.
BY_PREVIOUS = operand(
    UNGUARDED, Use.O_V, block=(32, 1), scope=Scope.PREVIOUS_BLOCK, static_scale=121
)
STATIC = operand(CUDNN, Use.S_Q, format="e4m3", block=None, scope=Scope.STATIC, static_scale=125)
VARIANTS = {
    "splits": (
        knobs(UNGUARDED, tiles={"query": 64, "key": 64, "masked": "skipped", "splits": 2}),
        knobs(UNGUARDED, tiles={"query": 64, "key": 64, "masked": "skipped"}),
        partial(written.flamia_mxfp8_unguarded, tile=64, splits=2),
    ),
    "previous block": (
        BY_PREVIOUS,
        UNGUARDED,
        partial(written.flamia_mxfp8_unguarded, quantize=written.by_previous(121 - 127)),
    ),
    "static": (STATIC, CUDNN, partial(written.cudnn_mxfp8, quantize_q=written.static(125 - 127))),
    "codes in guarded blocks": (
        replace(GUARDED, guard_operands="codes"),
        GUARDED,
        partial(written.flamia_mxfp8, high=written.codes),
    ),
    "row sum of codes": (
        knobs(FOLDED, row_sum_of="codes"),
        FOLDED,
        partial(written.flamia_mxfp8_folded, of_codes=True),
    ),
    "score of masked pairs": (
        knobs(CUDNN, mask_value=-2.5, score="scaled", tiles={"masked": "computed"}),
        CUDNN,
        partial(written.cudnn_mxfp8, masked=-2.5 * written.LOG2_E),
    ),
    "score of masked pairs in skipped tiles and splits": (
        knobs(
            FOLDED,
            mask_value=-2.5,
            row_sum_of="codes",
            tiles={"query": 96, "key": 64, "masked": "skipped", "splits": 2},
        ),
        FOLDED,
        partial(
            written.flamia_mxfp8_folded,
            masked=-2.5 * SCALE * written.LOG2_E,
            of_codes=True,
            tile=64,
            splits=2,
        ),
    ),
}  # fmt: skip
VARIANTS_NIGHTLY = set(VARIANTS) - {"splits", "score of masked pairs in skipped tiles and splits"}


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=[pytest.mark.nightly] * (what in VARIANTS_NIGHTLY))
        for what in VARIANTS
    ],
)
def test_other_forwards_against_automatic_differentiation(what: str) -> None:
    recipe, base, forward = VARIANTS[what]
    for mask in ("causal", "window, bottom-right"):
        check(recipe, forward, MASKS[mask], sink=SINK)
    given = [
        exact.gradient(*x, *rest, **options)
        for x, rest, options in (arguments(one, MASKS["causal"]) for one in (recipe, base))
    ]
    assert deviation(*given) > 1e-9  # so the inputs reach the knob


def unguarded(product):
    return replace(product, right=replace(product.right, guard=Guard.NONE), guard_instruction=None)


OTHER_FORWARDS = {
    "threshold of fa4": (FA4, replace(FA4, softmax=replace(FA4.softmax, rescale_threshold=0))),
    "threshold of cudnn": (
        CUDNN,
        replace(CUDNN, softmax=replace(CUDNN.softmax, rescale_threshold=0)),
    ),
    "offset": (CUDNN, replace(CUDNN, softmax=replace(CUDNN.softmax, p_offset=0))),
    "base": (FA4, replace(FA4, softmax=replace(FA4.softmax, base="integer_max", lse="log2_sum"))),
    "order": (FA4, replace(FA4, o=replace(FA4.o, tile_order=TileOrder.ASCENDING))),
    "tiles": (FA4, replace(FA4, tiles=replace(FA4.tiles, key=64))),
    "fold": (
        FOLDED,
        replace(FOLDED, o=replace(FOLDED.o, right=replace(FOLDED.o.right, scale_folded_into=None))),
    ),
    "block of q": (
        CUDNN,
        replace(CUDNN, s=replace(CUDNN.s, left=replace(CUDNN.s.left, block=(1, "all")))),
    ),
    "block of v": (
        CUDNN,
        replace(CUDNN, o=replace(CUDNN.o, right=replace(CUDNN.o.right, block=(1, 32)))),
    ),
    "block of k": (
        GUARDED,
        replace(GUARDED, s=replace(GUARDED.s, right=replace(GUARDED.s.right, block=(1, 32)))),
    ),
    "guard of s": (GUARDED, replace(GUARDED, s=unguarded(GUARDED.s))),
    "guard of o": (GUARDED, replace(GUARDED, o=unguarded(GUARDED.o))),
}


@pytest.mark.parametrize("what", OTHER_FORWARDS)
def test_the_inputs_reach_every_knob_of_the_forward(what: str) -> None:
    # So the agreement above is agreement about each of these. P in e4m3 takes any power of two, but for underflow.
    given = [
        exact.gradient(*x, *rest, **keywords)
        for x, rest, keywords in map(arguments, OTHER_FORWARDS[what])
    ]
    assert deviation(*given) > 1e-9


SMALL = ((90, 0, 3, 40), (75, 9, 0, 61))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", RECIPES)
def test_without_quantizers_all_are_one(name: str, mask: str) -> None:
    check_identities(RECIPES[name], MASKS[mask])
    check_identities(RECIPES[name], MASKS[mask], softcap=3.0, sink=SINK)


def check_identities(recipe, mask, softcap=None, sink=None) -> None:
    """Without quantizers, a recipe's forward, its gradient and its backward are those of float64 attention."""
    wide = None if sink is None else sink.astype(np.float64)
    given, rest, options = arguments(recipe, mask, *SMALL, softcap=softcap, sink=wide)
    keywords = {
        "cu_seqlens": offsets(SMALL[0]),
        "cu_seqlens_k": offsets(SMALL[1]),
        "softcap": softcap,
        "sink": sink,
        **mask,
    }
    expected = float64.forward(*given[:3], **keywords)
    found = exact.forward(*given[:3], *rest, **options, quantized=False)
    assert deviation(found, expected) < 1e-13
    expected = float64.backward(*given, **keywords)
    assert deviation(exact.gradient(*given, *rest, **options, quantized=False), expected) < 1e-13
    if recipe.has_backward:
        assert deviation(exact.backward(*given, *rest, **options), expected) < 1e-12


SOURCES = ("returned_out", "unrounded_out", "quantized_dout", "p_dp")


@pytest.mark.parametrize("p_for_dv", ["recomputed", "forward"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ["flamia-mxfp8-folded", "cudnn-mxfp8", "flamia-mxfp8"])
def test_backwards_of_other_knobs_without_quantizers(name: str, source: str, p_for_dv: str) -> None:
    recipe = RECIPES[name]
    # A sum of P dP is delta only where P is the probability; folding leaves it a power of two and a rest away.
    normalisation = "lse" if source == "p_dp" else recipe.gradient.normalisation
    gradient = replace(
        recipe.gradient,
        delta_source=source,
        p_for_dv=p_for_dv,
        normalisation=normalisation,
        softmax_scale="in_ds" if p_for_dv == "forward" else "epilogue",
    )
    recipe = knobs(
        replace(recipe, gradient=gradient),
        row_sum_of="codes" if source == "quantized_dout" else "p",
        tiles={"query": 64, "key": 32, "splits": 2},
    )
    check_identities(recipe, MASKS["left window, top-left"], softcap=3.0, sink=SINK)


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("bf16-fa4", "causal"),
        ("cudnn-mxfp8", "window, bottom-right"),
        ("flamia-mxfp8-folded", "left window, top-left"),
    ],
)
def test_finite_differences_of_the_forward_without_quantizers(name: str, mask: str) -> None:
    given, rest, options = arguments(RECIPES[name], MASKS[mask], softcap=3.0)
    sink = np.array([0.5, -1.0, 3.0, -2.0])
    gradient = exact.gradient(*given, *rest, **options, sink=sink, quantized=False)
    rng = np.random.default_rng(5)
    variables = [*given[:3], sink]
    for index, slopes in enumerate(gradient):
        direction = rng.standard_normal(variables[index].shape)
        step = 1e-5
        values = []
        for sign in (1, -1):
            moved = list(variables)
            moved[index] = moved[index] + sign * step * direction
            out = exact.forward(*moved[:3], *rest, **options, sink=moved[3], quantized=False).out
            values.append((given[3] * out).sum())
        slope = (values[0] - values[1]) / (2 * step)
        # The error of a central difference: step^2 times a third derivative, and rounding / step.
        assert abs(slope - (direction * slopes).sum()) < 1e-6 * np.abs(direction * slopes).sum()


def folded_elsewhere(product, use):
    return replace(product, right=replace(product.right, scale_folded_into=use))


WRONG_BACKWARDS = {
    "scale of P missing": replace(CUDNN, gradient=replace(CUDNN.gradient, p_offset=0)),
    "static scale of P": replace(
        CUDNN, dv=replace(CUDNN.dv, left=replace(CUDNN.dv.left, static_scale=127))
    ),
    "static scale of the forward": replace(
        CUDNN, o=replace(CUDNN.o, left=replace(CUDNN.o.left, static_scale=123))
    ),
    "scale of Q into the dS of dQ": replace(FOLDED, dk=folded_elsewhere(FOLDED.dk, Use.DQ_DS)),
    "scale of K into the dS of dK": replace(FOLDED, dq=folded_elsewhere(FOLDED.dq, Use.DK_DS)),
    "scale of dO into the P of O": replace(FOLDED, dv=folded_elsewhere(FOLDED.dv, Use.O_P)),
    "the forward's P with another scale": replace(
        CUDNN,
        o=replace(CUDNN.o, left=replace(CUDNN.o.left, static_scale=123)),
        gradient=replace(CUDNN.gradient, p_for_dv="forward"),
    ),
    "masked pairs that the backward selects out": knobs(FOLDED, mask_value=-1.0),
}


@pytest.mark.parametrize("what", WRONG_BACKWARDS)
def test_a_backward_that_does_not_fit_is_seen(what: str) -> None:
    given, rest, options = arguments(WRONG_BACKWARDS[what], PLAIN, *SMALL)
    expected = exact.gradient(*given, *rest, **options, quantized=False)
    assert deviation(exact.backward(*given, *rest, **options), expected) > 0.01


WRONG_PARTS = ("sink twice", "no slope of the soft cap", "alignment swapped", "window off by one")


@pytest.mark.parametrize("what", WRONG_PARTS)
def test_a_wrong_part_of_the_forward_is_seen(what: str, monkeypatch) -> None:
    recipe, mask = RECIPES["flamia-mxfp8"], PLAIN | {"window": (40, 0)}
    check_identities(recipe, mask, softcap=3.0, sink=SINK)
    right_init, right_cap = ExactForward.__init__, exact_forward.capped

    def init(self, q, k, v, recipe, of, **options):
        if what == "alignment swapped":
            of = replace(of, alignment="top_left")
        elif what == "window off by one":
            of = replace(of, window=(39, 0))
        right_init(self, q, k, v, recipe, of, **options)
        if what == "sink twice":
            self.sink = self.sink + 1

    def capped(s, softcap):
        found, slope = right_cap(s, softcap)
        return found, np.ones_like(slope) if what == "no slope of the soft cap" else slope

    monkeypatch.setattr(ExactForward, "__init__", init)
    monkeypatch.setattr(exact_forward, "capped", capped)
    with pytest.raises(AssertionError):
        check_identities(recipe, mask, softcap=3.0, sink=SINK)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_a_row_does_not_see_is_not_in_its_results(value: float) -> None:
    given, rest, options = arguments(FA4, PLAIN | {"window": (8, 0)}, (60,), (60,))
    base = exact.gradient(*given, *rest, **options)
    for index in range(4):
        changed = [x.copy() for x in given]
        changed[index][30] = value
        dq, dk, dv, _ = exact.gradient(*changed, *rest, **options)
        # A key or value reaches rows 30 to 38, and those the keys 22 to 38; a query or dO the keys 22 to 30.
        rows = np.arange(60)
        reached = (rows >= 30) & (rows <= 38) if index in (1, 2) else rows == 30
        assert np.abs(dq - base.dq)[~reached].max() < 1e-13 * np.abs(base.dq).max()
        assert not np.isfinite(dq[reached]).any()
        keys = (rows >= 22) & (rows <= (38 if index in (1, 2) else 30))
        for a, b in ((dk, base.dk), (dv, base.dv)):
            assert np.abs(a - b)[~keys].max() < 1e-13 * np.abs(b).max()
        assert not np.isfinite(dk[keys]).any()


COPIES = {**RECIPES, "previous block": BY_PREVIOUS, "static": STATIC}
USES = [use for use in Use if use.split(".")[1] in ("q", "k", "v", "do")]


@pytest.mark.parametrize("name", COPIES)
def test_the_values_of_copies_are_those_that_the_recipe_computes_with(name: str) -> None:
    recipe, documents = COPIES[name], packed((45, 0, 1, 70))
    maker = Maker(documents, np, lambda x: x, lambda x: x, False)
    for seed, make in enumerate((wide, any_bits, with_specials, tiny)):
        x = make(seed, [116], 3, 1, 48)[0].astype(np.float32)
        for use in filter(recipe.has_use, USES):
            operand = recipe.operand(use)
            source = recipe.operand(operand.promoted_from or use)
            copy = maker.copy(x.view(np.uint32), source)
            if operand.promoted_from is not None:
                copy = maker.promoted(copy, operand)
            expected = maker.values(copy).view(np.float32)
            if copy.descales is not None:  # one for all heads of a document
                of_tokens = np.repeat(copy.descales.view(np.float32)[:, 0], documents.lengths)
                with np.errstate(all="ignore"):
                    expected = expected * of_tokens[:, None, None]
            with np.errstate(all="ignore"):
                found = tensor(x.astype(np.float64), recipe, use, documents, quantized=True)
                single = found.values.astype(np.float32)
            assert np.array_equal(single, expected, equal_nan=True), (use, make.__name__)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (31, 32), (33, 64), (64, 33), (300, 300), (300, 200), (40, 310)]
)
def test_guarded_blocks(queries: int, keys: int, mask: str) -> None:
    expected, _ = written.dense_masks(queries, keys, **MASKS[mask])[1:]
    found = np.zeros_like(expected)
    of = Mask.of(Documents((0, queries)), Documents((0, keys)), **MASKS[mask])
    for part in parts(of, 1, 1):
        found[part.rows, part.keys] = part.guarded()
    assert (found == expected).all()


def test_a_row_of_infinitely_low_scores_is_dead() -> None:
    q, k, v, _ = (np.ones((4, 1, 32)) for _ in range(4))
    q[2] = np.inf
    k[:] = -1
    of = Mask.of(Documents((0, 4)), Documents((0, 4)), **PLAIN)
    for sink in (-np.inf, 2.0):
        out, lse = exact.forward(q, k, v, FA4, of, softmax_scale=1.0, sink=np.array([sink]))
        assert (out[2] == 0).all()
        assert lse[0, 2] == sink
        share = 1 / (1 + np.exp(sink + 32) / np.arange(1, 5))  # scores are -32
        assert np.abs(out[[0, 1, 3], 0] - share[[0, 1, 3], None]).max() < 1e-15


def test_float64_inputs_are_for_no_recipe() -> None:
    x = np.zeros((3, 1, 32))
    with pytest.raises(TypeError, match="q holds float64; it must be float32 or bfloat16"):
        float64.gradient(x, x, x, x, "bf16-fa4")
