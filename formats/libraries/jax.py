"""jax.nn.scaled_matmul's own quantizers on CPU, where XLA flushes subnormals: MXFP8 and NVFP4."""

import math

from flamia_ref.evidence import Evidence
from flamia_ref.formats.block import (
    Arithmetic,
    BlockFormat,
    NanPolicy,
    PartialBlock,
    ScaleRule,
    Subnormals,
)
from flamia_ref.formats.libraries.common import (
    BLOCKS_ON_CPU,
    ROWS_OF_16,
    ROWS_OF_32,
    TENSORS_ON_CPU,
)
from flamia_ref.formats.rounding import Rounding
from flamia_ref.formats.scalar import E2M1, E4M3, E8M0, UE4M3

_SOURCE = "jax _src/cudnn/scaled_matmul_stablehlo.py, quantize"


_OUT_OF_CONTRACT = "devices that keep subnormals; blocks with a NaN, of which XLA makes what the number of rows decides"


def _mx(name: str, scale_values: tuple[tuple[int, float], ...], run: str) -> BlockFormat:
    return BlockFormat(
        name=name,
        element=E4M3,
        scale=E8M0,
        rule=ScaleRule.QUOTIENT,
        block=(1, 32),
        blocks=ROWS_OF_32,
        partial=PartialBlock.REFUSE,
        arithmetic=Arithmetic.INPUT,
        subnormals=Subnormals.FLUSH,
        quotient="amax * (1 / 448)",
        scale_rounding=Rounding.UP,
        nan=NanPolicy.MAXIMUM_NUMBER,
        nan_scale=E8M0.nan_code,
        narrow=(
            ("quotient", "amax / 448"),
            ("nan", NanPolicy.PROPAGATE),
            ("nan_scale", 0),
            ("nan_in_contract", True),
        ),
        infinity_scale=E8M0.nan_code,
        scale_values=scale_values,
        nan_codes=(0x7F, 0xFF, 0xFF),
        source=f"{_SOURCE}, {run}, {BLOCKS_ON_CPU}",
        version="0.10.2",
        evidence=Evidence.MEASURED,
        nan_in_contract=False,
        out_of_contract=_OUT_OF_CONTRACT,
    )


FORMATS = (
    # A scale of 2^-127 is flushed to zero, which elements are divided by; not so in one program.
    _mx("jax-mx-e4m3", ((0, 0.0), (255, math.inf)), "eager"),
    _mx("jax-mx-jit-e4m3", ((255, math.inf),), "under jax.jit"),
    BlockFormat(
        name="jax-nvfp4",
        element=E2M1,
        scale=UE4M3,
        rule=ScaleRule.QUOTIENT,
        block=(1, 16),
        blocks=ROWS_OF_16,
        partial=PartialBlock.REFUSE,
        subnormals=Subnormals.FLUSH,
        tensor_scale="finite(if_zero(tensor_amax, 1, tensor_amax / 2688), 1)",
        prepared="x * (1 / tensor_scale)",
        quotient="amax * (1 / 6)",
        scaled="x * (1 / scale)",
        nan=NanPolicy.PROPAGATE,
        nan_scale=UE4M3.nan_code,
        nan_codes=(0x08, 0x08, 0x08),
        source=f"{_SOURCE}, {TENSORS_ON_CPU}",
        version="0.10.2",
        evidence=Evidence.MEASURED,
        nan_in_contract=False,
        out_of_contract=_OUT_OF_CONTRACT,
    ),
)
