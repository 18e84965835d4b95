"""The FP8 flash attention of `triton_flash_fp8.py` in numpy or JAX: the same steps for a machine without a
GPU, not its bits.

Forward only. Query tiles of 64 rows, key tiles of `keys`. Q and K are e4m3 with a float32 scale a token. V is e4m3 with

- leaky: one scale a key tile, of all its tokens and channels. Rows of the tile take V by a scale that tokens after them
  decide;
- repaired: one scale a token, which P takes in before it is rounded to e4m3 with one scale a row. That row sees the
  token or has P = 0 by select, so nothing reaches it that it may not know.
"""

import ml_dtypes
import numpy as np

from examples.leakage.packed import documents, namespace, product
from flamia_ref.formats import decode, encode

ROWS = 64
PER_LARGEST = np.float32(1 / 448)
# Of a largest magnitude, so that no scale is 0 or a subnormal.
SMALLEST = np.float32(2.0**-100)
P_FACTOR = np.float32(256)


def flash_fp8_leaky(q, k, v, *, cu_seqlens, causal, softmax_scale):
    """V with one scale for 64 keys."""
    return _run(q, k, v, cu_seqlens, causal, softmax_scale, keys=64, folded=False)


def flash_fp8_leaky_128(q, k, v, *, cu_seqlens, causal, softmax_scale):
    """V with one scale for 128 keys."""
    return _run(q, k, v, cu_seqlens, causal, softmax_scale, keys=128, folded=False)


def flash_fp8_repaired(q, k, v, *, cu_seqlens, causal, softmax_scale):
    """V with one scale a key, folded into P."""
    return _run(q, k, v, cu_seqlens, causal, softmax_scale, keys=64, folded=True)


def _run(q, k, v, cu_seqlens, causal, softmax_scale, *, keys, folded):
    outs, lses = [], []
    for start, end in documents(cu_seqlens):
        for first in range(start, end, ROWS):
            last = min(first + ROWS, end)
            stop = last if causal else end
            tile = (q[first:last], k[start:stop], v[start:stop], first - start)
            with np.errstate(all="ignore"):
                out, lse = _rows(*tile, causal, np.float32(softmax_scale), keys, folded)
            outs.append(out)
            lses.append(lse)
    xp = namespace(q)
    return {"out": xp.concatenate(outs), "lse": xp.concatenate(lses, axis=1)}


def _rows(q, k, v, first, causal, scale, keys, folded):
    """One query tile against the keys it needs: out [rows, heads, channels], lse [heads, rows]."""
    xp = namespace(q)
    rows, heads, channels = q.shape
    group = heads // k.shape[1]
    q, k, v = (xp.swapaxes(x, 0, 1).astype(np.float32) for x in (q, k, v))
    k, v = (xp.repeat(x, group, axis=0) for x in (k, v))
    q_codes, q_scale = _scaled(q, -1)
    row = first + xp.arange(rows)[:, None]

    base = xp.full((heads, rows, 1), -np.inf, dtype=np.float32)
    total = xp.zeros_like(base)
    o = xp.zeros((heads, rows, channels), dtype=np.float32)
    for start in range(0, k.shape[1], keys):
        k_codes, k_scale = _scaled(k[:, start : start + keys], -1)
        v_tile = v[:, start : start + keys]
        key = start + xp.arange(v_tile.shape[1])[None]
        seen = (key <= row) if causal else (key >= 0) & (row >= 0)
        s = product(q_codes, k_codes.swapaxes(1, 2)) * q_scale * k_scale.swapaxes(1, 2)
        s = xp.where(seen, s * scale, -np.inf)
        chosen = xp.maximum(base, s.max(axis=-1, keepdims=True))
        safe = xp.where(chosen == -np.inf, np.float32(0), chosen)
        p = xp.where(seen, xp.exp(s - safe), np.float32(0))
        rescale = xp.exp(base - safe)
        total = total * rescale + p.sum(axis=-1, keepdims=True)
        if folded:
            v_codes, v_scale = _scaled(v_tile, -1)
            p = xp.where(seen, p * v_scale.swapaxes(1, 2), np.float32(0))
            p_codes, p_scale = _scaled(p, -1)
            o = o * rescale + product(p_codes, v_codes) * p_scale
        else:
            v_codes, v_scale = _scaled(v_tile, (1, 2))
            p_codes = _e4m3(p * P_FACTOR)
            o = o * rescale + product(p_codes, v_codes) * (v_scale / P_FACTOR)
        base = chosen
    out = (o / total).astype(ml_dtypes.bfloat16)
    return xp.swapaxes(out, 0, 1), (base + xp.log(total))[..., 0]


def _scaled(x, axes):
    """The e4m3 values of x over one scale for all of `axes`, and that scale."""
    xp = namespace(x)
    largest = abs(x).max(axis=axes, keepdims=True)
    scale = xp.maximum(largest, SMALLEST) * PER_LARGEST
    return _e4m3(x / scale), scale


def _e4m3(x):
    return decode(encode(x, "e4m3"), "e4m3")
