"""Checking a certificate that somebody else made: read strictly, recomputed, compared entry by entry."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flamia_ref import kernels
from flamia_ref._errors import line, shown
from flamia_ref.attention import Recipe
from flamia_ref.attention.data import once
from flamia_ref.leakage.certificate import SCHEMA, SCHEMA_VERSION, Certificate
from flamia_ref.leakage.proof import Progress, prove

_CLAIMS = ("verdict", "legal", "exact", "severities", "counts", "illegal", "assumptions", "unknown")
"""What must come out the same. Which primitives were met, and the program's digest, change with the version of JAX."""

_ARGUMENTS = (
    "lengths",
    "lengths_k",
    "heads",
    "kv_heads",
    "head_dim",
    "value_dim",
    "causal",
    "window",
    "alignment",
    "softmax_scale",
    "softcap",
    "sink",
    "dtype",
    "backward",
)
_FIELDS = (
    "schema",
    "schema_version",
    "subject",
    "setting",
    "strict",
    *_CLAIMS,
    "primitives",
    "program",
    "versions",
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Verification:
    """What came of recomputing a certificate. `str(verification)` is its text.

    Attributes:
        claimed: the certificate's data.
        found: the certificate made anew.
        differences: the entries that differ, with what was claimed and what was found.
        same_program: whether the traced program is the same to the letter.
    """

    claimed: Mapping[str, Any]
    found: Certificate
    differences: tuple[tuple[str, Any, Any], ...]
    same_program: bool

    @property
    def holds(self) -> bool:
        """Whether every claim came out the same."""
        return not self.differences

    @property
    def exit_code(self) -> int:
        """0 if the certificate holds, 1 if not."""
        return 0 if self.holds else 1

    def to_text(self) -> str:
        """Return the outcome for people."""
        if self.holds:
            lines = [f"HOLDS: made anew, it says the same: {self.found.verdict}"]
        else:
            lines = ["DOES NOT HOLD: made anew, it says otherwise"]
            for name, claimed, found in self.differences:
                lines.append(f"  {name}: claimed {shown(claimed)}, found {shown(found)}")
        claimed, here = dict(self.claimed["versions"]), dict(self.found.versions)
        if claimed != here:
            lines.append(f"made with {shown(claimed)}, here {shown(here)}")
        if not self.same_program:
            lines.append("the traced program is another one, as that of another version of JAX is")
        lines += ["", self.found.to_text()]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.to_text()

    def to_json(self) -> str:
        """Return the outcome as JSON."""
        document = {
            "schema": "flamia-ref leak verification",
            "schema_version": 1,
            "holds": self.holds,
            "same_program": self.same_program,
            "differences": [
                {"entry": name, "claimed": claimed, "found": found}
                for name, claimed, found in self.differences
            ],
            "found": self.found.to_dict(),
        }
        return json.dumps(document, indent=1, allow_nan=False) + "\n"


def verify(text: str, *, progress: Progress | None = None) -> Verification:
    """Recompute the certificate that `text` holds as JSON, and compare.

    A recipe is taken from the certificate, whole; a function is imported by its name "module:function".

    Raises ValueError for what is no certificate of this schema, and as `prove` does.
    """
    data = _read(text)
    setting, subject = data["setting"], data["subject"]
    what = _subject(subject)
    try:
        found = prove(
            what,
            strict=data["strict"],
            progress=progress,
            **{name: setting[name] for name in _ARGUMENTS},
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"the certificate cannot be made anew: {line(str(error))}") from error
    anew = json.loads(found.to_json())
    if _canonical(anew["subject"]) != _canonical(subject):
        raise ValueError(
            f"the certificate is of {shown(subject)}, made anew of {shown(anew['subject'])}"
        )
    same_program = data["program"] == anew["program"]
    compared = ("setting", "strict", *_CLAIMS, *(("primitives",) if same_program else ()))
    differences = tuple(
        (name, data[name], anew[name])
        for name in compared
        if _canonical(data[name]) != _canonical(anew[name])
    )
    return Verification(
        claimed=data, found=found, differences=differences, same_program=same_program
    )


def _canonical(value: Any) -> str:
    """JSON text, in which True is not 1."""
    return json.dumps(value, sort_keys=True)


def _read(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text, object_pairs_hook=once)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the certificate is not JSON: {line(str(error))}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"the file is no certificate: its schema must be {SCHEMA!r}")
    version = data.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ValueError(
            f"the certificate has schema_version {shown(version)}; this version reads"
            f" {SCHEMA_VERSION}, read it with the version that wrote it"
        )
    for expected, given in ((set(_FIELDS), set(data)),):
        if expected != given:
            wrong = sorted(expected ^ given)
            raise ValueError(
                f"the certificate lacks fields, or has unknown ones: {shown(', '.join(wrong))}"
            )
    setting = data["setting"]
    if not isinstance(setting, dict) or set(setting) != {*_ARGUMENTS, "gradients"}:
        raise ValueError(
            f"the certificate's setting must have {', '.join(_ARGUMENTS)} and gradients"
        )
    kinds = {"strict": bool, "versions": dict, "subject": dict, "program": str, "primitives": dict}
    for name, kind in kinds.items():
        if not isinstance(data[name], kind):
            raise ValueError(f"the certificate's {name} is {shown(data[name])}, no {kind.__name__}")
    return data


def _subject(subject: Mapping[str, Any]) -> Recipe | Callable[..., Any]:
    if set(subject) == {"recipe", "data"}:
        try:
            return Recipe.from_json(subject["data"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"the certificate's recipe: {line(str(error))}") from error
    if set(subject) == {"function"} and isinstance(subject["function"], str):
        return kernels.load(subject["function"])
    raise ValueError(
        "the certificate's subject must be a recipe and its data, or a function as module:function"
    )
