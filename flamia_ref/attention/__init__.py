"""Attention over packed documents by recipes, to the last bit, and in float64."""

from typing import TYPE_CHECKING

from flamia_ref._lazy import attach

if TYPE_CHECKING:
    from flamia_ref.attention import consistency as consistency
    from flamia_ref.attention import float64 as float64
    from flamia_ref.attention.attribution import Attribution as Attribution
    from flamia_ref.attention.backward_pass import backward as backward
    from flamia_ref.attention.differentiable import attention as attention
    from flamia_ref.attention.error_sums import ErrorSums as ErrorSums
    from flamia_ref.attention.forward_pass import forward as forward
    from flamia_ref.attention.given_operands import operands_from as operands_from
    from flamia_ref.attention.knobs import Gradient as Gradient
    from flamia_ref.attention.knobs import Schedule as Schedule
    from flamia_ref.attention.knobs import Softmax as Softmax
    from flamia_ref.attention.knobs import Tiles as Tiles
    from flamia_ref.attention.measured_error import AttentionError as AttentionError
    from flamia_ref.attention.measured_error import error as error
    from flamia_ref.attention.memory import BytesKept as BytesKept
    from flamia_ref.attention.memory import bytes_kept as bytes_kept
    from flamia_ref.attention.prepared import Prepared as Prepared
    from flamia_ref.attention.prepared import prepare as prepare
    from flamia_ref.attention.prepared import prepare_dout as prepare_dout
    from flamia_ref.attention.product import Operand as Operand
    from flamia_ref.attention.product import Product as Product
    from flamia_ref.attention.product import Use as Use
    from flamia_ref.attention.protection import Safeguard as Safeguard
    from flamia_ref.attention.protection import safeguards as safeguards
    from flamia_ref.attention.recipe import Recipe as Recipe
    from flamia_ref.attention.recipes import RECIPES as RECIPES
    from flamia_ref.attention.results import Backward as Backward
    from flamia_ref.attention.results import Forward as Forward
    from flamia_ref.attention.staged import Preprocessed as Preprocessed
    from flamia_ref.attention.staged import backward_from_operands as backward_from_operands
    from flamia_ref.attention.staged import forward_from_operands as forward_from_operands
    from flamia_ref.attention.staged import preprocess as preprocess
    from flamia_ref.attention.stages import backward_stages as backward_stages
    from flamia_ref.attention.stages import forward_stages as forward_stages
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "consistency": [],
            "float64": [],
            "attribution": ["Attribution"],
            "backward_pass": ["backward"],
            "differentiable": ["attention"],
            "forward_pass": ["forward"],
            "error_sums": ["ErrorSums"],
            "measured_error": ["AttentionError", "error"],
            "memory": ["BytesKept", "bytes_kept"],
            "prepared": ["Prepared", "prepare", "prepare_dout"],
            "product": ["Operand", "Product", "Use"],
            "protection": ["Safeguard", "safeguards"],
            "given_operands": ["operands_from"],
            "knobs": ["Gradient", "Schedule", "Softmax", "Tiles"],
            "recipe": ["Recipe"],
            "recipes": ["RECIPES"],
            "results": ["Backward", "Forward"],
            "staged": [
                "Preprocessed",
                "backward_from_operands",
                "forward_from_operands",
                "preprocess",
            ],
            "stages": ["backward_stages", "forward_stages"],
        },
    )
