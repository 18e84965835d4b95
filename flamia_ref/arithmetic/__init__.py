"""What a machine computes: special functions, and float32 operations on bit patterns."""

from typing import TYPE_CHECKING

from flamia_ref._lazy import attach

if TYPE_CHECKING:
    from flamia_ref.arithmetic import float32 as float32
    from flamia_ref.arithmetic.special import SPECIAL_MODELS as SPECIAL_MODELS
    from flamia_ref.arithmetic.special import SpecialModel as SpecialModel
    from flamia_ref.arithmetic.special import exp2 as exp2
    from flamia_ref.arithmetic.special import log2 as log2
    from flamia_ref.arithmetic.special import reciprocal as reciprocal
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "float32": [],
            "special": ["SPECIAL_MODELS", "SpecialModel", "exp2", "log2", "reciprocal"],
        },
    )
