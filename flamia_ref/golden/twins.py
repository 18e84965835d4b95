"""Twins: two cases that differ in a few tokens, and the results that may not show it.

What may depend on what follows from the mask alone. Row i of out and of dQ is made of query i and of
the keys and values that it sees, dQ of dO i besides; lse of no value. Row j of dK is made of what
makes out and dQ of the rows that see key j, row j of dV of the same without the values.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flamia_ref.golden.case_fields import Rows, Twin
from flamia_ref.golden.cases import CaseSpec

Tensor = npt.NDArray[np.generic]

# Inputs by the results that they have no part in.
_NO_PART = {
    "out": ("dout",),
    "lse": ("v", "dout"),
    "dq": (),
    "dk": (),
    "dv": ("v",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Leak:
    """Rows of a result that differ between twins, and may not.

    `rows` are tokens, counted over all documents. `changed` are the rows that the twins differ in.
    """

    tensor: str
    rows: tuple[int, ...]
    changed: Rows

    def __str__(self) -> str:
        first, last = self.changed.first, self.changed.end - 1
        return (
            f"{len(self.rows)} rows of {self.tensor}, the first of them {self.rows[0]}, change with "
            f"{self.changed.tensor} of tokens {first} to {last}, which they may not depend on"
        )


def leaks(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], spec: CaseSpec
) -> tuple[Leak, ...]:
    """Return where the results of twins differ and may not, by tensor.

    `spec` is that of the case with the field `twin`; the other one is the case that it names. Results
    are arrays by name, out, dq, dk, dv [tokens, heads, head_dim] and lse [heads, tokens], compared by
    their bits, but NaN with NaN as equal; a result that either lacks is not compared.

    Raises ValueError for a case without a twin, and for results of different shapes or dtypes.
    """
    if spec.twin is None:
        raise ValueError(f"case {spec.name} has no twin; give the case that names one")
    found: dict[str, list[int]] = {}
    for rows in spec.twin.equal:
        if rows.tensor not in first or rows.tensor not in second:
            continue
        differs = _differing(rows.tensor, first[rows.tensor], second[rows.tensor])
        part = np.flatnonzero(differs[rows.first : rows.end]) + rows.first
        found.setdefault(rows.tensor, []).extend(int(row) for row in part)
    return tuple(
        Leak(tensor=tensor, rows=tuple(rows), changed=spec.twin.changed)
        for tensor, rows in found.items()
        if rows
    )


def twin(spec: CaseSpec, case: str, changed: Rows) -> Twin:
    """Return what a case that differs from `case` in the rows `changed` must share with it."""
    return Twin(case=case, changed=changed, equal=tuple(_untouched(spec, changed)))


def _untouched(spec: CaseSpec, changed: Rows) -> Iterator[Rows]:
    """Yield the runs of rows that do not depend on the rows of an input."""
    sees = _visible(spec)
    given = np.zeros(spec.shape_of(changed.tensor)[0], bool)
    given[changed.first : changed.end] = True
    of_queries = changed.tensor in ("q", "dout")
    # A row that sees no key is zero, whatever its query.
    rows = given & sees.any(1) if of_queries else sees[:, given].any(1)
    touched = {"out": rows, "lse": rows, "dq": rows}
    touched |= dict.fromkeys(("dk", "dv"), sees[rows].any(0))
    for name, depends in touched.items():
        free = np.ones_like(depends) if changed.tensor in _NO_PART[name] else ~depends
        ends = np.flatnonzero(np.diff(np.concatenate(([False], free, [False]))))
        for first, end in ends.reshape(-1, 2):
            yield Rows(tensor=name, first=int(first), end=int(end))


def _visible(spec: CaseSpec) -> npt.NDArray[np.bool_]:
    """Return which [tokens, key_tokens] are legal pairs, of all documents."""
    sees = np.zeros((spec.tokens, spec.key_tokens), bool)
    for document, (queries, keys) in enumerate(spec.mask):
        sees[queries, keys] = spec.visible(document)
    return sees


def _differing(name: str, first: Tensor, second: Tensor) -> npt.NDArray[np.bool_]:
    """Return which tokens of a result differ."""
    one, other = np.asarray(first), np.asarray(second)
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        raise ValueError(
            f"{name} is {one.dtype} {list(one.shape)} in one of the twins, and {other.dtype} "
            f"{list(other.shape)} in the other; they must be alike"
        )
    if one.dtype.itemsize not in (2, 4):
        raise ValueError(f"{name} is {one.dtype}; give bfloat16, its bits, or float32")
    half = one.dtype.itemsize == 2
    left, right = (x.view(np.uint16 if half else np.uint32).astype(np.uint32) for x in (one, other))
    # Beyond infinity by magnitude is NaN.
    infinity, rest = (np.uint32(0x7F80), 0x7FFF) if half else (np.uint32(0x7F800000), 0x7FFFFFFF)
    both_nan = ((left & np.uint32(rest)) > infinity) & ((right & np.uint32(rest)) > infinity)
    differs = (left != right) & ~both_nan
    tokens = 1 if name == "lse" else 0
    return np.asarray(differs.any(tuple(axis for axis in range(differs.ndim) if axis != tokens)))
