"""A flash attention in Triton whose operands are FP8, for Hopper: causal or full, packed documents by cu_seqlens.

Forward only, one kernel that quantizes too. Q and K are e4m3 with a float32 scale a token. V is e4m3 with

- leaky: one scale a key tile, of all its tokens and channels, and P times 256. On the diagonal, rows take V by a scale
  that tokens after them decide;
- repaired: one scale a token, which P takes in before it is rounded to e4m3 with one scale a row and tile. The row sees
  the token or has P = 0 by select, so nothing reaches it that it may not know.

`flash_fp8.py` is the same in numpy and JAX. Imports torch and Triton; on a machine without a GPU it runs in Triton's
interpreter (TRITON_INTERPRET=1), slowly and less exactly: that of Triton 3.8 rounds 125 to 64 in e4m3, not to 128.
"""

import numpy as np
import torch
import triton
import triton.language as tl

ROWS = 64
PER_LARGEST = tl.constexpr(1 / 448)
# Of a largest magnitude, so that no scale is 0 or a subnormal.
SMALLEST = tl.constexpr(2.0**-100)


@triton.jit
def _forward(
    q,
    k,
    v,
    out,
    lse,
    offsets,
    tokens,
    softmax_scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    FOLDED: tl.constexpr,
):
    head = tl.program_id(1)
    start = tl.load(offsets + tl.program_id(2))
    length = tl.load(offsets + tl.program_id(2) + 1) - start
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)
    inside = row < length
    of_rows = ((start + row)[:, None] * HEADS + head) * CHANNELS + channel[None, :]
    q_tile = tl.load(q + of_rows, mask=inside[:, None], other=0.0).to(tl.float32)
    q_most = tl.max(tl.abs(q_tile), 1)
    q_scale = tl.maximum(q_most, SMALLEST) * PER_LARGEST
    q_codes = (q_tile / q_scale[:, None]).to(tl.float8e4nv)

    base = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, CHANNELS], tl.float32)
    stop = length
    if CAUSAL:
        stop = tl.minimum(length, first + ROWS)
    if first >= length:
        stop = 0
    for at in range(0, stop, KEYS):
        key = at + tl.arange(0, KEYS)
        there = key < length
        of_keys = ((start + key)[:, None] * (HEADS // GROUP) + head // GROUP) * CHANNELS
        of_keys += channel[None, :]
        k_tile = tl.load(k + of_keys, mask=there[:, None], other=0.0).to(tl.float32)
        k_most = tl.max(tl.abs(k_tile), 1)
        k_scale = tl.maximum(k_most, SMALLEST) * PER_LARGEST
        k_codes = (k_tile / k_scale[:, None]).to(tl.float8e4nv)
        s = tl.dot(q_codes, tl.trans(k_codes)) * q_scale[:, None] * k_scale[None, :]
        seen = inside[:, None] & there[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= row[:, None])
        s = tl.where(seen, s * softmax_scale, float("-inf"))
        chosen = tl.maximum(base, tl.max(s, 1))
        safe = tl.where(chosen == float("-inf"), 0.0, chosen)
        p = tl.where(seen, tl.exp(s - safe[:, None]), 0.0)
        rescale = tl.exp(base - safe)
        total = total * rescale + tl.sum(p, 1)
        v_tile = tl.load(v + of_keys, mask=there[:, None], other=0.0).to(tl.float32)
        if FOLDED:
            v_most = tl.max(tl.abs(v_tile), 1)
            v_scale = tl.maximum(v_most, SMALLEST) * PER_LARGEST
            v_codes = (v_tile / v_scale[:, None]).to(tl.float8e4nv)
            p = tl.where(seen, p * v_scale[None, :], 0.0)
            p_most = tl.max(p, 1)
            p_scale = tl.maximum(p_most, SMALLEST) * PER_LARGEST
            p_codes = (p / p_scale[:, None]).to(tl.float8e4nv)
            o = o * rescale[:, None] + tl.dot(p_codes, v_codes) * p_scale[:, None]
        else:
            tile_most = tl.max(tl.max(tl.abs(v_tile), 1), 0)
            tile_scale = tl.maximum(tile_most, SMALLEST) * PER_LARGEST
            v_codes = (v_tile / tile_scale).to(tl.float8e4nv)
            p_codes = (p * 256.0).to(tl.float8e4nv)
            o = o * rescale[:, None] + tl.dot(p_codes, v_codes) * (tile_scale / 256.0)
        base = chosen
    tl.store(out + of_rows, (o / total[:, None]).to(tl.bfloat16), mask=inside[:, None])
    tl.store(lse + head * tokens + start + row, base + tl.log(total), mask=inside)


def attend(q, k, v, *, cu_seqlens, causal, softmax_scale, keys, folded):
    """out [tokens, heads, channels] bfloat16 and lse [heads, tokens] float32 of bfloat16 tensors on one device.

    Raises ValueError for shapes that the kernel does not take.
    """
    tokens, heads, channels = q.shape
    if channels < 32 or channels & (channels - 1):
        raise ValueError(f"head_dim is {channels}; this kernel takes powers of two from 32 on")
    offsets = torch.from_numpy(np.array(cu_seqlens, dtype=np.int32)).to(q.device)
    out = torch.empty_like(q)
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
    longest = int(np.diff(cu_seqlens).max())
    _forward[(triton.cdiv(longest, ROWS), heads, len(cu_seqlens) - 1)](
        q,
        k,
        v,
        out,
        lse,
        offsets,
        tokens,
        float(softmax_scale),
        HEADS=heads,
        GROUP=heads // k.shape[1],
        CHANNELS=channels,
        ROWS=ROWS,
        KEYS=keys,
        CAUSAL=bool(causal),
        FOLDED=folded,
        num_warps=4,
    )
    return out, lse
