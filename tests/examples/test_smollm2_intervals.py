"""Means over documents and their intervals, against numbers worked out by hand and against all resamples."""

from itertools import product

import numpy as np
import pytest

from examples.smollm2 import intervals


def test_of_equal_values_the_interval_is_a_point():
    assert intervals.mean([2.5, 2.5, 2.5]) == (2.5, 2.5, 2.5)
    assert intervals.mean([4.0]) == (4.0, 4.0, 4.0)


def test_of_two_values_all_three_means_are_inside():
    # Of 0 and 1, resamples have the means 0, 1/2 and 1 with 1/4, 1/2 and 1/4: 2.5% and 97.5% are the outer ones, and
    # 30% and 70% the middle one.
    assert intervals.mean([0.0, 1.0]) == (0.5, 0.0, 1.0)
    assert intervals.mean([0.0, 1.0], level=0.4) == (0.5, 0.5, 0.5)


def test_percentiles_are_those_of_all_resamples():
    values = [0.0, 1.0, 3.0, 10.0, 11.0]
    every = np.array([np.mean(drawn) for drawn in product(values, repeat=5)])
    found = intervals.mean(values, resamples=100_000, seed=3)
    assert found.mean == 5.0
    assert found.low == pytest.approx(np.percentile(every, 2.5), abs=0.21)  # means are 1/5 apart
    assert found.high == pytest.approx(np.percentile(every, 97.5), abs=0.21)


def test_of_many_documents_it_is_the_normal_interval():
    values = np.random.default_rng(1).standard_normal(400)
    found = intervals.mean(values)
    half = 1.96 * values.std() / 20
    assert (found.low, found.high) == pytest.approx(
        (values.mean() - half, values.mean() + half), abs=0.01
    )


def test_a_seed_draws_the_same_again():
    values = np.random.default_rng(2).standard_normal(40)
    assert intervals.mean(values) == intervals.mean(values)
    assert intervals.mean(values) != intervals.mean(values, seed=1)


def test_pairs_are_subtracted_document_by_document():
    # Documents differ by 100, the two values of one by 1 or 3.
    found = intervals.paired([101.0, 203.0], [100.0, 200.0])
    assert found == (2.0, 1.0, 3.0)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")], [[1.0]]])
def test_what_has_no_mean_is_refused(values):
    with pytest.raises(ValueError, match=r"values have shape|NaN or infinite"):
        intervals.mean(values)


def test_pairs_need_equally_many():
    with pytest.raises(ValueError, match="1 values and 2 of the reference"):
        intervals.paired([1.0], [1.0, 2.0])


def test_a_summary_of_two_documents():
    entry, reference = {"document_nll": [1.0, 3.0]}, {"document_nll": [0.5, 3.5]}
    found = intervals.summary(entry, reference)
    assert found["nll"] == {"mean": 2.0, "low": 1.0, "high": 3.0}
    assert found["perplexity"] == pytest.approx(7.38905609893)  # e squared
    assert found["difference"] == {"mean": 0.0, "low": -0.5, "high": 0.5}


def test_documents_without_a_loss_are_counted():
    entry = {"document_nll": [1.0, float("nan"), float("inf")]}
    assert intervals.summary(entry, entry) == {"documents_without_a_loss": 2}
