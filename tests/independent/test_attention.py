"""The slow forward of flamia-mxfp8-folded: closed forms, special values, and float64 checks stage by stage."""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.independent import factors, float32, sums
from tests.independent.attention import forward
from tests.independent.oracles import load
from tests.independent.samples import E4M3_VALUES, as_float64, bell, scale_values

ONE, NAN, HUGE = 0x3F80, 0x7FC0, 0x7E00  # bfloat16; HUGE is 2**125


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Two results hold the same bits in every stage."""
    assert a.keys() == b.keys()
    for name in a:
        for x, y in zip(a[name], b[name], strict=True):
            np.testing.assert_array_equal(x, y, err_msg=name)


def test_equal_scores_and_values() -> None:
    """k = 0 and v = 1: P = 1, l counts the keys, out = 1."""
    length = 37
    q, v = bell(1, length, 2, 32), np.full((length, 1, 32), ONE, np.uint16)
    result = forward(q, np.zeros_like(v), v, [0, length])
    count = np.arange(1, length + 1, dtype=np.float32)
    triangle = np.tril(np.full((length, length), float32.ONE, np.uint32))
    for head in range(2):
        np.testing.assert_array_equal(result["p"][0][head], triangle)
        np.testing.assert_array_equal(result["row_sum"][head], count.view(np.uint32))
        np.testing.assert_allclose(
            as_float64(result["lse"][head]), np.log(count), rtol=1e-6, atol=1e-7
        )
    assert not result["row_max"].any()
    assert not result["s"][0].any()
    assert (result["out"] == ONE).all()
    # 1 is 256 * 2**-8 (the next scale would need 512), so v's byte is 119, and P times 2**-8 needs
    # 111. A block whose keys are all masked has byte 0.
    assert (result["v.scales"] == 119).all()
    assert (result["v.codes"] == 0x78).all()
    wanted = np.where(np.arange(length)[:, None] >= [0, 32], 111, 0)
    np.testing.assert_array_equal(result["p.o.scales"][0][0], wanted)
    np.testing.assert_array_equal(result["p.o.codes"][0][0], np.where(triangle, 0x78, 0))


def test_value_scale_is_folded_into_p() -> None:
    """Two keys of equal score; v = 1 and v = 2**-20: the second code of P is 2**-20 lower."""
    v = np.full((2, 1, 32), ONE, np.uint16)
    v[1] -= 20 << 7
    result = forward(bell(2, 2, 1, 32), np.zeros_like(v), v, [0, 2])
    assert result["v.scales"][:, 0, 0].tolist() == [119, 99]
    # 256 * 2**-20 is below half the smallest e4m3: the second key vanishes from O, not from l.
    assert result["p.o.codes"][0][0, 1].tolist() == [0x78, 0x00]
    assert (as_float64(result["out"][1]) == 0.5).all()


@pytest.mark.parametrize("causal", [True, False])
def test_documents_do_not_see_each_other(causal: bool) -> None:
    lengths = [1, 0, 9, 33]
    bounds = [0, *np.cumsum(lengths).tolist()]
    q, k, v = bell(3, 43, 2, 32), bell(4, 43, 1, 32), bell(5, 43, 1, 32)
    packed = forward(q, k, v, bounds, causal=causal)
    for index, (start, end) in enumerate(itertools.pairwise(bounds)):
        part = slice(start, end)
        alone = forward(q[part], k[part], v[part], [0, end - start], causal=causal)
        for name in ("s", "p", "p.o.codes", "p.o.scales"):
            np.testing.assert_array_equal(packed[name][index], alone[name][0], err_msg=name)
        for name in ("lse", "row_max", "row_sum"):
            np.testing.assert_array_equal(packed[name][:, part], alone[name], err_msg=name)
        for name in ("out", "o", "q.codes", "k.scales"):
            np.testing.assert_array_equal(packed[name][part], alone[name], err_msg=name)


def test_first_tokens_give_first_rows() -> None:
    q, k, v = bell(6, 40, 1, 32), bell(7, 40, 1, 32), bell(8, 40, 1, 32)
    whole = forward(q, k, v, [0, 40])
    for count in (1, 31, 33):
        part = forward(q[:count], k[:count], v[:count], [0, count])
        np.testing.assert_array_equal(part["out"], whole["out"][:count])
        np.testing.assert_array_equal(part["lse"], whole["lse"][:, :count])


def test_heads_share_their_key_value_head() -> None:
    q, k, v = bell(9, 12, 4, 32), bell(10, 12, 2, 32), bell(11, 12, 2, 32)
    grouped = forward(q, k, v, [0, 12])
    same(grouped, forward(q, k, v, np.array([0, 12], np.int32), softmax_scale=32**-0.5))
    for head in range(4):
        one = slice(head // 2, head // 2 + 1)
        alone = forward(q[:, head : head + 1], k[:, one], v[:, one], [0, 12])
        np.testing.assert_array_equal(grouped["out"][:, head], alone["out"][:, 0])


@pytest.mark.parametrize(
    ("operand", "reaches"),
    [
        (0, lambda row, head, channel: row == 8 and head == 1),  # q: its own row
        (1, lambda row, head, channel: row >= 8),  # k: the rows that see the key
        (2, lambda row, head, channel: row >= 5 and channel == 3),  # v: all rows of the document
    ],
)
def test_nan_reaches_what_it_must_and_no_more(
    operand: int, reaches: Callable[[int, int, int], bool]
) -> None:
    inputs = [bell(12, 12, 2, 32), bell(13, 12, 1, 32), bell(14, 12, 1, 32)]
    inputs[operand][8, -1, 3] = NAN
    result = forward(inputs[0], inputs[1], inputs[2], [0, 5, 12])
    for row, head, channel in np.ndindex(12, 2, 32):
        is_nan = int(result["out"][row, head, channel]) == 0x7FFF
        assert is_nan == reaches(row, head, channel), (row, head, channel)
    for row, head in np.ndindex(12, 2):
        for name in ("lse", "row_max", "row_sum"):
            is_nan = int(result[name][head, row]) == float32.NAN
            assert is_nan == (operand != 2 and reaches(row, head, 0)), (name, row, head)


def test_scores_of_minus_infinity() -> None:
    """Row 0 sees only -inf and is dead; row 1 has one ordinary key; row 2 sees +inf: NaN."""
    q, k, v = (np.full((3, 1, 32), HUGE, np.uint16) for _ in range(3))
    v[:] = ONE
    k[0], k[1] = HUGE | 0x8000, 0
    result = forward(q, k, v, [0, 3])
    assert result["s"][0][0, 0, 0] == float32.MINUS_INFINITY
    assert result["s"][0][0, 0, 2] == float32.INFINITY
    assert not result["out"][0].any()
    assert not result["o"][0].any()
    assert result["lse"][0].tolist() == [float32.MINUS_INFINITY, 0, float32.NAN]
    assert result["row_max"][0].tolist() == [float32.MINUS_INFINITY, 0, float32.NAN]
    assert result["row_sum"][0].tolist() == [0, float32.ONE, float32.NAN]
    assert (result["out"][1] == ONE).all()
    assert (result["out"][2] == 0x7FFF).all()
    assert result["p"][0][0].tolist() == [[0, 0, 0], [0, float32.ONE, 0], [float32.NAN] * 3]
    assert result["p.o.codes"][0][0, 2].tolist() == [0x7F] * 3
    assert result["p.o.scales"][0][0, 2].tolist() == [0]


@pytest.mark.parametrize("sign", [0, 1])
def test_scores_that_overflow_only_with_the_softmax_scale(sign: int) -> None:
    """S = -+2**123 is finite, t is not: -inf leaves a dead row, +inf counts as NaN."""
    q, k = np.full((1, 1, 32), 0x5F00, np.uint16), np.zeros((1, 1, 32), np.uint16)  # q = 2**63
    k[..., 0] = 0x5D80 if sign else 0xDD80  # +-2**60
    result = forward(q, k, np.full_like(k, ONE), [0, 1], softmax_scale=2.0**5)
    score = Fraction(2**123 if sign else -(2**123))
    assert result["s"][0][0, 0, 0] == float32.nearest(score)
    assert result["lse"].item() == (float32.NAN if sign else float32.MINUS_INFINITY)
    assert (result["out"] == (0x7FFF if sign else 0)).all()


@pytest.mark.parametrize(("first", "positive"), [(0x4B20, False), (0x4B10, True)])
def test_the_split_keeps_the_rounding_of_t_out_of_p(first: int, positive: bool) -> None:
    """S = 1.25 * 2**23 or 1.125 * 2**23: t is an integer by its rounding, x is the exact rest."""
    q, k = np.zeros((1, 1, 32), np.uint16), np.full((1, 1, 32), ONE, np.uint16)
    q[..., 0] = first
    result = forward(q, k, k, [0, 1], softmax_scale=1.0)
    exact = as_float64(q)[0, 0, 0] * float(float32.value(factors.exact_product(1.0)))
    n = float(np.float32(exact))
    assert n == math.ceil(n) == as_float64(result["row_max"]).item()
    assert (exact > n) == positive
    p = as_float64(result["p"][0]).item()
    assert p == pytest.approx(2.0 ** (exact - n), rel=3e-7)
    assert (p > 1) == positive


def test_lanes() -> None:
    """The order of the row sum, by numpy's float32 additions on a table with a column a lane."""
    other_order = 0
    for seed in range(20):
        values = as_float64(bell(100 + seed, 128)).astype(np.float32) ** 2
        start = np.float32(3.7)
        lanes = np.zeros(8, np.float32)
        lanes[0] = start
        for row in values.reshape(16, 8):
            lanes = lanes + row
        pairs = lanes[[0, 4, 1, 5]] + lanes[[2, 6, 3, 7]]
        wanted = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])
        got = sums.eight_lanes(int(start.view(np.uint32)), values.view(np.uint32).tolist())
        assert got == int(wanted.view(np.uint32))
        other_order += (lanes[:4] + lanes[4:]).sum() != wanted
    # Another tree over the same lanes would have been noticed.
    assert other_order > 0


def test_score_factor() -> None:
    assert factors.exact_product(1.0) == 0x3FB8AA3B
    assert factors.exact_product(0.125) == 0x3FB8AA3B - (3 << 23)
    # Near enough to no rounding boundary that float64 gives the same bits.
    wanted = np.float32(1 / math.sqrt(128) * math.log2(math.e)).view(np.uint32)
    assert factors.exact_product(1 / math.sqrt(128)) == int(wanted)
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="softmax_scale"):
            factors.exact_product(bad)


@pytest.mark.parametrize(
    ("length", "head_dim", "causal"), [(33, 64, True), (40, 48, False), (150, 32, True)]
)
def test_every_stage_follows_from_the_one_before(length: int, head_dim: int, causal: bool) -> None:
    """In float64, from the traced stages; 150 keys cross a tile."""
    q, k, v = (bell(seed, length, 1, head_dim) for seed in (16, 17, 18))
    result = forward(q, k, v, [0, length], causal=causal)
    mask = np.tril(np.ones((length, length), bool)) if causal else np.ones((length, length), bool)

    # Step 1: decoded operands are within half an e4m3 step (2**-4 relative) of the inputs.
    decoded = {}
    for name, bits in (("q", q), ("k", k), ("v", v)):
        values = E4M3_VALUES[result[f"{name}.codes"]] * scale_values(result[f"{name}.scales"])
        # Below the normal range the step is 2**-9 of the scale.
        slack = 2.0**-10 * scale_values(result[f"{name}.scales"])
        assert (abs(values - as_float64(bits)) <= np.maximum(abs(values) * 2.0**-4, slack)).all()
        decoded[name] = values[:, 0]

    # Step 2: exact products, at most 2 * 33 terms cut at 2**-25 of the largest, 2 results cut.
    s = as_float64(result["s"][0])[0]
    exact = decoded["q"] @ decoded["k"].T
    assert (abs(s - exact) <= 2.0**-18 * (abs(decoded["q"]) @ abs(decoded["k"]).T)).all()

    # Steps 3 and 4.
    c = float(float32.value(factors.exact_product(1 / math.sqrt(head_dim))))
    n = np.where(mask, np.ceil((s * c).astype(np.float32)), -np.inf)
    tiles = [slice(start, min(start + 128, length)) for start in range(0, length, 128)]
    m = np.full(length, -np.inf)
    exact_p, tile_m = np.zeros_like(s), np.zeros_like(s)
    for tile in tiles:
        m = np.maximum(m, n[:, tile].max(axis=1))
        tile_m[:, tile] = m[:, None]
        exact_p[:, tile] = np.where(mask[:, tile], np.exp2(s[:, tile] * c - m[:, None]), 0)
    np.testing.assert_array_equal(as_float64(result["row_max"])[0], m)
    p = as_float64(result["p"][0])[0]
    np.testing.assert_allclose(p, exact_p, rtol=4e-7)

    # Step 5, everything brought to the final m.
    row_sum = as_float64(result["row_sum"])[0]
    np.testing.assert_allclose(row_sum, (p * np.exp2(tile_m - m[:, None])).sum(axis=1), rtol=1e-6)

    # Step 6: the codes decode to P times v's scale; with v's codes they give O.
    folded = p * scale_values(result["v.scales"])[:, 0, 0]
    block_scale = np.repeat(scale_values(result["p.o.scales"][0][0]), 32, axis=1)[:, :length]
    decoded_p = E4M3_VALUES[result["p.o.codes"][0][0]] * block_scale
    slack = np.maximum(2.0**-4 * abs(decoded_p), 2.0**-10 * block_scale)
    assert (abs(decoded_p - folded) <= slack).all()
    for start in range(0, length, 32):
        amax = folded[:, start : start + 32].max(axis=1)
        scale = block_scale[:, start]
        assert ((amax <= 448 * scale) & ((amax > 224 * scale) | (amax == 0))).all()

    # Step 7.
    weights = decoded_p * np.exp2(tile_m - m[:, None])
    v_codes = E4M3_VALUES[result["v.codes"][:, 0]]
    o = as_float64(result["o"])[:, 0]
    bound = (abs(weights) @ abs(v_codes)) / row_sum[:, None]
    assert (abs(o - (weights @ v_codes) / row_sum[:, None]) <= 2.0**-17 * bound).all()
    out = result["o"].view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(result["out"], out)
    lse = (m + np.log2(row_sum)) * math.log(2)
    np.testing.assert_allclose(as_float64(result["lse"])[0], lse, rtol=1e-6, atol=1e-6)


def test_near_float64_attention_on_a_real_model() -> None:
    """Two documents of SmolLM2, 75 tokens cut to 30, against attention without quantization."""
    oracle = load("smollm2", "layer14")
    part = slice(361, 391)
    q, k, v = oracle["q_bits"][part, :3], oracle["k_bits"][part, :1], oracle["v_bits"][part, :1]
    bounds = [0, 18, 30]
    result = forward(q, k, v, bounds, softmax_scale=float(oracle["softmax_scale"]))
    wanted = np.zeros(q.shape)
    for start, end in itertools.pairwise(bounds):
        document = slice(start, end)
        for head in range(3):
            scores = as_float64(q[document, head]) @ as_float64(k[document, 0]).T / 8
            weights = np.tril(np.exp(scores - scores.max(axis=1, keepdims=True)))
            weights /= weights.sum(axis=1, keepdims=True)
            wanted[document, head] = weights @ as_float64(v[document, 0])
    error = np.linalg.norm(as_float64(result["out"]) - wanted) / np.linalg.norm(wanted)
    assert 0.03 < error < 0.13
