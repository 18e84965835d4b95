"""What the error of a result adds up to, by document, head and position: sums, and the figures that follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flamia_ref.attention.parts import Values
from flamia_ref.packing import Documents

Places = npt.NDArray[np.int64]

AXES = ("documents", "heads", "positions")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ErrorSums:
    """The error of one result against its reference, float64 arrays [documents, heads, positions], or less after
    `over` and indexing. e is found less reference, r the reference; a row is a token of a head.

    An element counts where both are finite. It is lost where one of them is not and they are not the same infinity:
    what was found is NaN or infinite in place of a number, say. Where elements are lost nothing measures the result,
    and no figure leaves them out: `relative_l2`, `largest` and `largest_of_row` are infinite, all others NaN. The sums
    are those of the elements that count. Standard errors take rows as independent of each other, elements of a row not.

    Attributes:
        elements, rows, lost: how many count, rows with such, and how many are lost.
        signal, noise, found: sums of r^2, of e^2, and of the squares of what was found.
        product, match: sums of e r, and of found r.
        signed: the sum of e.
        row_bias, row_bias_squares: sums over rows of the row's mean e, and of its square.
        row_product_squares, row_signal_squares, row_cross: sums over rows of (sum e r)^2, (sum r^2)^2, their product.
        largest: the largest |e|; NaN where no element counts.
        largest_of_row: the largest |e| relative to the root mean square of its row of the reference, of rows that are
            more than 2^-30 of what all rows are: dQ of a token that sees itself alone is nothing but rounding. NaN
            where there is no such row.
    """

    elements: Any
    rows: Any
    lost: Any
    signal: Any
    noise: Any
    found: Any
    product: Any
    match: Any
    signed: Any
    row_bias: Any
    row_bias_squares: Any
    row_product_squares: Any
    row_signal_squares: Any
    row_cross: Any
    largest: Any
    largest_of_row: Any

    @property
    def relative_l2(self) -> Any:
        """|e| / |r|, Euclidean norms: 0 where both are 0, infinite where r alone is or elements are lost, NaN where no
        element counts and none is lost."""
        return np.where(self._whole(), _relative(self), np.inf)[()]

    @property
    def cosine(self) -> Any:
        """The cosine between what was found and the reference: NaN where one of them is 0."""
        return self._of_whole(_ratio(self.match, np.sqrt(self.signal) * np.sqrt(self.found)))

    @property
    def bias(self) -> Any:
        """The mean signed error."""
        return self._of_whole(_ratio(self.signed, self.elements))

    @property
    def bias_error(self) -> Any:
        """The standard error of `bias`, over rows; NaN for fewer than two."""
        return self._of_whole(np.sqrt(_ratio(self._row_variance(), self.rows)))

    @property
    def rms(self) -> Any:
        """The root mean square of the reference, what biases may be compared with."""
        return self._of_whole(np.sqrt(_ratio(self.signal, self.elements)))

    @property
    def slope(self) -> Any:
        """<e, r> / <r, r>: by how much of itself the result is too large, negative where it is too small."""
        return self._of_whole(_ratio(self.product, self.signal))

    @property
    def slope_error(self) -> Any:
        """The standard error of `slope`, over rows; NaN for fewer than two."""
        slope = self.slope
        squares = (
            self.row_product_squares
            - 2 * slope * self.row_cross
            + slope * slope * self.row_signal_squares
        )
        count = np.where(np.less(self.rows, 2), np.nan, self.rows)
        return self._of_whole(
            _ratio(np.sqrt(np.maximum(squares, 0) * _ratio(count, count - 1)), self.signal)
        )

    def over(self, *axes: str) -> ErrorSums:
        """The sums over some of "documents", "heads" and "positions"; without any, over all three: numbers."""
        unknown = [axis for axis in axes if axis not in AXES]
        if unknown:
            raise ValueError(f"axis is {unknown[0]!r}; allowed: {', '.join(AXES)}")
        along = tuple(AXES.index(axis) for axis in axes or AXES)
        return ErrorSums(
            **{
                name: np.fmax.reduce(x, axis=along, initial=np.nan)
                if name in _LARGEST
                else x.sum(axis=along)
                for name, x in self._fields()
            }
        )

    def __getitem__(self, index: Any) -> ErrorSums:
        """Some of the cells."""
        return ErrorSums(**{name: x[index] for name, x in self._fields()})

    def to_dict(self) -> dict[str, float | int | str]:
        """The figures of one cell, for JSON: NaN and infinities in words."""
        plain = {name: float(getattr(self, name)) for name in FIGURES}
        shown: dict[str, float | int | str] = {
            name: value if np.isfinite(value) else str(value) for name, value in plain.items()
        }
        return {"elements": int(self.elements), "lost": int(self.lost)} | shown

    def _fields(self) -> Iterator[tuple[str, Any]]:
        return ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))

    def _row_variance(self) -> Any:
        count = np.where(np.less(self.rows, 2), np.nan, self.rows)
        mean = _ratio(self.row_bias, count)
        return np.maximum(_ratio(self.row_bias_squares - count * mean * mean, count - 1), 0)

    def _whole(self) -> Any:
        """Whether no element is lost."""
        return np.equal(self.lost, 0)

    def _of_whole(self, figure: Any) -> Any:
        return np.where(self._whole(), figure, np.nan)[()]


FIGURES = (
    "relative_l2",
    "cosine",
    "largest",
    "largest_of_row",
    "rms",
    "bias",
    "bias_error",
    "slope",
    "slope_error",
)
"""The figures of a cell, in the order in which they are shown."""

_NOTHING = 2.0**-30

_LARGEST = ("largest", "largest_of_row")


def _relative(one: ErrorSums) -> Any:
    both = np.equal(one.noise, 0) & np.equal(one.signal, 0) & np.not_equal(one.elements, 0)
    return np.where(both, 0.0, _ratio(np.sqrt(one.noise), np.sqrt(one.signal)))


def _ratio(x: Any, y: Any) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.divide(x, y)


def cells(documents: Documents, starts: Places, rows: Places) -> tuple[Places, Places]:
    """The document and the bucket of some packed tokens; `starts`: the first position of each bucket, ascending."""
    offsets = np.asarray(documents.offsets, dtype=np.int64)
    document = np.searchsorted(offsets, rows, side="right") - 1
    return document, np.searchsorted(starts, rows - offsets[document], side="right") - 1


def sums(
    found: Values, reference: Values, document: Places, bucket: Places, shape: tuple[int, int]
) -> ErrorSums:
    """The error of `found` [rows, heads, channels]. `document` and `bucket` [rows] say where each row belongs, `shape`
    how many documents and buckets there are."""
    with np.errstate(all="ignore"):  # a result may be anything, its squares beyond float64
        by_row = _of_rows(found, reference)
    gathered = {}
    for name, x in by_row.items():
        kept, into = (np.fmax, np.nan) if name in _LARGEST else (np.add, 0.0)
        cells_of = np.full((shape[0], found.shape[1], shape[1]), into)
        kept.at(cells_of, (document[:, None], np.arange(found.shape[1]), bucket[:, None]), x)
        gathered[name] = cells_of
    return ErrorSums(**gathered)


def lost(found: Values, reference: Values) -> Any:
    """Where elements are lost: one of the two is not finite, and they are not the same infinity."""
    finite = np.isfinite(found) & np.isfinite(reference)
    return ~finite & (found != reference)


def _of_rows(found: Values, reference: Values) -> dict[str, Any]:
    """The sums of each row [rows, heads]."""
    gone = lost(found, reference)
    counts = np.isfinite(found) & np.isfinite(reference)
    found, reference = (np.where(counts, x, 0.0) for x in (found, reference))
    error = found - reference
    elements = counts.sum(axis=2)
    some, any_lost = elements > 0, gone.any(axis=2)
    signal, product = (reference**2).sum(axis=2), (error * reference).sum(axis=2)
    mean = _ratio(error.sum(axis=2), np.maximum(elements, 1))
    largest = np.where(some, np.abs(error).max(axis=2, initial=0.0), np.nan)
    size = np.sqrt(_ratio(signal, np.maximum(elements, 1)))
    whole_size = np.sqrt(_ratio(signal.sum(), max(elements.sum(), 1)))
    of_row = np.where(size > _NOTHING * whole_size, _ratio(largest, size), np.nan)
    return {
        "elements": elements,
        "rows": some,
        "lost": gone.sum(axis=2),
        "signal": signal,
        "noise": (error**2).sum(axis=2),
        "found": (found**2).sum(axis=2),
        "product": product,
        "match": (found * reference).sum(axis=2),
        "signed": error.sum(axis=2),
        "row_bias": mean,
        "row_bias_squares": mean**2,
        "row_product_squares": product**2,
        "row_signal_squares": signal**2,
        "row_cross": product * signal,
        "largest": np.where(any_lost, np.inf, largest),
        "largest_of_row": np.where(any_lost, np.inf, of_row),
    }
