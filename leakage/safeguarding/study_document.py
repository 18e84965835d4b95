"""The JSON form of a safeguards study."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from flamia_ref.leakage.safeguarding.points import Alone, StudyPoint

if TYPE_CHECKING:
    from flamia_ref.leakage.safeguarding.study_report import SafeguardsStudy

SCHEMA = "flamia-ref leak safeguards"
SCHEMA_VERSION = 1


def render(study: SafeguardsStudy) -> str:
    """Return the study as indented JSON that ends with a newline. Points on the front have their recipe in full."""
    places = {id(point): place for place, point in enumerate(study.points)}
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "recipe": study.recipe.name,
        "evidence": study.recipe.label,
        "sample": study.sample,
        "lengths": list(study.lengths),
        "head_dim": study.head_dim,
        "causal": study.causal,
        "window": list(study.window),
        "at": list(study.at),
        "groups": {group.name: list(group.uses) for group in study.groups},
        "held": list(study.held),
        "counts": {
            "possible": study.possible,
            "safe": study.safe,
            "contradictory": study.contradictory,
            "considered": study.considered,
            "measured": study.measured,
            "missing": study.missing,
            "runs": study.runs,
            "exhaustive": study.exhaustive,
        },
        "guarded": float(study.guarded),
        "guarded_at": [float(share) for share in study.guarded_at],
        "alone": [_alone(one, places) for one in study.alone],
        "points": [_point(point) for point in study.points],
        "front": [places[id(point)] for point in study.front],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _alone(one: Alone, places: dict[int, int]) -> dict[str, Any]:
    return {
        "group": one.group,
        "alternative": one.alternative,
        "computed": one.point is not None,
        "reason": one.reason,
        "leaks": one.leaks,
        "point": None if one.point is None else places[id(one.point)],
        "left_out": one.left_out,
    }


def _point(point: StudyPoint) -> dict[str, Any]:
    return {
        "label": point.label,
        "choices": dict(point.choices),
        "names": list(point.names),
        "but_for": {name: list(parts) for name, parts in point.but_for.items()},
        "standing": point.standing,
        "proven": point.proven,
        "illegal": dict(point.illegal),
        "errors": dict(point.errors),
        "error": point.error,
        "work": [float(share) for share in point.work],
        "work_exact": [str(share) for share in point.work],
        "kept": point.kept,
        "extra": point.extra,
        "front": point.front,
        "recipe": json.loads(point.recipe.to_json()) if point.front else None,
    }
