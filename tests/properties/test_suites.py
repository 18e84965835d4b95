"""Each suite passes on a kernel that has the property, and fails, with the right words, on one that lacks it."""

import re
from typing import Any

import numpy as np
import pytest

from flamia_ref.golden.simulator import numpy_kernel
from flamia_ref.kernels import KernelError
from flamia_ref.properties import (
    PROPERTIES,
    Edit,
    Example,
    Profile,
    PropertyFailure,
    Space,
    Subject,
    check,
    search,
)
from flamia_ref.properties.perturbing import Observed
from flamia_ref.properties.searching import Inconclusive, NothingToFind, summed
from flamia_ref.properties.simplifying import simplified
from flamia_ref.properties.subject import unequal
from tests.properties.kernels import (
    BF16,
    FAULTY,
    exact,
    forward_only,
    lse_alone,
    nans,
    v_columns,
    window_off_by_one,
    windowed,
    zeros,
)

FEW = Profile(name="few", examples=4, random=False, remembered=False)
MANY = Profile(name="many", examples=60, random=False, remembered=False)
SMALL = Space(heads=2, kv_heads=1, head_dim=32, lengths=(0, 1, 5, 17))
LONG = Space(heads=1, kv_heads=1, head_dim=32, lengths=(40,))
SHORT = Space(heads=1, kv_heads=1, head_dim=32, lengths=(5,))
GROUPED = Space(heads=4, kv_heads=2, head_dim=32, lengths=(1, 5))

NIGHTLY = pytest.mark.nightly
DAILY = {
    "v_columns",
    "one_document",
    "times_zero",
    "longer_coarser",
    "later_coarser",
    "stops_at_empty",
}
# By day each fault is found once, and some kernels shown to have another property; all of them by night.
RED = [
    pytest.param(name, lacking, marks=() if lacking == one.lacks[0] and one.daily else NIGHTLY)
    for name, one in FAULTY.items()
    for lacking in one.lacks
]
GREEN = [
    pytest.param(name, having, marks=() if having in one.has[1:2] and name in DAILY else NIGHTLY)
    for name, one in FAULTY.items()
    for having in one.has
]
# By day one recipe is held to one property of each kind: two calls compared, tokens changed, gradients.
OF_DAY = {
    "flamia-mxfp8-folded": ("causality", "packing_invariance", "scale_invariance"),
    "bf16-fa4": ("locality", "backward_legality"),
}
OF_RECIPES = [
    pytest.param(recipe, name, marks=() if name in daily else NIGHTLY)
    for recipe, daily in OF_DAY.items()
    for name in PROPERTIES
    if name != "nan_poison"
]


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_kernel_that_is_right_has_every_property(name: str) -> None:
    found = search(exact, name, space=SMALL, profile=FEW)
    assert found.examples >= FEW.examples
    if PROPERTIES[name].control is not None:
        assert found.control
        assert found.shared


@pytest.mark.parametrize(("fault", "name"), RED)
def test_a_planted_fault_is_found(fault: str, name: str) -> None:
    one = FAULTY[fault]
    space = {"wrong_group": GROUPED, "p_blocks": LONG, "q_blocks": SHORT}.get(fault, SMALL)
    with pytest.raises(PropertyFailure) as failure:
        search(one.kernel, name, space=space, profile=MANY)
    example = failure.value.example
    assert example.property == name
    if name == one.lacks[0]:
        assert re.search(one.says, str(failure.value))
    if fault not in ("atomics", "remembers"):
        with pytest.raises(PropertyFailure):
            check(one.kernel, example)
        check(exact, example)  # it is the fault that it shows


@pytest.mark.parametrize(("fault", "name"), GREEN)
def test_nothing_else_is_found(fault: str, name: str) -> None:
    search(FAULTY[fault].kernel, name, space=SMALL, profile=FEW)


@pytest.mark.nightly
@pytest.mark.parametrize("name", PROPERTIES)
def test_a_kernel_that_is_right_has_every_property_of_many_examples(name: str) -> None:
    many = Profile(name="many", examples=300, random=True, remembered=False)
    wide = Space(heads=2, kv_heads=1, head_dim=32, lengths=(0, 1, 31, 32, 33, 65))
    search(exact, name, space=wide, profile=many)


SIMPLE = [
    # One token, one channel, and the least of the tried powers of two that shows it.
    ("v_columns", "causality", Edit(operand="v", token=1, channel=0, exponent=15)),
    pytest.param(
        "lse_of_v",
        "locality",
        Edit(operand="v", token=0, channel=0, exponent=1),
        marks=NIGHTLY,
    ),
    pytest.param(
        "times_zero",
        "nan_poison",
        Edit(operand="v", token=1, channel=0, poison="nan"),
        marks=NIGHTLY,
    ),
    pytest.param(
        "dout_blocks",
        "backward_legality",
        Edit(operand="dout", token=0, channel=0, exponent=15),
        marks=NIGHTLY,
    ),
]


@pytest.mark.parametrize(("fault", "name", "edit"), SIMPLE)
def test_what_is_found_is_simple(fault: str, name: str, edit: Edit) -> None:
    with pytest.raises(PropertyFailure) as failure:
        search(FAULTY[fault].kernel, name, space=SMALL, profile=MANY)
    example = failure.value.example
    assert (example.lengths, example.family, example.seed) == ((5,), "ones", 0)
    assert example.edits == (edit,)


def test_two_edits_become_one_that_is_larger() -> None:
    """What two edits do together, times 2^16 in all, one has to do alone: Hypothesis would keep both."""
    one = Edit(operand="v", token=7, exponent=8, sign=-1)
    example = Example(property="causality", lengths=(3, 9), document=1, edits=(one, one))
    tried = []

    def fails(candidate: Example) -> bool:
        tried.append(candidate)
        return sum(edit.exponent for edit in candidate.edits) >= 15

    best = simplified(fails, example)
    assert best.edits == (Edit(operand="v", token=3, channel=0, exponent=15),)
    assert len(tried) <= 60
    assert simplified(lambda candidate: False, example) == example


def test_a_window() -> None:
    windows = Space(heads=2, kv_heads=1, head_dim=32, lengths=(1, 17, 40), window=3)
    for name in ("locality", "nan_poison"):
        search(windowed, name, space=windows, profile=FEW)
    with pytest.raises(PropertyFailure, match=r"[kv] of token .*past"):
        search(window_off_by_one, "locality", space=windows, profile=MANY)
    with pytest.raises(KernelError, match="forward_only takes no window"):
        search(forward_only, "causality", space=windows, profile=FEW)


def test_what_cannot_be_tested_is_said() -> None:
    def said(kernel: Any, name: str, **space: Any) -> str:
        with pytest.raises(NothingToFind) as nothing:
            search(kernel, name, space=Space(head_dim=32, **space), profile=FEW)
        return str(nothing.value)

    assert "has no backward" in said(forward_only, "backward_legality", lengths=(5,))
    assert "no length of (1,) is 2 or more" in said(exact, "causality", lengths=(1,))
    assert "takes at least 2" in said(exact, "document_isolation", lengths=(5,), documents=1)
    assert "0 is not among the lengths (5,)" in said(exact, "zero_length_documents", lengths=(5,))
    assert "none are shared" in said(exact, "grouped_heads", lengths=(5,), heads=2, kv_heads=2)


def test_documents_that_share_no_block_are_said() -> None:
    aligned = Space(heads=1, kv_heads=1, head_dim=32, lengths=(32,))
    found = search(exact, "document_isolation", space=aligned, profile=FEW)
    assert found.shared == 0
    assert "no block straddled documents" in str(found)


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_kernel_that_computes_nothing_is_no_success(name: str) -> None:
    says = r"did any output move|no backward|out and lse of kernel .*zeros did not move"
    with pytest.raises((Inconclusive, NothingToFind), match=says):
        search(zeros, name, space=SMALL, profile=FEW)


# By day one that perturbs and one that does not; backward_legality does not look at out alone.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("locality", "packing_invariance") else NIGHTLY)
        for name in PROPERTIES
        if name != "backward_legality"
    ],
)
def test_an_output_without_a_number_is_no_success(name: str) -> None:
    says = r"compared of out was NaN in \d+ examples|planted in front of the kernel was not found"
    with pytest.raises(Inconclusive, match=says):
        search(nans, name, space=SMALL, profile=FEW)
    says = r"out of kernel .*lse_alone did not move|planted in front of the kernel was not found"
    # Where v is made 2^k times larger, an out that stays is a failure.
    with pytest.raises((Inconclusive, PropertyFailure), match=f"{says}|besides by"):
        search(lse_alone, name, space=SMALL, profile=FEW)


def test_gradients_that_are_zero_by_right_may_stand_still() -> None:
    """A query that sees one key has a P of 1, whatever the scores: dq and dk are 0."""
    for space in (
        Space(heads=2, kv_heads=1, head_dim=32, lengths=(0, 1)),
        Space(heads=2, kv_heads=1, head_dim=32, lengths=(5,), window=0),
    ):
        assert search(windowed, "packing_invariance", space=space, profile=FEW).examples


def test_a_control_that_is_not_found_is_no_success() -> None:
    """A kernel whose outputs move with the row's own k alone does not show what is planted in v."""

    def own(q, k, v, **settings: Any):
        return {"out": np.repeat(k, 2, 1), "lse": np.zeros(q.shape[1::-1], np.float32)}

    with pytest.raises(Inconclusive, match="planted in front of the kernel was not found"):
        search(own, "causality", space=SMALL, profile=FEW)


def test_a_search_whose_changes_share_no_block_is_none() -> None:
    apart = [Observed(elements=5, shared=False, alive=True)] * 3
    with pytest.raises(NothingToFind, match="in none of 3 examples were a changed token and an"):
        summed(PROPERTIES["causality"], apart, True)
    with pytest.raises(NothingToFind, match="no example had an output that may not change"):
        summed(PROPERTIES["causality"], [Observed(elements=0, shared=False, alive=True)], True)
    assert summed(PROPERTIES["document_isolation"], apart, True).shared == 0


def test_bits_are_compared_and_not_values() -> None:
    def differ(one: int, other: int) -> bool:
        return bool(unequal(*(np.array([bits], np.uint32) for bits in (one, other)))[0])

    assert differ(0x00000000, 0x80000000)  # +0 and -0
    assert differ(0x3F800000, 0x3F800001)
    assert differ(0x7F800000, 0xFF800000)
    assert differ(0x7F800000, 0x7FC00000)  # infinity and NaN
    assert not differ(0x7FC00000, 0xFFC00001)  # NaN and NaN
    assert not differ(0x7F800000, 0x7F800000)


def raises(q, k, v, **settings: Any):
    raise RuntimeError("out of registers")


def result(name: str, change: Any):
    def kernel(q, k, v, **settings: Any):
        results = exact(q, k, v, **settings)
        if change is None:
            del results[name]
        else:
            results[name] = change(results[name])
        return results

    kernel.__qualname__ = "kernel"
    return kernel


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (raises, r"raises failed in case determinism .*: RuntimeError: out of registers"),
        (lambda q, k, v, **settings: None, r"returned 'NoneType' .* must return a dict"),
        (lambda q, k: None, "cannot be called with"),
        (result("out", None), "returned no out in case"),
        (
            result("lse", lambda x: x.T),
            r"lse of shape \(\d+, 2\) .* \(heads, tokens\) = \(2, \d+\)",
        ),
        (result("out", lambda x: x[:, 0]), r"out of shape .* \(tokens, heads, head_dim\) ="),
        (result("out", lambda x: x.astype(np.float64)), "out as float64 .* must be bfloat16 or"),
        (result("lse", lambda x: x.astype(BF16)), "lse as bfloat16 .* must be float32$"),
        (result("lse", lambda x: x.astype(np.float64)), "lse as float64 .* must be float32$"),
        (result("out", lambda x: object()), r"out of shape \(\)"),
        (result("dq", lambda x: x[:0]), "dq of shape"),
    ],
)
def test_a_kernel_that_fails_is_named_in_one_line(kernel: Any, says: str) -> None:
    with pytest.raises(KernelError, match=says) as error:
        search(kernel, "determinism", space=SMALL, profile=FEW)
    assert "\n" not in str(error.value)
    assert not hasattr(error.value, "__notes__")
    assert "kernel" in str(error.value)
    assert "determinism (lengths " in str(error.value) or "cannot be called" in str(error.value)


def test_results_may_be_bits_and_buffers_that_are_used_again() -> None:
    buffer: dict[tuple[int, ...], Any] = {}

    def kernel(q, k, v, **settings: Any):
        results = exact(q, k, v, **settings)
        out = buffer.setdefault(q.shape, np.empty(q.shape, np.uint16))
        out[...] = results["out"].view(np.uint16)
        q[...] = k[...] = v[...] = 0  # they are the kernel's own
        return results | {"out": out}

    search(kernel, "causality", space=SMALL, profile=FEW)
    search(kernel, "packing_invariance", space=SMALL, profile=FEW)
    with pytest.raises(PropertyFailure):
        search(lambda q, k, v, **s: v_columns(q, k, v, **s), "causality", space=SMALL, profile=FEW)


@pytest.mark.parametrize(("recipe", "name"), OF_RECIPES)
def test_the_recipes_have_the_properties(recipe: str, name: str) -> None:
    few = Profile(name="few", examples=2, random=False, remembered=False)
    space = Space(head_dim=32, lengths=(0, 1, 33), documents=2)
    search(of_recipe(recipe), name, space=space, profile=few)


def test_the_leak_of_a_recipe_is_found() -> None:
    space = Space(head_dim=32, lengths=(1, 33))
    with pytest.raises(PropertyFailure, match=r"v of token .*forward"):
        search(of_recipe("cudnn-mxfp8"), "causality", space=space, profile=MANY)


def test_nan_in_a_tensor_core_reaches_its_block() -> None:
    """0 x NaN is NaN there: what the recipes model, and why the property is one of its own."""
    poisoned = Edit(operand="v", token=1, poison="nan")
    example = Example(property="nan_poison", lengths=(33,), head_dim=32, edits=(poisoned,))
    with pytest.raises(PropertyFailure, match=r"made nan changes .* to nan"):
        check(of_recipe("flamia-mxfp8-folded"), example)


def of_recipe(name: str) -> Subject:
    return Subject(kernel=numpy_kernel, keywords={"recipe": name})
