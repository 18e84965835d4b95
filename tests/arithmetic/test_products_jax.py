"""Matrix products as JAX programs: one primitive, its batching rule, 64-bit types on and off."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from flamia_ref import _primitive
from flamia_ref.arithmetic.instructions import Scaling
from flamia_ref.arithmetic.products import chain, fused_dot, matmul, matmul_bits
from tests.repository.layout import ROOT

MX = "sm100.tcgen05.mxf8f6f4"
F16 = "sm100.tcgen05.f16"
CALLS = {  # instruction, format, scaled
    MX: ("e4m3", True),
    F16: ("bf16", False),
    "exact": ("e5m2", True),
    "float32": ("fp32", False),
}
WIDTHS = {"bf16": np.uint16, "fp32": np.uint32}


def operands(name: str, m: int = 3, k: int = 64, n: int = 2, seed: int = 0) -> dict[str, Any]:
    """numpy operands of matmul_bits, moderate and finite."""
    rng = np.random.default_rng(seed)
    element, scaled = CALLS[name]
    dtype = WIDTHS.get(element, np.uint8)
    values = rng.normal(size=(m + n, k)).astype(np.float32)
    if element == "bf16":
        codes = (values.view(np.uint32) >> np.uint32(16)).astype(dtype)
    elif element == "fp32":
        codes = values.view(np.uint32)
    else:
        codes = rng.integers(0, 0x70, (m + n, k)).astype(dtype) | (
            rng.integers(0, 2, (m + n, k)).astype(dtype) << 7
        )
    given = {"a": codes[:m], "b": codes[m:].T.copy()}
    given["c"] = rng.normal(size=(m, n)).astype(np.float32).view(np.uint32)
    if scaled:
        blocks = -(-k // 32)
        given["a_scales"] = rng.integers(120, 134, (m, blocks), dtype=np.uint8)
        given["b_scales"] = rng.integers(120, 134, (blocks, n), dtype=np.uint8)
    return given


def call(name: str, **given: Any) -> Any:
    element, _ = CALLS[name]
    return matmul_bits(**given, instruction=name, a_format=element, b_format=element)


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program, those of its inner programs too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(getattr(inner, "jaxpr", inner))


# One primitive.

LAYOUT = {"broadcast_in_dim", "fused_sum", "jit", "reshape", "squeeze", "transpose"}


@pytest.mark.parametrize("name", CALLS)
def test_a_product_is_one_primitive(name: str) -> None:
    given = operands(name)
    programs = {
        "with c": jax.make_jaxpr(lambda given: call(name, **given))(given),
        "without c": jax.make_jaxpr(lambda given: call(name, **given))(
            {key: x for key, x in given.items() if key != "c"}
        ),
        "batched": jax.make_jaxpr(jax.vmap(lambda given: call(name, **given)))(
            {key: np.stack([x, x]) for key, x in given.items()}
        ),
    }
    for which, program in programs.items():
        names = [equation.primitive.name for equation in equations(program.jaxpr)]
        assert names.count("fused_sum") == 1, f"{which}: {names}"
        assert set(names) <= LAYOUT, f"{which}: {sorted(set(names) - LAYOUT)}"


def test_the_primitive_names_its_rules() -> None:
    program = jax.make_jaxpr(lambda given: call(MX, **given))(operands(MX))
    (equation,) = (x for x in equations(program.jaxpr) if x.primitive.name == "fused_sum")
    scaling = Scaling(format="e8m0", block=32)
    formats = {"a_format": "e4m3", "b_format": "e4m3"}
    assert equation.params == {"instruction": MX, "scaling": scaling, **formats}
    assert [x.aval.shape for x in equation.outvars] == [(3, 2)]
    assert equation.outvars[0].aval.dtype == np.uint32


def test_fused_dot_is_one_primitive_and_values_one_bitcast() -> None:
    given = operands("float32")
    formats = {"instruction": "float32", "a_format": "fp32", "b_format": "fp32"}
    dot = jax.make_jaxpr(lambda a, c: fused_dot(a, a, c, **formats))(given["a"], given["c"][:, 0])
    names = [equation.primitive.name for equation in equations(dot.jaxpr)]
    assert names.count("fused_sum") == 1
    values = jax.make_jaxpr(lambda a, b, c: matmul(a, b, c=c, **formats))(
        given["a"], given["b"], given["c"].view(np.float32)
    )
    names = [equation.primitive.name for equation in equations(values.jaxpr)]
    assert names.count("bitcast_convert_type") == 2
    assert set(names) <= LAYOUT | {"bitcast_convert_type", "custom_jvp_call"}


# The batching rule.

PLACES = ("x", "y", "z", "c")
COMBINATIONS = [chosen for size in range(1, 5) for chosen in itertools.combinations(range(4), size)]


def _weighted(x: Any, y: Any, z: Any, c: Any) -> Any:
    """A function of the form that `lane_primitive` takes, quick to compile."""
    total = c
    for k in range(x.shape[0]):
        total = total * np.uint32(3) + x[k] * y[k]
    for k in range(z.shape[0]):
        total = total + z[k]
    return total


weighted = _primitive.lane_primitive("weighted", _weighted)


@pytest.mark.parametrize(
    "chosen", COMBINATIONS, ids=lambda chosen: "".join(PLACES[place] for place in chosen)
)
def test_every_combination_of_batched_operands(chosen: tuple[int, ...]) -> None:
    """Operands in the two layouts in use, row by row and as a matmul."""
    rng = np.random.default_rng(len(chosen))
    layouts = (((4, 5), (4, 5), (0, 5), (5,)), ((4, 3, 1), (4, 1, 2), (2, 3, 1), (3, 2)))
    for shapes in layouts:
        for even_first in (True, False):
            operands, axes = [], []
            for place, shape in enumerate(shapes):
                at = None
                if place in chosen:
                    # Half of the operands have the batch first, the others last.
                    at = 0 if even_first == (place % 2 == 0) else len(shape)
                    shape = (*shape[:at], 6, *shape[at:])
                    at = at - len(shape) if place > 1 else at
                operands.append(rng.integers(0, 1 << 32, shape, dtype=np.uint32))
                axes.append(at)
            got = jax.jit(jax.vmap(weighted, in_axes=tuple(axes)))(*operands)
            assert got.shape == (6, *shapes[-1])
            for index in range(6):
                one = [
                    x if at is None else np.moveaxis(x, at, 0)[index]
                    for x, at in zip(operands, axes, strict=True)
                ]
                np.testing.assert_array_equal(got[index], _weighted(*one))


def batched_call(name: str, chosen: tuple[str, ...], axis: int) -> None:
    """vmap over the operands in `chosen` against numpy, one product after the other."""
    lots = [operands(name, seed=seed) for seed in range(3)]
    given = {
        key: np.stack([lot[key] for lot in lots], axis=axis) if key in chosen else x
        for key, x in lots[0].items()
    }
    axes = {key: axis if key in chosen else None for key in given}
    got = jax.vmap(lambda given: call(name, **given), in_axes=(axes,), out_axes=1)(
        {key: jnp.asarray(x) for key, x in given.items()}
    )
    assert got.shape == (3, 3, 2)
    for index, lot in enumerate(lots):
        one = {key: lot[key] if key in chosen else lots[0][key] for key in given}
        np.testing.assert_array_equal(got[:, index], call(name, **one))


@pytest.mark.parametrize(
    ("name", "chosen", "axis"),
    [
        (MX, ("a", "a_scales", "c"), 1),
        (F16, ("b",), 0),
        ("exact", ("a", "b", "a_scales", "b_scales", "c"), -1),
    ],
)
def test_batched_products(name: str, chosen: tuple[str, ...], axis: int) -> None:
    batched_call(name, chosen, axis)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("size", range(1, 6))
def test_every_combination_of_batched_products(name: str, size: int) -> None:
    for index, chosen in enumerate(itertools.combinations(operands(name), size)):
        batched_call(name, chosen, (index + size) % 3)


def test_vmap_in_vmap_and_in_scan() -> None:
    lots = [[operands(F16, k=16, seed=3 * i + j) for j in range(3)] for i in range(2)]
    stacked = {key: jnp.asarray([[lot[key] for lot in row] for row in lots]) for key in lots[0][0]}
    wanted = np.array([[call(F16, **lot) for lot in row] for row in lots])
    function = lambda given: call(F16, **given)  # noqa: E731
    np.testing.assert_array_equal(jax.vmap(jax.vmap(function))(stacked), wanted)
    inner = jax.jit(lambda given: jax.lax.scan(lambda _, x: (0, function(x)), 0, given)[1])
    np.testing.assert_array_equal(jax.vmap(inner)(stacked), wanted)


def test_chained_in_a_users_scan() -> None:
    """The accumulator of one product is the next one's, as a kernel's main loop has it."""
    given = operands(MX, k=128)
    formats = {"instruction": MX, "a_format": "e4m3", "b_format": "e4m3"}
    split = {
        "a": given["a"].reshape(3, 2, 64).swapaxes(0, 1),
        "b": given["b"].reshape(2, 64, 2),
        "a_scales": given["a_scales"].reshape(3, 2, 2).swapaxes(0, 1),
        "b_scales": given["b_scales"].reshape(2, 2, 2),
    }

    @jax.jit
    def run(split: dict[str, Any], c: Any) -> Any:
        return jax.lax.scan(lambda c, x: (matmul_bits(**x, c=c, **formats), None), c, split)[0]

    np.testing.assert_array_equal(run(split, given["c"]), call(MX, **given))


# 64-bit types.


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("name", [MX, "exact", "float32"])
def test_64_bit_types_on_and_off(name: str, x64: bool) -> None:
    given = operands(name, seed=5)
    wanted = call(name, **given)
    with jax.enable_x64(x64):
        operand = {key: jnp.asarray(x) for key, x in given.items()}
        got = jax.jit(lambda operand: call(name, **operand))(operand)
        assert jax.config.jax_enable_x64 is x64
    assert got.dtype == np.uint32
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", [F16, pytest.param("exact", marks=pytest.mark.nightly)])
def test_the_bare_primitive_runs_outside_of_jit(name: str) -> None:
    """Its lowering brings 64-bit types itself, whatever the caller's setting."""
    element, scaled = CALLS[name]
    given = operands(name, k=32)
    lanes = [given["a"].T[:, :, None], given["b"][:, None, :]]
    empty = np.zeros((0, 1, 1), np.uint8)
    lanes += (
        [given["a_scales"].T[:, :, None], given["b_scales"][:, None, :]] if scaled else [empty] * 2
    )
    got = chain(
        *map(jnp.asarray, lanes),
        jnp.asarray(given["c"]),
        scaling=Scaling(format="e8m0", block=32) if scaled else None,
        instruction=name,
        a_format=element,
        b_format=element,
    )
    np.testing.assert_array_equal(got, call(name, **given))


def test_no_gradient_goes_through_codes() -> None:
    given = operands(MX)
    with pytest.raises(TypeError, match="uint"):
        jax.grad(lambda a: call(MX, **given | {"a": a}).sum())(jnp.asarray(given["a"]))


# Devices.

TWO_DEVICES = """
import jax, numpy as np
from flamia_ref.arithmetic.products import fused_dot
first, second = jax.devices()
a = jax.device_put(np.zeros((2, 32), np.uint8), first)
b = jax.device_put(np.zeros((2, 32), np.uint8), second)
scales = np.full((2, 1), 127, np.uint8)
given = dict(a_format="e4m3", b_format="e4m3", a_scales=scales, b_scales=scales)
try:
    fused_dot(a, b, np.zeros(2, np.uint32), "sm100.tcgen05.mxf8f6f4", **given)
except ValueError as error:
    print(error)
result = fused_dot(b, b, np.zeros(2, np.uint32), "sm100.tcgen05.mxf8f6f4", **given)
print(result.devices() == {second})
"""


def test_operands_on_two_devices_are_refused() -> None:
    run = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES],
        cwd=ROOT,
        env={
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    message, on_second = run.stdout.splitlines()
    assert "a on " in message
    assert "b on " in message
    assert message.endswith("move them to one")
    assert on_second == "True"
