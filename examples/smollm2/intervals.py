"""Means over documents and their confidence intervals, by resampling whole documents.

Tokens of one document are no independent draws, so documents are what is drawn, with replacement: an interval holds for
other documents like these. With few documents it is rough, and rather too short than too long.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

LEVEL, RESAMPLES, SEED = 0.95, 10_000, 0


class Mean(NamedTuple):
    """A mean over documents and the bounds of its interval."""

    mean: float
    low: float
    high: float


def mean(
    values: Sequence[float],
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> Mean:
    """The mean of one value a document, and the percentiles of the means of resampled documents.

    The documents that are drawn depend on their number and the seed alone, so figures of one set of documents are
    resampled alike. Raises: ValueError for no values, or values that are no numbers.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not array.size:
        raise ValueError(
            f"values have shape {array.shape}; give at least one value, one a document"
        )
    if not np.isfinite(array).all():
        raise ValueError("a document's value is NaN or infinite; it has no mean")
    drawn = np.random.default_rng(seed).integers(0, array.size, (resamples, array.size))
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(array[drawn].mean(axis=1), (tail, 100 - tail))
    return Mean(float(array.mean()), float(low), float(high))


def paired(values: Sequence[float], reference: Sequence[float], **options: Any) -> Mean:
    """The mean difference of two values of each document. Raises: as `mean`, and ValueError for other lengths."""
    if len(values) != len(reference):
        raise ValueError(
            f"{len(values)} values and {len(reference)} of the reference; pairs need equally many"
        )
    return mean(np.subtract(values, reference), **options)


def summary(entry: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """The figures of one attention: the mean loss, and how far it is from the reference's, with intervals."""
    values = entry["document_nll"]
    bad = sum(not math.isfinite(value) for value in values)
    if bad:
        return {"documents_without_a_loss": bad}
    nll = mean(values)
    return {
        "nll": nll._asdict(),
        "perplexity": math.exp(nll.mean),
        "difference": paired(values, reference["document_nll"])._asdict(),
    }
