"""Faults put into the interpreter are noticed: what it forgets by changing elements, what it adds by the legal set."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from flamia_ref.leakage.flow import (
    bounds,
    contraction,
    control,
    deciding,
    elementwise,
    fields,
    indexing,
    tensor_core,
)
from flamia_ref.leakage.flow.interpreter import RULES
from flamia_ref.leakage.flow.value import Flow, known
from tests.leakage.flow import masks, test_tensor_core
from tests.leakage.flow.brute import WrongValue, compared, compiled
from tests.leakage.flow.cases import CASES
from tests.leakage.flow.masks import dependencies, differences, mask_of, visible
from tests.leakage.flow.test_primitives import drawn

Patch = pytest.MonkeyPatch


def _noticed(name: str, rules: Any = RULES) -> bool:
    """Whether a case shows a dependency that the analysis does not have, or a value that it has wrong."""
    case = CASES[name]
    function = compiled(case.function)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        try:
            return any(
                compared(function, *drawn(case, share), trials=8, fine=True, rules=rules)[0]
                for share in (1.1, 0.5)
            )
        except WrongValue:
            return True


def _forgets(rule: Callable[..., Any], which: Sequence[int]) -> Callable[..., Any]:
    """A rule that takes some operands for known zeros."""

    def mutated(context: Any, equation: Any, operands: Sequence[Flow]) -> Any:
        given = list(operands)
        for place in which:
            given[place] = known(np.zeros(given[place].shape, dtype=given[place].dtype))
        return rule(context, equation, given)

    return mutated


def _union_of_cases(context: Any, equation: Any, operands: Sequence[Flow]) -> Flow:
    shape = tuple(equation.outvars[0].aval.shape)
    ids = elementwise.union(context, operands[1:])
    return Flow(shape, operands[1].dtype, np.maximum(ids, 0))


def _forget_seen(patch: Patch) -> None:
    patch.setattr(control, "_with", lambda _, x, __: x)


def _forget_neighbours(patch: Patch) -> None:
    of = fields._fields_of
    patch.setattr(fields, "_fields_of", lambda x: of(x)[:1])


def _forget_other_half(patch: Patch) -> None:
    patch.setattr(fields, "_both", lambda _, __, a, b, result: a)


def _confuse_bounds(patch: Patch) -> None:
    patch.setattr(bounds, "_RULES", {**bounds._RULES, "sub": bounds._RULES["add"]})


def _forget_start(patch: Patch) -> None:
    patch.setattr(
        indexing, "_anywhere", lambda _, ids, axis, size, extent: ids.take(range(size), axis)
    )


FAULTS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "predicate of a cond": (_forget_seen, "cond"),
    "predicate of a switch": (_forget_seen, "switch"),
    "condition of a while": (_forget_seen, "while-shift"),
    "neighbours in a word": (_forget_neighbours, "signed-words"),
    "other half of an and": (_forget_other_half, "and-of-words"),
    "bounds of a difference": (_confuse_bounds, "difference-of-bytes"),
    "start of a slice": (_forget_start, "dynamic_slice-unknown"),
}


@pytest.mark.parametrize("name", ["select-bool", "select-int"])
def test_forgotten_predicate_of_a_select_is_noticed(name: str) -> None:
    assert _noticed(name, {**RULES, "select_n": _union_of_cases})


@pytest.mark.parametrize(
    ("primitive", "operand", "name"),
    [
        ("gather", 1, "take-unknown"),
        ("dynamic_slice", 1, "dynamic_slice-unknown"),
        ("dynamic_update_slice", 2, "dynamic_update_slice-unknown"),
        ("scatter", 2, "scatter-set-unknown"),
        ("scatter-add", 0, "scatter-add"),
        ("scatter-add", 1, "scatter-add-unknown"),
        ("concatenate", 0, "concatenate"),
        ("dot_general", 1, "dot-matmul"),
        ("conv_general_dilated", 1, "conv-plain"),
        ("sort", 1, "sort-two"),
        ("clamp", 0, "clamp"),
        ("add", 1, "add"),
        ("pad", 1, "pad-with-unknown"),
        ("random_fold_in", 1, "random-of-input"),
        ("reduce_window", 1, "reduce_window-own"),
        ("select_and_scatter_add", 1, "max-pool-gradient"),
    ],
)
def test_forgotten_operand_is_noticed(primitive: str, operand: int, name: str) -> None:
    assert _noticed(name, {**RULES, primitive: _forgets(RULES[primitive], [operand])})


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_noticed(name: str, monkeypatch: Patch) -> None:
    mutate, case = FAULTS[name]
    mutate(monkeypatch)
    assert _noticed(case)


def _exact(rules: Any = RULES) -> bool:
    mask = mask_of([16])
    forward = masks.with_gradients(masks.plain(visible(mask)))
    found, _ = dependencies(forward, [(16, 4)] * 4, rules=rules)
    return differences(found, mask, ("out", "dq", "dk", "dv")) == {}


def test_forgotten_zero_times_x_is_noticed(monkeypatch: Patch) -> None:
    assert _exact()
    with monkeypatch.context() as patch:
        patch.setattr(deciding, "_RULES", {**deciding._RULES, "mul": None})
        assert not _exact()
    with monkeypatch.context() as patch:
        blind = contraction.Factor.of
        patch.setattr(
            contraction.Factor,
            "of",
            lambda x: blind(x)._replace(zero=np.zeros((1,) * x.ndim, bool)),
        )
        assert not _exact()


@pytest.mark.parametrize("rule", ["div", "sub"])
def test_forgotten_decisions_are_noticed(rule: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(deciding, "_RULES", {**deciding._RULES, rule: None})
    assert not _exact()


def test_known_elements_that_count_in_a_maximum_are_noticed() -> None:
    """A select whose known predicate is not used."""
    assert not _exact({**RULES, "select_n": _union_of_cases})


KIND = test_tensor_core.KINDS["sm100.tcgen05.mxf8f6f4-e4m3-e4m3-e8m0-32"]
PARTS = {"a": 0, "b": 1, "scale of a": 2, "scale of b": 3, "accumulator": 4}


@pytest.mark.parametrize("part", PARTS)
def test_forgotten_part_of_the_fused_sum_is_noticed(part: str) -> None:
    def forgetful(context: Any, equation: Any, operands: Sequence[Flow]) -> Flow:
        given = list(operands)
        x = given[PARTS[part]]
        given[PARTS[part]] = known(np.ones(x.shape, dtype=x.dtype))
        return tensor_core.fused_sum(context, equation, given)

    rules = {**RULES, "fused_sum": forgetful}
    missed = 0
    for seed in range(5):
        found = test_tensor_core.both(KIND, 32, strict=False, seed=seed, rules=rules)
        rule, program = (found[2].sets.members(x.full_ids()) for x in found[:2])
        missed += int((program & ~rule).sum())
    assert missed > 0


def test_forgotten_zero_of_the_fused_sum_is_noticed(monkeypatch: Patch) -> None:
    def blind(x: Flow, *_: Any) -> Any:
        return np.zeros((1,) * x.ndim, dtype=np.bool_)

    monkeypatch.setattr(tensor_core, "_where", blind)
    by_rule, by_program, context = test_tensor_core.both(KIND, 32, strict=False, seed=1)
    rule, program = (context.sets.members(x.full_ids()) for x in (by_rule, by_program))
    assert (rule & ~program).any()
