"""The JSON form of a report on capacity."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from flamia_ref.leakage.information.report import SCHEMA, SCHEMA_VERSION

if TYPE_CHECKING:
    from flamia_ref.leakage.information.report import CapacityReport

MEANINGS = {
    "severities.row": "bound: bits of a row (one token, one head) of any output, for every finite input; 0 is a proof;"
    " null: no bound is known",
    "severities.rows": "the same of each output that can receive something",
    "uses.row": "bound: bits of a row by this use alone, for every finite input; 0 is a proof",
    "uses.source_mean": "of the sample, on average: bits of the elements of one token jointly; no bound of a row",
    "uses.element_any": "bound: bits of one element, for every finite bfloat16 element",
    "uses.element_mean": "bound of the sample's elements, on average",
    "uses.element_most": "bound of the sample's elements, the largest",
    "uses.growths": "bound of the sample's elements, whose block's amax is raised up to its 2^powers-fold",
    "entropies.low": "lower bound: with 95 % confidence, of this prefix and family",
    "entropies.plugin": "observation: entropy of the outcomes drawn",
    "entropies.corrected": "observation: the same, corrected for its bias",
    "entropies.high": "observation: upper end of a bootstrap interval; no bound",
    "entropies.leaks": "proof of a leak where true",
    "probes.gain": "observation: bits that one model gained on held-out samples, and their standard error",
    "probes.differing": "proof of a leak where above 0",
}
"""What each number is: a bound, a lower bound, an observation or a proof."""


def render(report: CapacityReport) -> str:
    """Return the report as indented JSON that ends with a newline."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "recipe": report.recipe,
        "evidence": report.evidence,
        "settings": dataclasses.asdict(report.settings),
        "meanings": MEANINGS,
        "proved": report.proved,
        "leaks": report.leaks,
        "severities": [
            {
                "severity": one.severity,
                "row": one.row,
                "unbounded": one.unbounded,
                "uses": list(one.uses),
                "rows": [dataclasses.asdict(row) for row in one.rows],
                "largest_low": max((e.entropy.low for e in report.of(one.severity)), default=None),
                "seen": any(e.leaks for e in report.of(one.severity)),
            }
            for one in report.severities
        ],
        "uses": [
            {
                **{
                    name: getattr(one, name)
                    for name in one.__slots__
                    if name not in ("illegal", "growths")
                },
                "legal": one.legal,
                "severities": list(one.severities),
                "growths": [dataclasses.asdict(growth) for growth in one.growths],
            }
            for one in report.uses
        ],
        "entropies": [
            {
                "drawn": one.drawn,
                "family": one.family,
                "output": one.output,
                "severities": list(one.severities),
                "rows": one.rows,
                "leaks": one.leaks,
                "saturated": one.entropy.saturated,
                **dataclasses.asdict(one.entropy),
            }
            for one in report.entropies
        ],
        "probes": [dataclasses.asdict(one) for one in report.probes],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"
