"""Every adapter there is."""

import importlib

from flamia_ref.adapters.adapter import Adapter

LIBRARIES = (
    "cudnn",
    "flash_attention_4",
    "transformer_engine",
    "flashinfer",
    "sage_attention_3",
    "torch_sdpa",
    "jax_cudnn",
)
"""Modules of this package, one a library."""


def adapters() -> tuple[Adapter, ...]:
    """Every adapter, library by library. Imports no library."""
    found: list[Adapter] = []
    for name in LIBRARIES:
        found += importlib.import_module(f"flamia_ref.adapters.{name}").ADAPTERS
    return tuple(found)
