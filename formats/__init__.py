"""What a number is: scalar formats, rounding, block formats, scale rules, presets, layouts.

Arrays are numpy or JAX; results come back in the library of the input. Codes are unsigned integers.
"""

from typing import TYPE_CHECKING

from flamia_ref._lazy import attach

if TYPE_CHECKING:
    from flamia_ref.formats import layout as layout
    from flamia_ref.formats.bits import decode_bits as decode_bits
    from flamia_ref.formats.bits import encode_bits as encode_bits
    from flamia_ref.formats.block import Arithmetic as Arithmetic
    from flamia_ref.formats.block import BlockFormat as BlockFormat
    from flamia_ref.formats.block import Choice as Choice
    from flamia_ref.formats.block import NanPolicy as NanPolicy
    from flamia_ref.formats.block import PartialBlock as PartialBlock
    from flamia_ref.formats.block import ScaleRule as ScaleRule
    from flamia_ref.formats.block import Subnormals as Subnormals
    from flamia_ref.formats.block import TensorExtent as TensorExtent
    from flamia_ref.formats.block import ZeroSign as ZeroSign
    from flamia_ref.formats.block_tensors import BlockTensor as BlockTensor
    from flamia_ref.formats.blocks import encode_blocks as encode_blocks
    from flamia_ref.formats.blocks import quantize_bits as quantize_bits
    from flamia_ref.formats.contract import in_contract as in_contract
    from flamia_ref.formats.dequantizer import dequantize as dequantize
    from flamia_ref.formats.diagnosis.comparison import Boundaries as Boundaries
    from flamia_ref.formats.diagnosis.comparison import Comparison as Comparison
    from flamia_ref.formats.diagnosis.comparison import compare as compare
    from flamia_ref.formats.diagnosis.comparison import smallest as smallest
    from flamia_ref.formats.diagnosis.identification import Identification as Identification
    from flamia_ref.formats.diagnosis.identification import identify as identify
    from flamia_ref.formats.elements import value_bits as value_bits
    from flamia_ref.formats.encoding import decode as decode
    from flamia_ref.formats.encoding import encode as encode
    from flamia_ref.formats.error_measures import ErrorMeasures as ErrorMeasures
    from flamia_ref.formats.error_measures import QuantizationError as QuantizationError
    from flamia_ref.formats.error_measures import error as error
    from flamia_ref.formats.presets import PRESETS as PRESETS
    from flamia_ref.formats.quantizer import quantize as quantize
    from flamia_ref.formats.rounding import Overflow as Overflow
    from flamia_ref.formats.rounding import Rounding as Rounding
    from flamia_ref.formats.scalar import BF16 as BF16
    from flamia_ref.formats.scalar import E2M1 as E2M1
    from flamia_ref.formats.scalar import E2M3 as E2M3
    from flamia_ref.formats.scalar import E3M2 as E3M2
    from flamia_ref.formats.scalar import E4M3 as E4M3
    from flamia_ref.formats.scalar import E5M2 as E5M2
    from flamia_ref.formats.scalar import E8M0 as E8M0
    from flamia_ref.formats.scalar import FORMATS as FORMATS
    from flamia_ref.formats.scalar import FP16 as FP16
    from flamia_ref.formats.scalar import FP32 as FP32
    from flamia_ref.formats.scalar import TF32 as TF32
    from flamia_ref.formats.scalar import UE4M3 as UE4M3
    from flamia_ref.formats.scalar import ScalarFormat as ScalarFormat
    from flamia_ref.formats.scalar import Specials as Specials
    from flamia_ref.formats.scales import least_power as least_power
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "bits": ["decode_bits", "encode_bits"],
            "block": [
                "Arithmetic",
                "BlockFormat",
                "Choice",
                "NanPolicy",
                "PartialBlock",
                "ScaleRule",
                "Subnormals",
                "TensorExtent",
                "ZeroSign",
            ],
            "blocks": ["encode_blocks", "quantize_bits"],
            "contract": ["in_contract"],
            "diagnosis.comparison": ["Boundaries", "Comparison", "compare", "smallest"],
            "diagnosis.identification": ["Identification", "identify"],
            "elements": ["value_bits"],
            "encoding": ["decode", "encode"],
            "error_measures": ["ErrorMeasures", "QuantizationError", "error"],
            "layout": [],
            "presets": ["PRESETS"],
            "block_tensors": ["BlockTensor"],
            "dequantizer": ["dequantize"],
            "quantizer": ["quantize"],
            "rounding": ["Overflow", "Rounding"],
            "scalar": [
                "BF16",
                "E2M1",
                "E2M3",
                "E3M2",
                "E4M3",
                "E5M2",
                "E8M0",
                "FORMATS",
                "FP16",
                "FP32",
                "TF32",
                "UE4M3",
                "ScalarFormat",
                "Specials",
            ],
            "scales": ["least_power"],
        },
    )
