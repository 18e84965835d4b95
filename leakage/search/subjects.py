"""What is hunted in: a kernel, a recipe by the simulator, or either with a leak planted in front of it."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flamia_ref import _backend, kernels
from flamia_ref._errors import shown
from flamia_ref.attention import Recipe, backward, backward_stages, forward, forward_stages
from flamia_ref.attention.computed import computed_recipe
from flamia_ref.attention.copies import copy_names
from flamia_ref.attention.product import Guard, Use
from flamia_ref.attention.stages import pair_names
from flamia_ref.kernels import KernelError
from flamia_ref.leakage.search.bases import Inputs
from flamia_ref.leakage.search.outcomes import Outcome, read
from flamia_ref.leakage.search.scale_bytes import MOST_TOKENS
from flamia_ref.leakage.search.setting import Setting

Array = NDArray[Any]


class Subject(Protocol):
    """Something that attends."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def together(self) -> int:
        """How many inputs it is best given together."""

    @property
    def uses(self) -> Mapping[str, tuple[Use, ...]] | None:
        """The uses that take each stage of scales, where that is known better than by its name."""

    def run(self, setting: Setting, inputs: Sequence[Inputs]) -> list[Outcome]:
        """The outcome of each of some inputs."""


@dataclass(frozen=True, kw_only=True)
class KernelSubject:
    """A kernel of the protocol of `flamia_ref.kernels`.

    Attributes:
        kernel: the callable.
        trace: names of stages that it is asked for, if it takes `trace`.
    """

    kernel: kernels.Kernel
    trace: tuple[str, ...] = ()
    together: int = 1
    uses: Mapping[str, tuple[Use, ...]] | None = None

    @property
    def name(self) -> str:
        """The kernel's name."""
        return kernels.name_of(self.kernel)

    def run(self, setting: Setting, inputs: Sequence[Inputs]) -> list[Outcome]:
        """One call for each of the inputs; a failure is an outcome."""
        return [self._outcome(setting, one) for one in inputs]

    def _outcome(self, setting: Setting, inputs: Inputs) -> Outcome:
        given = {name: x.copy() for name, x in inputs.items()}
        try:
            # The values of a search are extreme, and those of poison no numbers: numpy need not say so.
            with np.errstate(all="ignore"):
                results = kernels.call(
                    self.kernel,
                    given["q"],
                    given["k"],
                    given["v"],
                    case="the hunt",
                    cu_seqlens=setting.cu_seqlens,
                    causal=setting.mask.causal,
                    softmax_scale=setting.softmax_scale,
                    **self._extra(setting),
                    **({"dout": given["dout"]} if setting.backward else {}),
                )
            found = read(results, setting, wanted=setting.outputs)
        except KernelError as error:
            return Outcome(failure=str(error).replace("in case the hunt", "in the hunt"))
        touched = tuple(
            name
            for name, x in given.items()
            if not np.array_equal(x.view(np.uint16), inputs[name].view(np.uint16))
        )
        return Outcome(outputs=found.outputs, scales=found.scales, touched=touched)

    def _extra(self, setting: Setting) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if setting.mask.window != (None, None):
            extra["window"] = setting.mask.window
        if self.trace:
            extra["trace"] = self.trace
        return extra


@dataclass(frozen=True, kw_only=True)
class RecipeSubject:
    """A recipe, by the simulator.

    Attributes:
        recipe: the recipe.
        library: "numpy" or "jax".
        scales: whether scale bytes are traced.
    """

    recipe: Recipe
    library: str = "numpy"
    scales: bool = True
    together: int = 8

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.recipe.name

    def run(self, setting: Setting, inputs: Sequence[Inputs]) -> list[Outcome]:
        """The outcomes of some inputs, which are heads of one pass: heads do not know of each other."""
        found: list[Outcome] = []
        for start in range(0, len(inputs), self.together):
            found += self._batch(setting, inputs[start : start + self.together])
        return found

    def _batch(self, setting: Setting, inputs: Sequence[Inputs]) -> list[Outcome]:
        count = len(inputs)
        if self.library == "jax":
            # Few shapes, so few programs.
            inputs = [*inputs, *[inputs[-1]] * (_filled(count, self.together) - count)]
        put = _putter(self.library)
        arrays = {
            name: put(np.concatenate([one[name] for one in inputs], axis=1))
            for name in setting.operands
        }
        mask = setting.mask
        ahead_names, back_names = self._traced(setting.backward)
        ahead = forward(
            arrays["q"],
            arrays["k"],
            arrays["v"],
            self.recipe,
            cu_seqlens=setting.cu_seqlens,
            causal=mask.causal,
            alignment=mask.alignment,
            window=None if mask.window == (None, None) else mask.window,
            softmax_scale=setting.softmax_scale,
            trace=ahead_names,
        )
        results = {"out": ahead.out, "lse": ahead.lse, **ahead.trace}
        if setting.backward:
            q, k, v, dout = arrays.values()
            back = backward(q, k, v, dout, ahead, trace=back_names)
            results |= {"dq": back.dq, "dk": back.dk, "dv": back.dv, **back.trace}
        host = {
            name: [np.asarray(x) for x in found] if isinstance(found, list) else np.asarray(found)
            for name, found in results.items()
        }
        return [
            read(_heads_of(host, setting, index), setting, wanted=setting.outputs)
            for index in range(count)
        ]

    def _traced(self, with_backward: bool) -> tuple[list[str], list[str]]:
        if not self.scales:
            return [], []
        taken = self.uses
        stages = (
            forward_stages(self.recipe),
            backward_stages(self.recipe) if with_backward else (),
        )
        ahead, back = ([one for one in names if taken.get(one)] for names in stages)
        return ahead, back

    @property
    def uses(self) -> Mapping[str, tuple[Use, ...]]:
        """The uses that take each stage of scales wherever the values are in low precision.

        Those that are guarded take other values in every block that holds what a row must not depend on.
        """
        names = {**copy_names(self.recipe), **pair_names(self.recipe)}
        found: dict[str, tuple[Use, ...]] = {}
        for use, operand in self.recipe.uses():
            guarded = operand.guard is not Guard.NONE and self.recipe.guard_operands == "inputs"
            stage = f"{names[use]}.scales"
            found[stage] = (*found.get(stage, ()), *(() if guarded else (use,)))
        return found


def _filled(count: int, most: int) -> int:
    return min(most, 1 << (count - 1).bit_length())


def _putter(library: str) -> Callable[[Array], Any]:
    if library == "numpy":
        return lambda x: x
    import jax.numpy

    return lambda x: _backend.put(x, jax.numpy)


def _heads_of(results: dict[str, Any], setting: Setting, index: int) -> dict[str, Any]:
    """The results of one of the inputs that were heads of one pass."""
    heads, kv_heads = setting.heads, setting.kv_heads
    found: dict[str, Any] = {}
    for name, x in results.items():
        if isinstance(x, list):
            found[name] = [one[index * heads : (index + 1) * heads] for one in x]
        elif name == "lse":
            found[name] = x[index * heads : (index + 1) * heads]
        else:
            count = kv_heads if name[0] in "kv" or name in ("dk", "dv") else heads
            found[name] = x[:, index * count : (index + 1) * count]
    return found


def subject_of(given: Any, *, setting: Setting, trace: Sequence[str]) -> Subject:
    """The subject that a caller names: a recipe, its name, or a kernel. Raises ValueError or TypeError of one line."""
    if isinstance(given, (str, Recipe)):
        return RecipeSubject(recipe=computed_recipe(given))
    if not callable(given):
        raise TypeError(
            f"a hunt is given {shown(given)}; give a recipe, the name of one, or a kernel that can be called"
        )
    if setting.mask.alignment != "bottom_right":
        raise ValueError(
            "alignment is 'top_left'; the kernel protocol has no alignment, leave it out for a kernel"
        )
    if setting.mask.window != (None, None) and not _takes(given, "window"):
        raise ValueError(
            f"kernel {kernels.name_of(given)} takes no window, and would attend to what it hides; leave window out"
        )
    return KernelSubject(kernel=given, trace=tuple(trace))


def _takes(kernel: kernels.Kernel, keyword: str) -> bool:
    """Whether a kernel is called with a keyword of the protocol."""
    try:
        parameters = inspect.signature(kernel).parameters
    except (TypeError, ValueError):
        return False
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return takes_all or keyword in parameters


def fitted(subject: Subject, setting: Setting, planned: int) -> Subject:
    """The subject with the array library that is quicker for a number of calls, and a size for what runs together."""
    if not isinstance(subject, RecipeSubject):
        return subject
    work = planned * max(setting.tokens, 64) * (3 if setting.backward else 1)
    many = work > _WORTH_COMPILING and importlib.util.find_spec("jax") is not None
    heads = max(1, 2048 // max(setting.tokens, 1) // setting.heads)
    return replace(
        subject,
        library="jax" if many else "numpy",
        scales=setting.tokens <= MOST_TOKENS,
        together=min(32 if many else 16, heads),
    )


_WORTH_COMPILING = 150_000  # calls times tokens, thrice with a backward
