"""Backwards from a foreign out and lse, and special values: NaN, infinities, dead rows."""

import numpy as np
import pytest

from tests.independent import float32
from tests.independent.attention import run
from tests.independent.samples import constant
from tests.independent.test_recipes import FLAMIA, LEAKING, every_recipe, same, small_inputs

NAN = 0x7FC0
DEAD = float32.MINUS_INFINITY


@every_recipe
def test_own_results_given_back(recipe: str) -> None:
    inputs = small_inputs(6)
    own = run(recipe, *inputs, [0, 2, 6])
    same(own, run(recipe, *inputs, [0, 2, 6], out_bits=own["out"], lse_bits=own["lse"]))
    # delta comes from the out that is given, or from one of high precision, which is not.
    zero = run(recipe, *inputs, [0, 2, 6], out_bits=np.zeros_like(own["out"]))
    if recipe == "attn-qat-nvfp4":
        np.testing.assert_array_equal(zero["delta"], own["delta"])
    else:
        assert not zero["delta"].any()
    np.testing.assert_array_equal(zero["out"], own["out"])


@every_recipe
def test_a_nan_lse(recipe: str) -> None:
    """Row 3 of 6. Keys up to 3 see it through P and dS, and no other does."""
    inputs = small_inputs(6, heads=1)
    own = run(recipe, *inputs, [0, 6])
    lse = own["lse"].copy()
    lse[0, 3] = 0xFFC12345
    result = run(recipe, *inputs, [0, 6], lse_bits=lse)
    if recipe == "cudnn-mxfp8-reference":  # its backward has a softmax of its own
        same({x: own[x] for x in ("dq", "dk", "dv")}, {x: result[x] for x in ("dq", "dk", "dv")})
        return
    nan = {name: (result[name][:, 0] == 0x7FFF).all(axis=1).tolist() for name in ("dq", "dk", "dv")}
    assert nan["dq"] == [row == 3 for row in range(6)]
    assert nan["dk"] == [key <= 3 for key in range(6)]
    # In e2m1 the P that is NaN is a number.
    assert nan["dv"] == [key <= 3 and recipe != "attn-qat-nvfp4" for key in range(6)]
    visible = [key <= 3 for key in range(6)]
    assert (result["p.dv"][0][0, 3] == float32.NAN).tolist() == visible
    assert (result["ds"][0][0, 3] == float32.NAN).tolist() == visible
    assert recipe not in FLAMIA or result["delta"][0, 3] == 0
    same({"dq": own["dq"][:3]}, {"dq": result["dq"][:3]})


@pytest.mark.parametrize("recipe", FLAMIA)
def test_a_dead_row_of_flamia(recipe: str) -> None:
    """Row 5 of 6 with lse = -inf, and NaN in k, v, dout and out that would poison it."""
    q, k, v, do = small_inputs(6, heads=1)
    k[5] = v[2] = NAN
    lse = np.zeros((1, 6), np.uint32)
    lse[0, 5] = DEAD
    do[5, 0, 0] = NAN
    out = np.full_like(q, NAN)
    out[5] = 0
    result = run(recipe, q, k, v, do, [0, 6], out_bits=out, lse_bits=lse)
    assert not result["dq"][5].any()
    # In the folded and in the other recipes, the other rows meet the NaN code of the masked key.
    assert (result["dq"][:5] == 0x7FFF).all()
    assert not result["p.dv"][0][0, 5].any()
    assert not result["ds"][0][0, 5].any()
    assert not result["do.codes"][5].any()
    assert result["delta"][0].tolist() == [float32.NAN] * 5 + [0]
    assert not result["dk"][5].any()
    assert not result["dv"][5].any()
    if recipe != "flamia-mxfp8-unguarded":
        assert result["do.scales"][5, 0, 0] == 0


@every_recipe
def test_a_dead_row(recipe: str) -> None:
    """One token with lse = -inf: no gradient, whatever its score says."""
    q, k, v, do = (constant(x, 1, 1, 8) for x in (0.0, 1.0, 3.0, 1.0))
    lse = np.array([[DEAD]], np.uint32)
    result = run(recipe, q, k, v, do, [0, 1], out_bits=np.zeros_like(q), lse_bits=lse)
    for name in ("dq", "dk", "dv"):
        assert not result[name].any()
    assert result["p.dv"][0].item() == result["ds"][0].item() == 0


def test_infinite_lse_of_flamia() -> None:
    inputs = small_inputs(1, heads=1)
    lse = np.array([[float32.INFINITY]], np.uint32)
    for recipe in FLAMIA:
        result = run(recipe, *inputs, [0, 1], lse_bits=lse)
        assert result["p.dv"][0].item() == result["ds"][0].item() == float32.NAN
        assert not result["do.codes"].any()
        assert (result["dv"] == 0x7FFF).all()


@pytest.mark.parametrize(
    "recipe",
    [
        "flamia-mxfp8-folded",
        "flamia-mxfp8",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in (*LEAKING, "bf16-fa4", "cudnn-mxfp8-pv-bf16")
        ),
    ],
)
def test_a_nan_v_in_a_tile_that_is_skipped(recipe: str) -> None:
    """130 tokens, v[129] NaN: rows of the first tile meet it only where all tiles are in the chain."""
    q, k, v, _ = small_inputs(130, heads=1, head_dim=2)
    v[129, 0, 0] = NAN
    result = run(recipe, q, k, v, None, [0, 130])
    nan = result["out"][:, 0, 0] == 0x7FFF
    assert nan.tolist() == [recipe == "flamia-mxfp8-folded" or row >= 128 for row in range(130)]
    assert not (result["out"][:, 0, 1] == 0x7FFF).any()
