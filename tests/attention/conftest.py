"""Fixtures of the attention tests."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def uncached() -> Iterator[None]:
    """No persistent compilation cache: a user's program holds the function tables as constants, 128 MB to store."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()
