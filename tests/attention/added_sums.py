"""Attention and its gradients with Python floats and `math.fsum`: every sum exact but for its one rounding."""

import itertools
import math

import numpy as np

from tests.attention.masks import sees


def attention(
    q, k, v, dout, cu_seqlens, cu_seqlens_k=None, *, mask, scale, softcap=None, sink=None
):
    """out, lse, dq, dk, dv and dsink, every sum exact but for its one rounding."""
    q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    out, lse = np.zeros(dout.shape), np.zeros((heads, len(q)))
    terms = [[[] for _ in range(x.size)] for x in (q, k, v)]
    place = [np.arange(x.size).reshape(x.shape) for x in (q, k, v)]
    of_sink = [[] for _ in range(heads)]
    documents = itertools.pairwise(cu_seqlens)
    of_keys = itertools.pairwise(cu_seqlens if cu_seqlens_k is None else cu_seqlens_k)
    for (start, end), (first, last) in zip(documents, of_keys, strict=True):
        for i, h in itertools.product(range(start, end), range(heads)):
            g = h // group
            keys = [
                j
                for j in range(first, last)
                if sees(i - start, j - first, end - start, last - first, **mask)
            ]
            logit = -math.inf if sink is None else float(sink[h])
            if not keys:
                lse[h, i] = logit
                continue
            scores = [scale * math.fsum(q[i, h] * k[j, g]) for j in keys]
            slopes = [1.0] * len(keys)
            if softcap is not None:
                slopes = [1 / math.cosh(s / softcap) ** 2 for s in scores]
                scores = [softcap * math.tanh(s / softcap) for s in scores]
            top = max([*scores, logit])
            weights = [math.exp(s - top) for s in scores]
            total = math.fsum([*weights, math.exp(logit - top)])
            lse[h, i] = top + math.log(total)
            p = [w / total for w in weights]
            sinking = math.exp(logit - top) / total
            for c in range(v.shape[2]):
                out[i, h, c] = math.fsum(one * v[j, g, c] for one, j in zip(p, keys, strict=True))
            dp = [math.fsum(dout[i, h] * v[j, g]) for j in keys]
            of_sink[h].append(-sinking * math.fsum(a * b for a, b in zip(p, dp, strict=True)))
            for at, j in enumerate(keys):
                # dp - delta, without the subtraction of two sums
                rest = [a * (dp[at] - b) for a, b in zip(p, dp, strict=True)]
                ds = scale * p[at] * slopes[at] * math.fsum([*rest, sinking * dp[at]])
                for c in range(q.shape[2]):
                    terms[0][place[0][i, h, c]].append(ds * k[j, g, c])
                    terms[1][place[1][j, g, c]].append(ds * q[i, h, c])
                for c in range(v.shape[2]):
                    terms[2][place[2][j, g, c]].append(p[at] * dout[i, h, c])
    gradients = [
        np.array([math.fsum(one) for one in some]).reshape(x.shape)
        for some, x in zip(terms, (q, k, v), strict=True)
    ]
    return out, lse, *gradients, np.array([math.fsum(one) for one in of_sink])
