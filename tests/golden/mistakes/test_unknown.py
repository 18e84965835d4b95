"""What is no known mistake gets no name: noise, flipped bits, mistakes that nobody has written down."""

from typing import Any

import numpy as np
import pytest

from tests.golden.mistakes.planting import InMemory, case_of, diagnosed, forward, recipe_of
from tests.golden.mistakes.planting import changed as with_part

FOLDED, CUDNN = "flamia-mxfp8-folded", "cudnn-mxfp8"
nightly = pytest.mark.nightly


def copies(case: InMemory) -> dict[str, Any]:
    return {
        name: np.array(tensor, order="C")
        for name, tensor in case.tensors.items()
        if case.places[name].stage.role != "input"
    }


@pytest.mark.parametrize(
    "tensor",
    [
        "q.codes",
        *(
            pytest.param(name, marks=nightly)
            for name in ("k.scales", "s.1", "p.2", "p.o.codes.1", "row_sum", "o", "out", "lse")
        ),
        *(pytest.param(name, marks=nightly) for name in ("delta", "ds.1", "dq", "dk", "dv")),
    ],
)
@pytest.mark.parametrize("final", [False, True])
def test_noise_has_no_name(tensor: str, final: bool) -> None:
    case = case_of("documents", FOLDED)
    given, random = copies(case), np.random.default_rng(7)
    bits = given[tensor].view(f"u{given[tensor].dtype.itemsize}")
    if final and tensor not in ("out", "lse", "dq", "dk", "dv"):
        pytest.skip("not among the outputs")
    where = random.random(bits.shape) < 0.3
    bits[where] ^= random.integers(1, 4, bits.shape).astype(bits.dtype)[where]
    first, found = diagnosed(case, given, final=final)
    assert (first, found) == (tensor, ())


@pytest.mark.parametrize(
    "tensor",
    [
        "out",
        *(
            pytest.param(name, marks=nightly)
            for name in ("k.scales", "v.codes", "s.0", "p.0", "row_max", "lse", "dk")
        ),
    ],
)
@pytest.mark.parametrize("count", [1, pytest.param(5, marks=nightly)])
def test_flipped_bits_have_no_name(tensor: str, count: int) -> None:
    case = case_of("documents", FOLDED)
    given, random = copies(case), np.random.default_rng(11)
    bits = given[tensor].view(f"u{given[tensor].dtype.itemsize}").reshape(-1)
    for at in random.choice(bits.size, count, replace=False):
        bits[at] ^= bits.dtype.type(1 << int(random.integers(8 * bits.dtype.itemsize - 2)))
    _, found = diagnosed(case, given, final=False)
    assert found == ()


@nightly
@pytest.mark.parametrize("recipe", [FOLDED, CUDNN])
def test_an_unknown_mistake_has_no_name(recipe: str) -> None:
    """The softmax scale three quarters too large, from the outputs and from all stages."""
    case = case_of("documents", recipe)
    given = forward(case, softmax_scale=1.75 * case.spec.softmax_scale)
    for final in (True, False):
        _, found = diagnosed(case, given, final=final)
        assert found == ()


@nightly
def test_every_third_token_of_another_case_has_no_name() -> None:
    case = case_of("documents", FOLDED)
    given = copies(case)
    given["out"][::3] = np.roll(given["out"], 7, axis=0)[::3]
    first, found = diagnosed(case, given, final=True)
    assert (first, found) == ("out", ())


@nightly
def test_a_threshold_that_changes_nothing_has_no_name() -> None:
    """Another rescale threshold: known to nobody, and bits of P alone."""
    case = case_of("tiles", CUDNN)
    given = forward(case, with_part(recipe_of(case), "softmax", rescale_threshold=0))
    _, found = diagnosed(case, given, final=False)
    assert found == ()
