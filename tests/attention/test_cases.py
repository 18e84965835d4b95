"""Worked inputs: mass that small probabilities lose, finite masks, the ends of float32's range, and inputs that went
wrong for others. Expected values are worked out by hand or in exact arithmetic."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest

from flamia_ref import attention
from flamia_ref.attention import RECIPES, Recipe
from flamia_ref.attention.product import Scope
from tests.attention.changes import changed
from tests.attention.passes import every_backward, every_recipe
from tests.attention.samples import BF16, assert_same, bell, bits
from tests.attention.shapes import Shape, run


def cudnn(p_offset: int) -> Recipe:
    """`cudnn-mxfp8`, P 2^p_offset times the probability, its base the maximum at any time."""
    softmax = dataclasses.replace(
        RECIPES["cudnn-mxfp8"].softmax, rescale_threshold=0, p_offset=p_offset
    )
    return dataclasses.replace(RECIPES["cudnn-mxfp8"], softmax=softmax)


def against_a_tail(recipe: Recipe, keys: int, log2: float, *, sink=None, first: bool = True):
    """One query, a first key of score 0 and others of score `log2` in log2 units, all values 1."""
    q, k = np.zeros((1, 1, 32), BF16), np.zeros((keys + first, 1, 32), BF16)
    q[0, 0, 0], k[first:, 0, 0] = 1, -1
    return attention.forward(
        q,
        k,
        np.ones((keys + first, 1, 32), BF16),
        recipe,
        cu_seqlens=[0, 1],
        cu_seqlens_k=[0, keys + first],
        softmax_scale=-log2 * math.log(2),
        sink=sink,
        trace=("o", "row_sum"),
    )


TAIL = math.log2(0.9) - 14


@pytest.mark.parametrize(
    ("p_offset", "code_values"),
    # 0.9 x 2^-10 is below half of e4m3's smallest number, 2^-9; 0.9 x 2^-6 = 7.2 x 2^-9 becomes 7 x 2^-9.
    [(4, Fraction(0)), pytest.param(8, 7 * Fraction(1, 512), marks=pytest.mark.nightly)],
)
def test_a_first_key_and_a_flat_tail(p_offset: int, code_values: Fraction) -> None:
    """32768 keys of probability 0.9 x 2^-14 relative to the first: 9/14 of the mass, most of it lost with 2^4."""
    found = against_a_tail(cudnn(p_offset), 32768, TAIL)
    one = Fraction(2**p_offset)
    row_sum = one * (1 + 32768 * Fraction(9, 10) / 2**14)
    expected = (one + 32768 * code_values) / row_sum
    assert round(float(expected), 2) == (0.36 if p_offset == 4 else 0.98)
    # Of 32768 float32 sums that err by 2^-24 of what they have, each.
    np.testing.assert_allclose(found.trace["row_sum"], float(row_sum), rtol=1e-4)
    np.testing.assert_allclose(found.trace["o"], float(expected), rtol=1e-4)
    assert (found.out == np.float32(found.trace["o"].astype(BF16))).all()


def test_a_sink_beside_a_flat_tail_loses_nothing() -> None:
    """The sink is no key: the tail's own maximum is the base, and each P is 2^p_offset."""
    for p_offset in (4, 8):
        found = against_a_tail(
            cudnn(p_offset), 4096, TAIL, sink=np.zeros(1, np.float32), first=False
        )
        mass = 4096 * 0.9 * 2.0**-14
        np.testing.assert_allclose(found.trace["o"], mass / (1 + mass), rtol=1e-5)
        np.testing.assert_allclose(found.lse, math.log(1 + mass), rtol=1e-5)


@pytest.mark.parametrize("p_offset", [0, 4, 8])
def test_probabilities_of_2_to_the_minus_11(p_offset: int) -> None:
    """B31: 4095 keys whose P is 2^-11, an exact power here: c is 11. Unscaled it is below e4m3's numbers."""
    one = against_a_tail(cudnn(p_offset), 4095, -11.0)
    assert one.trace["row_sum"] == 2.0**p_offset * 2.99951171875
    expected = 1.0 if p_offset else 0.33338759563731074
    np.testing.assert_allclose(one.trace["o"], expected, rtol=2**-23)  # two roundings
    assert (one.out == np.float32(BF16.type(expected))).all()


def test_a_row_sum_of_codes_loses_no_mass() -> None:
    """B31: what P lost is not in the row sum either."""
    recipe = changed(cudnn(0), "softmax.row_sum_of", "codes")
    found = against_a_tail(recipe, 4095, -11.0).trace
    assert found["row_sum"] == 1
    assert (found["o"] == 1).all()


# The scale of a block with the largest value 1 is e4m3(1 / 6) = 11 / 64, between 10 / 64 and 11 / 64; 1 over that is
# 5.8, whose code is 6.
NVFP4_ONE = {"attn-qat-nvfp4": 66 / 64}


def test_values_of_one_give_one_with_a_row_sum_of_codes() -> None:
    """B31, whatever the scores: O = (sum of P) / (sum of P). The division is one rounding, the sum some."""
    q, k, v, _ = bell(31, [150], 1, 1, 32, spread=3.0)
    for name in RECIPES:
        recipe = changed(RECIPES[name], "softmax.row_sum_of", "codes")
        if recipe.o.left.scope is Scope.LARGEST_SCORE:  # its P has no values without its divisor
            with pytest.raises(ValueError, match=r"softmax\.row_sum_of = 'codes'; computed is 'p'"):
                attention.forward(q, k, v, recipe)
            continue
        found = attention.forward(q, k, np.ones_like(v), recipe, trace=("o",)).trace["o"]
        tolerance = 2.0**-8 if name == "flamia-mxfp8" else 3e-6  # bfloat16 P in guarded blocks
        if name == "attn-qat-nvfp4":  # a sum of 32 columns in bfloat16 is rounded five times
            tolerance = 5 * 2.0**-9
        elif (
            name == "fp8-fa3"
        ):  # five instructions, each of 33 terms of which 13 bits of a fraction are kept
            tolerance = 5 * 33 * 2.0**-13
        np.testing.assert_allclose(found, NVFP4_ONE.get(name, 1), rtol=tolerance, err_msg=name)


def masked_by(recipe: str, value: float | None) -> Recipe:
    """The recipe with a finite mask, every tile computed where it can be."""
    found = changed(RECIPES[recipe], "softmax.mask_value", value)
    found = changed(found, "tiles.query", 32)
    found = changed(found, "tiles.key", 32)
    if recipe == "cudnn-mxfp8":
        found = changed(found, "gradient.heads", "float32_sum")
        found = changed(found, "tiles.masked", "computed")
    return found


@every_recipe
def test_a_mask_value_far_below_is_a_select(recipe: str) -> None:
    """Tiles that are masked for all of a row come first, and last: what they add is multiplied by 2^-huge, or is so
    small. A power of two times c is exact, so that P is 1 in the units of such a tile."""
    if (
        RECIPES[recipe].softmax.base == "natural_max"
    ):  # it takes exponentials of differences, of -inf too
        with pytest.raises(
            ValueError, match=r"mask_value is -8\.0 with base 'natural_max'; allowed: None"
        ):
            masked_by(recipe, -8.0)
        return
    shape = Shape(lengths=((70, 100), (33, 20)), mask="window, bottom-right", value_dim=32)
    queries, keys = shape.cu_seqlens
    options = {"cu_seqlens": queries, "cu_seqlens_k": keys, **shape.options, "stages": False}
    expected = run(shape.arrays(), masked_by(recipe, None), **options)
    if RECIPES[recipe].o.left.scope is Scope.LARGEST_SCORE:  # of the visible scores
        with pytest.raises(ValueError, match=r"has softmax\.mask_value = .*; computed is None"):
            run(shape.arrays(), masked_by(recipe, -8.0), **options)
        return
    for value in (-(2.0**100), -(2.0**120)):
        found = run(shape.arrays(), masked_by(recipe, value), **options)
        for name, wanted in expected.items():
            assert_same(found[name], wanted, name)


def test_a_fused_exponent_of_a_mask_value_that_rounds() -> None:
    """x = fma(S', c, -fl(S' c)) is the rounding error of the product, up to 2^75 for -1e30: the exponential of a tile
    that is masked for a row is 0 or infinity, and infinity stays in the row sum, as 0 x infinity, when the base
    rises."""
    shape = Shape(lengths=((70, 100),), mask="left window", value_dim=32)
    q, k, v, _ = shape.arrays()
    queries, keys = shape.cu_seqlens
    options = {"cu_seqlens": queries, "cu_seqlens_k": keys, **shape.options}
    kinds = set()
    for value in (-1e30, -1.1e30, -1.3e30, -1.7e30, -2.3e30):
        recipe = changed(masked_by("cudnn-mxfp8", value), "softmax.emulated", None)
        given = Fraction(float(np.float32(value)))
        c = Fraction(float(np.float32(1 / math.sqrt(33) * math.log2(math.e))))
        error = given * c - Fraction(float(np.float32(float(given * c))))
        found = attention.forward(q, k, v, recipe, **options)
        # Rows 35 on stand at keys from 65 on and see 9 before: the first key tile is masked for all of them.
        assert np.isnan(found.lse[:, 35:]).all() == (error > 200)
        assert np.isnan(found.lse[:, 35:]).any() == (error > 200)
        kinds.add(error > 200)
        unfused = changed(recipe, "softmax.exp2_argument", "unfused")
        assert np.isfinite(attention.forward(q, k, v, unfused, **options).lse).all()
    assert kinds == {True, False}


@pytest.mark.parametrize("recipe", ["cudnn-mxfp8", "flamia-mxfp8-folded", "bf16-fa4"])
def test_a_mask_value_that_is_near_lets_masked_values_in(recipe: str) -> None:
    """-8 is no mask: e^(-8 scale) of each masked column of the tiles worked on, past the document's end too."""
    q = np.zeros((40, 1, 32), BF16)
    v = np.zeros((40, 1, 32), BF16)
    v[20:] = 1
    hidden = attention.forward(q, q, v, masked_by(recipe, None)).out
    assert not hidden[:20].any()
    found = attention.forward(q, q, v, masked_by(recipe, -8.0), softmax_scale=0.5, trace=("o",))
    weight = math.exp(-4)
    for row in (0, 7, 19):
        tiles = 2 if recipe == "cudnn-mxfp8" or recipe.startswith("flamia") else 1
        keys = min(40, 32 * tiles)
        total = (row + 1) + (32 * tiles - row - 1) * weight
        expected = (keys - 20) * weight / total
        # e4m3 rounds e^-4 by up to one part in 16.
        np.testing.assert_allclose(found.trace["o"][row], expected, rtol=0.07)


@every_backward
def test_a_row_sum_below_one_beside_a_large_gradient(recipe: str) -> None:
    """One key at 2^0.25: an integer base is 1 above, and l = 2^-0.75. dO = 1.5 x 2^127 must not be divided by that."""
    q, k = np.zeros((1, 1, 32), BF16), np.zeros((1, 1, 32), BF16)
    q[0, 0, 0], k[0, 0, 0] = 1, 1
    v, dout = np.zeros((1, 1, 32), BF16), np.zeros((1, 1, 32), BF16)
    v[0, 0, 0], dout[0, 0, :2] = 2.0**-60, 1.5 * 2.0**127
    scale = 0.25 * math.log(2)
    one = attention.forward(q, k, v, recipe, softmax_scale=scale, trace=("row_sum",))
    # With UE4M3 scales 1.0 becomes 6 x 352 / 2048.
    if RECIPES[recipe].softmax.base == "integer_max" and recipe != "flamia-nvfp4-fp8-ue4m3":
        row_sum = one.trace["row_sum"] / 2.0 ** RECIPES[recipe].softmax.p_offset
        np.testing.assert_allclose(row_sum, 2.0**-0.75, rtol=1e-6)
    found = attention.backward(q, k, v, dout, one)
    for name in ("dq", "dk", "dv"):
        assert np.isfinite(getattr(found, name)).all(), name
    np.testing.assert_allclose(found.dv[0, 0, :2], np.float32(1.5 * 2.0**127), rtol=0.13)


def e4m3_grid(x: float) -> float:
    """A positive value to three significant bits after the first, ties to even."""
    unit = 2.0 ** (math.floor(math.log2(x)) - 3)
    return round(x / unit) * unit


# fl(2^-130 / 448) = 1170 x 2^-149 with the code 448; P is 2^8 and so is l, and fl(2^-8 x 1170 x 2^-149) = 5 x 2^-149,
# which 448 x 2^8 = 1.75 x 2^16 makes 8.75 x 2^-133, and bfloat16 9 x 2^-133.
_DESCALED = (9 * 2.0**-133, None)
AT_THE_ENDS = {
    # The least scale is 2^-9, of which 2^-130 is nothing; the largest is 448, six times which is 2688. P of 1 is
    # 66 / 64 there, and 2772 is between 2768 and 2784.
    "attn-qat-nvfp4": (0.0, 2768.0),
    "cutlass-fp8": (0.0, 448.0),
    "fp8-fa3": _DESCALED,
    "fp8-fa4": _DESCALED,
    "sage3-nvfp4": (0.0, 2688.0),
}
"""What 2^-130 and 3e38 become, where that is another number; None for the bfloat16 of 3e38."""


@every_recipe
def test_documents_at_the_ends_of_the_range(recipe: str) -> None:
    """A token alone gives its value: 2^-130, below float32's normal numbers, exactly, and 3e38 as e4m3 has it, unless
    2^4 or 2^8 times that, as P has it, is beyond float32. A document between them has the bits that it has alone.

    Without a scale, or with one that is itself an e4m3, both are beyond the format, and with a float32 descale the one
    below its normal numbers is rounded."""
    q, k, v, cu_seqlens = bell(4, [1, 20, 1], 2, 1, 32)
    dout = q[::-1].copy()
    for x in (q, k, v):
        x[0], x[21] = 2.0**-130, 3e38
    q[21] = 0
    found = run((q, k, v, dout), recipe, stages=False, cu_seqlens=cu_seqlens)
    top = float(np.float32(BF16.type(3e38)))
    # The scale is 2^120, with which the value is 225.7 of 448.
    wanted = top if RECIPES[recipe].o.right.format == "bf16" else e4m3_grid(top)
    least, wanted = AT_THE_ENDS.get(recipe, (2.0**-130, wanted))
    assert (bits(found["out"][0]) == np.float32(least).view(np.uint32)).all()
    if recipe in AT_THE_ENDS:
        wanted = top if wanted is None else wanted
    elif wanted * 2.0 ** RECIPES[recipe].softmax.p_offset > float(np.finfo(np.float32).max):
        wanted = np.inf
    assert (found["out"][21] == np.float32(wanted)).all()
    assert found["lse"][0, 0] == found["lse"][0, 21] == 0
    own = run((q[1:21], k[1:21], v[1:21], dout[1:21]), recipe, stages=False)
    for name in {"out", "dq", "dk", "dv"} & set(found):
        assert_same(found[name][1:21], own[name], name)
        assert np.isfinite(found[name][0]).all(), name


# The descale 3 / 448 makes 149.3 of 1, for which e4m3 has 144.
_THREE_AT_448 = ([1, 2, 4, 8, 16], [144 * 3 / 448, 3], 1)
SEEN: dict[str, tuple[list[float], list[float], float]] = {
    # A scale for one token: 1 and its powers of two are 66 / 64 times as much, as P is, and 3 is 3.
    "attn-qat-nvfp4": ([66 / 64 * x for x in (1, 2, 4, 8, 16)], [66 / 64, 3], 66 / 64),
    "fp8-fa3": _THREE_AT_448,
    "fp8-fa4": _THREE_AT_448,
    # A scale for all five: e4m3(16 / 6) = 2.75, with the codes 0.5, 0.5, 1.5, 3 and 6; that of 1 and 3 is 0.5.
    "sage3-nvfp4": ([2.75 * x for x in (0.5, 0.5, 1.5, 3, 6)], [1, 3], 1),
}
"""What 1, 2, 4, 8, 16, what 1, 3, and what a P of 1 become, where that is other than they are."""


@every_recipe
def test_the_diagonal_where_lengths_differ(recipe: str) -> None:
    """B29, every score 0: the mean of what a row sees, and the logarithm of how many it sees. Also B30."""
    five, two, of_p = SEEN.get(recipe, ([1, 2, 4, 8, 16], [1, 3], 1))
    means, of_two = (of_p * np.cumsum(x) / np.arange(1, len(x) + 1) for x in (five, two))
    zero = np.zeros((5, 1, 1), BF16)

    def of(queries: int, values, alignment: str):
        v = np.array(values, np.float32).astype(BF16).reshape(-1, 1, 1)
        bounds = {"cu_seqlens": [0, queries], "cu_seqlens_k": [0, len(v)]}
        one = attention.forward(
            zero[:queries], zero[: len(v)], v, recipe, trace=("o",), alignment=alignment, **bounds
        )
        if not RECIPES[recipe].has_backward:
            return one, None
        return one, attention.backward(
            zero[:queries], zero[: len(v)], v, np.ones((queries, 1, 1), BF16), one
        )

    one, _ = of(2, [1, 2, 4, 8, 16], "bottom_right")
    np.testing.assert_allclose(one.trace["o"].ravel(), means[3:], rtol=1e-6)
    np.testing.assert_allclose(one.lse[0], np.log([4, 5]), rtol=1e-6)
    one, _ = of(2, [1, 2, 4, 8, 16], "top_left")
    np.testing.assert_allclose(one.trace["o"].ravel(), means[:2], rtol=1e-6)
    one, grads = of(5, [1, 3], "bottom_right")
    np.testing.assert_allclose(one.trace["o"].ravel(), [0, 0, 0, *of_two], rtol=1e-6)
    assert not bits(one.out[:3]).any()
    assert (one.lse[0, :3] == -np.inf).all()
    np.testing.assert_allclose(one.lse[0, 3:], [0, np.log(2)], atol=1e-6)
    if grads is not None:
        assert not bits(grads.dq[:3]).any()
        np.testing.assert_allclose(grads.dv.ravel(), of_p * np.array([1.5, 0.5]), rtol=2e-2)
    one, _ = of(5, [1, 3], "top_left")
    np.testing.assert_allclose(one.trace["o"].ravel(), of_two[[0, 1, 1, 1, 1]], rtol=1e-6)


@every_recipe
def test_a_window_holds_its_own_key(recipe: str) -> None:
    """B33: left = 2 is three keys, the own one among them, to a bit of lse."""
    q, k, v, dout = (x[:5] for x in Shape(lengths=((5, 5),)).arrays())
    zeros = np.zeros_like(q)
    found = attention.forward(zeros, k, v, recipe, window=(2, 0))
    np.testing.assert_allclose(np.exp(found.lse[0]), [1, 2, 3, 3, 3], rtol=1e-6)
    found = attention.forward(zeros, k, v, recipe, causal=False, window=(1, 2))
    np.testing.assert_allclose(np.exp(found.lse[0]), [3, 4, 4, 3, 2], rtol=1e-6)
    found = attention.forward(zeros, k, v, recipe, causal=False, window=(0, 0))
    assert not found.lse.any()
    plain = run((q, k, v, dout), recipe)
    for left in (4, 5):
        other = run((q, k, v, dout), recipe, window=(left, 0))
        for name, value in plain.items():
            assert_same(other[name], value, name)


def test_a_scale_of_p_and_its_inverse_are_both_read() -> None:
    """B32: the scale of P's codes twice as large, beside the same row sum, is exactly twice O."""
    q, k, v, _ = bell(32, [40], 1, 1, 32)
    base = cudnn(4)
    one = attention.forward(q, k, v, base, trace=("o",)).trace["o"]
    doubled = changed(base, "o.left.static_scale", 128)
    assert_same(
        attention.forward(q, k, v, doubled, trace=("o",)).trace["o"], one * np.float32(2), "o"
    )


@every_recipe
def test_another_first_document(recipe: str) -> None:
    """B38: cu = [0, 5, 12], and what the first document is."""
    q, k, v, cu_seqlens = bell(38, [5, 7], 2, 1, 32)
    dout = q[::-1].copy()
    expected = run((q, k, v, dout), recipe, stages=False, cu_seqlens=cu_seqlens)
    for value in (1e30, np.nan, -np.inf):
        arrays = [x.copy() for x in (q, k, v, dout)]
        for x in arrays:
            x[:5] = value
        found = run(arrays, recipe, stages=False, cu_seqlens=cu_seqlens)
        for name in {"out", "dq", "dk", "dv"} & set(found):
            assert_same(found[name][5:], expected[name][5:], name)
        assert_same(found["lse"][:, 5:], expected["lse"][:, 5:], "lse")


ONE = {
    "attn-qat-nvfp4": (66 / 64, 66 / 64),
    # The sink of 1.5 is the base: 16 e^-1.5 = 3.57, for which e4m3 has 3.5.
    "cudnn-mxfp8-reference": (np.array([1, 3.5 / (16 * math.exp(-1.5))]), 1),
    "sage3-nvfp4": (1, 66 / 64),
}
"""What P of 1 and v of 1 are times themselves, beside the sinks 0 and 1.5, where that is not 1."""


@every_recipe
def test_a_sink_is_a_key_of_value_zero(recipe: str) -> None:
    """Beside one key of score 0 and value 1: out = 1 / (1 + e^sink), lse its logarithm, dsink = -P(sink) delta."""
    zero, one_ = np.zeros((1, 2, 32), BF16), np.ones((1, 2, 32), BF16)
    sink = np.array([0.0, 1.5], np.float32)
    found = attention.forward(zero, zero, one_, recipe, sink=sink, trace=("o",))
    share = 1 / (1 + np.exp(sink.astype(np.float64)))
    one_of_p, one_of_v = ONE.get(recipe, (1, 1))
    np.testing.assert_allclose(
        found.trace["o"][0],
        np.repeat((one_of_p * one_of_v * share)[:, None], 32, axis=1),
        rtol=2e-6,
    )
    np.testing.assert_allclose(
        found.lse[:, 0], np.log1p(np.exp(sink.astype(np.float64))), rtol=2e-6
    )
    if not RECIPES[recipe].has_backward:
        return
    grads = attention.backward(zero, zero, one_, one_, found)
    if recipe == "attn-qat-nvfp4":  # delta is that of P in bfloat16
        one_of_p = 1
    delta = 32 * one_of_p * one_of_v * share
    np.testing.assert_allclose(grads.dsink, -(1 - share) * delta, rtol=0.02)


@every_recipe
def test_a_sink_of_minus_infinity_is_none(recipe: str) -> None:
    shape = Shape(lengths=((40, 33), (5, 0)), sink=(-np.inf, -np.inf), mask="left window")
    queries, keys = shape.cu_seqlens
    options = {"cu_seqlens": queries, "cu_seqlens_k": keys}
    none = run(shape.arrays(), recipe, stages=False, **options, **shape.options | {"sink": None})
    found = run(shape.arrays(), recipe, stages=False, **options, **shape.options)
    if RECIPES[recipe].has_backward:
        assert not found.pop("dsink").any()
    for name, value in none.items():
        if not (name == "lse" or RECIPES[recipe].softmax.base == "scaled_max"):
            assert_same(found[name], value, name)
        else:  # cuDNN's way through natural units rounds once more
            np.testing.assert_allclose(found[name], value, rtol=1e-2, atol=1e-2)
