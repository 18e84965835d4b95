"""What a machine computes: matrix instructions, special functions, float32 operations on bits."""

from typing import TYPE_CHECKING

from flamia_ref._lazy import attach

if TYPE_CHECKING:
    from flamia_ref.arithmetic import float32 as float32
    from flamia_ref.arithmetic import interval as interval
    from flamia_ref.arithmetic import reductions as reductions
    from flamia_ref.arithmetic.catalogue import INSTRUCTIONS as INSTRUCTIONS
    from flamia_ref.arithmetic.error_bounds import error_bound as error_bound
    from flamia_ref.arithmetic.error_bounds import matmul_error_bound as matmul_error_bound
    from flamia_ref.arithmetic.instructions import Instruction as Instruction
    from flamia_ref.arithmetic.instructions import Result as Result
    from flamia_ref.arithmetic.instructions import Scaling as Scaling
    from flamia_ref.arithmetic.instructions import Summation as Summation
    from flamia_ref.arithmetic.order import Order as Order
    from flamia_ref.arithmetic.products import fused_dot as fused_dot
    from flamia_ref.arithmetic.products import matmul as matmul
    from flamia_ref.arithmetic.products import matmul_bits as matmul_bits
    from flamia_ref.arithmetic.special import SPECIAL_MODELS as SPECIAL_MODELS
    from flamia_ref.arithmetic.special import SpecialModel as SpecialModel
    from flamia_ref.arithmetic.special import exp as exp
    from flamia_ref.arithmetic.special import exp2 as exp2
    from flamia_ref.arithmetic.special import log as log
    from flamia_ref.arithmetic.special import log2 as log2
    from flamia_ref.arithmetic.special import reciprocal as reciprocal
    from flamia_ref.arithmetic.special import tanh as tanh
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "float32": [],
            "catalogue": ["INSTRUCTIONS"],
            "instructions": ["Instruction", "Result", "Scaling", "Summation"],
            "interval": [],
            "error_bounds": ["error_bound", "matmul_error_bound"],
            "order": ["Order"],
            "products": ["fused_dot", "matmul", "matmul_bits"],
            "reductions": [],
            "special": [
                "SPECIAL_MODELS",
                "SpecialModel",
                "exp",
                "exp2",
                "log",
                "log2",
                "reciprocal",
                "tanh",
            ],
        },
    )
