"""docs/errors.md has every recipe, and the figures of today."""

import importlib.util
from pathlib import Path

import pytest

from flamia_ref.attention import RECIPES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("errors", ROOT / "docs" / "errors.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(text, title):
    """The cells of the table under a title, by recipe."""
    lines = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0].splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    return {cells[0].strip("`"): cells[1:] for cells in table}


def test_the_page_has_every_recipe(program):
    text = program.FILE.read_text(encoding="utf-8")
    titles = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert len(titles) == 5
    for title in titles:
        assert set(rows(text, title)) == set(RECIPES), title
    for name, recipe in RECIPES.items():
        assert ("-" in rows(text, titles[0])[name]) != recipe.has_backward


@pytest.mark.nightly
def test_the_figures_are_those_of_today(program):
    name = "flamia-mxfp8"
    made = program.page({name: program.measured(name)}, {name: program.attributed(name)})
    text = program.FILE.read_text(encoding="utf-8")
    for title in (line[3:] for line in made.splitlines() if line.startswith("## ")):
        assert rows(made, title)[name] == rows(text, title)[name], title


def test_shares_and_rows_of_a_small_case(program):
    """The shares are of the sum of squares; without a backward there are none for dQ."""
    from types import SimpleNamespace

    only = {
        "out": {"s.q": 3.0, "s.k": 0.0, "o.p": 4.0, "o.v": 0.0},
        "dq": {"s.q": 1.0, "o.v": 1.0, "dp.do": 1.0, "dq.ds": 1.0},
    }
    told = SimpleNamespace(
        only=only, total={"out": 1.0, "dq": 1.0}, arithmetic={"out": 0.0123, "dq": 0.2}
    )
    found = SimpleNamespace(recipe="x", attribution=told)
    halves = ["36%", "64%", "0.012"]
    assert program.split_row(found) == [*halves, "25%", "25%", "25%", "25%", "0.2"]
    told.total = {"out": 1.0}
    assert program.split_row(found) == [*halves, *["-"] * 5]
    found.attribution = None
    with pytest.raises(ValueError, match="without its attribution"):
        program.split_row(found)
