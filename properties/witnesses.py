"""Examples that random search all but misses, made by hand and tried first."""

from __future__ import annotations

from flamia_ref.properties.drawn import BLOCK, Edit, Example, Space


def witnesses(property: str, space: Space) -> tuple[Example, ...]:
    """The witnesses of a property, as far as the space has documents for them.

    For one scale of the P of several queries: rows of the second block of 32 weigh the keys of their own block 2^43
    times those of the first, until one row changes the sign of its q. The largest P of these rows and the first keys
    then goes up by as much, and the P of the other rows vanish there. Where tokens of v share a scale: one is 2^40
    times the others, as in https://github.com/NVIDIA/TransformerEngine/issues/3248.
    """
    found = []
    long = space.at_least(BLOCK + 2)
    if long and property in ("causality", "locality", "backward_legality"):
        last = min(long[0], 2 * BLOCK) - 1
        token = BLOCK if property == "locality" else last
        flip = Edit(operand="q", token=token, sign=-1)
        found.append(_of(property, space, long[0], "blocks", flip))
    several = space.at_least(2)
    if several and property == "causality":
        last = min(several[0], BLOCK) - 1
        found.append(
            _of(property, space, several[0], "ones", Edit(operand="v", token=last, exponent=40))
        )
    return tuple(found)


def _of(property: str, space: Space, length: int, family: str, edit: Edit) -> Example:
    return Example(
        property=property, lengths=(length,), family=family, edits=(edit,), **space.shape
    )
