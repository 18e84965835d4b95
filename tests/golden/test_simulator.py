"""The simulator as a kernel takes every keyword of the protocol, on numpy and on JAX."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flamia_ref.attention import RECIPES
from flamia_ref.golden.inputs import TENSORS
from flamia_ref.golden.simulation import simulate
from flamia_ref.golden.simulator import jax_kernel, numpy_kernel
from tests.golden.packs import RECIPE, spec

CASE = spec(
    lengths=(2, 0, 35),
    key_lengths=(5, 1, 33),
    alignment="top_left",
    window=(20, 0),
    softcap=4.0,
    sinks=(0.5, -1.0),
)


def results(kernel: Any) -> dict[str, np.ndarray]:
    inputs = {name: bits.view(ml_dtypes.bfloat16) for name, bits in CASE.inputs().items()}
    q, k, v, dout = (inputs[name] for name in TENSORS)
    found = kernel(
        q,
        k,
        v,
        cu_seqlens=CASE.cu_seqlens,
        cu_seqlens_k=CASE.cu_seqlens_k,
        causal=CASE.causal,
        alignment=CASE.alignment,
        window=CASE.window,
        softmax_scale=CASE.softmax_scale,
        softcap=CASE.softcap,
        sink=CASE.sink,
        dout=dout,
    )
    return {name: np.asarray(found[name]) for name in ("out", "lse", "dq", "dk", "dv", "dsink")}


@pytest.mark.parametrize(
    "kernel", [numpy_kernel, pytest.param(jax_kernel, marks=pytest.mark.nightly)]
)
def test_a_kernel_gives_what_the_pack_holds(kernel: Any) -> None:
    expected = simulate(CASE, RECIPES[RECIPE])
    for name, found in results(kernel).items():
        wanted = expected[name]
        if wanted.dtype == np.uint16:
            wanted = (wanted.astype(np.uint32) << 16).view(np.float32)
        assert np.asarray(found, np.float32).tobytes() == wanted.tobytes(), name


@pytest.mark.parametrize(
    "changes",
    [
        {"key_lengths": (35, 1, 33)},
        {"alignment": "bottom_right"},
        {"window": None},
        {"softcap": None},
        {"sinks": (0.5, -1.5)},
    ],
    ids=str,
)
def test_every_option_changes_the_results(changes: dict[str, Any]) -> None:
    from dataclasses import replace

    one, other = (simulate(case, RECIPES[RECIPE]) for case in (CASE, replace(CASE, **changes)))
    assert one["out"].tobytes() != other["out"].tobytes()
    assert one["dq"].tobytes() != other["dq"].tobytes()
