"""All recipes by name."""

from collections.abc import Mapping

from flamia_ref._errors import Registry
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.recipes.attn_qat_nvfp4 import ATTN_QAT_NVFP4
from flamia_ref.attention.recipes.bf16_fa4 import BF16_FA4
from flamia_ref.attention.recipes.cudnn_mxfp8 import CUDNN_MXFP8, CUDNN_MXFP8_PV_BF16
from flamia_ref.attention.recipes.cudnn_mxfp8_reference import CUDNN_MXFP8_REFERENCE
from flamia_ref.attention.recipes.cutlass_fp8 import CUTLASS_FP8
from flamia_ref.attention.recipes.flamia_mxfp8 import FLAMIA_MXFP8, FLAMIA_MXFP8_UNGUARDED
from flamia_ref.attention.recipes.flamia_mxfp8_folded import FLAMIA_MXFP8_FOLDED
from flamia_ref.attention.recipes.flamia_nvfp4_fp8 import FLAMIA_NVFP4_FP8, FLAMIA_NVFP4_FP8_UE4M3
from flamia_ref.attention.recipes.fp8_fa3 import FP8_FA3
from flamia_ref.attention.recipes.fp8_fa4 import FP8_FA4
from flamia_ref.attention.recipes.sage3 import SAGE3_NVFP4

_ALL = (
    ATTN_QAT_NVFP4,
    BF16_FA4,
    CUDNN_MXFP8,
    CUDNN_MXFP8_PV_BF16,
    CUDNN_MXFP8_REFERENCE,
    CUTLASS_FP8,
    FLAMIA_MXFP8,
    FLAMIA_MXFP8_FOLDED,
    FLAMIA_MXFP8_UNGUARDED,
    FLAMIA_NVFP4_FP8,
    FLAMIA_NVFP4_FP8_UE4M3,
    FP8_FA3,
    FP8_FA4,
    SAGE3_NVFP4,
)

RECIPES: Mapping[str, Recipe] = Registry("recipe", ((recipe.name, recipe) for recipe in _ALL))
"""Every recipe by name, read-only."""
