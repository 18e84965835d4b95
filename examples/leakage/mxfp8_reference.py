"""NVIDIA's PyTorch reference of its MXFP8 attention, written anew from what is known of it.

It computes in numpy, or in JAX for JAX arrays, so that it can be hunted in and proved.

Source: NVIDIA/cudnn-frontend, test/python/sdpa/mxfp8_ref.py, and the article "How scales are applied in MXFP8
attention", https://nvidia.github.io/cudnn-frontend/mxfp8-attention-scaling/. Modelled:

1. q and k with one scale for 32 channels of a token, v with one for 32 tokens of a channel: Transformer Engine's
   quantizer, `te-mx-e4m3`. All products in float32, of dequantized operands.
2. Tiles of 128 keys ascend. The running maximum is that of natural scores; it is replaced by the first tile's, and
   later only by one that is larger by more than the threshold, 4. P = exp(s - max), the row sum adds it in float32;
   O takes e4m3(16 P) / 16, with no scale but the 16. out = O / max(row sum, 1).
3. Backward: P from a softmax of its own over all keys, in float32, not from lse. dV takes e4m3(256 P) / 256 and dO
   with one scale for 32 tokens of a channel; dP takes dO and v with one for 32 channels of a token.
   dS = P (dP - delta) softmax_scale, delta = rowsum(dO out) of the 16-bit values. It is quantized twice, after the
   factor: for dQ along 32 keys of a row, for dK along 32 queries of a key; k and q there have one scale for 32 tokens
   of a channel. Gradients of a group's heads are added in float32.

Not known, and chosen here: the order of sums and exp (those of numpy or XLA), how masked pairs are left out (by a score
of -inf, P = 0), that blocks start at each document (the reference is of dense batches), and the sum of delta.
"""

import ml_dtypes
import numpy as np

from examples.leakage.packed import documents, namespace, product
from flamia_ref.formats import decode, dequantize, encode, quantize

BLOCK, TILE = 32, 128
THRESHOLD = 4
FORWARD_P, BACKWARD_P = np.float32(16), np.float32(256)


def cudnn_mxfp8_reference(q, k, v, *, cu_seqlens, causal, softmax_scale, dout=None):
    """The reference, forward and backward, document by document."""
    parts = []
    for start, end in documents(cu_seqlens):
        of = slice(start, end)
        one = None if dout is None else dout[of]
        with np.errstate(all="ignore"):
            parts.append(_document(q[of], k[of], v[of], one, causal, np.float32(softmax_scale)))
    xp = namespace(q)
    return {
        name: xp.concatenate([part[name] for part in parts], axis=1 if name == "lse" else 0)
        for name in parts[0]
    }


def _document(q, k, v, dout, causal, scale):
    xp = namespace(q)
    tokens, heads, _ = q.shape
    group = heads // k.shape[1]
    q, k, v = (xp.swapaxes(x, 0, 1) for x in (q, k, v))  # [heads, tokens, channels]
    k, v = (xp.repeat(x, group, axis=0) for x in (k, v))
    seen = xp.tri(tokens, dtype=bool) if causal else xp.ones((tokens, tokens), dtype=bool)

    s = product(_of_channels(q), _of_channels(k).swapaxes(1, 2)) * scale
    s = xp.where(seen, s, -np.inf)
    out, lse = _forward(s, _of_tokens(v))
    out = out.astype(ml_dtypes.bfloat16)
    results = {"out": xp.swapaxes(out, 0, 1), "lse": lse}
    if dout is None:
        return results

    do = xp.swapaxes(dout, 0, 1)
    e = xp.exp(s - s.max(axis=-1, keepdims=True))
    p = e / e.sum(axis=-1, keepdims=True)
    dv = product(_fixed(p, BACKWARD_P).swapaxes(1, 2), _of_tokens(do))
    dp = product(_of_channels(do), _of_channels(v).swapaxes(1, 2))
    delta = (do.astype(np.float32) * out.astype(np.float32)).sum(axis=-1, keepdims=True)
    ds = p * (dp - delta) * scale
    dq = product(_quantized(ds, (1, BLOCK)), _of_tokens(k))
    dk = product(_quantized(ds, (BLOCK, 1)).swapaxes(1, 2), _of_tokens(q))
    dk, dv = (x.reshape(-1, group, *x.shape[1:]).sum(axis=1) for x in (dk, dv))
    gradients = {"dq": dq, "dk": dk, "dv": dv}
    return results | {
        name: xp.swapaxes(x, 0, 1).astype(ml_dtypes.bfloat16) for name, x in gradients.items()
    }


def _forward(s, v):
    xp = namespace(s)
    heads, tokens, _ = s.shape
    base = xp.full((heads, tokens, 1), -np.inf, dtype=np.float32)
    total = xp.zeros_like(base)
    o = xp.zeros((heads, tokens, v.shape[-1]), dtype=np.float32)
    for first in range(0, tokens, TILE):
        tile = s[..., first : first + TILE]
        largest = tile.max(axis=-1, keepdims=True)
        # Of a row that sees nothing of the tile it is -inf, and replaces nothing.
        chosen = xp.where((base == -np.inf) | (largest - base > THRESHOLD), largest, base)
        rescale = xp.where(base == chosen, np.float32(1), xp.exp(base - chosen))
        p = xp.where(tile == -np.inf, np.float32(0), xp.exp(tile - chosen))
        total = total * rescale + p.sum(axis=-1, keepdims=True)
        o = o * rescale + product(_fixed(p, FORWARD_P), v[:, first : first + TILE])
        base = chosen
    return o / xp.maximum(total, 1), (base + xp.log(total))[..., 0]


def _of_channels(x):
    """With one scale for 32 channels of a token."""
    return _quantized(x, (1, BLOCK))


def _of_tokens(x):
    """With one scale for 32 tokens of a channel."""
    return _quantized(x, (BLOCK, 1))


def _quantized(x, block):
    return dequantize(quantize(x, "te-mx-e4m3", block=block))


def _fixed(p, factor):
    """P by e4m3 with a constant factor, no scale."""
    return decode(encode(p * factor, "e4m3"), "e4m3") / factor
