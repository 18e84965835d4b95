"""The text of a safeguards study."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from flamia_ref.leakage.safeguarding.alternatives import Alternative
from flamia_ref.leakage.safeguarding.points import Standing, StudyPoint
from flamia_ref.leakage.sharing.text import NAMES, columns

if TYPE_CHECKING:
    from flamia_ref.leakage.safeguarding.study_report import SafeguardsStudy


def describe(study: SafeguardsStudy) -> str:
    """Return the study as lines of text, without a newline at the end."""
    if not study.groups:
        return "\n".join(_setting(study))
    parts = (_setting(study), _alone(study), [""], _front(study), _others(study), _notes(study))
    return "\n".join(line for part in parts for line in part)


def _setting(study: SafeguardsStudy) -> Iterator[str]:
    yield f"{study.recipe.name}, evidence {study.recipe.label}: safeguards of the uses that leak"
    lengths = ", ".join(map(str, study.lengths))
    yield f"errors on {study.sample}: {lengths} tokens, head_dim {study.head_dim}{_mask(study)}"
    if not study.groups:
        yield "no use of it leaks, or has a safeguard that could be another one: there is nothing to choose"
        return
    for group in study.groups:
        yield f"group {group.name}: {', '.join(group.uses)}"
    if study.held:
        yield f"left as they are: {', '.join(study.held)}"


def _mask(study: SafeguardsStudy) -> str:
    text = ", causal" if study.causal else ", full"
    return text if study.window == (None, None) else f"{text}, window {study.window}"


def _errors(study: SafeguardsStudy) -> list[str]:
    return list(study.base.errors)


def _heading(study: SafeguardsStudy) -> list[str]:
    names = [NAMES[name] for name in _errors(study)]
    overall = ["all"] if len(names) > 1 else []
    return [*names, *overall, *(f"work {length}" for length in study.at), "bytes", "extra"]


def _figures(study: SafeguardsStudy, point: StudyPoint) -> list[str]:
    errors = [f"{point.errors[name]:.4f}" for name in _errors(study)]
    if len(errors) > 1:
        errors.append(f"{point.error:.4f}")
    work = [f"{100 * float(share):.2f}%" for share in point.work]
    return [*errors, *work, f"{point.kept:.1f}", f"{point.extra:+.1f}"]


def _alone(study: SafeguardsStudy) -> Iterator[str]:
    if not study.alone:
        return
    yield ""
    yield "each alternative alone, the other groups as they are:"
    rows: list[Sequence[str]] = [("group", "alternative", "own uses", *_heading(study), "")]
    reasons = []
    for one in study.alone:
        if one.point is None:
            rows.append((one.group, one.alternative, "not computed"))
            reasons.append(f"  {one.group}, {one.alternative}: {one.reason}")
            continue
        safe = "leak" if one.leaks else "safe"
        note = "" if one.left_out is None else f"left out: {one.left_out} is no worse"
        rows.append((one.group, one.alternative, safe, *_figures(study, one.point), note))
    yield from _table(rows)
    if reasons:
        yield "not computed:"
        yield from dict.fromkeys(reasons)


def _notes(study: SafeguardsStudy) -> Iterator[str]:
    """What the figures do not show by themselves."""
    kinds = {choice for point in study.points for choice in point.choices.values()}
    if Alternative.GUARDED in kinds or any(
        product.guarded for _, product in study.recipe.products()
    ):
        shares = ", ".join(
            f"{100 * float(share):.1f}% at {length}"
            for length, share in zip(study.at, study.guarded_at, strict=True)
        )
        yield (
            f"note: guarded blocks are {100 * float(study.guarded):.1f}% of the blocks with a visible pair here and"
            f" {shares} tokens: what they save of the error is less there"
        )
    if study.recipe.has_backward:
        yield (
            f"note: bytes are kept for the backward, a token and head of a document of {study.at[0]} tokens: copies of"
            " q, k and v, bfloat16 values for guarded blocks, out and lse"
        )
    if any(parts for point in study.points for parts in point.but_for.values()):
        yield "note: a name is of a recipe with the same six products; 'but for' names its parts that differ"
    if Alternative.STATIC in kinds:
        yield "note: a static scale holds values of up to 16 times the sample's largest; beyond that they saturate"


def _front(study: SafeguardsStudy) -> Iterator[str]:
    yield _counts(study)
    if study.missing:
        yield (
            f"NOT ALL MEASURED: {study.missing} more may be on the front, as {study.runs} runs were spent; allow more"
            " runs, or measure all"
        )
    front = study.front
    if not front:
        yield "no combination is legal: the front is empty"
        return
    yield "the front, in error, work and bytes together:"
    rows: list[Sequence[str]] = [("", "standing", *_heading(study), "safeguards")]
    rows += [_row(study, point, point.label) for point in front]
    yield from _table(rows)


def _row(study: SafeguardsStudy, point: StudyPoint, label: str) -> Sequence[str]:
    names = "".join(f" [{title}]" for title in point.titles)
    return (label, point.standing, *_figures(study, point), _choices(point) + names)


def _choices(point: StudyPoint) -> str:
    """What the groups are, the same of several groups together."""
    kinds: dict[Alternative, list[str]] = {}
    for group, choice in point.choices.items():
        kinds.setdefault(choice, []).append(group)
    changed = [
        f"{', '.join(groups)}: {choice}"
        for choice, groups in kinds.items()
        if choice is not Alternative.AS_IS
    ]
    return "; ".join(changed) or "as it is"


def _counts(study: SafeguardsStudy) -> str:
    leaking = study.possible - study.safe
    text = (
        f"{study.possible} combinations are computed, {leaking} of them with a use that leaks alone"
    )
    text += f"; of the {study.safe} others"
    if study.contradictory:
        text += f", {study.contradictory} contradict themselves, and"
    text += f" {study.considered} different legal ones were considered"
    if study.exhaustive:
        return f"{text}, all measured, in {study.runs} runs"
    return f"{text}, {study.measured} measured, in {study.runs} runs"


def _others(study: SafeguardsStudy) -> Iterator[str]:
    """Registered recipes that are points and not on the front."""
    rows = [_row(study, point, "") for point in study.points if point.names and not point.front]
    if rows:
        yield ""
        yield "registered recipes with the products of other points:"
        yield from _table([("", "standing", *_heading(study), "safeguards"), *rows])
    if any(point.standing is Standing.DISPUTED for point in study.points):
        yield "DISPUTED: structure and proof disagree; report it, one of them is wrong"


def _table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    rows = [[str(cell) for cell in row] for row in rows]
    width = max(map(len, rows))
    yield from (
        f"  {text}" for text in columns([[*row, *[""] * (width - len(row))] for row in rows])
    )
