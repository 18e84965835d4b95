"""Files of examples and of expectations: what is written is read again, anything else is refused by one line."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings

from flamia_ref.properties import PROPERTIES, Edit, Example, Space, strategies
from flamia_ref.properties.files import (
    Expectation,
    Outcome,
    example_line,
    read_examples,
    read_expectations,
    save_example,
)

ONE = Example(
    property="causality",
    lengths=(33, 0),
    heads=2,
    head_dim=128,
    edits=(Edit(operand="v", token=1, channel=0, exponent=15),),
)
LINE = (
    "@example(Example(property='causality', lengths=(33, 0), heads=2, head_dim=128,"
    " edits=(Edit(operand='v', token=1, channel=0, exponent=15),)))"
)


def test_a_line_is_python_that_makes_the_example() -> None:
    assert example_line(ONE) == LINE
    made = eval(
        LINE.removeprefix("@example(").removesuffix(")"), {"Example": Example, "Edit": Edit}
    )
    assert made == ONE


@pytest.mark.parametrize("name", PROPERTIES)
def test_every_example_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    path = tmp_path / "examples"
    space = Space(heads=2, kv_heads=1, head_dim=32, lengths=(0, 1, 33), window=4)
    written = []

    @settings(max_examples=10, database=None, derandomize=True, deadline=None)
    @given(example=strategies.examples(name, space))
    def write(example: Example) -> None:
        if example not in written:
            written.append(example)
        save_example(path, example)

    write()
    assert read_examples(path) == tuple(written)


def test_comments_and_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "examples"
    path.write_text(f"# found on the first of May\n\n    {LINE}\n")
    assert read_examples(path) == (ONE,)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("@example(ONE)", "line 1: "),
        ("import os", "is no example; lines read @example"),
        ("@example(Example(property='causality', lengths=__import__('os')))", "line 1: "),
        ("@example(Example(property='causality', lengths=(1,), heads=open('x')))", "line 1: "),
        ("@example(3)", "is no example"),
        ("@example(Edit(operand='v', token=1))", "is no example"),
        ("@example(Example(property='causal', lengths=(1,)))", "did you mean 'causality'"),
        ("@example(Example(property='causality', lengths=(1,), head=1))", "unexpected keyword"),
        ("@example(Example(property='causality', lengths=()))", "give at least one document"),
        ("@example(Example(property='causality', lengths=(-1,)))", "must be an integer from 0"),
        ("@example(Example(property='causality', lengths=(True,)))", "must be an integer from 0"),
        ("@example(Example(property='causality', lengths=[1]))", "give a tuple"),
        ("@example(Example(property='causality', lengths=(1,), heads=3, kv_heads=2))", "divide"),
        ("@example(Example(property='causality', lengths=(1,), family='bel'))", "'bell'"),
        ("@example(Example(property='causality', lengths=(1,), cut=2))", "cut is 2"),
        (
            "@example(Example(property='causality', lengths=(1,), edits=(Edit(operand='v', token=1),)))",
            "lies outside 1 tokens",
        ),
        ("@example(Example(property='causality', lengths=(1,), edits=(1,)))", "give Edit"),
        (
            "@example(Example(property='causality', lengths=(1,), edits=(Edit(operand='w', token=0),)))",
            "unknown operand 'w'",
        ),
        ("@example(Example(" + "(" * 3000, "line 1: "),
    ],
)
def test_other_lines_are_refused(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "examples"
    path.write_text(f"{line}\n")
    with pytest.raises(ValueError, match="examples, line 1: ") as error:
        read_examples(path)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*: No such file"):
        read_examples(tmp_path / "none")
    (tmp_path / "latin").write_bytes(b"# \xe9\n")
    with pytest.raises(ValueError, match="is not UTF-8 text: byte 2"):
        read_examples(tmp_path / "latin")
    with pytest.raises(ValueError, match="cannot write"):
        save_example(tmp_path / "none" / "examples", ONE)


EXPECTED = {
    "nan_poison": Expectation(outcome=Outcome.XFAIL, reason="0 x NaN"),
    "grouped_heads": Expectation(outcome=Outcome.SKIP, reason="one head"),
}


def test_expectations_as_toml_and_as_json(tmp_path: Path) -> None:
    toml = tmp_path / "expected.toml"
    toml.write_text(
        '[nan_poison]\noutcome = "xfail"\nreason = "0 x NaN"\n'
        '[grouped_heads]\noutcome = "skip"\nreason = "one head"\n'
    )
    assert read_expectations(toml) == EXPECTED
    plain = tmp_path / "expected.json"
    entries = {
        name: {"outcome": one.outcome, "reason": one.reason} for name, one in EXPECTED.items()
    }
    plain.write_text(json.dumps(entries))
    assert read_expectations(plain) == EXPECTED


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[nan_poisn]\noutcome="skip"\nreason="x"', "did you mean 'nan_poison'"),
        ('[nan_poison]\noutcome="fail"\nreason="x"', "unknown outcome 'fail'"),
        ('[nan_poison]\noutcome="skip"', "give outcome and reason"),
        ('[nan_poison]\noutcome="skip"\nreason=" "', "say why"),
        ('[nan_poison]\noutcome="skip"\nreason="x"\nstrict=true', "give outcome and reason"),
        ('nan_poison="skip"', "give outcome and reason"),
        ("[nan_poison", "is not TOML"),
    ],
)
def test_other_expectations_are_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "expected.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"expected\.toml") as error:
        read_expectations(path)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"heads": 3, "kv_heads": 2}, "3 heads do not divide over 2 kv_heads"),
        ({"lengths": ()}, "give at least one"),
        ({"lengths": (0,)}, "holds only 0"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"documents": 0}, "documents is 0"),
        ({"window": -1}, "window is -1"),
    ],
)
def test_spaces_that_are_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Space(**fields)  # type: ignore[arg-type]
