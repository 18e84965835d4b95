"""What is expected of a kernel, as a file says it: which tests are skipped or known to fail, and why."""

from __future__ import annotations

import fnmatch
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flamia_ref._errors import shown, unknown_name

if TYPE_CHECKING:
    from flamia_ref.golden.pack import Case

_LARGEST = 1 << 24


class Outcome(StrEnum):
    """What a file can say of a test."""

    SKIP = "skip"
    """It is not run."""
    XFAIL = "xfail"
    """It is known to fail: that it passes is a failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """What is expected of one test, and why."""

    outcome: Outcome
    reason: str


def read_expectations(path: str | os.PathLike[str], *, what: str) -> dict[str, Expectation]:
    """Read what is expected: a TOML file, or a JSON one if its name ends so, a table for each name::

        ["causal-*.flamia-mxfp8"]
        outcome = "xfail"  # or "skip"
        reason = "V is scaled along tokens"

    `what` says in errors what the names are of ("property", "case").

    Raises ValueError for a file that cannot be read, another outcome, and no reason.
    """
    where = Path(path)
    text = read_text(where)
    try:
        found: Any = json.loads(text) if where.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "JSON" if where.suffix == ".json" else "TOML"
        raise ValueError(f"{where} is not {kind}: {shown(str(error))}") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{where} holds {shown(found)}; it must have a table for each {what}")
    return {name: _expectation(where, name, entry) for name, entry in found.items()}


def read_text(path: Path) -> str:
    """Return the text of a file of at most 16 MiB. Raises ValueError where it cannot be read."""
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"{path} has more than {_LARGEST} bytes, which is no such file")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte {error.start}") from error


def fits(case: Case, pattern: str) -> bool:
    """Return whether a name or a glob means a case, by its name with or without that of the recipe."""
    return any(fnmatch.fnmatchcase(name, pattern) for name in (case.name, case.spec.name))


def chosen(cases: Iterable[Case], patterns: Iterable[str]) -> list[Case]:
    """Return the cases that names or globs mean, in the order of the pack.

    Raises ValueError where one of them means no case.
    """
    listed, wanted = list(cases), list(patterns)
    for pattern in wanted:
        if not any(fits(case, pattern) for case in listed):
            short = dict.fromkeys(case.spec.name for case in listed)
            raise unknown_name("case", pattern, [*(case.name for case in listed), *short])
    return [case for case in listed if any(fits(case, pattern) for pattern in wanted)]


def by_case(expected: Mapping[str, Expectation], cases: Iterable[Case]) -> dict[str, Expectation]:
    """Return what is expected of each case that a file names: by its name, else by the first glob that fits.

    Raises ValueError where a name or glob means no case.
    """
    listed = list(cases)
    chosen(listed, expected)
    found = {}
    for case in listed:
        names = [name for name in expected if fits(case, name)]
        if names:
            exact = [name for name in names if name in (case.name, case.spec.name)]
            found[case.name] = expected[(exact or names)[0]]
    return found


def _expectation(where: Path, name: str, entry: Any) -> Expectation:
    if not isinstance(entry, Mapping) or set(entry) != {"outcome", "reason"}:
        raise ValueError(f"{where}: {name} is {shown(entry)}; give outcome and reason")
    if entry["outcome"] not in list(Outcome):
        raise ValueError(f"{where}: {unknown_name('outcome', entry['outcome'], Outcome)} ({name})")
    reason = entry["reason"]
    if not isinstance(reason, str) or not reason.strip():
        raise ValueError(f"{where}: the reason of {name} is {shown(reason)}; say why")
    return Expectation(outcome=Outcome(entry["outcome"]), reason=reason)
