"""The JSON form of a report."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from flamia_ref.report.model import Report

SCHEMA = "flamia-ref report"
SCHEMA_VERSION = 2


def render(report: Report) -> str:
    """Return the report as indented JSON that ends with a newline.

    It has every field of `Report` and what it contains, and `status` and `passed` of the whole.
    Numbers that JSON has not (infinities) are strings.
    """
    document = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "status": report.status,
        "passed": report.passed,
        **_plain(report),
    }
    return json.dumps(document, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return repr(value)
    return value
