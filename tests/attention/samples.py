"""Inputs for attention tests: bfloat16 arrays that reach the recipe's corners. Expected values are elsewhere."""

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)


def bell(seed: int, lengths, heads: int, kv_heads: int, head_dim: int, spread: float = 1.0):
    """q, k, v of normal values, and cu_seqlens."""
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)
    q, k, v = (
        (rng.standard_normal((tokens, count, head_dim)) * spread).astype(np.float32).astype(BF16)
        for count in (heads, kv_heads, kv_heads)
    )
    return q, k, v, np.cumsum([0, *lengths]).astype(np.int32)


def wide(seed: int, lengths, heads: int, kv_heads: int, head_dim: int):
    """Values whose exponents spread over 60 binades, a few of them zeros."""
    rng = np.random.default_rng(seed)
    q, k, v, cu_seqlens = bell(seed, lengths, heads, kv_heads, head_dim)
    arrays = []
    for x in (q, k, v):
        powers = np.exp2(rng.integers(-30, 30, x.shape)).astype(np.float32)
        scaled = x.astype(np.float32) * powers
        arrays.append(np.where(rng.random(x.shape) < 0.1, 0, scaled).astype(BF16))
    return *arrays, cu_seqlens


def any_bits(seed: int, lengths, heads: int, kv_heads: int, head_dim: int):
    """Random finite bit patterns: every exponent, subnormals, overflow in S."""
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)
    arrays = []
    for count in (heads, kv_heads, kv_heads):
        bits = rng.integers(0, 1 << 16, (tokens, count, head_dim), dtype=np.uint16)
        bits = np.where((bits & 0x7F80) == 0x7F80, bits & 0x807F, bits).astype(np.uint16)
        arrays.append(bits.view(BF16))
    return *arrays, np.cumsum([0, *lengths]).astype(np.int32)


def with_specials(seed: int, lengths, heads: int, kv_heads: int, head_dim: int):
    """Normal values with a few NaN and infinities of both signs in q, k and v."""
    rng = np.random.default_rng(seed)
    q, k, v, cu_seqlens = bell(seed, lengths, heads, kv_heads, head_dim)
    arrays = []
    for x in (q, k, v):
        x = x.copy()
        for value in (np.nan, np.inf, -np.inf):
            x[tuple(rng.integers(0, extent) for extent in x.shape)] = value
        arrays.append(x)
    return *arrays, cu_seqlens


def tiny(seed: int, lengths, heads: int, kv_heads: int, head_dim: int):
    """Values from 2^-133, the smallest of bfloat16, to 2^-100, zeros of both signs, and rows of zeros."""
    rng = np.random.default_rng(seed)
    q, k, v, cu_seqlens = bell(seed, lengths, heads, kv_heads, head_dim)
    arrays = []
    for x in (q, k, v):
        powers = np.exp2(rng.integers(-133, -100, x.shape)).astype(np.float32)
        x = (x.astype(np.float32) * powers).astype(BF16)
        x[rng.random(x.shape) < 0.2] = -0.0
        x[rng.random(x.shape[:2]) < 0.2] = 0
        arrays.append(x)
    return *arrays, cu_seqlens


def edges(seed: int, lengths, heads: int, kv_heads: int, head_dim: int):
    """Small integers times powers of two, so that sums, maxima and roundings meet ties and equal values."""
    rng = np.random.default_rng(seed)
    q, k, v, cu_seqlens = bell(seed, lengths, heads, kv_heads, head_dim)
    arrays = []
    for x in (q, k, v):
        integers = rng.integers(-8, 9, x.shape).astype(np.float32)
        x = np.ldexp(integers, rng.integers(-4, 3, x.shape[:1])[:, None, None])
        arrays.append(x.astype(np.float32).astype(BF16))
    return *arrays, cu_seqlens


def cancelling(groups: str, unit: int, heads: int = 1):
    """Groups of `unit` tokens whose parts of every contraction over tokens are big, or small by 2^-22, or the negative
    of the big ones: what an instruction cuts off, and where the sum of a tile begins and ends, shows in the result.

    b, n: for each token of b there is one of n with equal q and k in channels 0 to 15, which alone make S, so P is
    equal; with equal v in channels 0 to 23, where alone dO is not 0; with opposite v elsewhere, opposite k in channels
    16 to 23, where q is 0, and opposite dO. So dS of the two rows is opposite, and their q, where k is 0, is equal.
    """
    q, k, v, cu_seqlens = bell(6, [unit * len(groups)], heads, 1, 32)
    dout = bell(1006, [unit * len(groups)], heads, 1, 32)[0]
    q, k, v, dout = (x.astype(np.float32) for x in (q, k, v, dout))
    q[:, :, 16:24], k[:, :, 24:], dout[:, :, 24:] = 0, 0, 0
    tokens = np.arange(len(q)) // unit
    big = tokens == groups.index("b")
    for index, group in enumerate(groups):
        here = tokens == index
        if group == "n":
            for x in (q, k, v, dout):
                x[here] = x[big]
        factor = {"b": 1, "n": -1, "s": 2.0**-22}[group]
        k[here, :, 16:24] *= np.float32(factor)
        v[here, :, 24:] *= np.float32(factor)
        dout[here] *= np.float32(factor)
        q[here, :, 24:] *= np.float32(abs(factor))
    return *(x.astype(BF16) for x in (q, k, v, dout)), cu_seqlens


def bits(x) -> np.ndarray:
    """Bit patterns of any array, codes unchanged, every float NaN as one pattern."""
    x = np.asarray(x)
    if x.dtype == np.float32:
        pattern = x.view(np.uint32)
        return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), pattern)
    if x.dtype == BF16:
        return x.view(np.uint16)
    return x


def assert_same(actual, expected, what: str) -> None:
    """Bit equality of arrays or lists of arrays, with the first place that differs."""
    if isinstance(expected, list):
        assert len(actual) == len(expected), what
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(one, other, f"{what}[{index}]")
        return
    a, b = bits(actual), bits(expected)
    assert a.shape == b.shape, f"{what}: shape {a.shape} instead of {b.shape}"
    wrong = np.argwhere(a != b)
    assert not len(wrong), (
        f"{what}: {len(wrong)} of {a.size} differ, first at {tuple(wrong[0])}:"
        f" {a[tuple(wrong[0])]:#x} instead of {b[tuple(wrong[0])]:#x}"
    )
