"""GPUs as data: how many multiprocessors, how fast each part of them is, how we know."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from flamia_ref._errors import Registry

N = TypeVar("N", int, float)


class Certainty(StrEnum):
    """How a figure is known: measured by the source; told by the driver; said by the vendor; derived from others by
    arithmetic; assumed, of a neighbour's or a rule of thumb."""

    MEASURED = "measured"
    DRIVER = "driver"
    VENDOR = "vendor"
    DERIVED = "derived"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Quantity(Generic[N]):
    """A figure, whence it comes, and how sure that is."""

    value: N
    source: str
    certainty: Certainty


@dataclass(frozen=True, kw_only=True, slots=True)
class GPU:
    """A GPU.

    Attributes:
        name: as in results.
        sms: streaming multiprocessors that the driver reports.
        clock: hertz, the highest that is seen in runs: what a kernel gets is lower, and is in the fitted efficiency.
        tensor_bf16, tensor_fp8, tensor_fp4: dense multiplications and additions a clock and multiprocessor, each
            counted as one operation; None where the GPU has no such instruction.
        exp2: special functions a clock and multiprocessor.
        conversions: float32 values a clock and multiprocessor converted to 8 or 16 bits.
        float32: lanes.
        shared_bytes: bytes of shared memory a clock and multiprocessor.
        memory: bytes a second of device memory.
        l2_bytes: of the L2 cache.
    """

    name: str
    sms: Quantity[int]
    clock: Quantity[float]
    tensor_bf16: Quantity[int]
    tensor_fp8: Quantity[int]
    tensor_fp4: Quantity[int] | None
    exp2: Quantity[int]
    conversions: Quantity[int]
    float32: Quantity[int]
    shared_bytes: Quantity[int]
    memory: Quantity[float]
    l2_bytes: Quantity[int]


_QRC = "ademeure/QuickRunCUDA b300_clean"
_CFE = "NVIDIA/cudnn-frontend"
_PEAK = f"{_CFE} benchmark/attention_training/results, 2026-09-28, column peak_mma_tflops"
_RATES = f"{_CFE} pull request 314, rate table"
_VERDA = "verda.com/blog/gb300-nvl72-architecture"


def _measured(value: N, source: str) -> Quantity[N]:
    return Quantity(value, source, Certainty.MEASURED)


def _driver(value: N, source: str) -> Quantity[N]:
    return Quantity(value, source, Certainty.DRIVER)


def _vendor(value: N, source: str) -> Quantity[N]:
    return Quantity(value, source, Certainty.VENDOR)


def _derived(value: N, source: str) -> Quantity[N]:
    return Quantity(value, source, Certainty.DERIVED)


def _assumed(value: N, source: str) -> Quantity[N]:
    return Quantity(value, source, Certainty.ASSUMED)


def _blackwell(
    name: str,
    sms: Quantity[int],
    clock: Quantity[float],
    exp2: Quantity[int],
    memory: Quantity[float],
    measured: bool,
) -> GPU:
    """What SM100 and SM103 share; `measured`: it was measured on this chip, and is taken over for the other."""
    of = _measured if measured else _assumed
    return GPU(
        name=name,
        sms=sms,
        clock=clock,
        tensor_bf16=_vendor(8192, _RATES),
        tensor_fp8=_vendor(16384, _RATES),
        tensor_fp4=of(32768, f"{_QRC}/06_tensor_cores.md, of a B300"),
        exp2=exp2,
        conversions=of(64, f"{_QRC}/F2FP_DEEP_DIVE.md, of a B300"),
        float32=of(128, f"{_QRC}/16_power_clock.md, of a B300"),
        shared_bytes=of(128, f"{_QRC}/02_shmem.md, of a B300"),
        memory=memory,
        l2_bytes=_driver(
            132644864, f"pytorch/ao pull request 4002, of a B200; {_QRC}/03_caches.md, of a B300"
        ),
    )


_EXP2_SM100 = _measured(16, f"{_CFE} 0341681, python/cudnn/sdpa/fwd/config_sm100.py")
_EXP2_SM103 = _measured(32, f"{_QRC}/F2FP_DEEP_DIVE.md; {_CFE} 0341681, config_sm100.py")

GPUS = Registry[GPU](
    "GPU",
    (
        (gpu.name, gpu)
        for gpu in (
            _blackwell(
                "B200",
                _driver(148, "pytorch/ao pull request 4002; QwenLM/FlashQLA pull request 41"),
                _driver(1.965e9, "sgl-project/sglang pull request 28460"),
                _EXP2_SM100,
                _derived(
                    7.67e12, "pytorch/ao pull request 4002: 7680 bit at 3996 MHz, twice a clock"
                ),
                False,
            ),
            _blackwell(
                "B300",
                _driver(148, f"{_QRC}, of a B300 SXM6 AC"),
                _driver(2.032e9, f"{_QRC}/16_power_clock.md"),
                _EXP2_SM103,
                _vendor(7.7e12, _VERDA),
                True,
            ),
            _blackwell(
                "GB200",
                _driver(152, f"{_CFE} pull request 314"),
                _derived(2.062e9, f"{_PEAK}: 2568 of 152 multiprocessors at 8192"),
                _EXP2_SM100,
                _vendor(7.7e12, _VERDA),
                False,
            ),
            _blackwell(
                "GB300",
                _driver(152, "facebookexperimental/triton pull request 2768"),
                _derived(2.07e9, f"{_PEAK}: 2578 of 152 multiprocessors at 8192"),
                _EXP2_SM103,
                _vendor(8.0e12, _VERDA),
                True,
            ),
            GPU(
                name="H200",
                sms=_driver(132, f"{_CFE} pull request 650"),
                clock=_derived(1.98e9, f"{_PEAK}: 1071 of 132 multiprocessors at 4096"),
                tensor_bf16=_vendor(4096, f"{_CFE} pull request 650"),
                tensor_fp8=_vendor(8192, f"{_CFE} pull request 650"),
                tensor_fp4=None,
                exp2=_assumed(
                    16, "special functions of earlier chips; FA4 paper, arXiv:2603.05451"
                ),
                conversions=_assumed(64, f"{_QRC}/F2FP_DEEP_DIVE.md, of a B300"),
                float32=_vendor(128, "NVIDIA, H100 architecture"),
                shared_bytes=_vendor(128, "NVIDIA, H100 architecture"),
                memory=_vendor(4.8e12, "NVIDIA, H200 data sheet"),
                l2_bytes=_driver(62914560, "torch device properties of an H200: 60 MB"),
            ),
        )
    ),
)
