"""Named block formats: what real libraries and standards do, bit for bit."""

from flamia_ref._errors import Registry
from flamia_ref.formats.block import BlockFormat
from flamia_ref.formats.libraries import (
    compressed_tensors,
    cudnn,
    deepgemm,
    gfloat,
    jax,
    kernels,
    microxcaling,
    modelopt,
    quark,
    qwix,
    standards,
    torchao,
    transformer_engine,
    triton_kernels,
    vllm,
)

_LIBRARIES: tuple[tuple[BlockFormat, ...], ...] = (
    compressed_tensors.FORMATS,
    cudnn.FORMATS,
    deepgemm.FORMATS,
    gfloat.FORMATS,
    jax.FORMATS,
    kernels.FORMATS,
    microxcaling.FORMATS,
    modelopt.FORMATS,
    quark.FORMATS,
    qwix.FORMATS,
    standards.FORMATS,
    torchao.FORMATS,
    transformer_engine.FORMATS,
    triton_kernels.FORMATS,
    vllm.FORMATS,
)

PRESETS = Registry(
    "preset",
    sorted((preset.name, preset) for library in _LIBRARIES for preset in library),
)
