"""Shrinking a finding to one edit and one output element, in the simplest numbers that still show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from flamia_ref.leakage.search.bench import Bench, Target
from flamia_ref.leakage.search.edits import Action, Edit
from flamia_ref.leakage.search.observing import Observation
from flamia_ref.leakage.search.outcomes import Outcome, moved
from flamia_ref.leakage.search.plan import Case
from flamia_ref.leakage.search.setting import Setting
from flamia_ref.leakage.search.simplifications import Change, changed

_ONE = 0x3F80
_BIAS, _MANTISSA_BITS = 127, 7  # of bfloat16


def shrunk(case: Case, target: Target, bench: Bench) -> Case:
    """A simpler case that shows the same, as simple as the budget lets it become."""
    for step in (_fewer_tokens, _one_head, _one_channel, _a_value, _simple_base, _simple_value):
        case = step(case, target, bench)
    return _earlier(case, target, bench)


def _edited(case: Case, **changes: object) -> Case:
    return replace(case, edit=replace(case.edit, **changes))  # type: ignore[arg-type]


def _halved(
    case: Case,
    whole: tuple[int, ...],
    named: Callable[[tuple[int, ...]], Case],
    target: Target,
    bench: Bench,
    guesses: Sequence[int] = (),
) -> Case:
    """The case with as few of `whole` as show the target: guesses alone, then halves of what is left."""
    if len(whole) == 1:
        return named(whole)
    found = bench.first([named((guess,)) for guess in guesses], target)
    if found is not None:
        return found
    kept = whole
    while len(kept) > 1:
        middle = len(kept) // 2
        halves = [kept[:middle], kept[middle:]]
        found = bench.first([named(half) for half in halves], target)
        if found is None:
            break
        case = found
        kept = next(half for half in halves if named(half) == found)
    if 1 < len(kept) <= 8:
        found = bench.first([named((one,)) for one in kept], target)
        case = case if found is None else found
    return case


def _fewer_tokens(case: Case, target: Target, bench: Bench) -> Case:
    edit = case.edit

    def named(tokens: tuple[int, ...]) -> Case:
        # A swap needs its neighbours, and random numbers those that were drawn with them.
        if edit.action in (Action.SWAP, Action.RESAMPLE):
            return _edited(case, kept=tokens)
        return _edited(case, tokens=tokens)

    if len(edit.changed_tokens) == 1:
        return case
    return _halved(case, edit.changed_tokens, named, target, bench)


def _one_head(case: Case, target: Target, bench: Bench) -> Case:
    heads = case.edit.heads or tuple(range(_shape(case, bench)[1]))
    return _halved(case, heads, lambda some: _edited(case, heads=some), target, bench)


def _one_channel(case: Case, target: Target, bench: Bench) -> Case:
    channels = case.edit.channels or tuple(range(_shape(case, bench)[2]))
    return _halved(
        case, channels, lambda some: _edited(case, channels=some), target, bench, guesses=(0,)
    )


def _shape(case: Case, bench: Bench) -> tuple[int, int, int]:
    name = case.edit.operand
    return bench.setting.shape("q" if name == "dout" else name)


def element(edit: Edit) -> tuple[int, int, int] | None:
    """The one element that an edit changes: token, head, channel; None where it changes more."""
    parts = (edit.changed_tokens, edit.heads, edit.channels)
    if any(part is None or len(part) != 1 for part in parts):
        return None
    token, head, channel = (part[0] for part in parts if part is not None)
    return token, head, channel


def _a_value(case: Case, target: Target, bench: Bench) -> Case:
    """An edit of one element as the value that it gives it."""
    place = element(case.edit)
    if place is None or case.edit.action is Action.SET:
        return case
    inputs = case.base.inputs(bench.setting)
    bits = int(case.edit.applied(inputs)[case.edit.operand].view(np.uint16)[place])
    edit = replace(case.edit, tokens=(place[0],), kept=None, action=Action.SET, amount=bits, seed=0)
    return replace(case, edit=edit)


def _simple_base(case: Case, target: Target, bench: Bench) -> Case:
    """The same edit in simpler inputs."""
    operand = case.edit.operand
    others = [name for name in bench.setting.operands if name != operand]
    ones: list[tuple[Change, ...]] = [tuple(("fill", name, _ONE) for name in others)]
    ones += [(("fill", name, _ONE),) for name in others]
    case = _all_that_hold(case, ones, target, bench)
    case = _all_that_hold(case, [(("powers", name),) for name in others], target, bench)
    place = element(case.edit)
    if place is None:
        return case
    case = _all_that_hold(case, [(("channels", operand, place[2]),)], target, bench)
    kept = _witness_tokens(case, target, bench)
    few: list[Change] = [("tokens", operand, *sorted({one, place[0]})) for one in kept]
    case = _first_that_holds(case, [(change,) for change in few], target, bench)
    return _all_that_hold(case, [(("powers", operand),), (("positive", operand),)], target, bench)


def _witness_tokens(case: Case, target: Target, bench: Bench) -> list[int]:
    """Tokens whose values may be the ones that show: those that moved, and the first of their documents."""
    seen = bench.observe(case)
    if seen is None:
        return []
    rows = [int(np.flatnonzero(rows)[0]) for rows in seen.illegal.values()]
    starts = [int(bench.setting.cu_seqlens[bench.setting.document[row]]) for row in rows]
    return list(dict.fromkeys([*starts, *rows]))[:4]


def _changed(case: Case, changes: tuple[Change, ...], setting: Setting) -> Case | None:
    """The case with changed inputs, None where the changes do nothing."""
    before = case.base.inputs(setting)
    after = before
    for change in changes:
        after = changed(after, change)
    if all(np.array_equal(before[x].view(np.uint16), after[x].view(np.uint16)) for x in before):
        return None
    return replace(case, base=replace(case.base, changes=(*case.base.changes, *changes)))


def _first_that_holds(
    case: Case, tries: Sequence[tuple[Change, ...]], target: Target, bench: Bench
) -> Case:
    made = [_changed(case, changes, bench.setting) for changes in tries]
    found = bench.first([one for one in made if one is not None], target)
    return case if found is None else found


def _all_that_hold(
    case: Case, tries: Sequence[tuple[Change, ...]], target: Target, bench: Bench
) -> Case:
    for changes in tries:
        case = _first_that_holds(case, [changes], target, bench)
    return case


def power_bits(exponent: int) -> int:
    """The bits of 2^exponent in bfloat16, for normal ones."""
    return (exponent + _BIAS) << _MANTISSA_BITS


def _simple_value(case: Case, target: Target, bench: Bench) -> Case:
    """The smallest power of two, from 1 on, to which one element need be changed."""
    if case.edit.action is not Action.SET:
        return case
    bits = [power_bits(exponent) for exponent in (0, 4, 8, 12, 16, 20)]
    found = bench.first([_edited(case, amount=one) for one in [*bits, 0]], target)
    if found is None:
        return case
    exponent = (found.edit.amount >> _MANTISSA_BITS) - _BIAS
    if exponent <= 0:
        return found
    smaller = [power_bits(exponent - less) for less in (3, 2, 1)]
    better = bench.first([_edited(case, amount=one) for one in smaller], target)
    return found if better is None else better


def _earlier(case: Case, target: Target, bench: Bench) -> Case:
    """The same edit at an earlier token."""
    edit = case.edit
    if edit.action is not Action.SET or len(edit.tokens) != 1:
        return case
    (token,) = edit.tokens
    tries = [one for one in (0, 1, 2, 4, 8, 16, 32) if one < token]
    found = bench.first([_edited(case, tokens=(one,)) for one in tries], target)
    return case if found is None else found


def first_element(
    before: Outcome, after: Outcome, seen: Observation, target: Target, setting: Setting
) -> tuple[str, tuple[int, int, int]] | None:
    """The first output element that moves and must not: output, and token, head, channel."""
    case = seen.case
    tokens = np.array(case.edit.changed_tokens)
    for name in setting.outputs:
        if name not in seen.illegal:
            continue
        elements = moved(before.outputs[name], after.outputs[name])
        elements = elements & setting.forbidden(name, case.edit.operand, tokens)[:, None, None]
        for place in np.argwhere(elements):
            found = setting.severities(name, place[:1], case.edit.operand, tokens)
            if target.severity in found:
                token, head, channel = (int(i) for i in place)
                return name, (token, head, channel)
    return None
