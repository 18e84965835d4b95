"""Planted leaks: a plain fake-quantized attention in numpy, forward and a backward by hand, blocked as a test says.

Nothing of the package is used. Products are float64, so what reaches a row it must not reach comes through a scale, a
statistic or a mask, and through nothing else.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
Kernel = Callable[..., dict[str, Any]]

USES = (
    "s.q", "s.k", "o.p", "o.v", "dp.do", "dp.v", "dv.p", "dv.do", "dq.ds", "dq.k", "dk.ds", "dk.q",
)  # fmt: skip
BLOCKS: dict[str, tuple[int, int]] = {"tok": (1, 32), "col": (32, 1), "tile": (32, 32)}
"""Blocks as (rows, columns): of tokens and channels, of queries and keys."""

PAIRS = {"o.p", "dv.p", "dq.ds", "dk.ds"}

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)

LEAKY = frozenset(
    {(use, blocking) for use in USES for blocking in ("col", "tile")}
    - {("dv.p", "col"), ("dk.ds", "col")}
)
"""The uses and blockings that leak: every use with scales shared by tokens, but P and dS in dV and dK, where a column
of a block holds only rows that the key may see, or known zeros."""

FORWARD_USES = ("s.q", "s.k", "o.p", "o.v")


def planted(
    uses: Mapping[str, str] | None = None,
    *,
    grid: str = "document",
    smooth_k: str | None = None,
    decision: str | None = None,
    mask_value: float | None = None,
    padding: str = "zero",
    delayed: bool = False,
    noise: tuple[str, ...] = (),
    scales: bool = False,
) -> Kernel:
    """A kernel of the protocol with the scales that `uses` says, by use; the others are not quantized.

    Args:
        uses: "tok", "col", "tile", "tensor" (one scale for all), "previous" (32 tokens by the amax of the 32 before
            them in the document) or "previous_packed" (in the pack) for each use.
        grid: "document" where blocks of inputs begin at documents, "packed" at the first token of all.
        smooth_k: "document" or "pack", over which the mean of k is taken off first.
        decision: "row" or "tile", by which the running maximum is replaced where it grew by more than 2^6; P is then in
            e4m3 without a scale.
        mask_value: a finite score of masked pairs; None for a select.
        padding: what the amax of a document's last block takes in past its end: "zero", "neighbours" (what follows in
            the pack), or "workspace" (what the document before left there).
        delayed: whether v in O has a scale by the amax of the call before.
        noise: gradients and outputs that are added up in a random order, in float32.
        scales: whether the scale bytes of V in O are returned, as "v.o.scales".
    """
    chosen = dict(uses or {})
    for use, blocking in chosen.items():
        assert use in USES, use
        assert blocking in {*BLOCKS, "tensor", "previous", "previous_packed"}, blocking
    kept: dict[str, float] = {}
    mixer = np.random.default_rng(0)

    def add(name: str, a: Array, b: Array) -> Array:
        """a @ b."""
        if name not in noise:
            return a @ b
        parts = [
            (a[:, i : i + 4] @ b[i : i + 4]).astype(np.float32) for i in range(0, a.shape[1], 4)
        ]
        total = np.zeros((len(a), b.shape[1]), dtype=np.float32)
        for i in mixer.permutation(len(parts)):
            total = total + parts[i]
        return total.astype(np.float64)

    def kernel(
        q: Array,
        k: Array,
        v: Array,
        *,
        cu_seqlens: Array,
        causal: bool,
        softmax_scale: float,
        window: tuple[int | None, int | None] | None = None,
        dout: Array | None = None,
    ) -> dict[str, Any]:
        q, k, v = (x.astype(np.float64) for x in (q, k, v))
        do = np.zeros_like(q) if dout is None else dout.astype(np.float64)
        starts = [int(one) for one in cu_seqlens]
        documents = list(itertools.pairwise(starts))
        if smooth_k is not None:
            parts = documents if smooth_k == "document" else [(0, len(k))]
            for first, last in parts:
                if last > first:
                    k[first:last] -= k[first:last].mean(axis=0)

        def copy(use: str, x: Array) -> Array:
            blocking = chosen.get(use)
            if blocking is None:
                return x
            if blocking == "tensor":
                return shared(x, np.abs(x).max(initial=0))
            if blocking.startswith("previous"):
                parts = documents if blocking == "previous" else [(0, len(x))]
                return by_parts(x, parts, previous)
            parts = documents if grid == "document" else [(0, len(x))]
            if padding == "zero" or use in PAIRS:
                return by_parts(x, parts, lambda part: blocked(part, BLOCKS[blocking]))
            return padded(x, parts, BLOCKS[blocking], padding)

        copies = {
            use: copy(use, x)
            for use, x in (
                ("s.q", q), ("s.k", k), ("o.v", v), ("dp.do", do), ("dp.v", v), ("dv.do", do),
                ("dq.k", k), ("dk.q", q),
            )
        }  # fmt: skip
        if delayed:
            copies["o.v"] = shared(v, kept.get("v", 1.0))
            kept["v"] = float(np.abs(v).max(initial=0))
        heads, group = q.shape[1], q.shape[1] // k.shape[1]
        out, dq = np.zeros_like(q), np.zeros_like(q)
        lse = np.full((heads, len(q)), -np.inf)
        dk, dv = np.zeros_like(k), np.zeros_like(v)
        for first, last in documents:
            rows = slice(first, last)
            if last == first:
                continue
            seen = visible(last - first, causal, window)
            for head in range(heads):
                of_keys = head // group
                one = {
                    use: x[rows, of_keys if use.split(".")[1] in "kv" else head]
                    for use, x in copies.items()
                }
                o, row_lse = forward(one, seen, softmax_scale)
                out[rows, head], lse[head, rows] = o, row_lse
                if dout is not None:
                    rounded = o.astype(BF16).astype(np.float64)
                    grads = backward(one, seen, softmax_scale, row_lse, rounded, do[rows, head])
                    dq[rows, head] = grads[0]
                    dk[rows, of_keys] += grads[1]
                    dv[rows, of_keys] += grads[2]
        results: dict[str, Any] = {
            "out": out.astype(np.float32).astype(BF16),
            "lse": lse.astype(np.float32),
        }
        if dout is not None:
            for name, x in (("dq", dq), ("dk", dk), ("dv", dv)):
                results[name] = x.astype(np.float32).astype(BF16)
        if scales:
            results["v.o.scales"] = scale_bytes(v, documents)
        return results

    def pairs(use: str, x: Array) -> Array:
        blocking = chosen.get(use)
        if blocking is None:
            return x
        if blocking == "tensor":
            return shared(x, np.abs(x).max(initial=0))
        return blocked(x, BLOCKS[blocking])

    def scores(one: dict[str, Array], seen: Array, scale: float) -> Array:
        s = (one["s.q"] @ one["s.k"].T) * scale
        return np.where(seen, s, -np.inf if mask_value is None else mask_value)

    def forward(one: dict[str, Array], seen: Array, scale: float) -> tuple[Array, Array]:
        s = scores(one, seen, scale)
        if decision is not None:
            return online(s, one["o.v"], decision)
        m = s.max(axis=1, keepdims=True)
        p = np.exp(s - np.where(np.isfinite(m), m, 0))
        total = p.sum(axis=1, keepdims=True)
        o = add("out", pairs("o.p", p), one["o.v"]) / np.where(total > 0, total, 1)
        with np.errstate(divide="ignore"):
            return o, (m + np.log(total))[:, 0]

    def backward(
        one: dict[str, Array], seen: Array, scale: float, lse: Array, out: Array, do: Array
    ) -> tuple[Array, Array, Array]:
        s = scores(one, seen, scale)
        p = np.exp(s - np.where(np.isfinite(lse), lse, 0)[:, None])
        dp = one["dp.do"] @ one["dp.v"].T
        delta = (do * out).sum(axis=1, keepdims=True)
        ds = np.where(p == 0, 0, p * (dp - delta))
        dq = add("dq", pairs("dq.ds", ds), one["dq.k"]) * scale
        dk = add("dk", pairs("dk.ds", ds).T, one["dk.q"]) * scale
        dv = add("dv", pairs("dv.p", p).T, one["dv.do"])
        return dq, dk, dv

    return kernel


def visible(
    tokens: int, causal: bool, window: tuple[int | None, int | None] | None
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which keys each query sees."""
    row, key = np.arange(tokens)[:, None], np.arange(tokens)[None, :]
    seen = np.ones((tokens, tokens), dtype=np.bool_)
    if causal:
        seen &= key <= row
    if window is not None:
        left, right = window
        if left is not None:
            seen &= key >= row - left
        if right is not None:
            seen &= key <= row + right
    return seen


def exponent(amax: Array) -> Array:
    """The exponent of the smallest power of two that brings `amax` to 448 or below, -127 at least."""
    mantissa, power = np.frexp(amax / 448)
    return np.maximum(np.where(mantissa == 0.5, power - 1, power), -127)


def shared(x: Array, amax: Any) -> Array:
    """x by way of e4m3, with the scale of `amax`; larger values saturate."""
    power = exponent(np.asarray(amax))
    return np.ldexp(
        np.clip(np.ldexp(x, -power), -448, 448).astype(np.float32).astype(E4M3).astype(np.float64),
        power,
    )


def blocked(x: Array, block: tuple[int, int], above: Array | None = None) -> Array:
    """x [rows, columns] with a scale a block; `above` are rows that the last blocks take in too."""
    rows, columns = (-(-n // size) * size for n, size in zip(x.shape, block, strict=True))
    full = np.zeros((rows, columns))
    full[: x.shape[0], : x.shape[1]] = np.abs(x)
    if above is not None:
        below = above[: rows - x.shape[0]]
        full[x.shape[0] : x.shape[0] + len(below), : x.shape[1]] = np.abs(below)
    grid = full.reshape(rows // block[0], block[0], columns // block[1], block[1])
    amax = grid.max(axis=(1, 3)).repeat(block[0], axis=0).repeat(block[1], axis=1)
    return shared(x, amax[: x.shape[0], : x.shape[1]])


def previous(x: Array) -> Array:
    """x with, for every 32 tokens of a channel, the scale of the 32 before them; 1 for the first."""
    found = np.zeros_like(x)
    for start in range(0, len(x), 32):
        before = x[max(start - 32, 0) : start]
        amax = np.abs(before).max(axis=0) if len(before) else np.full(x.shape[1], 448.0)
        found[start : start + 32] = shared(x[start : start + 32], amax)
    return found


def by_parts(x: Array, parts: list[tuple[int, int]], function: Callable[[Array], Array]) -> Array:
    """A function of [tokens, channels] for each part and head of x [tokens, heads, channels]."""
    found = np.zeros_like(x)
    for first, last in parts:
        if last > first:
            for head in range(x.shape[1]):
                found[first:last, head] = function(x[first:last, head])
    return found


def padded(x: Array, parts: list[tuple[int, int]], block: tuple[int, int], padding: str) -> Array:
    """Blocks whose last ones take in what stands past a document's end."""
    found = np.zeros_like(x)
    for head in range(x.shape[1]):
        workspace = np.zeros((len(x) + block[0], x.shape[2]))
        for first, last in parts:
            if last == first:
                continue
            workspace[: last - first] = x[first:last, head]
            past = x[last:, head] if padding == "neighbours" else workspace[last - first :]
            found[first:last, head] = blocked(x[first:last, head], block, past)
    return found


def online(s: Array, v: Array, decision: str) -> tuple[Array, Array]:
    """Softmax over key tiles of 32, the maximum replaced lazily: by rows, or where a row of 32 asks for it."""
    tokens = len(s)
    m = np.full(tokens, -np.inf)
    total, o = np.zeros(tokens), np.zeros((tokens, v.shape[1]))
    for start in range(0, tokens, 32):
        tile = s[:, start : start + 32]
        top = np.maximum(m, tile.max(axis=1))
        grown = np.isfinite(top) & ((top - m) > 6 * np.log(2))
        if decision == "tile":
            for first in range(0, tokens, 32):
                grown[first : first + 32] = grown[first : first + 32].any()
        new = np.where(grown | ~np.isfinite(m), top, m)
        base = np.where(np.isfinite(new), new, 0)
        with np.errstate(invalid="ignore"):
            shift = np.where(np.isfinite(m), np.exp(m - base), 0)
        p = np.exp(tile - base[:, None])
        rounded = np.clip(p, 0, 448).astype(np.float32).astype(E4M3).astype(np.float64)
        total = total * shift + p.sum(axis=1)
        o = o * shift[:, None] + rounded @ v[start : start + 32]
        m = new
    with np.errstate(divide="ignore"):
        return o / total[:, None], m + np.log(total)


def scale_bytes(v: Array, documents: list[tuple[int, int]]) -> Array:
    """The e8m0 byte of every 32 tokens of a channel, counted from documents: uint8 [blocks, heads, channels]."""
    found = [
        exponent(np.abs(v[start : min(start + 32, last)]).max(axis=0)) + 127
        for first, last in documents
        for start in range(first, last, 32)
    ]
    return np.array(found).clip(0, 254).astype(np.uint8)
