"""Shared errors: one line that says what was given and what is allowed."""

import copy
import pickle

import numpy as np
import pytest

from flamia_ref._errors import Registry, UnknownName, shown, unknown_name

PRESETS = ["ocp-mx-floor-e4m3", "te-mx-e4m3", "te-mx-e5m2"]


def test_the_message_names_the_near_ones_and_the_allowed_ones() -> None:
    assert str(unknown_name("preset", "te-mx-e4m4", PRESETS)) == (
        "unknown preset 'te-mx-e4m4'; did you mean 'te-mx-e4m3' or 'te-mx-e5m2'? "
        "Allowed: ocp-mx-floor-e4m3, te-mx-e4m3, te-mx-e5m2"
    )


def test_case_does_not_matter_for_nearness() -> None:
    assert "did you mean 'te-mx-e4m3'" in str(unknown_name("preset", "TE-MX-E4M3", PRESETS))


def test_without_a_near_name_the_message_lists_the_allowed_ones() -> None:
    assert str(unknown_name("format", "q", ["e4m3", "bf16"])) == (
        "unknown format 'q'; allowed: e4m3, bf16"
    )


def test_a_long_list_is_cut() -> None:
    message = str(unknown_name("name", "q", [f"n{i}" for i in range(100)]))
    assert message.endswith("n10, n11, ... (100 in all)")


def test_an_empty_list_is_said_to_be_empty() -> None:
    assert str(unknown_name("name", "q", [])) == "unknown name 'q'; there is none to choose from"


@pytest.mark.parametrize("given", [None, 3, b"x", "two\nlines", np.zeros((100, 100)), "x" * 10_000])
def test_the_message_is_one_short_line(given: object) -> None:
    message = str(unknown_name("name", given, ["a"]))
    assert "\n" not in message
    assert len(message) < 120


def test_a_short_value_is_shown_whole() -> None:
    assert shown("a") == "'a'"
    assert shown("a" * 58) == repr("a" * 58)
    assert shown("a" * 59) == "'" + "a" * 56 + "..."
    assert shown([1, 2]) == "[1, 2]"


def test_the_error_is_a_value_error_and_a_key_error_and_survives_pickling() -> None:
    error = unknown_name("name", "q", ["a"])
    assert isinstance(error, ValueError)
    assert isinstance(error, KeyError)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (UnknownName, str(error))


@pytest.fixture
def registry() -> Registry[int]:
    return Registry("number", [("two", 2), ("one", 1)])


def test_a_registry_is_a_mapping_in_the_order_of_its_entries(registry: Registry[int]) -> None:
    assert registry["one"] == 1
    assert list(registry.items()) == [("two", 2), ("one", 1)]
    assert len(registry) == 2
    assert "one" in registry
    assert registry == {"one": 1, "two": 2}
    assert repr(registry) == "Registry('number', ['two', 'one'])"


def test_a_registry_names_the_near_ones(registry: Registry[int]) -> None:
    with pytest.raises(ValueError, match=r"unknown number 'ones'; did you mean 'one'\?"):
        registry["ones"]
    with pytest.raises(KeyError):
        registry["ones"]
    assert registry.get("ones") is None
    assert registry.get("ones", 3) == 3


@pytest.mark.parametrize("key", ["three", 1, None, [], {}])
def test_a_key_that_is_not_there_is_not_in_it(registry: Registry[int], key: object) -> None:
    assert key not in registry
    with pytest.raises(UnknownName):
        registry[key]  # type: ignore[index]


def test_a_registry_cannot_be_changed(registry: Registry[int]) -> None:
    with pytest.raises(TypeError):
        registry["three"] = 3  # type: ignore[index]
    with pytest.raises(TypeError):
        del registry["one"]  # type: ignore[attr-defined]


def test_a_registry_is_a_copy_of_its_entries() -> None:
    entries = {"one": 1}
    registry = Registry("number", entries.items())
    entries["one"] = 2
    assert registry["one"] == 1
    assert copy.deepcopy(registry) == registry
    assert pickle.loads(pickle.dumps(registry)) == registry


def test_a_name_registered_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="number 'one' is registered twice"):
        Registry("number", [("one", 1), ("one", 1)])
