"""Copies of inputs by scope, against the formats' exact rules, and how tiles are taken from them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flamia_ref import _backend
from flamia_ref.attention.copies import Maker, taken
from flamia_ref.attention.product import Operand, Scope, Use
from flamia_ref.attention.recipes import RECIPES
from flamia_ref.formats import quantize
from flamia_ref.packing import Documents
from tests.attention import samples
from tests.formats import exact

LENGTHS = (0, 5, 65, 0, 32, 1)
DOCUMENTS = Documents((0, *(int(end) for end in np.cumsum(LENGTHS))))
TOKENS = sum(LENGTHS)
E4M3 = exact.SPECS["e4m3"]
FP4 = [RECIPES[name].s.left for name in ("flamia-nvfp4-fp8", "flamia-nvfp4-fp8-ue4m3")]
PROMOTED = RECIPES["flamia-nvfp4-fp8"].dk.right
PREVIOUS = [
    Operand(format="te-mx-e4m3", block=block, scope=Scope.PREVIOUS_BLOCK, static_scale=first)
    for block, first in (((32, 1), 120), ((32, 32), 127))
]
STATIC = Operand(format="e4m3", scope=Scope.STATIC, static_scale=119)
OPERANDS = [
    *FP4,
    *PREVIOUS,
    STATIC,
    Operand(format="te-mx-e4m3", block=(1, 32)),
    Operand(format="te-mx-e4m3", block=(1, "all"), scope=Scope.TOKEN),
    Operand(format="te-mx-e4m3", block=(32, 1)),
    Operand(format="te-mx-e4m3", block=(32, 32)),
    Operand(format="bf16", scope=Scope.UNIT),
    Operand(format="bf16", scope=Scope.STATIC, static_scale=130),
]


def named(operand: Operand) -> str:
    """A short name of an operand for the list of tests."""
    block = "" if operand.block is None else "-{}x{}".format(*operand.block)
    return f"{operand.format}{block}-{operand.scope}"


BY_PRESET = [
    operand
    for operand in OPERANDS
    if operand.block is not None
    and operand.scope is not Scope.PREVIOUS_BLOCK
    and operand.format != "flamia-fp4-ue4m3"
]
"""Operands whose codes and scales are a preset's, and nothing else."""


def numpy_maker(documents: Documents = DOCUMENTS) -> Maker:
    return Maker(documents, np, lambda x: x, lambda x: x, False)


def jax_maker() -> Maker:
    return Maker(DOCUMENTS, np, lambda x: _backend.put(x, jnp), _backend.host, True)


def bits(sample, channels: int, heads: int = 2) -> np.ndarray:
    x = sample(11, LENGTHS, heads, heads, channels)[0]
    return x.view(np.uint16).astype(np.uint32) << np.uint32(16)


def e4m3(x: float, byte: int) -> int:
    x = float(x)
    scaled = x if not np.isfinite(x) else exact.Fraction(x) / exact.TWO ** (byte - 127)
    return exact.encode(scaled, E4M3, negative=bool(np.signbit(x)))


@pytest.mark.parametrize("byte", [0, 119, 127, 254])
def test_a_static_scale(byte: int) -> None:
    x = bits(samples.with_specials, 8)
    operand = replace(STATIC, static_scale=byte)
    codes, scales = numpy_maker().copy(x, operand).trace()
    assert scales is None
    for index, value in np.ndenumerate(x.view(np.float32)):
        assert codes[index] == e4m3(value, byte)


@pytest.mark.parametrize("operand", PREVIOUS, ids=named)
@pytest.mark.parametrize("sample", [samples.bell, samples.wide])
def test_the_scale_of_the_block_before(sample, operand: Operand) -> None:
    """Every block by hand: its document's block before gives the scale, the constant in the first."""
    channels, width = 40, int(operand.block[1])
    x = bits(sample, channels).view(np.float32)
    codes, scales = numpy_maker().copy(x.view(np.uint32), operand).trace()
    block = 0
    for document in DOCUMENTS:
        for start in range(document.start, document.stop, 32):
            rows = slice(start, min(start + 32, document.stop))
            for head in range(2):
                for column, first in enumerate(range(0, channels, width)):
                    cut = slice(first, first + width)
                    wanted = operand.static_scale
                    if start > document.start:
                        before = np.abs(x[start - 32 : start, head, cut])
                        wanted = exact.rceil_scale(exact.Fraction(float(before.max())), 448)
                    assert scales[block, head, column] == wanted
                    here = x[rows, head, cut]
                    found = [e4m3(value, wanted) for value in here.ravel()]
                    assert codes[rows, head, cut].ravel().tolist() == found
            block += 1
    assert scales.shape == (block, 2, -(-channels // width))


def test_a_block_before_of_zeros_saturates_and_one_of_nan_is_nan() -> None:
    x = np.zeros((96, 1, 32), np.float32)
    x[32:64] = 1.0
    x[40, 0, 3] = np.nan
    documents = Documents((0, 96))
    copy = numpy_maker(documents).copy(x.view(np.uint32), PREVIOUS[1])
    codes, scales = copy.trace()
    assert scales[:, 0, 0].tolist() == [127, 0, 119]  # te-mx takes the largest number
    assert codes[32, 0, 0] == 0x7E
    assert codes[40, 0, 3] == 0x7F
    # OCP: a block with a NaN has the scale NaN, and so has everything that takes it.
    other = replace(PREVIOUS[1], format="ocp-mx-floor-e4m3")
    codes, scales = numpy_maker(documents).copy(x.view(np.uint32), other).trace()
    assert scales[:, 0, 0].tolist() == [127, 0, 255]
    assert (codes[64:] == 0x7F).all()


@pytest.mark.parametrize("operand", OPERANDS, ids=named)
def test_a_document_is_copied_as_if_alone(operand: Operand) -> None:
    x = bits(samples.any_bits, 40)
    codes, scales = numpy_maker().copy(x, operand).trace()
    block = 0
    for document in DOCUMENTS:
        length = document.stop - document.start
        if not length:
            continue
        alone = numpy_maker(Documents((0, length))).copy(x[document], operand)
        np.testing.assert_array_equal(codes[document], alone.trace()[0])
        if scales is not None:
            blocks = -(-length // 32)
            place = document if operand.block[0] == 1 else slice(block, block + blocks)
            np.testing.assert_array_equal(scales[place], alone.trace()[1])
            block += blocks


@pytest.mark.parametrize("operand", BY_PRESET, ids=named)
def test_codes_are_those_of_the_preset(operand: Operand) -> None:
    x = bits(samples.wide, 40).view(np.float32)
    codes, scales = numpy_maker().copy(x.view(np.uint32), operand).trace()
    if operand.block[0] == 1:
        wanted = quantize(x, operand.format, block=operand.block)
        np.testing.assert_array_equal(codes, wanted.codes)
        np.testing.assert_array_equal(scales, wanted.scales)
        return
    parts = [
        quantize(np.moveaxis(x[document], 1, 0), operand.format, block=operand.block)
        for document in DOCUMENTS
    ]
    np.testing.assert_array_equal(
        codes, np.concatenate([np.moveaxis(part.codes, 0, 1) for part in parts])
    )
    np.testing.assert_array_equal(
        scales, np.concatenate([np.moveaxis(part.scales, 0, 1) for part in parts])
    )


def tile_of_tokens() -> tuple[np.ndarray, np.ndarray]:
    """Tiles of 64 rows: all of the second document, its end, a document of one token, none."""
    tokens = np.full((4, 64), -1, np.int32)
    tokens[0] = np.arange(5, 69)
    tokens[1, :1] = 69
    tokens[2, :1] = TOKENS - 1
    return tokens, np.array([0, 1, 1, 0], np.int32)


def unit(operand: Operand) -> int:
    return 0x38 if "ue4m3" in operand.format else 0x7F


@pytest.mark.parametrize("channels", [40, 64])
@pytest.mark.parametrize("operand", [op for op in OPERANDS if op.block != (32, 1)], ids=named)
def test_rows_over_channels(operand: Operand, channels: int) -> None:
    copy = numpy_maker().copy(bits(samples.bell, channels), operand)
    tokens, heads = tile_of_tokens()
    rows = taken(copy, Use.S_Q, operand, None, tokens, heads, lambda x: x)
    codes, scales = copy.trace()
    step = 16 if operand.block == (1, 16) else 32
    for tile, row in np.ndindex(tokens.shape):
        token, head = tokens[tile, row], heads[tile]
        inside = token >= 0
        wanted = codes[token, head] if inside else np.zeros(channels)
        np.testing.assert_array_equal(rows.codes[tile, row], wanted)
        for block in range(-(-channels // step)):
            if operand.scope is Scope.STATIC:
                byte = operand.static_scale
            elif scales is None:
                assert rows.scales is None
                continue
            elif not inside:
                byte = unit(operand)
            elif operand.block[0] == 1:
                byte = scales[token, head, min(block, scales.shape[2] - 1)]
            else:
                # The second document's blocks begin at token 5; one block before is of the first.
                place = 1 + (token - 5) // 32 if token < 70 else 5
                byte = scales[place, head, block]
            assert rows.scales[tile, row, block] == byte
        if copy.token_scales is not None:
            power = int(copy.token_scales[token, head, 0]) - 127 if inside else 0
            assert rows.shift[tile, row] == power
    assert (rows.shift is None) == (operand.format != "flamia-fp4-ue4m3")
    assert rows.fold is None


@pytest.mark.parametrize("operand", [op for op in OPERANDS if op.block != (1, 16)], ids=named)
def test_rows_over_tokens(operand: Operand) -> None:
    if operand.block is not None and operand.block[0] == 1:
        operand = replace(operand, block=(1, "all"), scope="token", scale_folded_into=Use.O_P)
    copy = numpy_maker().copy(bits(samples.bell, 40), operand)
    tokens, heads = tile_of_tokens()
    rows = taken(copy, Use.O_V, operand, None, tokens, heads, lambda x: x)
    codes, scales = copy.trace()
    starts = {(0, 0): 1, (0, 1): 2, (1, 0): 3, (2, 0): 5}  # tile and row block: token block
    for tile, row in np.ndindex(tokens.shape):
        token, head = tokens[tile, row], heads[tile]
        wanted = codes[token, head] if token >= 0 else np.zeros(40)
        np.testing.assert_array_equal(rows.codes[row, tile], wanted)
        if operand.scale_folded_into is not None:
            byte = scales[token, head, 0] if token >= 0 else 127
            assert rows.fold[tile, row] == byte
    for tile, block in np.ndindex(4, 2):
        for channel in range(40):
            if operand.scope is Scope.STATIC:
                byte = operand.static_scale
            elif scales is None:
                assert rows.scales is None
                continue
            elif operand.scale_folded_into is not None or (tile, block) not in starts:
                byte = 127
            else:
                byte = scales[starts[tile, block], heads[tile], channel // int(operand.block[1])]
            assert rows.scales[block, tile, channel] == byte


@pytest.mark.parametrize("operand", OPERANDS, ids=named)
def test_values_are_code_times_scale(operand: Operand) -> None:
    maker, x = numpy_maker(), bits(samples.bell, 40)
    copy = maker.copy(x, operand)
    found = maker.values(copy).view(np.float32).astype(np.float64)
    codes, scales = copy.trace()
    blocks = np.repeat(np.arange(6), [5, 32, 32, 1, 32, 1])
    name = (
        operand.format if operand.block is None else ("e2m1" if "fp4" in operand.format else "e4m3")
    )
    spec = exact.SPECS[name]
    for (token, head, channel), code in np.ndenumerate(codes):
        value = float(exact.value(int(code) & (spec.sign - 1), spec)) * (-1) ** bool(
            code & spec.sign
        )
        if operand.scope is Scope.STATIC:
            value *= 2.0 ** (operand.static_scale - 127)
        elif scales is not None:
            across = 40 if operand.block[1] == "all" else int(operand.block[1])
            row = token if operand.block[0] == 1 else blocks[token]
            scale = int(scales[row, head, channel // across])
            form = exact.SPECS["ue4m3" if "ue4m3" in operand.format else "e8m0"]
            value *= float(exact.value(scale, form))
        if copy.token_scales is not None:
            value *= 2.0 ** (int(copy.token_scales[token, head, 0]) - 127)
        assert found[token, head, channel] == value


@pytest.mark.parametrize("operand", OPERANDS, ids=named)
def test_jax_gives_the_same(operand: Operand) -> None:
    x = bits(samples.any_bits, 40)
    results = []
    for maker in (numpy_maker(), jax_maker()):
        with jax.numpy_dtype_promotion("strict"):
            copy = maker.copy(x, operand)
            parts = [*copy.trace(), copy.token_scales, maker.values(copy)]
            if operand.block == (1, 16):
                parts += maker.promoted(copy, PROMOTED).trace()
        results.append(parts)
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            samples.assert_same(other, one, str(operand))


@pytest.mark.parametrize("operand", OPERANDS, ids=named)
def test_a_copy_from_its_trace(operand: Operand) -> None:
    maker = numpy_maker()
    copy = maker.copy(bits(samples.bell, 40), operand)
    again = maker.given(*copy.trace(), copy.token_scales, operand)
    for one, other in zip(copy, again, strict=True):
        if isinstance(one, np.ndarray):
            np.testing.assert_array_equal(one, other)
        else:
            assert one is other or one == other
