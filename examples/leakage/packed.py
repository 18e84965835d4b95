"""What the kernels here share: documents of a pack, array libraries, and packages that must be there."""

import importlib
import importlib.util
import itertools

import numpy as np


def documents(cu_seqlens):
    """The first token of each document that has any, and the one after its last."""
    offsets = [int(x) for x in cu_seqlens]
    return [(start, end) for start, end in itertools.pairwise(offsets) if end > start]


def visible(cu_seqlens, causal):
    """Which key each query sees, bool [tokens, tokens]: those of its document, up to itself if causal."""
    offsets = np.asarray(cu_seqlens)
    document = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    seen = document[:, None] == document[None, :]
    return seen & np.tri(len(seen), dtype=bool) if causal else seen


def namespace(x):
    """numpy for a numpy array, else JAX's."""
    return np if isinstance(x, np.ndarray) else importlib.import_module("jax.numpy")


def product(a, b):
    """a @ b in float32, also where a GPU would take fewer bits."""
    xp = namespace(a)
    return np.matmul(a, b) if xp is np else xp.matmul(a, b, precision="highest")


def needed(package):
    """A package that only some kernels need. Raises RuntimeError of one line where it is not installed."""
    if importlib.util.find_spec(package) is None:
        raise RuntimeError(
            f"this kernel needs {package}, which is not installed here; install it, or choose another kernel"
        )
    return importlib.import_module(package)
