"""What several libraries have in common."""

import math

from flamia_ref.formats.block import ALL, Block
from flamia_ref.formats.scalar import E2M1, E2M3, E3M2, E4M3, E5M2, ScalarFormat

MX_ELEMENTS: tuple[ScalarFormat, ...] = (E4M3, E5M2, E2M3, E3M2, E2M1)
ROWS_OF_32: tuple[Block, ...] = ((1, 32),)
ROWS_OR_COLUMNS_OF_32: tuple[Block, ...] = ((1, 32), (32, 1))
MX_BLOCKS: tuple[Block, ...] = ((1, 32), (32, 1), (32, 32), (1, ALL), (ALL, 1))
ROWS_OF_16: tuple[Block, ...] = ((1, 16),)

CODE_0_FLUSHES = ((0, math.inf),)  # elements of a block with scale code 0 are multiplied by 0
BLOCKS_ON_CPU = "run on CPU: 2043 blocks of 32 in float32 and in bfloat16"
TENSORS_ON_CPU = "run on CPU: 19 tensors of 32x64 in float32 and in bfloat16"
