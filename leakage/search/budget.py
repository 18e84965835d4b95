"""How many calls and how many seconds a hunt may still use."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Budget:
    """Calls of the kernel and seconds. None for no limit.

    Attributes:
        calls, seconds: what there is in all.
        used: calls so far.
    """

    calls: int | None = None
    seconds: float | None = None
    used: int = 0
    start: float = field(default_factory=time.monotonic)

    def take(self, wanted: int) -> int:
        """Use up to so many calls; how many there are."""
        granted = wanted if self.calls is None else max(0, min(wanted, self.calls - self.used))
        if self.seconds_left == 0:
            granted = 0
        self.used += granted
        return granted

    def give(self, calls: int) -> None:
        """Give back calls that were not made."""
        self.used -= calls

    @property
    def calls_left(self) -> int | None:
        """Calls that are left."""
        return None if self.calls is None else max(0, self.calls - self.used)

    @property
    def seconds_left(self) -> float | None:
        """Seconds that are left."""
        if self.seconds is None:
            return None
        return max(0.0, self.seconds - (time.monotonic() - self.start))

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    @property
    def spent(self) -> bool:
        """Whether nothing is left."""
        return self.calls_left == 0 or self.seconds_left == 0
