"""Fit the model of schedules, keep its constants, and write docs/schedule.md's tables."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flamia_ref.schedule.validation import Validation, validate  # noqa: E402

CONSTANTS = ROOT / "flamia_ref" / "schedule" / "published" / "constants.json"


def constants(found: Validation) -> str:
    """The file of constants."""
    rows = [
        {
            "gpu": one.group.gpu,
            "library": one.group.library,
            "version": one.group.version,
            "pass": one.group.launch.value,
            "format": one.group.format,
            "efficiency": round(one.constants.efficiency, 4),
            "overhead": round(one.constants.overhead),
            "spread": round(one.spread, 4),
        }
        for one in found.fits
    ]
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


if __name__ == "__main__":
    found = validate()
    CONSTANTS.write_text(constants(found), encoding="utf-8")
    print(found.to_text(cells=False))
