"""The order in which the tiles of a launch are taken, and by whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Counts = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Every tile of a launch once.

    Attributes:
        places: places of the tiles in the work, in the order in which they are taken.
        sm: the multiprocessor of each, in the same order; None where whoever is free takes the next one.
    """

    places: Counts
    sm: Counts | None = None

    def __post_init__(self) -> None:
        count = len(self.places)
        seen = np.zeros(count, dtype=np.bool_)
        inside = (self.places >= 0) & (self.places < count)
        seen[self.places[inside]] = True
        if not seen.all():
            raise ValueError(f"an order of {count} tiles must have each of them once")
        if self.sm is not None and len(self.sm) != count:
            raise ValueError(f"{len(self.sm)} multiprocessors for {count} tiles; give one a tile")
