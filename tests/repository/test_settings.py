"""The settings that tests/conftest.py makes have arrived."""

import os
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest


def test_jax_refuses_to_promote_silently() -> None:
    with pytest.raises(jax.dtypes.TypePromotionError):
        jnp.zeros(1, np.uint8) + jnp.zeros(1, np.int32)


def test_jax_locks_its_compilation_cache() -> None:
    # It does so only where the cache has a size limit; two workers share the folder.
    assert jax.config.jax_compilation_cache_dir
    assert jax.config.jax_compilation_cache_max_size > 0


def test_hypothesis_sets_no_deadline() -> None:
    assert hypothesis.settings().deadline is None


@pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" not in os.environ or not Path("/proc/self/task").is_dir(),
    reason="only a worker of xdist on Linux counts its threads",
)
def test_a_worker_computes_on_one_thread() -> None:
    # The pool that XLA on CPU sizes by the number of cores; its name is that of jaxlib 0.10.
    jnp.zeros(1).block_until_ready()
    names = [task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir()]
    assert sum(name.startswith("tf_XLAEigen") for name in names) <= 1
