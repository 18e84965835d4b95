"""`BlockTensor.T`: the same codes and scales along the other axis."""

import dataclasses
import itertools
import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flamia_ref.formats import PRESETS, BlockTensor, dequantize, quantize
from tests.formats import exact, points
from tests.formats.representatives import REPRESENTATIVES

TE = "te-mx-e4m3"
SHAPES = [(1, 1), (64, 32), (33, 70), (2, 3, 40, 65), (0, 8), (8, 0)]
PRESET_BLOCKS = [
    (name, block)
    if name in REPRESENTATIVES
    else pytest.param(name, block, marks=pytest.mark.nightly)
    for name, preset in PRESETS.items()
    for block in preset.blocks
    if block[::-1] in preset.blocks
]


def made(shape: tuple[int, ...], name: str = TE, block: Any = None) -> BlockTensor:
    x = points.narrow_range(math.prod(shape), 5).reshape(shape).view(np.float32)
    return quantize(x, name, block=block)


def turned(x: Any) -> Any:
    """A contiguous copy with the last two axes exchanged."""
    return np.ascontiguousarray(np.moveaxis(x, -1, -2))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "block"), PRESET_BLOCKS, ids=str)
def test_it_is_the_transposed_matrix_quantized(name: str, block: Any, shape: Any) -> None:
    r, c = block
    if PRESETS[name].partial == "refuse":
        shape = (*shape[:-2], 32 * shape[-2], 32 * shape[-1])
    tensor = made(shape, name, block)
    x = points.narrow_range(math.prod(shape), 5).reshape(shape).view(np.float32)
    wanted = quantize(turned(x), name, block=(c, r))
    found = tensor.T
    assert isinstance(found, BlockTensor)
    np.testing.assert_array_equal(found.codes, wanted.codes)
    np.testing.assert_array_equal(found.scales, wanted.scales)
    assert found.block == wanted.block == tensor.block[::-1]
    assert found.format is tensor.format
    assert found.tensor_scale == wanted.tensor_scale == tensor.tensor_scale


@pytest.mark.parametrize("block", [(1, 32), (32, 1), (32, 32), ("all", 1)], ids=str)
def test_its_values_by_hand(block: Any) -> None:
    """Each code with the scale of the block that it was in."""
    tensor = made((40, 70), TE, block)
    found, (r, c) = dequantize(tensor.T, np.float64), tensor.block
    assert found.shape == (70, 40)
    for i, j in itertools.product(range(0, 40, 3), range(0, 70, 7)):
        code, scale = int(tensor.codes[i, j]), int(tensor.scales[i // r, j // c])
        element = exact.value(code & 0x7F, exact.SPECS["e4m3"]) * (-1 if code & 0x80 else 1)
        assert Fraction(found[j, i]) == element * exact.TWO ** (scale - 127)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", [(1, 32), (32, 32)], ids=str)
def test_values_of_views_and_copies(block: Any, shape: Any, dtype: Any) -> None:
    tensor = made(shape, TE, block)
    copies = dataclasses.replace(
        tensor, codes=turned(tensor.codes), scales=turned(tensor.scales), block=tensor.block[::-1]
    )
    found, unsigned = dequantize(tensor.T, dtype), f"u{np.dtype(dtype).itemsize}"
    bits = np.ascontiguousarray(found).view(unsigned)
    np.testing.assert_array_equal(bits, dequantize(copies, dtype).view(unsigned))
    np.testing.assert_array_equal(bits, turned(dequantize(tensor, dtype)).view(unsigned))


def test_nothing_is_copied_or_changed() -> None:
    tensor = made((2, 40, 70))
    for x in (tensor.codes, tensor.scales):
        x.flags.writeable = False
    found = tensor.T
    assert np.shares_memory(found.codes, tensor.codes)
    assert np.shares_memory(found.scales, tensor.scales)
    assert tensor.codes.shape == (2, 40, 70)
    assert tensor.scales.shape == (2, 40, 3)
    assert tensor.block == (1, 32)
    assert found.codes.shape == (2, 70, 40)
    assert found.scales.shape == (2, 3, 40)
    assert found.block == (32, 1)
    back = found.T
    np.testing.assert_array_equal(back.codes, tensor.codes)
    np.testing.assert_array_equal(back.scales, tensor.scales)
    assert back.block == tensor.block


def test_the_scale_of_the_whole_tensor_stays() -> None:
    tensor = dataclasses.replace(made((4, 64)), tensor_scale=np.float32(2))
    assert tensor.T.tensor_scale == np.float32(2)


def in_jax(tensor: BlockTensor) -> BlockTensor:
    return dataclasses.replace(
        tensor, codes=jnp.asarray(tensor.codes), scales=jnp.asarray(tensor.scales)
    )


def test_jax() -> None:
    tensor = made((3, 40, 70), TE, (1, 32))
    given, wanted = in_jax(tensor), tensor.T
    results = [
        given.T,
        jax.jit(lambda tensor: tensor.T)(given),
        jax.vmap(lambda tensor: tensor.T)(given),
    ]
    for found in results:
        assert isinstance(found, BlockTensor)
        assert isinstance(found.codes, jax.Array)
        np.testing.assert_array_equal(found.codes, wanted.codes)
        np.testing.assert_array_equal(found.scales, wanted.scales)
        assert found.block == wanted.block
        assert found.format == wanted.format
    values = jax.jit(lambda tensor: dequantize(tensor.T))(given)
    np.testing.assert_array_equal(values, dequantize(wanted))
