"""A certificate: which tokens each output may depend on, which of that is illegal, and what was taken for granted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flamia_ref.leakage.legal import Severity

SCHEMA = "flamia-ref leak certificate"
SCHEMA_VERSION = 1

_MOST_LINES = 12

_MORE = {
    "huge_plus_moderate": "scores stay far from a huge mask value",
    "zero_over_nonzero": "no divisor is 0",
}
"""What assumptions say beyond values that stay finite; the verdict itself has to say it."""


class Proof(StrEnum):
    """What an analysis shows."""

    PROVED = "proved"
    """No output depends on a token that it must not see, under the assumptions counted."""
    NOT_PROVED = "not_proved"
    """The program has a way from a token to an output that must not see it."""
    INCONCLUSIVE = "inconclusive"
    """So it seems, but primitives without a rule are in between, whose results are taken to depend on all they take."""


class Dependency(NamedTuple):
    """A token of an output that may depend on a token of an input."""

    output: str
    out_token: int
    input: str
    in_token: int


class Run(NamedTuple):
    """Illegal dependencies of one token of an output on the tokens `first` to `last` of an input."""

    output: str
    out_token: int
    input: str
    first: int
    last: int
    severity: Severity


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """The pairs of tokens of one output and one input.

    Attributes:
        output, input: their names.
        legal: pairs that may depend on each other.
        found: pairs for which the program has a way from one to the other.
        illegal: of those, the ones that are not legal.
        missing: legal pairs for which it has none.
    """

    output: str
    input: str
    legal: int
    found: int
    illegal: int
    missing: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Certificate:
    """What `prove` found. `str(certificate)` is its text.

    Attributes:
        subject: what was analysed: {"recipe": name, "data": the recipe} or {"function": "module:function"}.
        setting: lengths, heads, channels, mask, inputs' dtype, and where the gradients come from.
        strict: whether nothing was assumed of values.
        counts: pairs by output and input.
        runs: the illegal dependencies, tokens in a row together.
        assumptions: how often each was used, by its name, counted in elements.
        primitives: how many equations of each were met.
        unknown: those without a rule.
        program: the SHA-256 of the program's text, which changes with the version of JAX.
        versions: of this package, its numerics, and JAX.
    """

    subject: Mapping[str, Any]
    setting: Mapping[str, Any]
    strict: bool
    counts: tuple[Count, ...]
    runs: tuple[Run, ...]
    assumptions: Mapping[str, int]
    primitives: Mapping[str, int]
    unknown: Mapping[str, int]
    program: str
    versions: Mapping[str, Any]

    @property
    def legal(self) -> bool:
        """Whether there is no illegal dependency."""
        return not self.runs

    @property
    def exact(self) -> bool:
        """Whether the dependencies are the legal ones, none more and none missing."""
        return self.legal and not any(count.missing for count in self.counts)

    @property
    def verdict(self) -> Proof:
        """What the analysis shows."""
        if self.legal:
            return Proof.PROVED
        return Proof.INCONCLUSIVE if self.unknown else Proof.NOT_PROVED

    @property
    def illegal(self) -> list[Dependency]:
        """Every illegal dependency."""
        return [
            Dependency(run.output, run.out_token, run.input, token)
            for run in self.runs
            for token in range(run.first, run.last + 1)
        ]

    @property
    def severities(self) -> dict[Severity, int]:
        """How many illegal dependencies there are of each severity that occurs."""
        found: dict[Severity, int] = {}
        for run in self.runs:
            found[run.severity] = found.get(run.severity, 0) + run.last - run.first + 1
        return {severity: found[severity] for severity in Severity if severity in found}

    @property
    def exit_code(self) -> int:
        """0 if proved, or all that is illegal is of the severity "past"; 1 if not; 2 if inconclusive."""
        if set(self.severities) <= {Severity.PAST}:
            return 0
        return 2 if self.verdict is Proof.INCONCLUSIVE else 1

    def to_text(self) -> str:
        """Return the certificate for people."""
        return "\n".join(_text(self))

    def __str__(self) -> str:
        return self.to_text()

    def to_dict(self) -> dict[str, Any]:
        """The certificate as plain data."""
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "subject": dict(self.subject),
            "setting": dict(self.setting),
            "strict": self.strict,
            "verdict": str(self.verdict),
            "legal": self.legal,
            "exact": self.exact,
            "severities": {str(one): count for one, count in self.severities.items()},
            "counts": [
                {name: getattr(count, name) for name in Count.__slots__} for count in self.counts
            ],
            "illegal": [[*run[:-1], str(run.severity)] for run in self.runs],
            "assumptions": dict(self.assumptions),
            "primitives": dict(self.primitives),
            "unknown": dict(self.unknown),
            "program": self.program,
            "versions": dict(self.versions),
        }

    def to_json(self) -> str:
        """Return the certificate as JSON. "illegal" has a list a run: output, token, input, first and last token,
        severity."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"


def runs_of(
    output: str, input: str, illegal: NDArray[np.bool_], severity: NDArray[Any]
) -> list[Run]:
    """The illegal pairs [tokens of the output, tokens of the input] as runs of one severity each."""
    found = []
    for token in np.flatnonzero(illegal.any(axis=1)).tolist():
        row, kinds = illegal[token], severity[token]
        edges = np.flatnonzero(row)
        start = 0
        for place in range(1, len(edges) + 1):
            ends = place == len(edges) or edges[place] != edges[place - 1] + 1
            if ends or kinds[edges[place]] != kinds[edges[start]]:
                first, last = int(edges[start]), int(edges[place - 1])
                found.append(Run(output, token, input, first, last, kinds[first]))
                start = place
    return found


def _text(certificate: Certificate) -> list[str]:
    setting = certificate.setting
    lines = [f"{_subject(certificate)}: {_verdict(certificate)}"]
    lines += [f"  {text}" for text in _setting(setting)]
    lines += ["", *_table(certificate.counts)]
    if certificate.runs:
        lines += ["", *_examples(certificate)]
    lines += ["", *_granted(certificate)]
    return lines


def _subject(certificate: Certificate) -> str:
    from flamia_ref.attention import RECIPES

    subject = certificate.subject
    if "function" in subject:
        return str(subject["function"])
    name = str(subject["recipe"])
    if name in RECIPES and RECIPES[name].to_json() != subject["data"]:
        return f"{name} (NOT the registered recipe of that name)"
    return name


def _verdict(certificate: Certificate) -> str:
    names = list(dict.fromkeys(count.output for count in certificate.counts))
    outputs = names[0] if len(names) == 1 else f"each of {', '.join(names)}"
    if certificate.verdict is Proof.PROVED:
        tokens = "exactly the legal tokens" if certificate.exact else "legal tokens only"
        text = f"PROVED: {outputs} depends on {tokens}"
        if certificate.strict:
            return f"{text}, whatever the values"
        clauses = ["nothing that comes of the inputs is infinite or NaN"]
        clauses += [_MORE[one] for one in certificate.assumptions if one in _MORE]
        return f"{text}, where {', '.join(clauses)}; signs of zeros aside"
    total = sum(certificate.severities.values())
    kinds = ", ".join(f"{count} {severity}" for severity, count in certificate.severities.items())
    if certificate.verdict is Proof.INCONCLUSIVE:
        without = ", ".join(certificate.unknown)
        return (
            f"INCONCLUSIVE: {total} illegal dependencies ({kinds}), but {without} has no rule here and is taken to make"
            " everything of everything"
        )
    return f"NOT PROVED: {total} illegal dependencies ({kinds})"


def _setting(setting: Mapping[str, Any]) -> list[str]:
    lengths = ", ".join(map(str, setting["lengths"]))
    documents = f"documents of {lengths} tokens"
    if setting["lengths_k"] is not None:
        documents += f", of {', '.join(map(str, setting['lengths_k']))} keys"
    mask = "causal" if setting["causal"] else "full"
    if setting["window"] is not None:
        mask += f", window {setting['window']}"
    if setting["lengths_k"] is not None:
        mask += f", aligned {setting['alignment']}"
    channels = f"head_dim {setting['head_dim']}"
    if setting["value_dim"] != setting["head_dim"]:
        channels += f", value_dim {setting['value_dim']}"
    lines = [
        f"{documents}; {mask}; {setting['heads']} heads over {setting['kv_heads']}, {channels}"
    ]
    if setting["gradients"]:
        lines.append(f"gradients: {setting['gradients']}")
    return lines


def _table(counts: Sequence[Count]) -> list[str]:
    rows: list[tuple[str, ...]] = [("output <- input", "legal", "found", "illegal", "missing")]
    rows += [
        (
            f"{one.output} <- {one.input}",
            *(str(x) if x else "-" for x in (one.legal, one.found, one.illegal, one.missing)),
        )
        for one in counts
        if one.legal or one.found
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
        for row in rows
    ]


def _examples(certificate: Certificate) -> list[str]:
    lines, seen = [], set()
    for run in certificate.runs:
        kind = (run.output, run.input, run.severity)
        if kind in seen:
            continue
        seen.add(kind)
        tokens = (
            f"token {run.first}" if run.first == run.last else f"tokens {run.first} to {run.last}"
        )
        lines.append(
            f"  {run.severity}: {run.output} of token {run.out_token} may depend on {run.input} of {tokens}"
        )
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"  and {len(lines) - _MOST_LINES} kinds more"]
    return ["illegal, the first of each kind:", *lines]


def _granted(certificate: Certificate) -> list[str]:
    equations = sum(certificate.primitives.values())
    kinds = len(certificate.primitives)
    lines = [
        f"{equations} equations of {kinds} primitives; of the program as traced, not of how it is compiled"
    ]
    if "data" in certificate.subject:
        from flamia_ref.attention import Recipe

        label = Recipe.from_json(certificate.subject["data"]).label
        lines.append(
            f"the recipe itself has evidence {label}: that a kernel computes it is not proved"
        )
    if certificate.strict:
        lines.append("strict: nothing is assumed of values")
    else:
        lines.append("assumed of values:" + ("" if certificate.assumptions else " nothing"))
        lines += [f"  {name}: {count} elements" for name, count in certificate.assumptions.items()]
    lines += [f"no rule: {name}, {count} times" for name, count in certificate.unknown.items()]
    return lines
