"""Making a failing example simpler than Hypothesis leaves it: one edit, of one channel, of an early token, and small.

Hypothesis takes one thing away at a time, and stays with two edits where one of them has to grow for the other to go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from flamia_ref.properties.drawn import Edit, Example

_STEPS = (1, 4, 8, 15, 20, 30, 40)  # exponents of an edit, by size
_MOST_TRIES = 60


def simplified(fails: Callable[[Example], bool], example: Example) -> Example:
    """The simplest example found that fails as the given one does, in at most 60 tries."""
    left = _MOST_TRIES
    found = True
    while found:
        found = False
        for candidate in simpler(example):
            if not left:
                return example
            left -= 1
            if fails(candidate):
                example, found = candidate, True
                break
    return example


def simpler(example: Example) -> Iterator[Example]:
    """Examples that are simpler than one in one respect: fewer edits, one channel, an earlier token, less change."""
    if len(example.edits) > 1:
        for edit in example.edits:
            for changed in (edit, *_larger(edit)):
                yield replace(example, edits=(changed,))
    elif example.edits:
        yield from (replace(example, edits=(edit,)) for edit in _smaller(example.edits[0], example))


def _larger(edit: Edit) -> Iterator[Edit]:
    if edit.poison is None and edit.exponent:
        way = 1 if edit.exponent > 0 else -1
        yield from (replace(edit, exponent=way * n) for n in _STEPS if n > abs(edit.exponent))


def _smaller(edit: Edit, example: Example) -> Iterator[Edit]:
    if edit.channel != 0:
        yield replace(edit, channel=0)
    for token in example.tokens()[:2]:
        if token < edit.token:
            yield replace(edit, token=token)
    if edit.exponent and edit.sign < 0:
        yield replace(edit, sign=1)
    way = 1 if edit.exponent > 0 else -1
    for step in _STEPS:
        if step < abs(edit.exponent):
            yield replace(edit, exponent=way * step)
