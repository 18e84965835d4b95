"""Attention of one head group in float64, written out, for what adapters and fake libraries must give."""

import numpy as np


def visible(queries, keys, *, causal, window=(None, None), alignment="bottom_right"):
    """Which pairs count, [queries, keys], by the definition of the protocol."""
    shift = keys - queries if alignment == "bottom_right" else 0
    left, right = window
    pairs = np.zeros((queries, keys), bool)
    for i in range(queries):
        for j in range(keys):
            at = i + shift
            pairs[i, j] = (
                (not causal or j <= at)
                and (left is None or j >= at - left)
                and (right is None or j <= at + right)
            )
    return pairs


def forward(q, k, v, pairs, scale):
    """q [queries, heads, d], k and v [keys, kv_heads, d] float64 -> out, lse [heads, queries]."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    out, lse = np.zeros(q.shape), np.full((heads, len(q)), -np.inf)
    for h in range(heads):
        s = np.where(pairs, q[:, h] @ k[:, h // group].T * scale, -np.inf)
        for i in np.flatnonzero(pairs.any(1)):
            top = s[i].max()
            weights = np.exp(s[i] - top)
            out[i, h] = weights @ v[:, h // group] / weights.sum()
            lse[h, i] = top + np.log(weights.sum())
    return out, lse


def backward(one, pairs, scale, lse, delta):
    """Gradients; `one` gives the value of each use: q.s, k.s, q.dk, k.dq, v.dp, do.dp, do.dv."""
    heads, group = one["q.s"].shape[1], one["q.s"].shape[1] // one["k.s"].shape[1]
    dq, dk, dv = (np.zeros(one[name].shape) for name in ("q.s", "k.s", "v.dp"))
    for h in range(heads):
        g = h // group
        s = np.where(pairs, one["q.s"][:, h] @ one["k.s"][:, g].T * scale, -np.inf)
        p = np.exp(s - lse[h][:, None])
        ds = p * (one["do.dp"][:, h] @ one["v.dp"][:, g].T - delta[h][:, None])
        dq[:, h] = ds @ one["k.dq"][:, g] * scale
        dk[:, g] += ds.T @ one["q.dk"][:, h] * scale
        dv[:, g] += p.T @ one["do.dv"][:, h]
    return dq, dk, dv


def packed(q, k, v, dout, offsets, offsets_k, scale, **mask):
    """The results of packed documents, by name; q, k, v and dout in any float type."""
    q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
    found = {
        "out": np.zeros(q.shape),
        "lse": np.full((q.shape[1], len(q)), -np.inf),
        "dq": np.zeros(q.shape),
        "dk": np.zeros(k.shape),
        "dv": np.zeros(v.shape),
    }
    for n in range(len(offsets) - 1):
        rows, columns = slice(*offsets[n : n + 2]), slice(*offsets_k[n : n + 2])
        parts = {"q": q[rows], "k": k[columns], "v": v[columns], "do": dout[rows]}
        if not len(parts["q"]) or not len(parts["k"]):
            continue
        pairs = visible(len(parts["q"]), len(parts["k"]), **mask)
        out, lse = forward(parts["q"], parts["k"], parts["v"], pairs, scale)
        found["out"][rows], found["lse"][:, rows] = out, lse
        delta = (out * parts["do"]).sum(2).T
        uses = ("q.s", "k.s", "q.dk", "k.dq", "v.dp", "do.dp", "do.dv")
        one = {use: parts[use.split(".")[0]] for use in uses}
        safe = np.where(np.isfinite(lse), lse, 0)
        gradients = backward(one, pairs, scale, safe, delta)
        found["dq"][rows], found["dk"][columns], found["dv"][columns] = gradients
    return found
