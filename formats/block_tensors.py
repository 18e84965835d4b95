"""Codes and scales of a quantized tensor: `BlockTensor`."""

import dataclasses
import operator
from dataclasses import dataclass

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref._errors import shown
from flamia_ref.formats.block import BlockFormat


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockTensor:
    """A tensor in a block format. A pytree once JAX is in use; compare its arrays, not itself.

    Attributes:
        codes: element codes [..., rows, columns].
        scales: scale codes [..., ceil(rows / r), ceil(columns / c)] for a block of (r, c).
        tensor_scale: float32, one of the whole tensor, of shape (), or one of each row, [..., rows, 1]; None for
            formats without one.
        format: the block format.
        block: rows and columns that share a scale, as numbers.

    Raises TypeError for a `format` that is no `BlockFormat`, ValueError for a `block` that is not
    two integers.
    """

    codes: Array
    scales: Array
    tensor_scale: Array | None = None
    format: BlockFormat
    block: tuple[int, int]

    def __post_init__(self) -> None:
        if not isinstance(self.format, BlockFormat):
            raise TypeError(f"format is a BlockFormat, not {shown(self.format)}")
        try:
            rows, columns = map(operator.index, self.block)
        except (TypeError, ValueError):
            raise ValueError(
                f"block is (rows, columns) in numbers, not {shown(self.block)}; quantize"
                ' resolves "all"'
            ) from None
        object.__setattr__(self, "block", (rows, columns))
        _backend.register_value_type(
            BlockTensor, data=("codes", "scales", "tensor_scale"), meta=("format", "block")
        )

    @property
    def T(self) -> "BlockTensor":
        """The transposed tensor: the same codes and scales, seen along the other axis. Views in numpy."""
        return dataclasses.replace(
            self,
            codes=self.codes.swapaxes(-1, -2),
            scales=self.scales.swapaxes(-1, -2),
            block=self.block[::-1],
        )
