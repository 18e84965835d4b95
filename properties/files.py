"""The files that the suites read and write: what is expected of a kernel, and examples as lines of Python."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

from flamia_ref._errors import shown, unknown_name
from flamia_ref.golden import expectations
from flamia_ref.golden.expectations import Expectation as Expectation
from flamia_ref.golden.expectations import Outcome as Outcome
from flamia_ref.golden.expectations import read_text
from flamia_ref.properties.catalogue import PROPERTIES
from flamia_ref.properties.drawn import Edit, Example

_BEGIN, _END = "@example(", ")"
_MADE = {"Example": Example, "Edit": Edit}


def read_expectations(path: str | os.PathLike[str]) -> dict[str, Expectation]:
    """Read what is expected of a kernel: a TOML file, or a JSON one if its name ends so, a table a property::

        [nan_poison]
        outcome = "xfail"  # or "skip"
        reason = "0 x NaN is NaN in the tensor core"

    Raises ValueError for a file that cannot be read, an unknown property, another outcome, and no reason.
    """
    found = expectations.read_expectations(path, what="property")
    for name in found:
        if name not in PROPERTIES:
            raise ValueError(f"{path}: {unknown_name('property', name, PROPERTIES)}")
    return found


def example_line(example: Example) -> str:
    """The line that tries an example: for a file of them, or above a test's ``def`` under ``@given``."""
    return f"{_BEGIN}{example!r}{_END}"


def read_examples(path: str | os.PathLike[str]) -> tuple[Example, ...]:
    """Read the examples that `save_example` wrote, a line each; lines that are empty or comments are left out.

    Nothing in the file is run: a line is a call of Example with literals and calls of Edit.

    Raises ValueError for a file that cannot be read, and for any other line, by its number.
    """
    where = Path(path)
    found = []
    for number, line in enumerate(read_text(where).splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            found.append(_parsed(text))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
            raise ValueError(f"{where}, line {number}: {_one_line(error)}") from None
    return tuple(found)


def save_example(path: str | os.PathLike[str], example: Example) -> None:
    """Add an example to a file of them, unless it is there. Raises ValueError where the file cannot be written."""
    where, line = Path(path), example_line(example)
    try:
        if where.exists() and line in where.read_text(encoding="utf-8").splitlines():
            return
        with where.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot write {where}: {_one_line(error)}") from error


def _parsed(text: str) -> Example:
    if not (text.startswith(_BEGIN) and text.endswith(_END)):
        raise ValueError(f"{shown(text)} is no example; lines read @example(Example(...))")
    found = _value(ast.parse(text[len(_BEGIN) : -len(_END)], mode="eval").body)
    if not isinstance(found, Example):
        raise ValueError(f"{shown(text)} is no example; lines read @example(Example(...))")
    if found.property not in PROPERTIES:
        raise unknown_name("property", found.property, PROPERTIES)
    return found


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords) if name in _MADE:
            fields = {keyword.arg: _value(keyword.value) for keyword in keywords if keyword.arg}
            made: Any = _MADE[name]
            return made(**fields)
        case ast.Tuple(elts=elements):
            return tuple(_value(element) for element in elements)
        case _:
            return ast.literal_eval(node)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
