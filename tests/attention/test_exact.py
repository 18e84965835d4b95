"""The exact gradient of a recipe against automatic differentiation of forwards written out here, and differences.

The forwards below follow the steps in the recipes' docstrings, in JAX and float64, with quantizers of their own. None
of it reads a recipe's data.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flamia_ref.attention import RECIPES, exact, float64
from flamia_ref.attention.parts import parts
from flamia_ref.attention.product import Guard, TileOrder, Use
from flamia_ref.packing import Documents
from tests.attention.samples import BF16, bell

LOG2_E = 1 / np.log(2.0)
fixed = jax.lax.stop_gradient


def through(x, quantized):
    """`quantized` with the derivative of `x`."""
    return x + fixed(quantized - x)


def single(x):
    return x.astype(np.float32).astype(np.float64)


def rounded(x, bits: int, least: int):
    """x to nearest even with `bits` significand bits, and no unit below 2^least."""
    exponent = jnp.maximum(jnp.frexp(x)[1] - bits, least)
    return jnp.ldexp(jnp.round(jnp.ldexp(x, -exponent)), exponent)


def e4m3(x):
    return jnp.clip(rounded(single(x), 4, -9), -448, 448)


def bf16(x):
    return rounded(single(x), 8, -133)


def mx(x, rows: int, columns: int):
    """x [heads, n, m] in blocks of rows x columns: its values, and the powers of two of its blocks, spread."""
    heads, n, m = x.shape
    pad = ((0, 0), (0, -n % rows), (0, -m % columns))
    blocks = jnp.pad(single(x), pad).reshape(heads, -(-n // rows), rows, -(-m // columns), columns)
    amax = jnp.abs(blocks).max(axis=(2, 4), keepdims=True)
    mantissa, exponent = jnp.frexp(single(amax * np.float64(np.float32(1 / 448))))
    power = jnp.where(mantissa == 0.5, exponent - 1, exponent)  # the power of two at or above it
    power = jnp.where(amax == 0, -127, jnp.maximum(power, -127))
    values = jnp.ldexp(e4m3(jnp.ldexp(blocks, -power)), power)
    spread = jnp.broadcast_to(jnp.ldexp(np.float64(1), power), blocks.shape)
    whole = (heads, n + pad[1][1], m + pad[2][1])
    return values.reshape(whole)[:, :n, :m], spread.reshape(whole)[:, :n, :m]


def mxq(rows, columns):
    return lambda x: through(x, mx(x, rows, columns)[0])


def by_token(x):
    return through(x, mx(x, 1, x.shape[2])[0])


def softmax(t, seen, v, *, rounding, threshold, offset, whole, reverse=False, weights):
    """Running softmax by key tiles of 128: O [heads, n, channels]."""
    heads, n, m = t.shape
    t = jnp.where(seen, t, -jnp.inf)
    base = jnp.full((heads, n, 1), -jnp.inf)
    total = jnp.zeros((heads, n, 1))
    o = jnp.zeros((heads, n, v.shape[2]))
    tiles = range(0, m, 128)
    for first in reversed(tiles) if reverse else tiles:
        tile = slice(first, first + 128)
        level = jnp.ceil(t) if whole else t
        most = fixed(level[:, :, tile].max(axis=2, keepdims=True))
        moves = (base == -jnp.inf) | (most - base > threshold)
        new = jnp.where(moves, jnp.maximum(base, most), base)
        decay = jnp.where(base == -jnp.inf, 0, jnp.exp2(base - jnp.where(new == -jnp.inf, 0, new)))
        finite = jnp.where(new == -jnp.inf, 0, new)
        visible = seen[:, tile]
        p = jnp.where(visible, jnp.exp2(jnp.where(visible, t[:, :, tile], 0) - finite + offset), 0)
        total = total * decay + p.sum(axis=2, keepdims=True)
        o = o * decay + weights(p, tile, rounding)
        base = new
    return o / total


def plain(v):
    return lambda p, tile, rounding: through(p, rounding(p)) @ v[:, tile]


def folded(v):
    """V's token scale goes into P before that is quantized."""
    _, scale = mx(v, 1, v.shape[2])
    quantized = by_token(v)

    def weights(p, tile, rounding):
        scales = scale[:, tile, 0][:, None, :]
        return through(p, rounding(p * scales) / scales) @ quantized[:, tile]

    return weights


def guarded_blocks(n: int, causal: bool):
    """Blocks of 32 queries by 32 keys that hold a visible pair and a masked one, pair by pair."""
    cut = np.zeros((n, n), dtype=bool)
    for i in range(0, n, 32):
        for j in range(0, n, 32):
            pairs = [
                key < n and (key <= query or not causal)
                for query in range(i, min(i + 32, n))
                for key in range(j, j + 32)
            ]
            cut[i : i + 32, j : j + 32] = any(pairs) and not all(pairs)
    return cut


def bf16_fa4(q, k, v, seen, cut, c):
    t = q @ k.mT * c
    return softmax(
        t,
        seen,
        v,
        rounding=bf16,
        threshold=8,
        offset=0,
        whole=False,
        reverse=True,
        weights=plain(v),
    )


def cudnn_mxfp8(q, k, v, seen, cut, c):
    t = mxq(1, 32)(q) @ mxq(1, 32)(k).mT * c
    weights = plain(mxq(32, 1)(v))
    return softmax(t, seen, v, rounding=e4m3, threshold=4, offset=4, whole=False, weights=weights)


def cudnn_mxfp8_pv_bf16(q, k, v, seen, cut, c):
    t = mxq(1, 32)(q) @ mxq(1, 32)(k).mT * c
    return softmax(t, seen, v, rounding=bf16, threshold=4, offset=0, whole=False, weights=plain(v))


def flamia_mxfp8_folded(q, k, v, seen, cut, c):
    t = by_token(q) @ by_token(k).mT * c
    rounding = lambda p: mx(p, 1, 32)[0]  # noqa: E731
    return softmax(
        t, seen, v, rounding=rounding, threshold=0, offset=0, whole=True, weights=folded(v)
    )


def flamia_mxfp8(q, k, v, seen, cut, c):
    t = jnp.where(cut, q @ k.mT, by_token(q) @ mxq(32, 32)(k).mT) * c
    quantized = mxq(32, 32)(v)

    def weights(p, tile, rounding):
        inside = cut[:, tile]
        low = jnp.where(inside, 0, through(p, e4m3(p))) @ quantized[:, tile]
        return low + jnp.where(inside, through(p, bf16(p)), 0) @ v[:, tile]

    return softmax(t, seen, v, rounding=None, threshold=0, offset=8, whole=True, weights=weights)


def flamia_mxfp8_unguarded(q, k, v, seen, cut, c):
    t = mxq(32, 32)(q) @ mxq(32, 32)(k).mT * c
    weights = plain(mxq(32, 32)(v))
    return softmax(t, seen, v, rounding=e4m3, threshold=0, offset=8, whole=True, weights=weights)


FORWARDS = {
    function.__name__.replace("_", "-"): function
    for function in (
        bf16_fa4,
        cudnn_mxfp8,
        cudnn_mxfp8_pv_bf16,
        flamia_mxfp8,
        flamia_mxfp8_folded,
        flamia_mxfp8_unguarded,
    )
}


def packed(forward, q, k, v, *masks):
    """A forward over documents: q [tokens, heads, channels] and so on; which pairs of each are seen, and guarded."""
    group = q.shape[1] // k.shape[1]
    outs, start = [], 0
    for seen, cut in zip(masks[::2], masks[1::2], strict=True):
        rows = slice(start, start + len(seen))
        heads_first = [jnp.moveaxis(x[rows], 1, 0) for x in (q, k, v)]
        heads_first[1:] = [jnp.repeat(x, group, axis=0) for x in heads_first[1:]]
        out = forward(*heads_first, seen, cut, SCALE * LOG2_E)
        outs.append(jnp.moveaxis(out, 0, 1))
        start += len(seen)
    return jnp.concatenate(outs)


@functools.cache
def differentiated(name: str):
    """A compiled function of dout, q, k, v and masks: out, dq, dk, dv. One program for both masks."""

    def both(dout, q, k, v, *masks):
        out, pull = jax.vjp(lambda *x: packed(FORWARDS[name], *x, *masks), q, k, v)
        return out, *pull(dout)

    return jax.jit(both)


LENGTHS = (167, 37)
SCALE = 48**-0.5


@functools.cache
def inputs():
    """q, k, v, dout with 4 query heads and 2 key/value heads.

    Scores are spread enough that bases move. Exponents are too, inside every block and between them, so that what
    shares a scale matters.
    """
    q, k, v, cu_seqlens = bell(11, LENGTHS, 4, 2, 48, spread=2.0)
    rng = np.random.default_rng(12)
    growing = np.linspace(0.5, 4, len(q))[:, None, None]
    arrays = []
    for x, factor in ((q, growing), (k, 1), (v, 1)):
        powers = np.exp2(rng.integers(-20, 1, x.shape) * rng.integers(0, 2, x.shape))
        tokens = np.exp2(rng.integers(-3, 2, (len(x), x.shape[1], 1)))
        arrays.append((x.astype(np.float32) * powers * tokens * factor).astype(BF16))
    dout = rng.standard_normal(q.shape).astype(np.float32).astype(BF16)
    return *arrays, dout, cu_seqlens


# Compiling takes seconds each; the parts of these two are parts of the others.
NIGHTLY = ("cudnn-mxfp8-pv-bf16", "flamia-mxfp8-unguarded")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in FORWARDS],
)
def test_against_automatic_differentiation(name: str, causal: bool) -> None:
    q, k, v, dout, cu_seqlens = inputs()
    masks = []
    for length in LENGTHS:
        seen = np.ones((length, length), bool)
        masks += [np.tril(seen) if causal else seen, guarded_blocks(length, causal)]
    with jax.enable_x64(True):
        wide = [jnp.asarray(x.astype(np.float64)) for x in (dout, q, k, v)]
        expected = [np.asarray(x) for x in differentiated(name)(*wide, *masks)]
    found = float64.gradient(q, k, v, dout, name, cu_seqlens=cu_seqlens, causal=causal)
    given, rest, options = arguments(RECIPES[name], causal)
    out = exact.forward(*given[:3], *rest, **options).out
    for what, a, b in zip(("out", "dq", "dk", "dv"), (out, *found), expected, strict=True):
        assert a.dtype == np.float64
        assert np.abs(a - b).max() < 1e-12 * np.abs(b).max(), what


def test_every_recipe_is_differentiated_here() -> None:
    assert set(FORWARDS) == set(RECIPES)


def arguments(recipe, causal: bool = True):
    """Arguments of the functions in `exact`, in float64."""
    q, k, v, dout, cu_seqlens = inputs()
    documents = Documents.from_cu_seqlens(cu_seqlens, len(q))
    given = [x.astype(np.float64) for x in (q, k, v, dout)]
    return given, (recipe, documents), {"causal": causal, "softmax_scale": SCALE}


def deviation(found, expected) -> float:
    """The largest difference of any gradient, relative to the largest element of that gradient."""
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(found, expected, strict=True))


FOLDED, CUDNN, FA4 = (RECIPES[name] for name in ("flamia-mxfp8-folded", "cudnn-mxfp8", "bf16-fa4"))
GUARDED = RECIPES["flamia-mxfp8"]


def unguarded(product):
    return replace(product, right=replace(product.right, guard=Guard.NONE), guard_instruction=None)


OTHER_FORWARDS = {
    "threshold of fa4": (FA4, replace(FA4, softmax=replace(FA4.softmax, rescale_threshold=0))),
    "threshold of cudnn": (
        CUDNN,
        replace(CUDNN, softmax=replace(CUDNN.softmax, rescale_threshold=0)),
    ),
    "offset": (CUDNN, replace(CUDNN, softmax=replace(CUDNN.softmax, p_offset=0))),
    "base": (FOLDED, replace(FOLDED, softmax=replace(FOLDED.softmax, base="scaled_max"))),
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


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_without_quantizers_all_are_one(name: str, causal: bool) -> None:
    q, k, v, dout, cu_seqlens = inputs()
    keywords = {"cu_seqlens": cu_seqlens, "causal": causal}
    given, rest, options = arguments(RECIPES[name], causal)
    expected = float64.forward(q, k, v, **keywords)
    found = exact.forward(*given[:3], *rest, **options, quantized=False)
    assert deviation(found, expected) < 1e-13
    expected = float64.backward(q, k, v, dout, **keywords)
    assert deviation(exact.gradient(*given, *rest, **options, quantized=False), expected) < 1e-13
    assert deviation(exact.backward(*given, *rest, **options), expected) < 1e-12


@pytest.mark.parametrize(
    ("name", "causal"),
    [("bf16-fa4", True), ("cudnn-mxfp8", False), ("flamia-mxfp8-folded", True)],
)
def test_finite_differences_of_the_forward_without_quantizers(name: str, causal: bool) -> None:
    given, rest, options = arguments(RECIPES[name], causal)
    gradient = exact.gradient(*given, *rest, **options, quantized=False)
    rng = np.random.default_rng(5)
    for index in range(3):
        direction = rng.standard_normal(given[index].shape)
        step = 1e-5
        values = []
        for sign in (1, -1):
            moved = list(given[:3])
            moved[index] = moved[index] + sign * step * direction
            out = exact.forward(*moved, *rest, **options, quantized=False).out
            values.append((given[3] * out).sum())
        slope = (values[0] - values[1]) / (2 * step)
        # The error of a central difference: step^2 times a third derivative, and rounding / step.
        assert (
            abs(slope - (direction * gradient[index]).sum())
            < 1e-6 * np.abs(direction * gradient[index]).sum()
        )


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
}


@pytest.mark.parametrize("what", WRONG_BACKWARDS)
def test_a_backward_that_does_not_fit_is_seen(what: str) -> None:
    given, rest, options = arguments(WRONG_BACKWARDS[what])
    expected = exact.gradient(*given, *rest, **options, quantized=False)
    assert deviation(exact.backward(*given, *rest, **options), expected) > 0.01


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 300])
def test_guarded_blocks(length: int, causal: bool) -> None:
    for part in parts(Documents((0, length)), 1, 1, causal):
        expected = guarded_blocks(length, causal)[part.rows, part.keys]
        assert (part.guarded() == expected).all()


def test_a_row_of_infinitely_low_scores_is_dead() -> None:
    q, k, v, _ = (np.ones((4, 1, 32)) for _ in range(4))
    q[2] = np.inf
    k[:] = -1
    out, lse = exact.forward(q, k, v, FA4, Documents((0, 4)), causal=True, softmax_scale=1.0)
    assert (out[2] == 0).all()
    assert lse[0, 2] == -np.inf
    assert (out[[0, 1, 3]] == 1).all()


def test_float64_inputs_are_for_no_recipe() -> None:
    x = np.zeros((3, 1, 32))
    with pytest.raises(TypeError, match="q holds float64; it must be float32 or bfloat16"):
        float64.gradient(x, x, x, x, "bf16-fa4")
