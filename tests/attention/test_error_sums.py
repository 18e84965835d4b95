"""The sums behind the error of a result, against loops over rows and elements."""

import math

import numpy as np
import pytest

from flamia_ref.attention import error_sums
from flamia_ref.packing import Documents

DOCUMENTS = Documents((0, 5, 5, 12))
STARTS = np.array([0, 2, 4])
SHAPE = (3, 3)


@pytest.fixture(scope="module")
def sample():
    rng = np.random.default_rng(4)
    reference = rng.standard_normal((12, 2, 6))
    return reference + 0.1 * rng.standard_normal(reference.shape) + 0.02 * reference, reference


def cells():
    return error_sums.cells(DOCUMENTS, STARTS, np.arange(12))


def measured(found, reference):
    return error_sums.sums(found, reference, *cells(), SHAPE)


def test_where_tokens_belong():
    document, bucket = cells()
    assert document.tolist() == [0] * 5 + [2] * 7
    assert bucket.tolist() == [0, 0, 1, 1, 2, 0, 0, 1, 1, 2, 2, 2]


def by_hand(found, reference):
    """The figures of some rows [rows, channels], by loops."""
    pairs = [list(zip(x, y, strict=True)) for x, y in zip(found, reference, strict=True)]
    flat = [pair for row in pairs for pair in row]
    noise = sum((x - y) ** 2 for x, y in flat)
    signal = sum(y * y for _, y in flat)
    match, both = sum(x * y for x, y in flat), sum(x * x for x, _ in flat)
    means = [sum(x - y for x, y in row) / len(row) for row in pairs]
    bias = sum(means) / len(means)
    slope = sum((x - y) * y for x, y in flat) / signal
    residuals = [sum((x - y) * y - slope * y * y for x, y in row) for row in pairs]
    count = len(pairs)
    return {
        "relative_l2": math.sqrt(noise / signal),
        "cosine": match / math.sqrt(signal * both),
        "largest": max(abs(x - y) for x, y in flat),
        "largest_of_row": max(
            max(abs(x - y) for x, y in row) / math.sqrt(sum(y * y for _, y in row) / len(row))
            for row in pairs
        ),
        "rms": math.sqrt(signal / len(flat)),
        "bias": bias,
        "bias_error": math.sqrt(sum((x - bias) ** 2 for x in means) / (count - 1) / count),
        "slope": slope,
        "slope_error": math.sqrt(count / (count - 1) * sum(x * x for x in residuals)) / signal,
    }


def held(one, wanted):
    for name, value in wanted.items():
        assert float(getattr(one, name)) == pytest.approx(value, rel=1e-9), name
    assert set(wanted) == set(error_sums.FIGURES)


def test_figures_of_a_cell(sample):
    found, reference = sample
    rows = [9, 10, 11]  # the last document, positions from 4 on
    held(measured(*sample)[2, 1, 2], by_hand(found[rows, 1], reference[rows, 1]))


def test_figures_of_all_and_along_axes(sample):
    found, reference = sample
    sums = measured(*sample)
    held(sums.over(), by_hand(found.reshape(24, 6), reference.reshape(24, 6)))
    held(sums.over("documents", "positions")[1], by_hand(found[:, 1], reference[:, 1]))
    early = [0, 1, 5, 6]
    held(
        sums.over("documents", "heads")[0],
        by_hand(found[early].reshape(8, 6), reference[early].reshape(8, 6)),
    )
    assert sums.over("heads").rows[1].tolist() == [0, 0, 0]  # a document without tokens


def test_cells_without_elements_are_nan_and_exact_ones_0(sample):
    reference = sample[1]
    sums = measured(reference, reference)
    assert np.isnan(sums[1, 0, 0].relative_l2)
    assert sums.over().relative_l2 == sums.over().bias == sums.over().slope == 0
    assert sums.over().cosine == pytest.approx(1)
    nothing = measured(0 * reference, 0 * reference).over()
    assert nothing.relative_l2 == 0
    assert np.isnan(nothing.cosine)


@pytest.mark.parametrize(
    ("one", "other", "lost"),
    [
        *((x, 1.0, 1) for x in (np.nan, np.inf, -np.inf)),
        *((x, -np.inf, 1) for x in (np.nan, np.inf, 0.0)),
        *((x, x, 0) for x in (np.inf, -np.inf)),
    ],
)
def test_what_is_lost_is_in_no_figure_and_in_none_left_out(sample, one, other, lost):
    """A cell and all above it that have a lost element measure nothing; the same infinity on both sides is none."""
    found, reference = (x.copy() for x in sample)
    found[0, 0, 0], reference[0, 0, 0] = one, other
    sums = measured(found, reference)
    for cell in (sums[0, 0, 0], sums.over()):
        assert cell.lost == lost
        infinite = {name for name in error_sums.FIGURES if np.isinf(getattr(cell, name))}
        nothing = {name for name in error_sums.FIGURES if np.isnan(getattr(cell, name))}
        worst = {"relative_l2", "largest", "largest_of_row"} if lost else set()
        assert infinite == worst
        assert nothing == (set(error_sums.FIGURES) - worst if lost else set())
    assert sums.over().elements == 24 * 6 - 1
    assert np.isfinite(sums[0, 1, 0].relative_l2)


def test_nothing_measured_is_no_error_of_0(sample):
    empty = measured(*sample)[1, 0, 0]
    assert all(np.isnan(getattr(empty, name)) for name in error_sums.FIGURES)
    minus = np.full_like(sample[0], -np.inf)
    dead = measured(minus, minus).over()
    assert (dead.elements, dead.lost) == (0, 0)
    assert all(np.isnan(getattr(dead, name)) for name in error_sums.FIGURES)


def test_rows_of_nothing_but_rounding_have_no_relative_size(sample):
    found, reference = (x.copy() for x in sample)
    reference[3, 1] = 1e-17
    largest = measured(found, reference).over().largest_of_row
    found[3, 1] = reference[3, 1]
    assert largest == measured(found, reference).over().largest_of_row


def test_a_dictionary_for_json_has_words_for_what_is_not_finite(sample):
    plain = measured(*sample)[1, 0, 0].to_dict()
    assert plain["relative_l2"] == "nan"
    assert plain["elements"] == 0


def test_an_unknown_axis(sample):
    with pytest.raises(ValueError, match="axis is 'head'; allowed: documents, heads, positions"):
        measured(*sample).over("head")
