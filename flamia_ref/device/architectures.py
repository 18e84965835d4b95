"""GPU architectures that can be probed, and the names of the models that describe them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flamia_ref._errors import Registry


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One compilation target.

    Attributes:
        name: as nvcc calls it: "sm_90a".
        capability: the compute capability of its devices.
        nvcc: the first CUDA release whose nvcc knows it.
        model: prefix of the instructions in `INSTRUCTIONS` that describe it: "sm90".
        own_model: whether the model was made for this architecture, not carried over from a sister.
        was_run: whether the authors of this package have run its probes on a device.
    """

    name: str
    capability: str
    nvcc: tuple[int, int]
    model: str
    own_model: bool = True
    was_run: bool = False

    @property
    def number(self) -> int:
        """Ten times the number in the name, as the CUDA sources compare it: 900."""
        return int(self.capability.replace(".", "")) * 10


ARCHITECTURES: Mapping[str, Architecture] = Registry(
    "architecture",
    (
        (architecture.name, architecture)
        for architecture in (
            Architecture(name="sm_80", capability="8.0", nvcc=(11, 1), model="sm80"),
            Architecture(name="sm_89", capability="8.9", nvcc=(11, 8), model="sm89"),
            Architecture(name="sm_90a", capability="9.0", nvcc=(12, 0), model="sm90", was_run=True),
            Architecture(name="sm_100a", capability="10.0", nvcc=(12, 8), model="sm100"),
            Architecture(
                name="sm_103a", capability="10.3", nvcc=(12, 9), model="sm100", own_model=False
            ),
            Architecture(name="sm_120a", capability="12.0", nvcc=(12, 8), model="sm120"),
            Architecture(
                name="sm_121a", capability="12.1", nvcc=(12, 9), model="sm120", own_model=False
            ),
        )
    ),
)
"""Every architecture by name, read-only."""


def of_capability(capability: str) -> Architecture | None:
    """The architecture of a device's compute capability ("9.0"), or None for one without probes."""
    for architecture in ARCHITECTURES.values():
        if architecture.capability == capability:
            return architecture
    return None
