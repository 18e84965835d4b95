"""A kernel that is right, and kernels with one fault each: float64 attention in numpy, a row at a time.

A row of the right one is computed from the keys that it sees and from nothing else, so it has every property by
construction. `FAULTY` says what each of the others does wrong, and which properties it then lacks.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from flamia_ref.formats import dequantize, quantize

BF16 = ml_dtypes.bfloat16
Arrays = dict[str, Any]


def exact(q, k, v, *, cu_seqlens, causal, softmax_scale, dout=None, **how: Any) -> Arrays:
    """Attention and, with dout, its gradients."""
    assert causal
    given = [x.astype(np.float64) for x in (q, k, v)]
    return _attention(*given, _wide(dout), _runs(cu_seqlens), softmax_scale, **how)


def forward_only(q, k, v, *, cu_seqlens, causal, softmax_scale) -> Arrays:
    """The same without a backward."""
    return exact(q, k, v, cu_seqlens=cu_seqlens, causal=causal, softmax_scale=softmax_scale)


def windowed(q, k, v, *, window=None, **settings: Any) -> Arrays:
    """The same, with a window."""
    return exact(q, k, v, left=None if window is None else window[0], **settings)


def _wide(x):
    return None if x is None else x.astype(np.float64)


def _runs(cu_seqlens):
    return list(itertools.pairwise(int(x) for x in cu_seqlens))


def _attention(q, k, v, dout, runs, scale, *, left=None, group=None, coarse_from=None) -> Arrays:
    tokens, heads, _ = q.shape
    kv_heads = k.shape[1]
    out, lse = np.zeros((tokens, heads, v.shape[2])), np.full((heads, tokens), -np.inf)
    grads = [np.zeros_like(x) for x in (q, k, v)]
    for head in range(heads):
        kv = head // (heads // kv_heads) if group is None else group(head, kv_heads)
        for start, stop in runs:
            for i in range(start, stop):
                first = start if left is None else max(start, i - left)
                keys = slice(first, i + 1)
                s = (k[keys, kv] * q[i, head]).sum(1) * scale
                p = np.exp(s - s.max())
                total = p.sum()
                lse[head, i] = s.max() + np.log(total)
                p /= total
                terms = p[:, None] * v[keys, kv]
                if coarse_from is not None and stop - start > coarse_from:
                    terms = terms.astype(BF16)
                out[i, head] = terms.astype(np.float32).cumsum(0, dtype=np.float32)[-1]
                if dout is not None:
                    _gradients(
                        grads, q, k, v, dout[i, head], out[i, head], p, keys, i, head, kv, scale
                    )
    results = {"out": out.astype(BF16), "lse": lse.astype(np.float32)}
    if dout is not None:
        results |= {
            name: x.astype(np.float32) for name, x in zip(("dq", "dk", "dv"), grads, strict=True)
        }
    return results


def _gradients(grads, q, k, v, dout, out, p, keys, i, head, kv, scale) -> None:
    dq, dk, dv = grads
    ds = p * ((v[keys, kv] * dout).sum(1) - (dout * out).sum())
    dq[i, head] = (ds[:, None] * k[keys, kv]).sum(0) * scale
    dk[keys, kv] += ds[:, None] * q[i, head] * scale
    dv[keys, kv] += p[:, None] * dout


def quantized(x, block, runs):
    """x [tokens, heads, head_dim] in MXFP8 with one scale a block of tokens and channels, document by document."""
    made = x.astype(np.float32)
    for start, stop in runs:
        for head in range(x.shape[1]):
            if stop > start:
                one = quantize(
                    np.ascontiguousarray(made[start:stop, head]), "te-mx-e4m3", block=block
                )
                made[start:stop, head] = dequantize(one)
    return made.astype(x.dtype)


def v_columns(q, k, v, *, cu_seqlens, **settings):
    """One scale for 32 tokens of a channel of v."""
    return exact(q, k, quantized(v, (32, 1), _runs(cu_seqlens)), cu_seqlens=cu_seqlens, **settings)


def q_blocks(q, k, v, *, cu_seqlens, **settings):
    """One scale for 32 tokens and 32 channels of q."""
    return exact(quantized(q, (32, 32), _runs(cu_seqlens)), k, v, cu_seqlens=cu_seqlens, **settings)


def p_blocks(q, k, v, *, cu_seqlens, causal, softmax_scale):
    """One scale for 32 queries and 32 keys of P."""
    results = exact(q, k, v, cu_seqlens=cu_seqlens, causal=causal, softmax_scale=softmax_scale)
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    for start, stop in _runs(cu_seqlens):
        for head in range(q.shape[1] if stop > start else 0):
            kv = head // (q.shape[1] // k.shape[1])
            s = q[start:stop, head] @ k[start:stop, kv].T * softmax_scale
            s = np.where(np.tri(len(s), dtype=bool), s, -np.inf)
            p = np.exp(s - s.max(1, keepdims=True))
            coded = dequantize(quantize(p.astype(np.float32), "te-mx-e4m3", block=(32, 32)))
            results["out"][start:stop, head] = coded @ v[start:stop, kv] / p.sum(1, keepdims=True)
    return results


def v_tensor(q, k, v, *, cu_seqlens, **settings):
    """One scale for all tokens of a channel of v, in all documents."""
    return exact(q, k, quantized(v, ("all", 1), [(0, len(v))]), cu_seqlens=cu_seqlens, **settings)


def v_packed_columns(q, k, v, *, cu_seqlens, **settings):
    """Blocks of 32 tokens of v are counted over the packed tokens, so that they straddle documents."""
    return exact(q, k, quantized(v, (32, 1), [(0, len(v))]), cu_seqlens=cu_seqlens, **settings)


def one_document(q, k, v, *, cu_seqlens, **settings):
    """Documents are ignored."""
    return exact(q, k, v, cu_seqlens=[0, len(q)], **settings)


_calls = itertools.count()


def atomics(q, k, v, **settings):
    """The last bit of out changes from call to call."""
    results = exact(q, k, v, **settings)
    results["out"].view(np.uint16)[...] ^= np.uint16(next(_calls) % 2)
    return results


class Remembers:
    """The largest v of all calls so far is its scale."""

    def __init__(self) -> None:
        self.largest = 0.0

    def __call__(self, q, k, v, **settings):
        self.largest = max(self.largest, float(np.abs(v.astype(np.float32)).max()))
        kept = np.where(np.abs(v.astype(np.float32)) < self.largest / 256, 0, v.astype(np.float32))
        return exact(q, k, kept.astype(BF16), **settings)


remembers = Remembers()


def stops_at_empty(q, k, v, *, cu_seqlens, **settings):
    """An empty document ends the loop over documents."""
    runs = list(itertools.takewhile(lambda run: run[1] > run[0], _runs(cu_seqlens)))
    return exact(q, k, v, cu_seqlens=[0, *(stop for _, stop in runs)], **settings)


def times_zero(q, k, v, *, cu_seqlens, **settings):
    """Masked values of a document are multiplied by a P of 0."""
    results = exact(q, k, v, cu_seqlens=cu_seqlens, **settings)
    for start, stop in _runs(cu_seqlens):
        _add_zero_times(results["out"], v, start, stop, start, stop)
    return results


def times_zero_everywhere(q, k, v, *, cu_seqlens, **settings):
    """Values of all documents are multiplied by a P of 0."""
    results = exact(q, k, v, cu_seqlens=cu_seqlens, **settings)
    _add_zero_times(results["out"], v, 0, len(v), 0, len(v))
    return results


def _add_zero_times(out, v, start, stop, first, last):
    poison = (0 * v[first:last].astype(np.float32)).sum(0)
    poison = np.repeat(poison, out.shape[1] // v.shape[1], 0)
    out[start:stop] = np.where(
        np.isnan(poison), np.float32(np.nan), out[start:stop].astype(np.float32)
    )


def longer_coarser(q, k, v, **settings):
    """P V is rounded to bfloat16 in documents longer than 8: nothing leaks, but lengths decide bits."""
    return exact(q, k, v, coarse_from=8, **settings)


def later_coarser(q, k, v, *, cu_seqlens, causal, softmax_scale):
    """The same in documents that do not start at a block of 32."""
    runs = _runs(cu_seqlens)
    results = exact(q, k, v, cu_seqlens=cu_seqlens, causal=causal, softmax_scale=softmax_scale)
    other = longer_coarser(
        q, k, v, cu_seqlens=cu_seqlens, causal=causal, softmax_scale=softmax_scale
    )
    for start, stop in runs:
        if start % 32:
            results["out"][start:stop] = other["out"][start:stop]
    return results


def wrong_group(q, k, v, **settings):
    """Query heads take the key/value heads in turn."""
    return exact(q, k, v, group=lambda head, kv_heads: head % kv_heads, **settings)


def fixed_scale(q, k, v, **settings):
    """v in e4m3 without a scale."""
    return exact(q, k, v.astype(ml_dtypes.float8_e4m3fn).astype(BF16), **settings)


def small_scores(q, k, v, *, softmax_scale, **settings):
    """q loses what is below 1/4."""
    q = q.astype(np.float32)
    return exact(
        np.where(np.abs(q) < 0.25, 0, q).astype(BF16), k, v, softmax_scale=softmax_scale, **settings
    )


def dout_blocks(q, k, v, *, cu_seqlens, dout=None, **settings):
    """One scale for 32 tokens and 32 channels of dout."""
    dout = None if dout is None else quantized(dout, (32, 32), _runs(cu_seqlens))
    return exact(q, k, v, cu_seqlens=cu_seqlens, dout=dout, **settings)


def lse_of_v(q, k, v, **settings):
    """lse moves with v."""
    results = exact(q, k, v, **settings)
    results["lse"] += np.abs(v[:, 0, 0].astype(np.float32))
    return results


def window_off_by_one(q, k, v, *, window=None, **settings):
    """One key more than the window is seen."""
    return exact(q, k, v, left=None if window is None else window[0] + 1, **settings)


def zeros(q, k, v, **settings):
    """Nothing is computed."""
    return {"out": np.zeros(q.shape, BF16), "lse": np.zeros(q.shape[1::-1], np.float32)}


def nans(q, k, v, **settings):
    """Every out is NaN; the rest is right."""
    results = exact(q, k, v, **settings)
    results["out"][...] = np.nan
    return results


def lse_alone(q, k, v, **settings):
    """out is 1 for any inputs; the rest is right."""
    results = exact(q, k, v, **settings)
    results["out"][...] = 1
    return results


@dataclass(frozen=True, kw_only=True)
class Faulty:
    """A kernel, properties that it lacks, what the message of the first of them says, and properties that it has.

    Another kernel that is tested daily has the same kind of fault where `daily` is False.
    """

    kernel: Any
    lacks: tuple[str, ...]
    says: str
    has: tuple[str, ...] = ("determinism",)
    daily: bool = True


FAULTY = {
    "v_columns": Faulty(
        kernel=v_columns,
        lacks=("causality", "prefix_parity"),
        says=r"v of token \d+.*, times -?2\^\d+ changes out at token \d+.*forward",
        has=("determinism", "document_isolation", "packing_invariance", "zero_length_documents"),
    ),
    "q_blocks": Faulty(
        kernel=q_blocks,
        daily=False,
        lacks=("locality",),
        says=r"q of token \d+.*, times -?2\^\d+ changes (out|lse) at token \d+.*past",
    ),
    "p_blocks": Faulty(
        kernel=p_blocks,
        lacks=("causality", "locality"),
        says=r"q of token \d+, times -2\^0 changes out at token \d+.*forward",
    ),
    "v_tensor": Faulty(
        kernel=v_tensor,
        lacks=("document_isolation", "packing_invariance", "padding_garbage"),
        says=r"v of token \d+.* changes out at .*cross document",
    ),
    "v_packed_columns": Faulty(
        kernel=v_packed_columns,
        daily=False,
        lacks=("document_isolation", "packing_invariance", "padding_garbage"),
        says=r"v of token \d+.* changes out at .*cross document",
    ),
    "one_document": Faulty(
        kernel=one_document,
        lacks=("packing_invariance", "document_isolation"),
        says=r"packing document \d at token \d+ with the others changes, .* (out|dk) at token",
        has=("determinism", "causality", "locality", "prefix_parity", "zero_length_documents"),
    ),
    "atomics": Faulty(
        kernel=atomics, lacks=("determinism",), says="changes out at token 0", has=()
    ),
    "remembers": Faulty(
        kernel=remembers, lacks=("determinism",), says="changes out at token", has=()
    ),
    "stops_at_empty": Faulty(
        kernel=stops_at_empty,
        lacks=("zero_length_documents",),
        says=r"empty documents in lengths (\d+,)*0(,\d+)+ change out at token",
        has=("determinism", "prefix_parity", "causality"),
    ),
    "times_zero": Faulty(
        kernel=times_zero,
        lacks=("nan_poison",),
        says=r"v of token \d+.*, made (nan|-?inf) changes out .*to nan.*forward",
        has=("determinism", "causality", "padding_garbage", "packing_invariance", "prefix_parity"),
    ),
    "times_zero_everywhere": Faulty(
        kernel=times_zero_everywhere,
        lacks=("padding_garbage", "nan_poison"),
        says=r"(nan|inf) in every token outside document \d changes out .*to nan.*cross document",
        has=("determinism", "document_isolation", "packing_invariance"),
    ),
    "longer_coarser": Faulty(
        kernel=longer_coarser,
        lacks=("prefix_parity",),
        says=r"the presence of tokens \d+ to \d+ changes (out|dq) at token",
        has=("determinism", "causality", "packing_invariance"),
    ),
    "later_coarser": Faulty(
        kernel=later_coarser,
        lacks=("packing_invariance",),
        says=r"packing document 1 at token \d+ with the others changes, .* out at token",
        has=("determinism", "causality", "document_isolation", "prefix_parity"),
    ),
    "wrong_group": Faulty(
        kernel=wrong_group,
        lacks=("grouped_heads",),
        says=r"2 kv_heads in the place of each of them 2 times change out at token 0, head 1",
        has=("determinism", "causality"),
    ),
    "fixed_scale": Faulty(
        kernel=fixed_scale,
        lacks=("scale_invariance",),
        says=r"v times 2\^-?\d changes, besides by 2\^-?\d, out at",
        has=("determinism", "causality", "packing_invariance"),
    ),
    "small_scores": Faulty(
        kernel=small_scores,
        lacks=("scale_invariance",),
        daily=False,
        says=r"q times 2\^-?\d, with softmax_scale times 2\^-?\d, changes (out|lse) at",
        has=("determinism", "causality"),
    ),
    "dout_blocks": Faulty(
        kernel=dout_blocks,
        lacks=("backward_legality",),
        says=r"dout of token \d+.*, times -?2\^\d+ changes d[qkv] at .*backward",
        has=("determinism", "causality", "packing_invariance"),
    ),
    "lse_of_v": Faulty(
        kernel=lse_of_v,
        lacks=("locality",),
        says=r"v of token \d+.* changes lse at token",
        has=("determinism", "causality", "packing_invariance"),
    ),
}
