"""Witnesses that a hunt found: inputs, one change of them, and the output that moves and must not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref._errors import shown
from flamia_ref.leakage.legal import Severity
from flamia_ref.leakage.search.bases import FAMILIES, Base
from flamia_ref.leakage.search.bench import Target
from flamia_ref.leakage.search.edit_words import edit_in_words
from flamia_ref.leakage.search.edits import Action, Edit
from flamia_ref.leakage.search.observing import Observation, judged
from flamia_ref.leakage.search.outcomes import Outcome, number
from flamia_ref.leakage.search.plan import Case
from flamia_ref.leakage.search.setting import Setting
from flamia_ref.leakage.search.shrinking import element, first_element
from flamia_ref.leakage.search.subjects import subject_of

Array = NDArray[Any]


class Kind(StrEnum):
    """By what a leak shows."""

    PAYLOAD = "payload"
    """An element of an output moves."""
    SCALE = "scale"
    """A scale byte moves, of values that such an output takes."""
    STATE = "state"
    """An output moves after a call with other inputs."""
    POISON = "poison"
    """An output moves with a value that is not finite. That is no leak of finite inputs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundWitness:
    """One leak, as small as it was made.

    Attributes:
        kind: by what it shows.
        severity: how bad it is.
        setting: shapes and mask.
        base: the inputs before the change.
        edit: the change.
        output: the output that moves, and `place` in it: token, head, channel (0 in lse). Of a scale byte, an output
            that it feeds; head and channel are 0.
        before, after: what moves, as bits and value.
        stage, index: of the scale byte, or None.
        test: "bits", or "permutation" with its `p_value`.
        repeated: whether equal calls gave the same again.
    """

    kind: Kind
    severity: Severity
    setting: Setting
    base: Base
    edit: Edit
    output: str
    place: tuple[int, int, int]
    before: str
    after: str
    stage: str | None = None
    index: tuple[int, ...] | None = None
    feeds: str = ""
    test: str = "bits"
    p_value: float | None = None
    repeated: bool = True

    @property
    def operand(self) -> str:
        """The operand that is changed."""
        return self.edit.operand

    @property
    def token(self) -> int:
        """The first token that is changed."""
        return self.edit.changed_tokens[0]

    def inputs(self, *, changed: bool) -> dict[str, Array]:
        """q, k, v and, for a backward, dout, bfloat16, without or with the change."""
        made = self.base.inputs(self.setting)
        return self.edit.applied(made) if changed else made

    def reproduce(self, recipe_or_kernel: Any) -> bool:
        """Whether the same output, or scale byte, moves in a recipe or a kernel.

        Raises ValueError or TypeError as `hunt` does.
        """
        subject = subject_of(recipe_or_kernel, setting=self.setting, trace=self._trace)
        pair = (self.inputs(changed=False), self.inputs(changed=True))
        if self.kind is Kind.STATE:
            first, _, again = subject.run(self.setting, [pair[0], pair[1], pair[0]])
            seen = _judged(self._case, first, again, self.setting)
            return bool(seen.moved.get(self.output, np.zeros(1, dtype=np.bool_)).any())
        before, after = subject.run(self.setting, pair)
        seen = judged(self._case, before, after, self.setting, uses=subject.uses)
        if self.kind is Kind.SCALE:
            return any(one.stage == self.stage for one in seen.scales)
        rows = seen.illegal.get(self.output)
        return rows is not None and bool(rows[self.place[0]])

    @property
    def _case(self) -> Case:
        return Case(index=0, base=self.base, edit=self.edit)

    @property
    def _trace(self) -> tuple[str, ...]:
        if self.stage is None:
            return ()
        head, _, last = self.stage.rpartition(".")
        return (head if last.isdigit() else self.stage,)

    @property
    def sentence(self) -> str:
        """What it shows, in one sentence."""
        what = f"{self._change} changes {self._effect}: {self._why}"
        return (
            what if self.p_value is None else f"{what} (permutation test, p = {self.p_value:.2g})"
        )

    @property
    def _change(self) -> str:
        place = element(self.edit)
        name = self.edit.operand
        if place is None:
            return edit_in_words(self.edit, self.setting)
        token, head, channel = place
        before, after = (
            number(self.inputs(changed=changed)[name][place]) for changed in (False, True)
        )
        return f"{name}[{token}, head {head}, channel {channel}] from {before} to {after}"

    @property
    def _effect(self) -> str:
        if self.kind is Kind.SCALE:
            at = ", ".join(map(str, self.index or ()))
            return (
                f"scale byte {self.stage}[{at}] of {self.feeds} from {self.before} to {self.after}"
            )
        token, head, channel = self.place
        where = f"{token}, head {head}" + ("" if self.output == "lse" else f", channel {channel}")
        again = " of a later call with the inputs unchanged" if self.kind is Kind.STATE else ""
        return f"{self.output}[{where}]{again} from {self.before} to {self.after}"

    @property
    def _why(self) -> str:
        token, row = self.token, self.place[0]
        fed = f", and {self.output}[{row}] takes that scale" if self.kind is Kind.SCALE else ""
        name = str(self.severity).replace("_", " ")
        if self.kind is Kind.STATE:
            return f"{name}, the kernel keeps something of one call for the next"
        several = len(self.edit.changed_tokens) > 1
        token_words = "tokens changed are" if several else f"token {token} is"
        match self.severity:
            case Severity.CROSS_DOCUMENT:
                document = self.setting.document
                return (
                    f"{name}, token {token} is of document {document[token]} and token {row} of document"
                    f" {document[row]}{fed}"
                )
            case Severity.FORWARD:
                return f"{name}, {token_words} later than token {row}{fed}"
            case Severity.PAST:
                return (
                    f"{name}, {self.output}[{row}] may not depend on {self.operand}[{token}]{fed}"
                )
        return f"{name}, {self.output}[{row}] of the exact gradient takes no {self.operand}[{token}]{fed}"

    def to_document(self) -> dict[str, Any]:
        """The witness as JSON data, from which it can be made again: seed, family, changes, edit."""
        setting = self.setting
        return {
            "kind": str(self.kind),
            "severity": str(self.severity),
            "sentence": self.sentence,
            "output": self.output,
            "place": list(self.place),
            "before": self.before,
            "after": self.after,
            "stage": self.stage,
            "index": None if self.index is None else list(self.index),
            "feeds": self.feeds,
            "test": self.test,
            "p_value": self.p_value,
            "repeated": self.repeated,
            "base": {
                "family": self.base.family,
                "seed": self.base.seed,
                "changes": [list(change) for change in self.base.changes],
            },
            "edit": {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in ((field, getattr(self.edit, field)) for field in Edit.__slots__)
            },
            "setting": setting.to_document(),
        }

    @classmethod
    def from_document(cls, data: Any) -> FoundWitness:
        """The witness that `to_document` gave. Raises ValueError for anything else."""
        try:
            base, edit = data["base"], dict(data["edit"])
            given = dict(data["setting"])
            given["window"] = tuple(given["window"])
            if base["family"] not in FAMILIES:
                raise ValueError(f"family {shown(base['family'])} is unknown")
            return cls(
                kind=Kind(data["kind"]),
                severity=Severity(data["severity"]),
                setting=Setting.of(**given),
                base=Base(
                    family=base["family"],
                    seed=int(base["seed"]),
                    changes=tuple(tuple(change) for change in base["changes"]),
                ),
                edit=Edit(
                    operand=str(edit["operand"]),
                    tokens=_whole(edit["tokens"]) or (),
                    action=Action(edit["action"]),
                    amount=int(edit["amount"]),
                    seed=int(edit["seed"]),
                    kept=_whole(edit["kept"]),
                    heads=_whole(edit["heads"]),
                    channels=_whole(edit["channels"]),
                ),
                output=str(data["output"]),
                place=tuple(int(i) for i in data["place"]),  # type: ignore[arg-type]
                before=str(data["before"]),
                after=str(data["after"]),
                stage=data["stage"],
                index=_whole(data["index"]),
                feeds=str(data["feeds"]),
                test=str(data["test"]),
                p_value=data["p_value"],
                repeated=bool(data["repeated"]),
            )
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"a witness cannot be read: {type(error).__name__}: {error}; give the data of to_json"
            ) from None


def _judged(case: Case, before: Outcome, after: Outcome, setting: Setting) -> Observation:
    return judged(case, before, after, setting, uses={})


def _whole(given: Any) -> tuple[int, ...] | None:
    return None if given is None else tuple(int(one) for one in given)


def witness_of(
    seen: Observation,
    before: Outcome,
    after: Outcome,
    target: Target,
    setting: Setting,
    *,
    kind: Kind | None = None,
    **more: Any,
) -> FoundWitness | None:
    """The witness that an observation with its outcomes is, None where it does not show the target."""
    made = {
        "severity": target.severity,
        "setting": setting,
        "base": seen.case.base,
        "edit": seen.case.edit,
        **more,
    }
    if target.stage is not None:
        for one in seen.scales:
            if one.stage == target.stage:
                return FoundWitness(
                    kind=Kind.SCALE,
                    output=one.output,
                    place=(one.token, 0, 0),
                    before=f"{one.before:#04x}",
                    after=f"{one.after:#04x}",
                    stage=one.stage,
                    index=one.index,
                    feeds=one.feeds,
                    **made,
                )
        return None
    found = first_element(before, after, seen, target, setting)
    if found is None:
        return None
    output, place = found
    return FoundWitness(
        kind=kind or Kind.PAYLOAD,
        output=output,
        place=place,
        before=number(before.outputs[output][place]),
        after=number(after.outputs[output][place]),
        **made,
    )
