"""The error of many recipes that differ in parts: each product's result is computed once for what it depends on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flamia_ref import attention
from flamia_ref.attention import float64
from flamia_ref.attention.parts import parts
from flamia_ref.attention.recipe import Recipe
from flamia_ref.leakage.safeguarding.study_samples import StudySample
from flamia_ref.packing import Mask

Errors = Mapping[str, float]
"""The relative L2 error of "out", "dq", "dk" and "dv", of "out" alone without a backward."""

_GRADIENTS = ("dq", "dk", "dv")
_E4M3_MAX = 448.0
_UNIT = 127
_HEADROOM = 4  # powers of two


class Measurer:
    """Errors on one sample, causal or by a window.

    out follows from S, O and the softmax alone, dQ from these, dP and dQ's product, dK and dV alike. So of recipes that
    agree in S, O and dP, one run gives dQ of one, dK of another and dV of a third.
    """

    def __init__(self, sample: StudySample, *, causal: bool, window: Any) -> None:
        self.sample = sample
        self.settings = {
            "cu_seqlens": sample.documents.offsets,
            "causal": causal,
            "window": window,
            "softmax_scale": sample.softmax_scale,
        }
        documents = sample.documents
        self.mask = Mask.of(
            documents, documents, causal=causal, window=window, alignment="bottom_right"
        )
        self.runs = 0
        self._found: dict[Any, float] = {}

    def errors(self, recipe: Recipe) -> Errors | None:
        """The errors of a recipe, None if they are not measured yet."""
        keys = _keys(recipe)
        if any(key not in self._found for key in keys.values()):
            return None
        return {name: self._found[key] for name, key in keys.items()}

    def measure(
        self, recipes: Sequence[Recipe], report: Callable[[int, int], None] | None = None
    ) -> None:
        """Measure recipes, those that agree in what comes first together."""
        alike: dict[Any, list[Recipe]] = {}
        for recipe in recipes:
            alike.setdefault(_first(recipe), []).append(recipe)
        done = 0
        for group in alike.values():
            for place, recipe in enumerate(group):
                if report is not None:
                    report(done, len(recipes))
                done += 1
                if self.errors(recipe) is None:
                    self._run(self._filled(recipe, group[place + 1 :]))

    def _filled(self, recipe: Recipe, others: Sequence[Recipe]) -> Recipe:
        """A recipe with products of others where its own are measured already."""
        if not recipe.has_backward or _shares_ds(recipe):
            return recipe
        parts: dict[str, Any] = {}
        for name in _GRADIENTS:
            if _keys(recipe)[name] not in self._found:
                continue
            for other in others:
                if not _shares_ds(other) and _keys(other)[name] not in self._found:
                    parts[name] = getattr(other, name)
                    if name == "dv":
                        parts["gradient"] = other.gradient
                    break
        return replace(recipe, **parts)

    def _run(self, recipe: Recipe) -> None:
        self.runs += 1
        found = self._error(recipe)
        for name, key in _keys(recipe).items():
            self._found[key] = found[name]

    def _error(self, recipe: Recipe) -> Errors:
        x = self.sample
        dout = x.dout if recipe.has_backward else None
        found = attention.error(x.q, x.k, x.v, recipe, dout=dout, **self.settings).relative_l2
        return {name: error for name, error in found.items() if name != "lse"}

    def constants(self) -> dict[str, int]:
        """The e8m0 codes of constant scales: with values 16 times as large as the sample's none would be beyond the
        largest e4m3, as whoever sets a constant has not seen the data."""
        x = self.sample
        found = {
            name: _power(float(np.abs(values.astype(np.float64)).max()))
            for name, values in (("q", x.q), ("k", x.k), ("v", x.v), ("do", x.dout))
        }
        found["ds"] = _power(self._largest_ds())
        return {name: min(code + _HEADROOM, 254) for name, code in found.items()}

    def _largest_ds(self) -> float:
        """The largest magnitude of P (dP - delta) in float64."""
        x = self.sample
        q, k, v, dout = (y.astype(np.float64) for y in (x.q, x.k, x.v, x.dout))
        exact = float64.forward(q, k, v, **self.settings)
        delta = (exact.out * dout).sum(axis=2)
        most = 0.0
        for part in parts(self.mask, q.shape[1], k.shape[1]):
            row, key = (part.rows, part.head), (part.keys, part.kv_head)
            s = np.where(part.seen, x.softmax_scale * q[row] @ k[key].T, -np.inf)
            lse = exact.lse[part.head, part.rows][:, None]
            ds = np.exp(s - lse) * (dout[row] @ v[key].T - delta[row][:, None])
            most = max(most, float(np.abs(ds[part.seen]).max(initial=0)))
        return most


def overall(errors: Errors) -> float:
    """One number for the errors of all results: their root mean square."""
    return math.sqrt(sum(x * x for x in errors.values()) / len(errors))


def _power(largest: float) -> int:
    """The e8m0 code of the smallest power of two that `largest` is at most 448 times of."""
    if not largest:
        return 0
    mantissa, exponent = math.frexp(largest / _E4M3_MAX)
    return min(max(exponent - (mantissa == 0.5) + _UNIT, 0), 254)


def _shares_ds(recipe: Recipe) -> bool:
    return recipe.has_backward and recipe.backward.dk.left.same_codes_as is not None


def _first(recipe: Recipe) -> Any:
    """What all results of a backward depend on."""
    gradient = recipe.gradient and replace(recipe.gradient, p_offset=0)
    return (
        recipe.s,
        recipe.o,
        recipe.dp,
        recipe.softmax,
        gradient,
        recipe.tiles,
        recipe.guard_operands,
    )


def _keys(recipe: Recipe) -> dict[str, Any]:
    """What each result depends on."""
    keys: dict[str, Any] = {
        "out": ("out", recipe.s, recipe.o, recipe.softmax, recipe.tiles, recipe.guard_operands)
    }
    if recipe.has_backward:
        first, back = _first(recipe), recipe.backward
        keys["dq"] = ("dq", first, back.dq)
        keys["dk"] = ("dk", first, back.dk, back.dq if _shares_ds(recipe) else None)
        keys["dv"] = ("dv", first, back.dv, back.gradient)
    return keys
