"""Evidence labels and their order."""

import json
import pickle
from itertools import combinations

import pytest

from flamia_ref.evidence import Evidence, weakest

# From the strongest to the weakest.
ORDER = ["specified", "measured", "source", "simulated", "derived", "assumed"]


def test_the_labels_and_their_order() -> None:
    assert [str(label) for label in Evidence] == ORDER
    assert [label.rank for label in Evidence] == [0, 1, 2, 3, 4, 5]


def test_every_label_says_what_it_means_in_one_line() -> None:
    meanings = [label.meaning for label in Evidence]
    assert len(set(meanings)) == len(ORDER)
    assert all(meaning and "\n" not in meaning for meaning in meanings)


@pytest.mark.parametrize(("strong", "weak"), list(combinations(ORDER, 2)))
def test_the_weaker_of_two_wins_in_either_order(strong: str, weak: str) -> None:
    assert weakest([strong, weak]) is weakest([weak, strong]) is Evidence(weak)


def test_members_and_strings_mix() -> None:
    assert weakest([Evidence.SOURCE]) is Evidence.SOURCE
    assert weakest(iter(["measured", Evidence.SPECIFIED])) is Evidence.MEASURED


def test_no_label_is_not_evidence() -> None:
    with pytest.raises(ValueError, match="no evidence label given"):
        weakest([])


def test_an_unknown_label_is_refused() -> None:
    message = "unknown evidence label 'assume'; did you mean 'assumed'"
    with pytest.raises(ValueError, match=message):
        weakest(["specified", "assume"])


def test_a_label_is_its_string() -> None:
    assert json.dumps({"evidence": Evidence.DERIVED}) == '{"evidence": "derived"}'
    assert pickle.loads(pickle.dumps(Evidence.DERIVED)) is Evidence.DERIVED
