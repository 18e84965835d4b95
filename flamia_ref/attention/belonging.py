"""Whether out, lse and what else a forward kept can come from one forward, and from given inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref.attention.product import Operand, Scope
from flamia_ref.attention.recipe import Recipe
from flamia_ref.formats import FORMATS, PRESETS

# Of lse, and of S relative to its terms: for what is no operand's rounding.
_SCORE_MARGIN = 0.05
# How far out may pass the largest value: a P of half its format's smallest number doubles, and V rounds.
_OUT_ERROR = 4.0
# Rows that are looked at together.
_ROWS = 256
# From here on a float32 score is rounded so coarsely that P relative to a base may be anything.
_ROUNDED_LSE = 2.0**16
# Below this, relative to float32's range, a block may be flushed whole: the scale's code is 0.
_FLUSHED = 2.0**-117
_DESCALE_ROUNDING = 2.0**-22  # of a float32 descale and of the quotient by it


def check_pair(out_bits: Array, lse: Array) -> None:
    """Refuse rows whose out and lse cannot come from one forward."""
    out = _backend.from_bits(_backend.host(out_bits), np.float32)
    out_nan = np.isnan(out).any(axis=2).T
    out_zero = (out == 0).all(axis=2).T
    for wrong, what in (
        (np.isnan(lse) & ~out_nan, "NaN, but its out has none"),
        (
            (lse == np.inf) & ~out_nan & ~out_zero,
            "+inf, but its out is neither 0 nor NaN; a log-sum-exp is finite, or -inf for a row that sees no key",
        ),
        (
            (lse == -np.inf) & ~out_zero & ~out_nan,
            "-inf, a row that sees no key, but its out is not 0",
        ),
    ):
        if wrong.any():
            head, token = (int(x[0]) for x in np.nonzero(wrong))
            raise ValueError(f"lse of head {head}, token {token} is {what}")


def check_bases(saved: Mapping[str, Array], lse: Array, recipe: Recipe) -> None:
    """Refuse a `row_base` that is the base of no row. How large it may be beside lse depends on all that the recipe
    rounds away, so that is not looked at."""
    if recipe.softmax.base != "integer_max" or "row_base" not in saved:
        return
    bases = _backend.host(saved["row_base"])
    with np.errstate(invalid="ignore"):
        broken = np.isfinite(bases) & (bases != np.floor(bases))
    for wrong, what in (
        (broken, "with base 'integer_max' it is a whole number"),
        (np.isnan(bases) & ~np.isnan(lse)[:, :, None], "the lse of that row is a number"),
    ):
        if wrong.any():
            head, token, tile = (int(x[0]) for x in np.nonzero(wrong))
            raise ValueError(
                f"saved['row_base'] of head {head}, token {token}, key tile {tile} is {bases[head, token, tile]:.9g};"
                f" {what}"
            )


def check_belonging(bits: dict[str, Array], out: Array, lse: Array, forward: Any) -> None:
    """Refuse an lse below a query's score with the last key that it sees, and an out beyond every value.

    What quantization may take away is allowed for: a block keeps nothing far below its largest value, and a block
    reaches no further than its document. So nothing is refused that the recipe itself gives.
    """
    q, k, v = (_backend.from_bits(_backend.host(bits[name]), np.float32) for name in "qkv")
    group = q.shape[1] // k.shape[1]
    tops = {  # of each document and head
        name: [_largest(x[document]) for document in documents]
        for name, x, documents in (
            ("q", q, forward.mask.queries),
            ("k", k, forward.mask.keys),
            ("v", v, forward.mask.keys),
        )
    }
    with np.errstate(all="ignore"):
        for index, (queries, keys) in enumerate(forward.mask):
            _, last = forward.mask.document_bounds(index)
            seeing = np.flatnonzero(last >= 0)
            top = {"q": tops["q"][index], **{n: np.repeat(tops[n][index], group) for n in "kv"}}
            for first in range(0, len(seeing), _ROWS):
                rows = seeing[first : first + _ROWS]
                tokens = queries.start + rows
                key = np.repeat(k[keys.start + last[rows]], group, axis=1)
                given = lse[:, tokens].T
                _check_scores(q[tokens], key, given, tokens, top, forward)
                _check_reach(out[tokens], given, tokens, top["v"], forward)


def _largest(x: Array) -> Array:
    """The largest magnitude of each head [heads] of x [tokens, heads, channels], NaN if there is one; 0 of no token."""
    most = np.maximum(x.max(axis=(0, 2), initial=0), -x.min(axis=(0, 2), initial=0))
    return most.astype(np.float64)


def _check_scores(
    q: Array, key: Array, given: Array, tokens: Array, top: Mapping[str, Array], forward: Any
) -> None:
    """Of some rows, with the last key that each sees [rows, heads, channels]."""
    score, error = _score(q, key, top, forward)
    low = np.isfinite(given) & (given < score - error) & (np.abs(score) < _ROUNDED_LSE)
    if low.any():
        row, head = (int(x[0]) for x in np.nonzero(low))
        raise ValueError(
            f"lse of head {head}, token {tokens[row]} is {given[row, head]:.6g}, but the last key that the query sees"
            f" alone gives {score[row, head]:.6g}; is it negated, or of other inputs?"
        )


def _check_reach(out: Array, given: Array, tokens: Array, most: Array, forward: Any) -> None:
    """Of some rows of out, with the largest value of each head."""
    largest = np.abs(out).max(axis=2)
    far = np.isfinite(largest) & (largest > _OUT_ERROR * most)
    far &= np.abs(given) < _ROUNDED_LSE
    far &= _quantizes(forward.recipe.o.right)
    if far.any():
        row, head = (int(x[0]) for x in np.nonzero(far))
        raise ValueError(
            f"out of token {tokens[row]}, head {head} reaches {largest[row, head]:.6g}, but v in its document"
            f" {most[head]:.6g}; does it belong to these inputs?"
        )


def _score(q: Array, keys: Array, top: Mapping[str, Array], forward: Any) -> tuple[Array, Array]:
    """The score of rows with a key each [rows, heads], and how far S may be from it."""
    recipe = forward.recipe
    q, keys = (x.astype(np.float64) for x in (q, keys))
    q_error = _operand_error(np.abs(q), top["q"], recipe.s.left)
    k_error = _operand_error(np.abs(keys), top["k"], recipe.s.right)
    products = q * keys
    score = products.sum(axis=2)
    terms = np.abs(products).sum(axis=2)
    error = (np.abs(q) * k_error + q_error * np.abs(keys) + q_error * k_error).sum(axis=2)
    error = (error + _SCORE_MARGIN * terms) * forward.softmax_scale + _SCORE_MARGIN
    score = score * forward.softmax_scale
    if forward.softcap is not None:  # its slope is 1 at most
        score = forward.softcap * np.tanh(score / forward.softcap)
    return score, error


def _quantizes(operand: Operand) -> bool:
    """Whether the scale of an operand follows from the values that it scales, so that none is cut off."""
    return operand.plain or operand.scope in (Scope.BLOCK, Scope.TOKEN, Scope.HEAD)


def _operand_error(magnitude: Array, largest: Array, operand: Operand) -> Array | float:
    """How far a code of an operand [tokens, heads, channels] may be from its value, in a document whose heads reach
    `largest`."""
    if not _quantizes(operand):
        return np.inf
    if operand.plain:
        return 0.0
    if operand.scope is Scope.HEAD:
        scalar = FORMATS[operand.format]
        most = np.resize(largest, magnitude.shape[1])  # of all heads that share a descale
        relative = 2.0 ** -(scalar.mantissa_bits + 1) + _DESCALE_ROUNDING
        return relative * magnitude + scalar.smallest / scalar.max * most[:, None] + _FLUSHED
    element = PRESETS[operand.format].element
    saturated = 1 - element.max / 2.0 ** (element.emax + 1)
    relative = max(saturated, 2.0 ** -(element.mantissa_bits + 1))
    # A scale is at most twice the block's largest value over 2^emax.
    smallest = element.smallest * 2.0**-element.emax
    return relative * magnitude + smallest * largest[:, None] + _FLUSHED
