"""Dataclasses as checked data: fields held to their types, to JSON and back."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal, cast

import numpy as np

from flamia_ref._errors import shown, unknown_name

_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
_LONGEST_NAME = 100


class Data:
    """A frozen dataclass whose fields are held to their types when it is made, in Python as from JSON."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, kind in _hints(cast(Any, type(self))).items():
            given = plain(
                getattr(self, name), but=Data
            )  # what is Data was checked when it was made
            value = typed(kind, given, f"{type(self).__name__}.{name}")
            object.__setattr__(self, name, value)


def added(schema: int, default: Any) -> Any:
    """A field that came with a schema later than the first: recipes of an earlier one have its default."""
    return dataclasses.field(default=default, metadata={"schema": schema})


def plain(value: Any, *, but: type | tuple[()] = ()) -> Any:
    """`value` as JSON has it: dictionaries, lists, strings, numbers; numpy's scalars as the numbers they are.

    What is a `but` stays as it is.
    """
    if isinstance(value, but):
        return value
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(entry, but=but) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [plain(entry, but=but) for entry in value]
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, StrEnum) else value


def typed(kind: Any, value: Any, path: str, *, schema: int | None = None) -> Any:
    """`value` from JSON as the annotated type `kind`, or a ValueError that names `path`.

    `schema`: that of the document; all fields that had come with it must be there. None: those without a default.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _typed_dataclass(kind, value, path, schema=schema)
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise ValueError(f"{path} is {shown(value)}; it must be an object")
        return {
            key: typed(arguments[1], entry, f"{path}[{key!r}]", schema=schema)
            for key, entry in value.items()
        }
    if origin is Literal:
        if value in arguments and isinstance(value, str):
            return value
        raise ValueError(f"{path} is {shown(value)}; allowed: {', '.join(map(repr, arguments))}")
    if origin is tuple and arguments[-1] is Ellipsis:
        if not isinstance(value, list):
            raise ValueError(f"{path} is {shown(value)}; it must be a list")
        return tuple(
            typed(arguments[0], entry, f"{path}[{index}]", schema=schema)
            for index, entry in enumerate(value)
        )
    if origin is tuple:
        if not isinstance(value, list) or len(value) != len(arguments):
            raise ValueError(f"{path} is {shown(value)}; it must be a list of {len(arguments)}")
        return tuple(
            typed(argument, entry, f"{path}[{index}]", schema=schema)
            for index, (argument, entry) in enumerate(zip(arguments, value, strict=True))
        )
    if arguments:
        return _typed_union(arguments, value, path, schema=schema)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        try:
            return kind(value)
        except ValueError:
            raise ValueError(f"{path} is {shown(value)}; allowed: {', '.join(kind)}") from None
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{path} is {shown(value)}; it must be a finite number") from None
    if type(value) is not kind:
        raise ValueError(f"{path} is {shown(value)}; it must be {_WORDS[kind]}")
    return value


def _typed_union(arguments: tuple[Any, ...], value: Any, path: str, *, schema: int | None) -> Any:
    """`value` as the first member of a union that fits."""
    if value is None and type(None) in arguments:
        return None
    members = [argument for argument in arguments if argument is not type(None)]
    failures = []
    for argument in members:
        try:
            return typed(argument, value, path, schema=schema)
        except ValueError as error:
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    allowed = [
        " or ".join(map(repr, typing.get_args(member))) if member not in _WORDS else _WORDS[member]
        for member in members
    ]
    raise ValueError(f"{path} is {shown(value)}; it must be {' or '.join(allowed)}")


def check_name(path: str, name: str) -> None:
    """Refuse a name that cannot stand in a message, a table or a file name."""
    fits = 1 <= len(name) <= _LONGEST_NAME and name.isprintable() and bool(name.strip())
    if not fits or "/" in name or "\\" in name:
        raise ValueError(
            f"{path} is {shown(name)}; a name has 1 to {_LONGEST_NAME} printable characters, no / and no \\"
        )


@functools.cache
def _hints(kind: Any) -> Mapping[str, Any]:
    """The types of a dataclass's fields."""
    return typing.get_type_hints(kind)


def _typed_dataclass(kind: Any, value: Any, path: str, *, schema: int | None) -> Any:
    if type(value) is kind:
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{path} is {shown(value)}; it must be an object")
    hints = _hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for name in value:
        if name not in fields:
            raise unknown_name(f"field of {path}", name, fields)
    required = (dataclasses.MISSING, dataclasses.MISSING)
    missing = [
        name
        for name, f in fields.items()
        if name not in value
        and (
            (f.default, f.default_factory) == required
            or (schema is not None and f.metadata.get("schema", 1) <= schema)
        )
    ]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}")
    return kind(
        **{
            name: typed(hints[name], entry, f"{path}.{name}", schema=schema)
            for name, entry in value.items()
        }
    )


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names differ: of two with one name, `json` would silently keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{shown(twice)} comes twice in one object")
    return found
