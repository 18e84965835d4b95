"""Presets against the recordings of their libraries (tests/oracles/quantizers), block by block.

What is compared is all that a recording has, exactly: scale codes, element codes or values, the
tensor scale, the input after its Hadamard transform. What a recording does not show of its library:

- Transformer Engine's are of its reference in Python, whose zeros have no sign, as its kernels'
  have, and which takes NaN for something else (its presets say so: `nan_in_contract`).
- Bit 7 of a UE4M3 code means nothing: the format has no sign, and NaN is 0x7f or 0xff.
- Where gfloat raised there is nothing to compare: a NaN, and an element format without one.
- JAX takes the tensor scale from its caller. Where that was subnormal the preset has the zero that
  JAX's own operations make of it.
- Quark and microxcaling give values in the type of x. Quark's scale, recorded for `even`, is a float;
  of a block whose values are all NaN it may be any.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from flamia_ref.formats import (
    PRESETS,
    UE4M3,
    BlockFormat,
    BlockTensor,
    dequantize,
    in_contract,
    quantize,
)
from flamia_ref.formats.hadamard import transformed
from flamia_ref.formats.scalar import BF16, FP32
from tests.formats.stored import Arrays, inputs, oracle, presets

DTYPES = ("f32", "bf16")
Blocks = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One recording in one input type beside its preset.

    Attributes:
        recording, preset, dtype: what was compared; dtype as in the keys of the recording.
        tags: what each block, or each tensor, of the inputs is for.
        recorded: where the library gave something.
        inside: where the preset claims to equal it.
        differs: where the two differ in any bit. All three bool, one a block, in the same shape.
    """

    recording: str
    preset: str
    dtype: str
    tags: npt.NDArray[Any]
    recorded: Blocks
    inside: Blocks
    differs: Blocks

    @property
    def compared(self) -> int:
        """Blocks that the claim is made for."""
        return int((self.recorded & self.inside).sum())

    @property
    def outside(self) -> int:
        """Blocks out of contract."""
        return int((self.recorded & ~self.inside).sum())

    @property
    def wrong(self) -> int:
        """Blocks in contract that differ."""
        return int(self._wrong.sum())

    @property
    def wrong_tags(self) -> list[str]:
        """What these are for."""
        return sorted(
            set(self.tags[self._wrong.any(axis=tuple(range(1, self._wrong.ndim)))].tolist())
        )

    @property
    def differing_outside(self) -> int:
        """Blocks out of contract that differ."""
        return int((self.recorded & ~self.inside & self.differs).sum())

    @property
    def _wrong(self) -> Blocks:
        return self.recorded & self.inside & self.differs


def compare(recording: str, dtype: str, *, preset: BlockFormat | None = None) -> Comparison:
    """A recording of a quantizer beside its preset, or beside another format.

    Args:
        recording: one of the keys of `stored.presets()`.
        dtype: "f32" or "bf16", with "_jit" behind where there is such.
        preset: in place of the one that the table names.
    """
    block_format = PRESETS[presets()[recording]] if preset is None else preset
    recorded = oracle(recording)
    x, tags = values(recording, dtype.removesuffix("_jit"))
    # A tensor at a time: each has its own amax.
    tensors = [x] if x.ndim == 2 else list(x)
    made = [quantize(one, block_format) for one in tensors]
    kept = [in_contract(one, block_format) for one in tensors]
    of_rows = made[0].block[0]  # recordings repeat the scale of a square block for each of its rows
    inside, scales = (
        np.repeat(part[0] if x.ndim == 2 else np.stack(part), of_rows, axis=-2)
        for part in (kept, [tensor.scales for tensor in made])
    )
    differs = _differing_elements(made, recorded, dtype, block_format, x)
    differs = differs.reshape((*scales.shape, -1)).any(axis=-1)
    differs |= _differing_scales(scales, recorded, dtype, block_format)
    differs |= _differing_tensor(made, recorded, dtype, block_format, x)
    shown = recorded.get(f"ok_{dtype}")
    there = np.ones(inside.shape, bool) if shown is None else shown[:, None]
    return Comparison(
        recording=recording,
        preset=block_format.name,
        dtype=dtype,
        tags=tags,
        recorded=there,
        inside=inside,
        differs=differs,
    )


def values(recording: str, dtype: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """What a recording was made from, [blocks, 32] or [tensors, 32, 64], and what each is for."""
    # qwix quantized the blocks for mx as tensors of two NVFP4 blocks a row.
    kind = "nv" if recording.startswith("nvfp4") and "qwix" not in recording else "mx"
    bits = inputs()[f"{kind}_{dtype}_bits"]
    return bits.view(np.float32 if dtype == "f32" else ml_dtypes.bfloat16), inputs()[f"{kind}_tags"]


def _differing_elements(
    made: list[BlockTensor],
    recorded: Arrays,
    dtype: str,
    block_format: BlockFormat,
    x: npt.NDArray[Any],
) -> Blocks:
    if f"dequant_f32_bits_{dtype}" in recorded:
        with np.errstate(over="ignore", invalid="ignore"):
            found = dequantize(made[0]).astype(x.dtype).astype(np.float32)
        wanted = recorded[f"dequant_f32_bits_{dtype}"]
        nan = np.isnan(found) & np.isnan(wanted.view(np.float32))
        return (found.view(np.uint32) != wanted) & ~nan
    codes = np.stack([tensor.codes for tensor in made]).reshape(x.shape)
    wanted = recorded[f"element_codes_{dtype}"]
    differs: Blocks = codes != wanted
    if block_format.name.startswith("te-nvfp4"):
        differs &= ((codes | wanted) & np.uint8(7)) != 0  # zeros of whatever sign
    return differs


def _differing_scales(
    scales: npt.NDArray[Any], recorded: Arrays, dtype: str, block_format: BlockFormat
) -> Blocks:
    if f"scale_codes_{dtype}" in recorded:
        mask = np.uint8(0x7F if block_format.scale is UE4M3 else 0xFF)
        wanted = recorded[f"scale_codes_{dtype}"].reshape(scales.shape)
        return (scales & mask) != (wanted & mask)
    wanted = recorded.get(f"scale_f32_bits_{dtype}")
    if wanted is None:
        return np.zeros(scales.shape, bool)
    found = block_format.scale.table()[scales].astype(np.float32)
    wanted = wanted.reshape(scales.shape)
    return (found.view(np.uint32) != wanted) & ~np.isnan(found)


def _differing_tensor(
    made: list[BlockTensor],
    recorded: Arrays,
    dtype: str,
    block_format: BlockFormat,
    x: npt.NDArray[Any],
) -> Any:
    """What differs about a tensor as a whole, to broadcast against its blocks."""
    differs: Any = np.zeros((), bool)
    scales = recorded.get(f"global_scale_bits_{dtype}")
    if scales is not None and block_format.has_tensor_scale:
        found = np.array([tensor.tensor_scale for tensor in made], np.float32)
        nan = np.isnan(found) & np.isnan(scales.view(np.float32))
        differs = ((found.view(np.uint32) != scales) & ~nan)[:, None, None]
    turned = recorded.get(f"rht_f32_bits_{dtype}")
    if turned is not None:
        wide = x.astype(np.float32).view(np.uint32)
        assert block_format.signs is not None
        source = FP32 if dtype == "f32" else BF16
        found = np.stack([transformed(one, block_format.signs, source) for one in wide])
        nan = np.isnan(found.view(np.float32)) & np.isnan(turned.view(np.float32))
        columns = (found != turned) & ~nan
        differs = differs | columns.reshape((*x.shape[:-1], -1, 16)).any(axis=-1)
    return differs
