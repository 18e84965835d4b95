"""An element is walked back to the inputs, with numbers that are computed here by other means."""

import json
from itertools import pairwise

import numpy as np
import pytest

from flamia_ref.golden.explanation import Explanation, explain
from flamia_ref.golden.lineage import distance
from flamia_ref.golden.stage import View
from tests.golden.mistakes.planting import InMemory, case_of

FOLDED = "flamia-mxfp8-folded"


@pytest.fixture(scope="module")
def case() -> InMemory:
    return case_of("documents", FOLDED)


def walked(case: InMemory, tensor: str, index: tuple[int, ...]) -> Explanation:
    return explain(case, tensor, index)  # type: ignore[arg-type]


def e4m3(code: int) -> float:
    """The value of a code by the definition of the format."""
    sign, exponent, fraction = code >> 7, code >> 3 & 15, code & 7
    value = fraction * 2.0**-9 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


@pytest.mark.parametrize("tensor", ["dq", "dk", "dv", "out", "lse"])
def test_every_output_leads_to_an_input(case: InMemory, tensor: str) -> None:
    index = (1, 7) if tensor == "lse" else (7, 1, 3)
    found = walked(case, tensor, index)
    assert found.steps[0].element.tensor == tensor
    assert found.steps[-1].element.tensor in ("q", "k", "v", "dout")
    for step, later in pairwise(found.steps):
        assert later.element in step.parents
    assert len(found.to_text().splitlines()) <= 40


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("documents", FOLDED),
        ("documents", "fp8-fa3"),
        *(
            pytest.param(name, recipe, marks=pytest.mark.nightly)
            for name, recipe in (
                ("wide", "flamia-nvfp4-fp8"),
                ("keys", "cudnn-mxfp8"),
                ("documents", "flamia-mxfp8"),
                ("equal", "bf16-fa4"),
                ("sink", "flamia-mxfp8-unguarded"),
                ("wide", "cudnn-mxfp8-pv-bf16"),
            )
        ),
    ],
)
def test_every_tensor_has_an_explanation(name: str, recipe: str) -> None:
    """Also: sums of products agree with the stored value, to what the instruction and the output round."""
    case = case_of(name, recipe)
    random = np.random.default_rng(3)
    for tensor, place in case.places.items():
        if 0 in place.shape:
            continue
        index = tuple(int(random.integers(size)) for size in place.shape)
        found = walked(case, tensor, index)
        json.loads(found.to_json())
        assert len(found.to_text().splitlines()) <= 40
        step = found.steps[0]
        if step.total is None or place.stage.name in ("delta", "row_sum"):
            continue
        value = float(step.element.bits.expected.value)
        parts = max((abs(term.value) for term in step.terms), default=0.0)
        error = 2.0**-8 * abs(value) if place.stage.view is View.BF16 else 0.0
        assert abs(step.total - value) <= error + 2.0**-10 * parts + 1e-30, (tensor, index)


def test_the_parts_of_a_score(case: InMemory) -> None:
    head, query, key, start = 3, 20, 4, 5
    (step, *_) = walked(case, "s.1", (head, query, key)).steps
    q, k = case.tensors["q.codes"][start + query, head], case.tensors["k.codes"][start + key, 1]
    powers = (
        int(case.tensors["q.scales"][start + query, head, 0])
        + int(case.tensors["k.scales"][start + key, 1, 0])
        - 254
    )
    parts = [e4m3(int(a)) * e4m3(int(b)) * 2.0**powers for a, b in zip(q, k, strict=True)]
    assert step.total == sum(parts)
    assert step.count == 64
    assert [term.value for term in step.terms] == sorted(parts, key=abs, reverse=True)[:5]
    assert {parent.tensor for parent in step.parents} == {"q.codes", "k.codes"}
    assert step.evidence


def test_a_code_and_its_scale(case: InMemory) -> None:
    index = (9, 2, 17)
    first, second, *_ = walked(case, "q.codes", index).steps
    bits = int(case.tensors["q"][index])
    value = float(np.array([bits << 16], np.uint32).view(np.float32)[0])
    byte = int(case.tensors["q.scales"][9, 2, 0])
    assert first.before == value / 2.0 ** (byte - 127)
    assert [(one.tensor, one.index) for one in first.parents] == [
        ("q", index),
        ("q.scales", (9, 2, 0)),
    ]
    assert second.how == "an input"


def test_a_scale_comes_from_the_largest_of_its_block(case: InMemory) -> None:
    (step, *_) = walked(case, "k.scales", (40, 1, 0)).steps
    wide = case.tensors["k"][40, 1].astype(np.uint32) << 16
    largest = int(np.argmax(np.abs(wide.view(np.float32))))
    assert (step.parents[0].tensor, step.parents[0].index) == ("k", (40, 1, largest))


def test_a_descale_comes_from_the_largest_of_its_group() -> None:
    """Of all query heads of a key/value head, for q."""
    case = case_of("documents", "fp8-fa3")
    (first, second, *_) = walked(case, "q.scales", (0, 0)).steps
    assert first.element.tensor == "q.scales"
    end, heads = case.spec.lengths[0], case.spec.heads // case.spec.kv_heads
    values = np.abs(case.tensors["q"][:end, :heads].astype(np.uint32) << 16).view(np.float32)
    largest = np.abs(values).max()
    assert second.element.tensor == "q"
    assert abs(values[second.element.index]) == largest
    assert case.tensors["q.scales"].view(np.float32)[0, 0] == np.float32(largest) / np.float32(448)


def test_a_byte_of_a_tile_is_that_of_its_scale(case: InMemory) -> None:
    # Row 33 of a document that starts at token 38: byte 1 * 16 + 1 * 4.
    (step, *_) = walked(case, "q.scales.tiled.2", (2, 0, 0, 20)).steps
    assert (step.parents[0].tensor, step.parents[0].index) == ("q.scales", (71, 2, 0))
    (padding,) = walked(case, "q.scales.tiled.2", (2, 0, 0, 511)).steps
    assert padding.parents == ()
    assert "padding" in padding.how


@pytest.mark.parametrize(
    ("before", "view", "steps"),
    [
        (1.0, View.F8_E4M3, 0.5),  # a value
        (1.0625, View.F8_E4M3, 0.0),  # half way to 1.125
        (-1.03125, View.F8_E4M3, 0.25),
        (2.0**-10, View.F8_E4M3, 0.0),  # half way to the smallest
        (449.0, View.F8_E4M3, None),
        (2.5, View.F4_E2M1, 0.0),
        (3.75, View.F4_E2M1, 0.25),
        (1.0, View.BF16, 0.5),
        (1 + 2.0**-8, View.BF16, 0.0),
        (float("nan"), View.BF16, None),
    ],
)
def test_the_distance_to_the_next_boundary(before: float, view: View, steps: float | None) -> None:
    assert distance(before, view) == steps


def test_what_was_given_stands_beside(case: InMemory) -> None:
    given = {"s.1": np.array(case.tensors["s.1"]), "q.codes": np.array(case.tensors["q.codes"])}
    given["s.1"][0, 3, 2] = 1.5
    (step, *_) = explain(case, "s.1", (0, 3, 2), given).steps  # type: ignore[arg-type]
    assert step.element.bits.actual is not None
    assert step.element.bits.actual.value == "1.5"
    assert step.parents[0].bits.actual == step.parents[0].bits.expected
    assert step.parents[1].bits.actual is None


def test_json_has_a_schema(case: InMemory) -> None:
    document = json.loads(walked(case, "row_max", (0, 0)).to_json())
    assert (document["schema"], document["schema_version"]) == ("flamia-ref explanation", 1)
    assert document["steps"][0]["element"]["tensor"] == "row_max"


@pytest.mark.parametrize(
    ("tensor", "index", "message"),
    [
        ("quux", (0,), "quux"),
        ("out", (0, 0), r"out has tokens 0 to 77, heads 0 to 3, head_dim 0 to 63"),
        ("out", (78, 0, 0), "index is"),
        ("out", (-1, 0, 0), "index is"),
    ],
)
def test_bad_places_are_refused(
    case: InMemory, tensor: str, index: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        walked(case, tensor, index)
