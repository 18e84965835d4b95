"""Blocks of codes: which numbers share a byte, and what rows and columns carry along."""

import numpy as np
import pytest

from tests.independent import float32, machine
from tests.independent.operands import contract, contract_bfloat16, quantize_blocks, unit_line
from tests.independent.quantizer import quantize, quantize_flushing
from tests.independent.samples import bell


@pytest.mark.parametrize("shape", [(1, 32), (32, 1), (32, 32), (1, 70)])
def test_blocks(shape: tuple[int, int]) -> None:
    values = [[x << 16 for x in row] for row in bell(1, 40, 70).tolist()]
    blocks = quantize_blocks(values, *shape)
    array = np.array(values)
    codes = np.array(blocks.codes)
    for top in range(0, 40, shape[0]):
        for left in range(0, 70, shape[1]):
            part = slice(top, top + shape[0]), slice(left, left + shape[1])
            wanted, byte = quantize(array[part].ravel().tolist())
            assert codes[part].ravel().tolist() == wanted
            assert blocks.scales[top // shape[0]][left // shape[1]] == byte
    assert len(blocks.scales) == -(-40 // shape[0])
    assert {len(row) for row in blocks.scales} == {-(-70 // shape[1])}
    row, column = blocks.row(35), blocks.column(69)
    assert row.codes == codes[35].tolist()
    assert row.scales == [blocks.scales[35 // shape[0]][k // shape[1]] for k in (0, 32, 64)]
    assert column.codes == codes[:, 69].tolist()
    assert column.scales == [blocks.scales[k // shape[0]][69 // shape[1]] for k in (0, 32)]
    part_of_row = row.part(range(32, 70))
    assert (part_of_row.codes, part_of_row.scales) == (row.codes[32:], row.scales[1:])


def test_chains_may_be_cut() -> None:
    """A chain over two parts is the chain over the whole; no step at all returns c."""
    values = [[x << 16 for x in row] for row in bell(2, 2, 70).tolist()]
    a, b = (quantize_blocks(values, 1, 32).row(index) for index in (0, 1))
    whole = contract(a, b, 0x3F800000)
    first = contract(a.part(range(32)), b.part(range(32)), 0x3F800000)
    assert contract(a.part(range(32, 70)), b.part(range(32, 70)), first) == whole
    assert contract(unit_line([]), unit_line([]), 0x80000000) == 0x80000000
    assert contract_bfloat16([], [], 0x80000000) == 0x80000000
    assert contract_bfloat16([0x3F80] * 17, [0x4000] * 17) == 0x42080000  # 34


def test_products_from_the_table() -> None:
    """The table of products against the general fused sum, special codes included."""
    source = np.random.default_rng(3)
    decoded = machine.element_operands(machine.codes.E4M3)
    for trial in range(300):
        a, b = source.integers(0, 256, (2, 32)).tolist()
        if trial % 3:
            a, b = ([x & 0xF7 if x & 0x7F == 0x7F else x for x in row] for row in (a, b))
        c = int(source.integers(0, 1 << 32)) if trial % 2 else 0x3F800000
        scales = source.integers(90, 160, 2).tolist()
        wanted = machine.fused_sum(
            [(decoded[x], decoded[y]) for x, y in zip(a, b, strict=True)],
            c,
            scale_exponent=sum(scales) - 254,
            product_bits=6,
        )
        assert machine.scaled_chain(a, b, scales[:1], scales[1:], c_bits=c) == [wanted]


def test_flushing_rule() -> None:
    """Byte 0 flushes to zeros with their signs; one step above it does not."""
    tiny = float32.nearest(448 * float32.power_of_two(-127))
    assert quantize([tiny, tiny ^ float32.SIGN]) == ([0x7E, 0xFE], 0)
    assert quantize_flushing([tiny, tiny ^ float32.SIGN, 0, 0x80000000]) == ([0, 0x80, 0, 0x80], 0)
    assert quantize_flushing([tiny, 0xFFC00000]) == ([0, 0x7F], 0)
    above = float32.nearest(449 * float32.power_of_two(-127))
    assert quantize_flushing([above, tiny]) == quantize([above, tiny]) == ([0x76, 0x76], 1)
    block = [x << 16 for x in bell(4, 32).tolist()]
    assert quantize_flushing(block) == quantize(block)
