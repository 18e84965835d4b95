"""The public special functions: names, types, errors, evidence. Their bits have their own tests."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from flamia_ref import _float32, arithmetic
from flamia_ref import _mufu as mufu
from flamia_ref.arithmetic import (
    correct,
    correct_log2,
    correct_natural,
    correct_tanh,
    polynomial,
    special,
)
from flamia_ref.evidence import Evidence

PAIRS = [
    ("exp2", "mufu.sm90"),
    ("exp2", "polynomial3"),
    ("exp2", "correct"),
    ("log2", "mufu.sm90"),
    ("log2", "correct"),
    ("exp", "correct"),
    ("log", "correct"),
    ("reciprocal", "mufu.sm90"),
    ("reciprocal", "correct"),
    ("tanh", "mufu.sm90"),
    ("tanh", "correct"),
]
X = np.array([[0.5, 1.0, 2.75, 100.0], [1e-40, np.inf, np.nan, -3.0]], dtype=np.float32)


@pytest.mark.parametrize(("function", "model"), PAIRS)
def test_libraries(function: str, model: str) -> None:
    call = getattr(arithmetic, function)
    plain = call(X, model)
    assert isinstance(plain, np.ndarray)
    assert plain.dtype == np.float32
    assert plain.shape == X.shape
    words = X.view(np.uint32)
    expected = getattr(special, f"{function}_bits")(words, model=model)
    np.testing.assert_array_equal(plain.view(np.uint32), expected)
    for x64 in (False, True):
        with jax.enable_x64(x64):
            for mode in (call, jax.vmap(call, in_axes=(0, None))):
                result = mode(jnp.asarray(X), model)
                assert isinstance(result, jax.Array)
                assert result.dtype == jnp.float32
                np.testing.assert_array_equal(np.asarray(result).view(np.uint32), expected)


@pytest.mark.parametrize(("function", "model"), PAIRS)
def test_in_the_callers_program(function: str, model: str) -> None:
    call = getattr(arithmetic, function)
    result = jax.jit(lambda x: call(x, model))(jnp.asarray(X))
    expected = call(X, model).view(np.uint32)
    np.testing.assert_array_equal(np.asarray(result).view(np.uint32), expected)


@pytest.mark.parametrize(("function", "model"), PAIRS)
def test_shapes(function: str, model: str) -> None:
    call = getattr(arithmetic, function)
    for x in (np.float32(2), np.zeros((0, 3), dtype=np.float32), X[:, ::2], X.T):
        for given in (x, jnp.asarray(x)):
            result = call(given, model)
            assert result.shape == x.shape
            assert result.dtype == np.float32
    np.testing.assert_array_equal(call(X.T, model), call(X, model).T)


def test_some_values() -> None:
    np.testing.assert_array_equal(
        arithmetic.exp2(np.float32([-1, 0, 10]), "correct"), [0.5, 1, 1024]
    )
    assert arithmetic.exp2(np.float32(-149), "correct").view(np.uint32) == 1
    assert arithmetic.exp2(np.float32(-149), "mufu.sm90").view(np.uint32) == 0
    assert arithmetic.exp2(np.float32(10), "polynomial3") == 1024
    assert arithmetic.exp2(np.float32(np.nan), "polynomial3").view(np.uint32) == 0
    assert arithmetic.log2(np.float32(8), "mufu.sm90") == 3
    assert arithmetic.reciprocal(np.float32(-0.25), "mufu.sm90") == -4
    np.testing.assert_array_equal(
        arithmetic.log2(np.float32([0, 2.0**-149, 0.5, 1, 8, np.inf]), "correct"),
        [-np.inf, -149, -1, 0, 3, np.inf],
    )
    assert np.isnan(arithmetic.log2(np.float32(-1), "correct"))
    np.testing.assert_array_equal(
        arithmetic.reciprocal(np.float32([2, -0.25, np.inf, -0.0, 2.0**127]), "correct"),
        [0.5, -4, 0, -np.inf, 2.0**-127],
    )
    # 0.76159415595576... is 0.66 of a unit above 0x3f42f7d5 (OEIS A073744).
    assert arithmetic.tanh(np.float32(1), "correct").view(np.uint32) == 0x3F42F7D6
    np.testing.assert_array_equal(
        arithmetic.tanh(np.float32([-np.inf, -20, 1e-30, 20]), "correct"),
        np.float32([-1, -1, 1e-30, 1]),
    )


@pytest.mark.parametrize("x", [
    X.astype(np.float64), X.astype(np.float16), X.astype(ml_dtypes.bfloat16), X.view(np.uint32),
    X.astype(">f4"), 1.0, [1.0, 2.0], None, "1", jnp.zeros(3, dtype=jnp.int32),
], ids=str)  # fmt: skip
@pytest.mark.parametrize(
    ("function", "model"),
    [
        ("exp2", "mufu.sm90"),
        ("log2", "mufu.sm90"),
        ("reciprocal", "mufu.sm90"),
        ("tanh", "correct"),
    ],
)
def test_wrong_type(function: str, model: str, x: Any) -> None:
    with pytest.raises(
        TypeError, match=f"{function} takes a float32 array, not .*convert"
    ) as error:
        getattr(arithmetic, function)(x, model)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 160


@pytest.mark.parametrize(("function", "model", "message"), [
    ("exp2", "mufu.sm9", "unknown exp2 model 'mufu.sm9'; did you mean 'mufu.sm90'"),
    ("exp2", "corect", "unknown exp2 model 'corect'; did you mean 'correct'"),
    ("log2", "polynomial3", "unknown log2 model 'polynomial3'; allowed: mufu.sm90, correct"),
    ("reciprocal", None, "unknown reciprocal model None; allowed: mufu.sm90, correct"),
    ("tanh", "corect", "unknown tanh model 'corect'; did you mean 'correct'"),
    ("reciprocal", ["mufu.sm90"], "unknown reciprocal model"),
])  # fmt: skip
def test_unknown_model(function: str, model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(arithmetic, function)(X, model)
    with pytest.raises(ValueError, match=message):
        getattr(special, f"{function}_bits")(X.view(np.uint32), model=model)


def test_models() -> None:
    models = arithmetic.SPECIAL_MODELS
    assert {(f, name) for name, model in models.items() for f in model.functions} == set(PAIRS)
    assert models["mufu.sm90"].evidence == {"sm_90": Evidence.MEASURED, "sm_100": Evidence.ASSUMED}
    assert "H200" in models["mufu.sm90"].source
    assert models["polynomial3"].evidence["form"] is Evidence.SOURCE
    assert "exp2_emul_pair" in models["polynomial3"].source
    assert set(models["correct"].evidence.values()) == {Evidence.SPECIFIED, Evidence.DERIVED}
    hash(models["correct"])


@pytest.mark.parametrize(
    ("function", "model", "rule"),
    [
        ("exp2", "correct", correct.exp2_bits),
        ("exp2", "polynomial3", polynomial.exp2_bits),
        ("log2", "correct", correct_log2.log2_bits),
        ("exp", "correct", correct_natural.exp_bits),
        ("log", "correct", correct_natural.log_bits),
        ("reciprocal", "correct", lambda x: _float32.divide(_float32.ONE, x)),
        ("tanh", "correct", correct_tanh.tanh_bits),
        ("exp2", "mufu.sm90", mufu.exp2_bits),
        ("log2", "mufu.sm90", mufu.log2_bits),
        ("reciprocal", "mufu.sm90", mufu.reciprocal_bits),
        ("tanh", "mufu.sm90", mufu.tanh_bits),
    ],
)
def test_rules_of_models(function: str, model: str, rule: Callable[[Any], Any]) -> None:
    call = getattr(special, f"{function}_bits")
    for x in (X.view(np.uint32), jnp.asarray(X.view(np.uint32))):
        bits = call(x, model=model)
        np.testing.assert_array_equal(np.asarray(bits), rule(X.view(np.uint32)))


@pytest.mark.parametrize("function", arithmetic.SPECIAL_MODELS["correct"].functions)
def test_the_correct_models_have_no_derivative(function: str) -> None:
    with pytest.raises(TypeError, match=f"{function} has no derivative here"):
        jax.grad(lambda x: getattr(arithmetic, function)(x, "correct"))(jnp.float32(1.5))
