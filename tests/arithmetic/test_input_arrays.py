"""Arrays that are no plain ones, ranks that JAX may not promote, and derivatives."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flamia_ref import arithmetic
from flamia_ref.arithmetic import INSTRUCTIONS, float32, fused_dot, matmul, matmul_bits
from flamia_ref.formats import PRESETS, BlockTensor, decode, dequantize, encode, quantize

SPECIAL = [("exp2", "mufu.sm90"), ("exp2", "correct"), ("log2", "mufu.sm90")]
SPECIAL += [("reciprocal", "mufu.sm90")]
NEW = np.random.default_rng(3)
CODES = {"e4m3": NEW.integers(0, 0x7F, (2, 4, 64)).astype(np.uint8)}
CODES["bf16"] = NEW.integers(0, 0x7F80, (2, 4, 64)).astype(np.uint16)
CODES["fp16"] = NEW.integers(0, 0x7C00, (2, 4, 64)).astype(np.uint16)
CODES["e2m1"] = NEW.integers(0, 16, (2, 4, 64)).astype(np.uint8)
X = np.linspace(-3, 3, 240, dtype=np.float32).reshape(4, 60)


def masked(x: Any) -> Any:
    return np.ma.array(x, mask=np.arange(x.size).reshape(x.shape) == 0)


def matrix(x: Any) -> Any:
    return x.view(np.matrix)  # the constructor warns


def arguments(instruction: str, *, rows: bool) -> dict[str, Any]:
    """What `fused_dot` (rows) or `matmul_bits` takes."""
    rules = INSTRUCTIONS[instruction]
    element = rules.operand_formats[0]
    a, b = CODES[element]
    given = {"a": a, "b": b if rows else b.T, "a_format": element, "b_format": element}
    if rules.scalings:
        scales = NEW.integers(120, 134, (2, 4, 2)).astype(np.uint8)
        given |= {"a_scales": scales[0], "b_scales": scales[1] if rows else scales[1].T}
        given["scale_format"] = "e8m0"
    half = instruction.endswith(".f16out")
    c = np.zeros(4 if rows else (4, 4), np.uint16 if half else np.uint32)
    return given | {"instruction": instruction, "c_bits" if rows else "c": c}


def in_jax(given: dict[str, Any]) -> dict[str, Any]:
    return {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}


@pytest.mark.parametrize("unusual", [masked, matrix])
@pytest.mark.parametrize("instruction", ["sm100.tcgen05.mxf8f6f4", "exact"])
@pytest.mark.parametrize("name", ["a", "b", "a_scales", "b_scales", "c"])
def test_products_take_plain_arrays(name: str, instruction: str, unusual: Any) -> None:
    given = arguments(instruction, rows=False)
    message = f"{name} is a (MaskedArray|matrix); pass a plain array"
    with pytest.raises(TypeError, match=message):
        matmul_bits(**given | {name: unusual(given[name])})
    if name == "c":
        with pytest.raises(TypeError, match=message):
            matmul(**given | {"c": unusual(given["c"].view(np.float32))})
        name = "c_bits"
    given = arguments(instruction, rows=True)
    with pytest.raises(TypeError, match=f"{name} is a (MaskedArray|matrix); pass a plain array"):
        fused_dot(**given | {name: unusual(given[name])})


@pytest.mark.parametrize("unusual", [masked, matrix])
def test_block_tensors_hold_plain_arrays(unusual: Any) -> None:
    tensor = quantize(X[:, :32], "te-mx-e4m3")
    for name in ("codes", "scales"):
        fields = {"codes": tensor.codes, "scales": tensor.scales}
        fields[name] = unusual(fields[name])
        changed = BlockTensor(**fields, format=tensor.format, block=tensor.block)
        with pytest.raises(TypeError, match="pass a plain array"):
            fused_dot(changed, tensor, np.zeros(4, np.uint32), "exact")


@pytest.mark.parametrize("unusual", [masked, matrix])
@pytest.mark.parametrize(("function", "model"), SPECIAL)
def test_special_functions_take_plain_arrays(function: str, model: str, unusual: Any) -> None:
    with pytest.raises(TypeError, match=r"x is a (MaskedArray|matrix); pass a plain array"):
        getattr(arithmetic, function)(unusual(X), model)


def test_mapped_files_are_arrays(tmp_path: Path) -> None:
    given = arguments("exact", rows=False)
    mapped = {}
    for name, x in given.items():
        if isinstance(x, np.ndarray):
            np.save(tmp_path / f"{name}.npy", x)
            x = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
        mapped[name] = x
    np.testing.assert_array_equal(matmul_bits(**mapped), matmul_bits(**given))
    np.save(tmp_path / "x.npy", X)
    mapped_x = np.load(tmp_path / "x.npy", mmap_mode="r")
    np.testing.assert_array_equal(
        arithmetic.exp2(mapped_x, "correct"), arithmetic.exp2(X, "correct")
    )


def test_messages_name_the_byte_order() -> None:
    given = arguments("exact", rows=False)
    with pytest.raises(TypeError, match=r"c holds uint32 in the other byte order \(>u4\); it must"):
        matmul_bits(**given | {"c": given["c"].astype(">u4")})
    with pytest.raises(TypeError, match=r"not an array of float32 in the other byte order \(>f4\)"):
        arithmetic.exp2(X.astype(">f4"), "correct")


@pytest.fixture
def no_rank_promotion() -> Iterator[None]:
    with jax.numpy_rank_promotion("raise"):
        yield


def same_in_both(call: Callable[..., Any], *arrays: Any) -> None:
    expected = call(*arrays)
    for actual in (call(*map(jnp.asarray, arrays)), jax.jit(call)(*map(jnp.asarray, arrays))):
        np.testing.assert_array_equal(np.asarray(actual), expected)


PRODUCTS = (
    "sm100.tcgen05.mxf8f6f4",
    "sm100.tcgen05.f16",
    "sm100.tcgen05.mxf4nvf4",
    "sm90.wgmma.f16.f16out",
    "exact",
    "float32",
)


@pytest.mark.usefixtures("no_rank_promotion")
@pytest.mark.parametrize(
    "instruction",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name != PRODUCTS[0])) for name in PRODUCTS],
)
def test_products_promote_no_rank(instruction: str) -> None:
    for call, rows in ((fused_dot, True), (matmul_bits, False)):
        given = arguments(instruction, rows=rows)
        expected = call(**given)
        np.testing.assert_array_equal(np.asarray(call(**in_jax(given))), expected)
        codes = given.pop("a")
        rest = in_jax(given)
        both = jax.vmap(lambda a, call=call, rest=rest: call(a=a, **rest))(np.stack([codes, codes]))
        np.testing.assert_array_equal(np.asarray(both), np.stack([expected, expected]))


@pytest.mark.usefixtures("no_rank_promotion")
@pytest.mark.parametrize("instruction", PRODUCTS)
def test_products_are_traced_without_promoting_a_rank(instruction: str) -> None:
    for call, rows in ((fused_dot, True), (matmul_bits, False)):
        given = in_jax(arguments(instruction, rows=rows))
        names = [name for name, x in given.items() if isinstance(x, jax.Array)]

        def of_arrays(*arrays: Any, call=call, given=given, names=names) -> Any:
            return call(**given | dict(zip(names, arrays, strict=True)))

        arrays = [given[name] for name in names]
        shape = jax.eval_shape(of_arrays, *arrays).shape
        mapped = jax.vmap(of_arrays)
        assert jax.eval_shape(mapped, *(jnp.stack([x, x]) for x in arrays)).shape == (2, *shape)


def traces(call: Callable[..., Any], *arrays: Any) -> None:
    """A rank is refused while a function is traced: that needs no compiling."""
    jax.eval_shape(call, *map(jnp.asarray, arrays))


@pytest.mark.usefixtures("no_rank_promotion")
@pytest.mark.parametrize("same", [traces, pytest.param(same_in_both, marks=pytest.mark.nightly)])
def test_conversions_promote_no_rank(same: Callable[..., None]) -> None:
    for name in ("e4m3", "e5m2", "e8m0", "bf16"):
        same(lambda x, name=name: decode(encode(x, name), name), X)
    draws = np.full(X.shape, 77, np.uint8)
    same(lambda x, r: encode(x, "e4m3", rounding="stochastic", random_bits=r), X, draws)
    for name in (
        "cudnn-mx-e4m3",
        "flamia-fp4-e8m0",
        "flamia-fp4-ue4m3",
        "te-mx-e4m3",
        "gfloat-mx-e2m3",
    ):
        for block in PRESETS[name].blocks:
            same(lambda x, p=name, b=block: dequantize(quantize(x, p, block=b)), X)
    whole = np.tile(X[:, :32], (4, 1))
    for name in (
        "te-nvfp4",
        "te-nvfp4-2d",
        "te-nvfp4-rht",
        "te-nvfp4-4over6-mse",
        "torchao018-mx-rceil-e2m1",
    ):
        same(lambda x, p=name: dequantize(quantize(x, p)), whole)


@pytest.mark.usefixtures("no_rank_promotion")
def test_a_conversion_in_jax_is_that_in_numpy() -> None:
    same_in_both(lambda x: dequantize(quantize(x, "te-mx-e4m3", block=(1, 32))), X)


def test_a_rank_that_is_promoted_is_seen() -> None:
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="rank_promotion"):
        traces(lambda x: x + jnp.ones(60, np.float32), X)


@pytest.mark.usefixtures("no_rank_promotion")
@pytest.mark.parametrize("same", [traces, pytest.param(same_in_both, marks=pytest.mark.nightly)])
def test_functions_promote_no_rank(same: Callable[..., None]) -> None:
    words, whole = X.view(np.uint32), X.astype(np.int32)
    for function, model in SPECIAL:
        same(lambda x, f=function, m=model: getattr(arithmetic, f)(x, m), X)
    for name in ("is_nan", "is_zero", "negate", "canonical", "ceil", "floor", "to_int32"):
        same(getattr(float32, name), words)
    for name in ("add", "subtract", "multiply", "divide", "less", "maximum"):
        same(getattr(float32, name), words, words[::-1])
    for rounding in ("toward_zero", "up", "down"):
        same(lambda x, r=rounding: float32.fma(x, x, x, rounding=r), words)
    same(float32.shift, words, whole)
    same(float32.from_int32, whole)
    same(lambda x: float32.max_along(x, 1), words)


@pytest.mark.parametrize(("function", "model"), SPECIAL)
def test_special_functions_refuse_derivatives(function: str, model: str) -> None:
    def total(x: Any) -> Any:
        return getattr(arithmetic, function)(x, model).sum()

    x = jnp.asarray(X[:1, :3])
    for derivative in (jax.grad(total), jax.jit(jax.grad(total)), jax.grad(jax.jit(total))):
        with pytest.raises(TypeError, match=f"{function} has no derivative here; apply jax.lax"):
            derivative(x)
    stopped = jax.grad(lambda x: x.sum() + total(jax.lax.stop_gradient(x)))
    np.testing.assert_array_equal(stopped(x), np.ones_like(x))


def test_matmul_refuses_derivatives() -> None:
    given = in_jax(arguments("float32", rows=False) | {"c": X[:, :4]})
    c = given.pop("c")

    def total(c: Any) -> Any:
        return matmul(c=c, **given).sum()

    for derivative in (jax.grad(total), jax.jit(jax.grad(total)), jax.grad(jax.jit(total))):
        with pytest.raises(TypeError, match="matmul has no derivative; apply"):
            derivative(c)
    both = jax.vmap(lambda c: matmul(c=c, **given))(jnp.stack([c, c]))
    np.testing.assert_array_equal(both[1], matmul(c=c, **given))
    np.testing.assert_array_equal(jax.jit(lambda c: matmul(c=c, **given))(c), both[0])
