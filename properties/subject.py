"""The kernel under test: called on inputs, its results checked and brought to bits, and compared."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from flamia_ref import kernels
from flamia_ref._errors import line, shown, type_of
from flamia_ref.golden.dataflow import GRADIENTS, OUTPUTS
from flamia_ref.properties.data import Inputs
from flamia_ref.properties.drawn import Example

U32 = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]
Results = dict[str, U32]
"""Float32 bits by output, tokens first: out, dq [tokens, heads, head_dim], lse [tokens, heads], dk, dv [tokens,
kv_heads, head_dim]."""

_AXES = ("token", "head", "channel")


class PropertyFailure(AssertionError):
    """A kernel does not have a property. `example` shows it, `str` says what changed and where."""

    def __init__(self, message: str, example: Example) -> None:
        super().__init__(message)
        self.example = example


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A kernel, and how it is called.

    Attributes:
        kernel: a callable of the protocol of `flamia_ref.kernels`.
        name: what messages call it.
        keywords: what it gets besides, where it takes it: `recipe`, `recipe_json`.
        prepare: what is done to its inputs first; a planted fault.
    """

    kernel: kernels.Kernel
    name: str = ""
    keywords: Mapping[str, Any] = field(default_factory=dict, hash=False)
    prepare: Callable[[Inputs], Inputs] | None = None

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", kernels.name_of(self.kernel))

    def planted(self, prepare: Callable[[Inputs], Inputs]) -> Subject:
        """The kernel with a fault planted in front of it."""
        return replace(self, prepare=prepare)

    def run(self, inputs: Inputs, example: Example, *, gradients: bool) -> Results:
        """Call the kernel; with `gradients` it gets dout, and those that it returns are among the results.

        Raises KernelError of one line where it fails, or returns something else than the protocol says.
        """
        case = str(example)
        if self.prepare is not None:
            inputs = self.prepare(inputs)
        given = {
            name: getattr(inputs, name).copy().view(ml_dtypes.bfloat16)
            for name in ("q", "k", "v", "dout")
        }
        keywords: dict[str, Any] = {
            **self.keywords,
            "cu_seqlens": np.array(inputs.starts, np.int32),
            "causal": True,
            "softmax_scale": inputs.softmax_scale,
        }
        if gradients:
            keywords["dout"] = given["dout"]
        if inputs.window is not None:
            keywords["window"] = (inputs.window, 0)
            self._require_window(case)
        with np.errstate(all="ignore"):  # any bits are given, and numpy may have been told to raise
            results = kernels.call(
                self.kernel, given["q"], given["k"], given["v"], case=case, **keywords
            )
            return self._checked(results, inputs, case, gradients)

    def _require_window(self, case: str) -> None:
        with kernels.guarded(f"kernel {self.name} tells nothing of its parameters in case {case}"):
            parameters = inspect.signature(self.kernel).parameters.values()
        if not any(one.name == "window" or one.kind is one.VAR_KEYWORD for one in parameters):
            raise kernels.KernelError(
                f"kernel {self.name} takes no window; test it without one (--flamia-window)"
            )

    def _checked(
        self, results: Mapping[str, Any], inputs: Inputs, case: str, gradients: bool
    ) -> Results:
        missing = [name for name in OUTPUTS if name not in results]
        if missing:
            raise kernels.KernelError(
                f"kernel {self.name} returned no {' and no '.join(missing)} in case {case}, but"
                f" {shown(sorted(results))}; every kernel gives {' and '.join(OUTPUTS)}"
            )
        of_queries = inputs.q.shape
        shapes = {
            "out": of_queries,
            "lse": (of_queries[1], of_queries[0]),
            "dq": of_queries,
            "dk": inputs.k.shape,
            "dv": inputs.v.shape,
        }
        wanted = (*OUTPUTS, *GRADIENTS) if gradients else OUTPUTS
        return {
            name: self._bits(name, results[name], shapes[name], case)
            for name in wanted
            if name in results
        }

    def _bits(self, name: str, value: Any, shape: tuple[int, ...], case: str) -> U32:
        what = f"kernel {self.name} returned {name}"
        with kernels.guarded(f"{what} in case {case} that is no array"):
            array = np.asarray(value)
        if array.shape != shape:
            axes = "heads, tokens" if name == "lse" else "tokens, heads, head_dim"
            raise kernels.KernelError(
                f"{what} of shape {array.shape} in case {case}; it must be ({axes}) = {shape}"
            )
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        accepted = ("float32",) if name == "lse" else ("bfloat16", "uint16", "float32")
        if array.dtype.name not in accepted:
            raise kernels.KernelError(
                f"{what} as {line(type_of(array))} in case {case}; it must be {' or '.join(accepted)}"
                f"{'' if name == 'lse' else ' (uint16: bfloat16 bits)'}"
            )
        if array.dtype == np.float32:
            bits = np.array(array, order="C").view(np.uint32)
        else:
            bits = array.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return np.ascontiguousarray(bits.T) if name == "lse" else bits


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where results differ that must be equal: `count` of `elements`, the first of them at `place` of `output`.

    `before` and `after` are its float32 bits; `why` says in which relation the element stands, as a clause.
    """

    output: str
    place: tuple[int, ...]
    before: int
    after: int
    count: int
    elements: int
    why: str = ""

    def __str__(self) -> str:
        where = ", ".join(f"{axis} {at}" for axis, at in zip(_AXES, self.place, strict=False))
        return (
            f"{self.output} at {where} from {_shown(self.before)} to {_shown(self.after)}{self.why};"
            f" {self.count} of the {self.elements} elements of {self.output} that may not change do"
        )


def unequal(before: U32, after: U32) -> Bools:
    """Where float32 bits differ. A NaN equals any other; -0 is not +0."""
    nan = np.uint32(0x7F800000)
    both_nan = ((before & np.uint32(0x7FFFFFFF)) > nan) & ((after & np.uint32(0x7FFFFFFF)) > nan)
    differs: Bools = (before != after) & ~both_nan
    return differs


def first_difference(
    before: Results, after: Results, rows: Mapping[str, Any] | None = None
) -> Difference | None:
    """The first result that differs, of `rows` [tokens] of each output, all where there are none; None for equal bits.

    Outputs that one of both lacks are not compared.
    """
    for name, old in before.items():
        if name not in after:
            continue
        chosen = np.arange(len(old)) if rows is None else np.flatnonzero(rows[name])
        differs = unequal(old[chosen], after[name][chosen])
        if differs.any():
            place = tuple(int(x) for x in np.argwhere(differs)[0])
            place = (int(chosen[place[0]]), *place[1:])
            return Difference(
                output=name,
                place=place,
                before=int(old[place]),
                after=int(after[name][place]),
                count=int(differs.sum()),
                elements=differs.size,
            )
    return None


def _shown(bits: int) -> str:
    with np.errstate(all="ignore"):
        value = np.array(bits, np.uint32).view(np.float32)
    return f"{value:.9g} (0x{bits:08x})"
