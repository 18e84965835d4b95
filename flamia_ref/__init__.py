"""FLAMIA-ref: a bit-exact reference for low-precision attention, and the tools to check kernels.

Everything is imported on first use. Start at `flamia_ref.golden` to check a kernel, at
`flamia_ref.attention` to run a recipe, at `flamia_ref.formats` to encode numbers.
"""

from typing import TYPE_CHECKING

from flamia_ref._lazy import attach

__version__ = "0.1.0"

if TYPE_CHECKING:
    from flamia_ref import arithmetic as arithmetic
    from flamia_ref import attention as attention
    from flamia_ref import evidence as evidence
    from flamia_ref import formats as formats
    from flamia_ref import golden as golden
    from flamia_ref import leakage as leakage
    from flamia_ref import packing as packing
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "arithmetic": [],
            "attention": [],
            "evidence": [],
            "formats": [],
            "golden": [],
            "leakage": [],
            "packing": [],
        },
    )
