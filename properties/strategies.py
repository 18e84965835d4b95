"""Hypothesis strategies: what kernels and formats are tested on, drawn as small integers and made from them.

Every strategy draws a few integers and names, from the simplest to the most complex, and makes arrays from them by
integers alone: an example is the same on every machine, is small in a report, and shrinks to the plainest case. Arrays
of floats are never drawn element by element.
"""

from flamia_ref.properties.cases import attention_inputs, examples
from flamia_ref.properties.numbers import (
    bfloat16_bits,
    block_data,
    code_arrays,
    codes,
    float32_bits,
    ties,
)
from flamia_ref.properties.packed import cu_seqlens, cuts, documents, edits, masks
from flamia_ref.properties.variants import recipes, varied_recipes

__all__ = [
    "attention_inputs",
    "bfloat16_bits",
    "block_data",
    "code_arrays",
    "codes",
    "cu_seqlens",
    "cuts",
    "documents",
    "edits",
    "examples",
    "float32_bits",
    "masks",
    "recipes",
    "ties",
    "varied_recipes",
]
