"""What quantizing costs: `error`, of each element, of each block and of all."""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref.formats.block import BlockFormat
from flamia_ref.formats.block_tensors import BlockTensor
from flamia_ref.formats.dequantizer import dequantize
from flamia_ref.formats.encoding import as_matrices, decode, source_bits
from flamia_ref.formats.hadamard import transformed
from flamia_ref.formats.quantizer import quantize
from flamia_ref.formats.scalar import BF16, FP16, FP32, ScalarFormat

SCHEMA = "flamia-ref quantization error"
SCHEMA_VERSION = 1

_PART = 1 << 17  # elements that are measured at once, to keep temporaries small
_WORST = 8  # blocks in `to_json`
_SOURCES = {"bfloat16": BF16, "float16": FP16}

Floats = npt.NDArray[np.float64]
Place = tuple[slice, slice, slice]  # matrices, rows, columns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ErrorMeasures:
    """The error of blocks, arrays of one shape, or of all of them together, numbers.

    An element counts where it and its value are finite. `saturated`, `flushed` and `subnormal` are
    of those; `nan`, `infinite` and `lost` are the others.

    Attributes:
        counted: elements that count.
        signal: sum of squares of x, in float64.
        noise: sum of squares of the error, in float64.
        largest: largest magnitude of the error; 0 where no element counts.
        saturated: elements beyond the largest value under their scale, where that is not 0.
        flushed: elements that are not 0 and have the value 0, by their code or their scale.
        subnormal: elements with a subnormal code: exponent field 0, mantissa not 0.
        nan: elements that are NaN.
        infinite: elements that are infinite.
        lost: finite elements whose value is NaN or infinite, by their code or their scale.
    """

    counted: Any
    signal: Any
    noise: Any
    largest: Any
    saturated: Any
    flushed: Any
    subnormal: Any
    nan: Any
    infinite: Any
    lost: Any

    @property
    def rms(self) -> Any:
        """Root of the mean square of the error; NaN where no element counts."""
        with np.errstate(invalid="ignore"):
            return np.sqrt(np.divide(self.noise, self.counted))

    @property
    def snr_db(self) -> Any:
        """10 log10(signal / noise), in dB: infinite without noise, NaN where no element counts."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = 10 * np.log10(np.divide(self.signal, self.noise))
        without_noise = np.where(np.equal(self.counted, 0), np.nan, np.inf)
        return np.where(np.equal(self.noise, 0), without_noise, ratio)[()]

    def __getitem__(self, index: Any) -> "ErrorMeasures":
        """The measures of some of the blocks."""
        return ErrorMeasures(**{name: array[index] for name, array in self._fields()})

    def _fields(self) -> Iterator[tuple[str, Any]]:
        for field in dataclasses.fields(self):
            yield field.name, getattr(self, field.name)

    def _together(self) -> "ErrorMeasures":
        """The measures of all the blocks together."""
        found: dict[str, Any] = {
            name: array.sum(dtype=np.float64 if array.dtype == np.float64 else np.int64).item()
            for name, array in self._fields()
        }
        found["largest"] = self.largest.max(initial=0.0).item()
        return ErrorMeasures(**found)

    def to_dict(self) -> dict[str, int | float | str]:
        """The measures of one block, or of all together, for JSON: NaN and infinities in words."""
        given = dict(self._fields()) | {"rms": self.rms, "snr_db": self.snr_db}
        plain = {name: np.asarray(value).item() for name, value in given.items()}
        return {name: value if np.isfinite(value) else str(value) for name, value in plain.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizationError:
    """The error of a tensor in a block format. Its measures are numpy, whatever x is.

    Attributes:
        tensor: x as it was quantized.
        elements: value less x, float64 [..., rows, columns]; NaN for elements that do not count.
        blocks: the measures of each block, arrays of the shape of the scales.
        total: the measures of all blocks together, numbers.
    """

    tensor: BlockTensor
    elements: Floats
    blocks: ErrorMeasures
    total: ErrorMeasures

    def to_json(self) -> str:
        """The measures of the whole as JSON, and those of the eight blocks of the largest rms error."""
        rms = self.blocks.rms
        worst = np.argsort(-rms, axis=None, kind="stable")[:_WORST]  # NaN comes last
        places = [tuple(map(int, np.unravel_index(place, rms.shape))) for place in worst]
        document = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "format": self.tensor.format.name,
            "block": list(self.tensor.block),
            "shape": list(self.elements.shape),
            "blocks": list(rms.shape),
            "total": self.total.to_dict(),
            "worst_blocks": [
                {"index": list(place), **self.blocks[place].to_dict()} for place in places
            ],
        }
        return json.dumps(document, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def error(
    x: Array,
    preset: str | BlockFormat,
    *,
    block: Any = None,
    tensor_amax: Any = None,
) -> QuantizationError:
    """The error that x has in a block format: of each element, of each block, and of all.

    A value is what `dequantize` gives in float64, so the product of its parts, exact, but for
    formats that divide by a tensor scale: there the quotient is rounded to float64. The error of an
    element is that less x, rounded to float64.

    Args:
        x, preset, block, tensor_amax: as in `quantize`. Where the format transforms x first
            (`signs`), the errors are those of the transformed x, in the type of x.

    Returns:
        A `QuantizationError`. It takes some 11 bytes an element, and temporaries of some MB.

    Raises:
        TypeError: for traced arrays, whose values are not known, and as `quantize` does.
        ValueError: as `quantize` does.
    """
    if _backend.is_traced(x):
        raise TypeError("error counts elements on the host; call it outside jit, on x itself")
    x = as_matrices(x, "error")
    tensor = quantize(x, preset, block=block, tensor_amax=tensor_amax)
    return _Measured(_host(tensor), _backend.host(x)).result(tensor)


def _host(tensor: BlockTensor) -> BlockTensor:
    """The tensor with numpy arrays of three axes: matrices, rows, columns."""
    matrices = int(np.prod(tensor.codes.shape[:-2], dtype=np.int64))
    codes, scales = (
        _backend.host(array).reshape((matrices, *array.shape[-2:]))
        for array in (tensor.codes, tensor.scales)
    )
    scale = tensor.tensor_scale
    if scale is not None:
        scale = _backend.host(scale)
        rows = scale.shape[-2] if scale.ndim > 1 else 1
        scale = np.broadcast_to(scale, (*tensor.codes.shape[:-2], rows, 1))
        scale = scale.reshape((matrices, rows, 1))
    return dataclasses.replace(tensor, codes=codes, scales=scales, tensor_scale=scale)


class _Measured:
    """A tensor and x, measured a part at a time. Parts consist of whole blocks."""

    def __init__(self, tensor: BlockTensor, x: npt.NDArray[Any]) -> None:
        self.tensor = tensor
        self.x = x.reshape(tensor.codes.shape)
        self.source: ScalarFormat = _SOURCES.get(x.dtype.name, FP32)
        self.elements = np.empty(tensor.codes.shape)
        floats = {"signal", "noise", "largest"}
        self.found = {
            field.name: np.zeros(
                tensor.scales.shape, np.float64 if field.name in floats else np.int32
            )
            for field in dataclasses.fields(ErrorMeasures)
        }

    def result(self, tensor: BlockTensor) -> QuantizationError:
        for place in self.parts():
            self.measure(place)
        shape = tensor.scales.shape
        blocks = ErrorMeasures(**{name: array.reshape(shape) for name, array in self.found.items()})
        return QuantizationError(
            tensor=tensor,
            elements=self.elements.reshape(tensor.codes.shape),
            blocks=blocks,
            total=blocks._together(),
        )

    def parts(self) -> Iterator[Place]:
        """Matrices, rows of blocks and columns of blocks of each part."""
        matrices, down, across = self.tensor.scales.shape
        size = self.tensor.block[0] * self.tensor.block[1]
        wide = max(1, min(across, _PART // size))
        high = max(1, min(down, _PART // (size * wide)))
        deep = max(1, min(matrices, _PART // (size * wide * high)))
        for i in range(0, matrices, deep):
            for j in range(0, down, high):
                for k in range(0, across, wide):
                    yield slice(i, i + deep), slice(j, j + high), slice(k, k + wide)

    def measure(self, blocks: Place) -> None:
        """Fill in the measures of some blocks."""
        rows, columns = self.tensor.block
        place = (
            blocks[0],
            slice(blocks[1].start * rows, blocks[1].stop * rows),
            slice(blocks[2].start * columns, blocks[2].stop * columns),
        )
        part = self.part(blocks, place)
        x, values = self.part_of_x(place), dequantize(part, np.float64)
        finite = np.isfinite(x)
        counts = finite & np.isfinite(values)
        with np.errstate(invalid="ignore"):
            error = np.where(counts, values - x, np.nan)
        self.elements[place] = error
        largest = self.largest(part)
        magnitude = np.where(counts, np.abs(x), 0.0)
        error = np.where(counts, np.abs(error), 0.0)
        if self.tensor.format.tensor_divides and part.tensor_scale is not None:
            # Exact: the quotient `largest / tensor_scale` is not.
            with np.errstate(invalid="ignore"):  # 0 by an infinite one is not beyond
                beyond = magnitude * part.tensor_scale.astype(np.float64) > largest
        else:
            beyond = magnitude > largest
        measures = {
            "counted": counts,
            "signal": magnitude * magnitude,
            "noise": error * error,
            "saturated": beyond & (largest != 0),
            "flushed": (magnitude != 0) & (values == 0),
            "subnormal": counts & self.subnormal(part.codes),
            "nan": np.isnan(x),
            "infinite": np.isinf(x),
            "lost": finite & ~counts,
        }
        for name, measure in measures.items():
            self.found[name][blocks] = self.in_blocks(measure).sum(
                axis=(2, 4), dtype=self.found[name].dtype
            )
        self.found["largest"][blocks] = self.in_blocks(error).max(axis=(2, 4), initial=0.0)

    def part(self, blocks: Place, place: Place) -> BlockTensor:
        scale = self.tensor.tensor_scale
        if scale is not None:
            scale = scale[place[:2]] if scale.shape[1] > 1 else scale[place[0]]
        return dataclasses.replace(
            self.tensor,
            codes=self.tensor.codes[place],
            scales=self.tensor.scales[blocks],
            tensor_scale=scale,
        )

    def part_of_x(self, place: Place) -> Floats:
        x = self.x[place]
        signs = self.tensor.format.signs
        if signs is not None:
            bits = source_bits(x if self.source is not FP32 else x.astype(np.float32))
            x = _backend.from_bits(transformed(bits, signs, self.source), np.float32)
        with np.errstate(invalid="ignore"):  # a signalling NaN
            return x.astype(np.float64)

    def largest(self, part: BlockTensor) -> Floats:
        """Largest value under the scale of each element, before a division by the tensor scale."""
        scales = decode(part.scales, part.format.scale, np.float64)
        spread = np.repeat(np.repeat(scales, part.block[0], 1), part.block[1], 2)
        largest = part.format.element.max * spread[:, : part.codes.shape[1], : part.codes.shape[2]]
        if part.tensor_scale is not None and not part.format.tensor_divides:
            largest = largest * part.tensor_scale.astype(np.float64)
        return np.asarray(largest)

    def subnormal(self, codes: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        element = self.tensor.format.element
        magnitude = codes & (element.code_mask & ~element.sign_code)
        smallest_normal = 1 << (element.mantissa_bits + element.padding_bits)
        return np.asarray((magnitude != 0) & (magnitude < smallest_normal))

    def in_blocks(self, elements: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """[matrices, down, rows, across, columns], partial blocks filled with zeros."""
        rows, columns = self.tensor.block
        matrices, height, width = elements.shape
        down, across = -(-height // rows), -(-width // columns)
        if (down * rows, across * columns) != (height, width):
            filling = ((0, 0), (0, down * rows - height), (0, across * columns - width))
            elements = np.pad(elements, filling)
        return elements.reshape((matrices, down, rows, across, columns))
