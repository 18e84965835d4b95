"""The error of a recipe: its real simulator against float64 attention of the same inputs, forward and gradients."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from flamia_ref import _backend
from flamia_ref._errors import shown
from flamia_ref.attention import attribution as attributed
from flamia_ref.attention import error_sums, float64, inputs, observed
from flamia_ref.attention.attribution import Attribution
from flamia_ref.attention.computed import computed_recipe
from flamia_ref.attention.error_sums import ErrorSums, Places
from flamia_ref.attention.parts import Values
from flamia_ref.attention.recipe import Recipe
from flamia_ref.evidence import Evidence
from flamia_ref.packing import Mask
from flamia_ref.packing.tiles import BLOCK

SCHEMA = "flamia-ref attention error"
SCHEMA_VERSION = 1

GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionError:
    """The error of a recipe on some inputs. `str(error)` is the text. Arrays are numpy, float64.

    Attributes:
        recipe, evidence: the recipe's name, and the weakest evidence of its steps.
        lengths, key_lengths: tokens of each document, and of its keys.
        positions: the first position in its document of each bucket of tokens, ascending, the last without an end.
        results: by name, "out", "lse" and, with gradients, "dq", "dk", "dv": sums over documents, heads and positions;
            those of dk and dv by key/value heads and positions of keys. "lse" of a recipe that smooths the keys is of
            the smoothed scores, its reference too: the float64 lse of k less its document's mean.
        queries: the packed queries that the forward's figures are of; None for all.
        mass_lost: [heads, queries], for each row 1 less the sum of P as O takes it over the row sum l, of visible keys;
            about 1e-6 of it is the rounding of lse. Positive: O is too small. NaN in rows that see no key, infinite in
            rows that are lost: their P or lse is not finite.
        ds_sums: [heads, queries], the sums of the rows of dS before it is quantized, relative to the sum of the row's
            magnitudes; the exact dS sums to 0. 0 where all of dS is, NaN in rows that see one key, whose dS is nothing
            but rounding, or none, and infinite in rows that are lost. None without gradients.
        attribution: what each quantizer adds, where that was asked for.
    """

    recipe: str
    evidence: Evidence
    lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    positions: tuple[int, ...]
    results: Mapping[str, ErrorSums]
    queries: Places | None
    mass_lost: Values
    ds_sums: Values | None = None
    attribution: Attribution | None = None

    @property
    def total(self) -> Mapping[str, ErrorSums]:
        """The sums of each result over all documents, heads and positions: numbers."""
        return {name: one.over() for name, one in self.results.items()}

    @property
    def relative_l2(self) -> Mapping[str, float]:
        """|found - reference| / |reference| of each result as a whole, by its name. Infinite where elements of it are
        lost, NaN or infinite in place of a number; NaN where there is nothing to measure."""
        return {name: float(one.relative_l2) for name, one in self.total.items()}

    def to_text(self) -> str:
        """The error for people: a line a result, P's mass, dS's sums, the attribution."""
        tokens, documents = sum(self.lengths), len(self.lengths)
        head = f"recipe {self.recipe}: evidence {self.evidence}; {tokens} tokens in {documents} documents"
        if self.queries is not None:
            head += f", {len(self.queries)} queries of them"
        lines = [head, "        rel. L2   1-cosine  largest   of row    bias/rms          slope"]
        lines += [_line(name, one) for name, one in self.total.items()]
        for title, rows in (("P mass lost", self.mass_lost), ("sums of dS", self.ds_sums)):
            if rows is not None:
                lines.append(f"{title}: {_told(_summary(rows))}")
        if self.attribution is not None:
            lines.append(self.attribution.to_text())
        return "\n".join(lines)

    def to_json(self) -> str:
        """The error as JSON: of each result the figures of all, by head and by position; no arrays of rows."""
        document = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "recipe": self.recipe,
            "evidence": str(self.evidence),
            "lengths": list(self.lengths),
            "key_lengths": list(self.key_lengths),
            "positions": list(self.positions),
            "queries": None if self.queries is None else len(self.queries),
            "results": {name: _figures(one) for name, one in self.results.items()},
            "mass_lost": _plain(_summary(self.mass_lost)),
            "ds_sums": None if self.ds_sums is None else _plain(_summary(self.ds_sums)),
            "attribution": None if self.attribution is None else self.attribution.to_dict(),
        }
        return json.dumps(document, indent=1, ensure_ascii=True, allow_nan=False) + "\n"

    def __str__(self) -> str:
        return self.to_text()


def error(
    q: Any,
    k: Any,
    v: Any,
    recipe: Recipe | str,
    *,
    dout: Any = None,
    cu_seqlens: Any = None,
    cu_seqlens_k: Any = None,
    causal: bool = True,
    alignment: str = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sink: Any = None,
    queries: Any = None,
    positions: Any = None,
    attribution: bool = False,
) -> AttentionError:
    """The error of a recipe: the real simulator against float64 attention of the same inputs.

    The inputs are rounded to the recipe's input format first, with an `InputRounded` warning where that changes one;
    the reference takes the rounded ones. Both run in numpy, whatever the arrays are, in memory that grows with tokens.
    The gradients, for `dout`, are those of the recipe's own backward from its own forward; a recipe without a backward
    has none of them.

    What is not finite in a result, where float64 attention is, is lost: counted in `ErrorSums.lost`, said in the text,
    and the figures of that result are infinite or NaN.

    Args:
        q, k, v, dout, recipe and the keywords of the mask and the scores: as in `forward` and `backward`.
        queries: packed queries [int] that the forward is measured on alone, for long documents: the tiles that they are
            in are computed, those of all heads. It goes without dout and attribution.
        positions: the first positions of buckets of tokens in their documents, ascending from 0; by default 0, 32, 64,
            128, ..., each bucket twice as long as the one before it. `range(n)` gives every position its own.
        attribution: whether to measure what each quantizer adds, see `Attribution`. It takes memory and time as two
            float64 passes for each use.

    Returns: an `AttentionError`.
    Raises: ValueError or TypeError of one line before any work, as `forward` and `backward` do, and ValueError for NaN
        and infinities in the inputs and where there is no query: there is no error to measure.
    """
    chosen = computed_recipe(recipe)
    attended = {
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_k": cu_seqlens_k,
        "causal": causal,
        "alignment": alignment,
        "window": window,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "sink": sink,
    }
    for name, x in {"q": q, "k": k, "v": v, "dout": dout, "sink": sink}.items():
        if _backend.is_traced(x):
            raise TypeError(f"{name} is traced; error measures on the host, keep it out of jit")
    given = inputs.check(q, k, v, **attended)
    if dout is not None:
        inputs.check_dout(dout, q, v, inputs.DTYPES)
    mask = given.shape.mask
    chosen_queries = _queries(queries, mask, dout, attribution=attribution)
    starts = _positions(positions, mask)
    rounded = {name: _backend.host(getattr(given, name)).view(np.float32) for name in "qkv"}
    if dout is not None:
        (bits,) = inputs.rounded_bits({"dout": dout}).values()
        rounded["dout"] = _backend.host(bits).view(np.float32)
    _check_measurable(rounded)
    narrow = rounded.pop("dout", None)
    if sink is not None:
        attended["sink"] = sink = inputs.native(_backend.host(sink))
    wide_q, wide_k, wide_v = (x.astype(np.float64) for x in rounded.values())

    results: dict[str, ErrorSums] = {}
    found: dict[str, Values] = {}
    ds_sums = None
    rows = np.arange(mask.queries.tokens) if chosen_queries is None else chosen_queries
    smoothed = chosen.lse_of_smoothed_scores
    centred = _centred(wide_k, mask) if smoothed else wide_k
    if chosen_queries is None:
        ahead, mass = observed.forward(given, chosen, sink)
        exact = float64.forward(wide_q, wide_k, wide_v, **attended)
        exact_lse = exact.lse
        if smoothed:
            exact_lse = float64.forward(wide_q, centred, wide_v, **attended).lse
        found["out"] = ahead.out
        out, lse = _wide(ahead.out), _wide(ahead.lse).T
    else:
        out, lse, mass = observed.rows(given, chosen, rows, sink)
        exact = float64.forward_rows(wide_q, wide_k, wide_v, rows, **attended)
        exact_lse = exact.lse
        if smoothed:
            exact_lse = float64.forward_rows(wide_q, centred, wide_v, rows, **attended).lse
    place = error_sums.cells(mask.queries, starts, rows)
    shape = (len(mask.queries), len(starts))
    reference = {"out": exact.out}
    results["out"] = error_sums.sums(out, exact.out, *place, shape)
    results["lse"] = error_sums.sums(lse[:, :, None], exact_lse.T[:, :, None], *place, shape)
    lost_mass = _rows(_visible(lse, sink) - mass, ~mask.dead()[rows][:, None])

    if narrow is not None and chosen.has_backward:
        back, sums = observed.backward(**rounded, dout=narrow, ahead=ahead)
        wanted = float64.backward(wide_q, wide_k, wide_v, narrow.astype(np.float64), **attended)
        key_place = error_sums.cells(mask.keys, starts, np.arange(mask.keys.tokens))
        for name in GRADIENTS:
            found[name], reference[name] = getattr(back, name), getattr(wanted, name)
            where = place if name == "dq" else key_place
            results[name] = error_sums.sums(_wide(found[name]), reference[name], *where, shape)
        sizes = np.where(sums.magnitudes == 0, 1, sums.magnitudes)
        with np.errstate(all="ignore"):
            ds_sums = _rows(sums.sums / sizes, _seen(mask) > 1).T
    added = None
    if attribution:
        wide_dout = None
        if narrow is not None and "dq" in found:
            wide_dout = narrow.astype(np.float64)
        added = attributed.measured(
            (wide_q, wide_k, wide_v, wide_dout),
            chosen,
            given.shape,
            None if sink is None else sink.astype(np.float64),
            {name: _wide(x) for name, x in found.items()},
            reference,
        )
    return AttentionError(
        recipe=chosen.name,
        evidence=chosen.label,
        lengths=tuple(map(int, mask.queries.lengths)),
        key_lengths=tuple(map(int, mask.keys.lengths)),
        positions=tuple(map(int, starts)),
        results=MappingProxyType(results),
        queries=chosen_queries,
        mass_lost=lost_mass.T,
        ds_sums=ds_sums,
        attribution=added,
    )


def _wide(x: Any) -> Values:
    return np.asarray(_backend.host(x), dtype=np.float64)


def _centred(k: Values, mask: Mask) -> Values:
    """k less the mean over its document's tokens."""
    found = k.copy()
    for document in mask.keys:
        if document.stop > document.start:
            found[document] -= k[document].mean(axis=0)
    return found


def _visible(lse: Values, sink: Any) -> Values:
    """The share of a row's l that is not the sink's [rows, heads]."""
    share = np.ones(lse.shape)
    if sink is not None:
        with np.errstate(all="ignore"):
            share = 1 - np.exp(sink.astype(np.float64)[None, :] - lse)
    return np.where(np.isfinite(lse), share, np.nan)


def _rows(figures: Values, there: Any) -> Values:
    """Figures of rows: NaN where there is none, infinite where it is not finite."""
    return np.where(there, np.where(np.isfinite(figures), figures, np.inf), np.nan)


def _check_measurable(arrays: Mapping[str, Any]) -> None:
    """Refuse what has no error: no queries, NaN, infinities. `arrays`: q, k, v, dout as the recipe takes them."""
    if not len(arrays["q"]):
        raise ValueError("q has no tokens; there is no error to measure, give one or more")
    for name, x in arrays.items():
        count = int(np.count_nonzero(~np.isfinite(x)))
        if count:
            raise ValueError(
                f"{name} has {count} of {x.size} elements that are NaN or infinite in the recipe's input format; error"
                " measures on finite inputs"
            )


def _seen(mask: Mask) -> Places:
    """How many keys each packed query sees [queries, 1]."""
    bounds = (mask.document_bounds(index) for index in range(len(mask.queries)))
    counts = [last.astype(np.int64) - first + 1 for first, last in bounds]
    return np.concatenate([np.zeros(0, dtype=np.int64), *counts])[:, None]


def _queries(queries: Any, mask: Mask, dout: Any, *, attribution: bool) -> Places | None:
    """Checked packed queries, ascending, each once."""
    if queries is None:
        return None
    if dout is not None or attribution:
        other = "dout" if dout is not None else "attribution"
        raise ValueError(
            f"queries is given with {other}; a sample of queries has a forward alone, leave one of them out"
        )
    found = np.asarray(queries)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer) or not len(found):
        raise TypeError(
            f"queries is {shown(queries)}; it must be whole numbers, packed queries to measure, one or more"
        )
    found = np.unique(found).astype(np.int64)
    if found[0] < 0 or found[-1] >= mask.queries.tokens:
        raise ValueError(
            f"queries are from {found[0]} to {found[-1]}; there are 0 to {mask.queries.tokens - 1}"
        )
    return found


def _positions(positions: Any, mask: Mask) -> Places:
    """The checked first positions of buckets."""
    if positions is None:
        longest = max((*mask.queries.lengths, *mask.keys.lengths), default=0)
        starts = [0, BLOCK]
        while starts[-1] < longest:
            starts.append(2 * starts[-1])
        return np.array(starts[:1] + [x for x in starts[1:] if x < longest], dtype=np.int64)
    found = np.asarray(list(positions) if isinstance(positions, range) else positions)
    whole = found.ndim == 1 and len(found) and np.issubdtype(found.dtype, np.integer)
    if not whole or found[0] != 0 or (np.diff(found) <= 0).any():
        raise ValueError(
            f"positions is {shown(positions)}; it must be whole numbers ascending from 0, the first of each bucket"
        )
    return found.astype(np.int64)


def _figures(one: ErrorSums) -> dict[str, Any]:
    heads, places = one.over("documents", "positions"), one.over("documents", "heads")
    return {
        "all": one.over().to_dict(),
        "heads": [heads[at].to_dict() for at in range(len(heads.rows))],
        "positions": [places[at].to_dict() for at in range(len(places.rows))],
    }


def _line(name: str, one: ErrorSums) -> str:
    """The line of a result: its figures, and how many of its elements are lost."""
    elements, gone = int(one.elements), int(one.lost)
    if not elements + gone:
        return f"{name:<6} nothing to measure: no number in float64 attention"
    with np.errstate(all="ignore"):
        bias, spread = (np.divide(x, one.rms) for x in (one.bias, one.bias_error))
    line = (
        f"{name:<6} {one.relative_l2:9.3g} {1 - one.cosine:9.3g} {one.largest:9.3g} {one.largest_of_row:9.3g}"
        f"  {bias:+.1e} ({spread:.0e})  {one.slope:+.1e} ({one.slope_error:.0e})"
    )
    return f"{line}  lost {gone} of {elements + gone}" if gone else line


def _summary(rows: Values) -> dict[str, float | int]:
    """The mean, the root mean square and the largest magnitude of figures of rows that there are, NaN where there are
    none; infinite and NaN where rows are lost."""
    x = rows[~np.isnan(rows)]
    gone = int(np.count_nonzero(np.isinf(x)))
    told = {"mean": np.nan, "rms": np.nan, "largest": np.inf if gone else np.nan}
    if x.size and not gone:
        told = {
            "mean": float(x.mean()),
            "rms": float(np.sqrt((x * x).mean())),
            "largest": float(np.abs(x).max()),
        }
    return told | {"rows": x.size, "lost": gone}


def _told(summary: Mapping[str, float | int]) -> str:
    mean, rms, most, count, gone = summary.values()
    if not count:
        return "nothing to measure: no such row"
    line = f"mean {mean:+.2e}, rms {rms:.2e}, largest {most:.2e}"
    return f"{line}, lost {gone} of {count} rows" if gone else line


def _plain(summary: Mapping[str, float | int]) -> dict[str, float | int | str]:
    """For JSON: NaN and infinities in words."""
    return {name: x if np.isfinite(x) else str(x) for name, x in summary.items()}
