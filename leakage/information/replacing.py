"""On real data: how many bits of legal outputs change when the suffix of each document is replaced by another's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref._errors import shown, type_of
from flamia_ref.attention.computed import computed_recipe
from flamia_ref.attention.recipe import Recipe
from flamia_ref.formats import FORMATS
from flamia_ref.leakage.information.changes import Change, Drawn
from flamia_ref.leakage.information.simulating import simulate
from flamia_ref.leakage.information.text import DRAWN
from flamia_ref.leakage.legal import Severity
from flamia_ref.leakage.search.bases import BFLOAT16
from flamia_ref.leakage.search.setting import Setting
from flamia_ref.leakage.sharing.text import NAMES, columns

Array = NDArray[Any]

_BLOCK, _INSIDE = 32, 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplacedOutput:
    """What changed of one output that must not: an observation, and above 0 a proof of a leak.

    Attributes:
        drawn: which tokens were replaced.
        output: the output.
        severities: what a change shows.
        bits, of_bits: bits that changed, of all in the output format.
        elements, of_elements: the same of elements.
        rows, of_rows: the same of tokens.
    """

    drawn: Drawn
    output: str
    severities: tuple[Severity, ...]
    bits: int
    of_bits: int
    elements: int
    of_elements: int
    rows: int
    of_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplacedSuffix:
    """What changed when tokens of each document were replaced by another document's. `str(found)` is its text.

    Attributes:
        recipe: the recipe's name.
        lengths: tokens of the documents.
        cuts: where the suffix of each begins; its length where it was left as it is.
        donors: the document that each takes tokens of.
        outputs: what changed.
    """

    recipe: str
    lengths: tuple[int, ...]
    cuts: tuple[int, ...]
    donors: tuple[int, ...]
    outputs: tuple[ReplacedOutput, ...]

    @property
    def leaks(self) -> bool:
        """Whether a bit changed that must not: a proof."""
        return any(one.bits for one in self.outputs)

    def to_text(self) -> str:
        """Return it for people."""
        rows: list[Sequence[str]] = [("replaced", "output", "severity", "bits", "elements", "rows")]
        for one in self.outputs:
            rows.append(
                (
                    DRAWN[one.drawn],
                    NAMES[one.output],
                    ", ".join(severity.replace("_", "-") for severity in one.severities),
                    _share(one.bits, one.of_bits),
                    _share(one.elements, one.of_elements),
                    _share(one.rows, one.of_rows),
                )
            )
        lengths = ", ".join(map(str, self.lengths))
        head = (
            f"{self.recipe}: documents of {lengths} tokens, cut at {', '.join(map(str, self.cuts))}"
        )
        return "\n".join([head, *columns(rows)])

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    def __str__(self) -> str:
        return self.to_text()


def replaced_suffix(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens: Any,
    recipe: Recipe | str,
    *,
    dout: Any = None,
    cuts: Sequence[int] | None = None,
    softmax_scale: float | None = None,
) -> ReplacedSuffix:
    """How many bits change that must not, when each document's suffix is replaced by another document's tokens.

    Causal. Two changes, each against the inputs as they are: q, k, v and dO from a cut on, which earlier rows of out,
    lse and dQ must not see; and q and dO before it, which later rows of all outputs must not see. A document takes the
    tokens at the same places of the longest other document, again from its start where that ends.

    Args:
        q: bfloat16 numpy array [tokens, heads, head_dim], finite as all of them.
        k, v: the same [tokens, kv_heads, head_dim].
        cu_seqlens: where documents begin and end; two documents or more.
        recipe: a recipe that is computed here, or its name.
        dout: like q, for recipes with a backward; without it gradients are left out.
        cuts: a place in each document; None: place 20 of the block of 32 at the middle of each, or its middle.
        softmax_scale: None for 1 / sqrt(head_dim).

    Returns: a `ReplacedSuffix`. Raises ValueError or TypeError of one line.
    """
    chosen = computed_recipe(recipe)
    given = {"q": q, "k": k, "v": v} | ({} if dout is None else {"dout": dout})
    if dout is not None and not chosen.has_backward:
        raise ValueError(f"recipe {chosen.name!r} has no backward, and dout is given; leave it out")
    for name, x in given.items():
        if not isinstance(x, np.ndarray) or x.dtype != BFLOAT16 or x.ndim != 3:
            raise TypeError(
                f"{name} holds {type_of(x)}; it must be a bfloat16 numpy array [tokens, heads, head_dim]"
            )
    offsets = np.asarray(cu_seqlens)
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or len(offsets) < 3:
        raise ValueError(
            f"cu_seqlens is {shown(cu_seqlens)}; it must be whole numbers of two documents or more"
        )
    ends = offsets.astype(np.int64)
    lengths: NDArray[np.int64] = ends[1:] - ends[:-1]
    if offsets[0] != 0 or (lengths < 0).any() or offsets[-1] != len(q):
        raise ValueError(
            f"cu_seqlens is {shown(cu_seqlens)}; it must ascend from 0 to the {len(q)} tokens of q"
        )
    if (lengths > 0).sum() < 2:
        raise ValueError("only one document has tokens; give two, as one takes the other's suffix")
    setting = Setting.of(
        lengths=lengths.tolist(),
        head_dim=q.shape[2],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        causal=True,
        window=None,
        alignment="bottom_right",
        softmax_scale=softmax_scale,
        backward="dout" in given,
    )
    for name, x in given.items():
        if x.shape != setting.shape("q" if name == "dout" else name):
            wanted = setting.shape("q" if name == "dout" else name)
            raise ValueError(f"{name} has shape {x.shape}; it must be {wanted}")
        if not np.isfinite(x.astype(np.float32)).all():
            raise ValueError(
                f"{name} has elements that are NaN or infinite, which can hide what moves; give finite values"
            )
    places = _cuts(lengths, cuts)
    donors = _donors(lengths)
    return ReplacedSuffix(
        recipe=chosen.name,
        lengths=tuple(lengths.tolist()),
        cuts=tuple(places.tolist()),
        donors=tuple(donors.tolist()),
        outputs=_changed(chosen, setting, given, places, donors),
    )


def _changed(
    recipe: Recipe,
    setting: Setting,
    given: Mapping[str, Array],
    cuts: NDArray[np.int64],
    donors: NDArray[np.int64],
) -> tuple[ReplacedOutput, ...]:
    starts = setting.cu_seqlens.astype(np.int64)
    donor = donors[setting.document]
    size = np.maximum(np.diff(starts)[donor], 1)
    source = starts[donor] + setting.place % size
    later = setting.place >= cuts[setting.document]
    before = _one(recipe, setting, given)
    found = []
    for drawn, tokens, operands in (
        (Drawn.SUFFIX, np.flatnonzero(later), setting.operands),
        (
            Drawn.PAST_QUERIES,
            np.flatnonzero(~later),
            tuple(name for name in ("q", "dout") if name in given),
        ),
    ):
        change = Change(drawn=drawn, operands=operands, tokens=tokens)
        other = {name: x.copy() for name, x in given.items()}
        for name in operands:
            other[name][tokens] = given[name][source[tokens]]
        after = _one(recipe, setting, other)
        for output in setting.outputs:
            rows = change.observed(setting, output)
            if rows.any():
                severities = change.severities(setting, output)
                width = 32 if output == "lse" else FORMATS[recipe.output].bits
                pair = before[output][rows], after[output][rows]
                found.append(_output(drawn, output, severities, width, *pair))
    return tuple(found)


def _one(recipe: Recipe, setting: Setting, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Bits [tokens, heads, channels] of a pass of its own: nothing else may be in it."""
    found = simulate(recipe, setting, {name: x[:, None] for name, x in inputs.items()})
    return {name: x[0] for name, x in found.items()}


def _output(
    drawn: Drawn,
    output: str,
    severities: tuple[Severity, ...],
    width: int,
    before: Array,
    after: Array,
) -> ReplacedOutput:
    differing = before ^ after
    return ReplacedOutput(
        drawn=drawn,
        output=output,
        severities=severities,
        bits=int(np.bitwise_count(differing).sum(dtype=np.int64)),
        of_bits=differing.size * width,
        elements=int((differing != 0).sum()),
        of_elements=differing.size,
        rows=int((differing != 0).any(axis=(1, 2)).sum()),
        of_rows=len(differing),
    )


def _cuts(lengths: NDArray[np.int64], cuts: Sequence[int] | None) -> NDArray[np.int64]:
    if cuts is None:
        inside = lengths // 2 // _BLOCK * _BLOCK + _INSIDE
        return np.where(inside < lengths, inside, lengths // 2)
    found = np.asarray(cuts)
    if found.shape != lengths.shape or found.dtype.kind not in "iu":
        raise ValueError(
            f"cuts is {shown(cuts)}; it must be a whole number for each of {len(lengths)} documents"
        )
    if (found < 0).any() or (found > lengths).any():
        raise ValueError(f"cuts is {shown(cuts)}; each must be from 0 to its document's length")
    return found.astype(np.int64)


def _donors(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The longest other document of each, the first of equals."""
    order = np.argsort(-lengths, kind="stable")
    found = np.full(len(lengths), order[0])
    found[order[0]] = order[1]
    return found


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.3g} %)" if part else f"0 of {whole}"
