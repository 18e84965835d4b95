"""Where the error of a recipe comes from: what each of its quantizers adds, measured in float64, and what the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from flamia_ref.attention import error_sums, exact
from flamia_ref.attention.inputs import Shape
from flamia_ref.attention.parts import Values
from flamia_ref.attention.product import Use
from flamia_ref.attention.recipe import Recipe

Figures = Mapping[str, Mapping[str, float]]

Inputs = tuple[Values, Values, Values, Values | None]  # q, k, v, dout

_EVERY: frozenset[Use] = frozenset(Use)
_FORWARD = frozenset(use for use in Use if use.split(".")[0] in ("s", "o"))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Attribution:
    """What each quantizer of a recipe adds to the error of each result.

    Measured in the recipe's float64 model: its forward and its own backward, each use with its quantizer on or off, off
    being the values before it, with nothing else rounded. A use is quantized as it is in the recipe: with the scales
    that it takes over, its own second rounding where it is promoted, and what it takes in guarded blocks. Everything is
    a Euclidean norm relative to that of float64 attention. Norms of errors that are independent add up in squares.
    Where elements of a result are lost, NaN or infinite in place of a number, its norm is infinite, and its slope NaN.

    Attributes:
        uses: the uses, in the order of the dataflow.
        only: by result and use, the error with that quantizer on alone.
        without: by result and use, the error with all the others on.
        slope: by result and use, with that quantizer on alone, <e, r> / <r, r> of error and reference: by how much of
            itself the result is too large.
        quantizers: by result, the error with all on.
        arithmetic: by result, the simulator less the model with all on: what instructions, orders of sums, special
            functions and the rounding of results add, decisions that fall otherwise in float64, as at a tie, among it.
        total: by result, the simulator's error.
    """

    uses: tuple[str, ...]
    only: Figures
    without: Figures
    slope: Figures
    quantizers: Mapping[str, float]
    arithmetic: Mapping[str, float]
    total: Mapping[str, float]

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the results."""
        return tuple(self.total)

    def to_text(self) -> str:
        """A line for each use: the error by it alone, and in brackets without it."""
        names = self.results
        lines = [f"{'alone (all but it)':<20}" + "".join(f"{name:>20}" for name in names)]
        for use in self.uses:
            found = (
                f"{self.only[name][use]:.3g} ({self.without[name][use]:.3g})" for name in names
            )
            lines.append(f"{use:<20}" + "".join(f"{one:>20}" for one in found))
        for title, figures in (
            ("all quantizers", self.quantizers),
            ("arithmetic", self.arithmetic),
            ("simulator", self.total),
        ):
            lines.append(f"{title:<20}" + "".join(f"{figures[name]:>20.3g}" for name in names))
        norms = [*self.total.values(), *self.quantizers.values()]
        norms += [
            x for by in (self.only, self.without) for one in by.values() for x in one.values()
        ]
        if np.inf in norms:
            lines.append(
                "inf: elements of that result are lost, NaN or infinite in place of a number"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; NaN and infinities in words."""

        def plain(x: Any) -> Any:
            if isinstance(x, Mapping):
                return {name: plain(entry) for name, entry in x.items()}
            return x if np.isfinite(x) else str(x)

        names = ("only", "without", "slope", "quantizers", "arithmetic", "total")
        return {"uses": list(self.uses)} | {name: plain(getattr(self, name)) for name in names}

    def __str__(self) -> str:
        return self.to_text()


def modelled(
    arrays: Inputs,
    recipe: Recipe,
    shape: Shape,
    sink: Values | None,
    quantized: frozenset[Use],
    *,
    out: Values | None = None,
) -> dict[str, Values]:
    """out and, for a dout, dq, dk and dv of the float64 model of a recipe, with the quantizers of some uses. `out`
    where it is known."""
    q, k, v, dout = arrays
    attended: dict[str, Any] = {
        "softmax_scale": shape.softmax_scale,
        "softcap": shape.softcap,
        "sink": sink,
        "quantized": quantized,
    }
    if out is None:
        out = exact.forward(q, k, v, recipe, shape.mask, **attended).out
    found = {"out": out}
    if dout is not None:
        back = exact.backward(q, k, v, dout, recipe, shape.mask, **attended)
        found |= {"dq": back.dq, "dk": back.dk, "dv": back.dv}
    return found


def measured(
    arrays: Inputs,
    recipe: Recipe,
    shape: Shape,
    sink: Values | None,
    simulated: Mapping[str, Values],
    reference: Mapping[str, Values],
) -> Attribution:
    """The attribution of the `simulated` results, against the float64 attention in `reference`. Without a dout the
    forward's alone. Everything is rounded to the recipe's input format already."""
    uses = tuple(use for use, _ in recipe.uses() if arrays[3] is not None or use in _FORWARD)

    outs: dict[frozenset[Use], Values] = {}

    def model(on: frozenset[Use]) -> dict[str, Values]:
        ahead = on & _FORWARD  # what is behind out does not change it
        found = modelled(arrays, recipe, shape, sink, on, out=outs.get(ahead))
        outs.setdefault(ahead, found["out"])
        return found

    whole = model(_EVERY)
    names = tuple(whole)
    only: dict[str, dict[str, float]] = {name: {} for name in names}
    without: dict[str, dict[str, float]] = {name: {} for name in names}
    slope: dict[str, dict[str, float]] = {name: {} for name in names}
    for use in uses:
        alone, others = model(frozenset({use})), model(_EVERY - {use})
        for name in names:
            wanted = reference[name]
            only[name][str(use)] = relative(alone[name], wanted, wanted)
            without[name][str(use)] = relative(others[name], wanted, wanted)
            slope[name][str(use)] = sloping(alone[name], wanted)
    return Attribution(
        uses=tuple(map(str, uses)),
        only=_kept(only),
        without=_kept(without),
        slope=_kept(slope),
        quantizers=MappingProxyType(
            {name: relative(whole[name], reference[name], reference[name]) for name in names}
        ),
        arithmetic=MappingProxyType(
            {name: relative(simulated[name], whole[name], reference[name]) for name in names}
        ),
        total=MappingProxyType(
            {name: relative(simulated[name], reference[name], reference[name]) for name in names}
        ),
    )


def relative(x: Values, y: Values, of: Values) -> float:
    """|x - y| / |of|, Euclidean norms: 0 where both are 0, infinite where `of` alone is or elements of x or y are lost,
    NaN where there are no elements."""
    counts = np.isfinite(of)
    if error_sums.lost(x, of).any() or error_sums.lost(y, of).any():
        return np.inf
    with np.errstate(all="ignore"):
        noise, signal = ((x - y)[counts] ** 2).sum(), (of[counts] ** 2).sum()
        return 0.0 if counts.any() and noise == signal == 0 else float(np.sqrt(noise / signal))


def sloping(found: Values, reference: Values) -> float:
    """<e, r> / <r, r>; NaN where r is 0 or elements are lost."""
    if error_sums.lost(found, reference).any():
        return np.nan
    with np.errstate(all="ignore"):
        error = found - reference
        return float((error * reference).sum() / (reference * reference).sum())


def _kept(figures: dict[str, dict[str, float]]) -> Figures:
    return MappingProxyType({name: MappingProxyType(one) for name, one in figures.items()})
