"""The JSON form has every field, and only what JSON knows."""

import json
from dataclasses import fields

from flamia_ref.report import CaseResult, Report, TensorResult
from tests.report import examples


def read(report: Report) -> dict:
    def refused(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(report.to_json(), parse_constant=refused)


def test_every_field_is_there() -> None:
    report = examples.mixed()
    document = read(report)
    assert (document["schema"], document["schema_version"]) == ("flamia-ref report", 2)
    assert (document["status"], document["passed"]) == ("bit mismatch", False)
    assert {one.name for one in fields(Report)} <= document.keys()
    case = document["cases"][1]
    assert case.keys() == {one.name for one in fields(CaseResult)}
    assert case["consistent"] is False
    assert case["diagnoses"] == [
        {
            "mistake": "scale-off-by-one",
            "sentence": "one scale byte of V is too large by one",
            "name": "v.scales",
            "explained": 9,
            "failing": 10,
        }
    ]
    scales, out = case["tensors"][1], case["tensors"][3]
    assert scales.keys() == {one.name for one in fields(TensorResult)}
    assert scales["steps"] == {"1": 7, "2": 2, "NaN": 1}
    assert scales["heat_map"] == {
        "rows": "tokens",
        "columns": "head_dim",
        "row_size": 32,
        "column_size": 16,
        "counts": [[4, 1, 2, 3], [0, 0, 0, 0]],
        "sizes": [[4, 4, 4, 4], [4, 4, 0, 0]],
    }
    assert out["envelope"] == {"relative": 5.12e-4, "ambiguous": 77, "unbounded": 0}
    assert out["inside"] == 9000
    assert document["environment"]["device"] == "NVIDIA H200"


def test_what_json_has_not_is_text() -> None:
    document = read(examples.hostile(5))
    tensor = document["cases"][0]["tensors"][0]
    assert tensor["largest"] == "nan"
    assert tensor["envelope"]["relative"] == "inf"
    assert tensor["name"].startswith(examples.HOSTILE)
