"""Dataclasses as checked data: fields held to their types, to JSON and back."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal, cast

from flamia_ref._errors import shown, unknown_name


class Data:
    """A dataclass whose fields are held to their types when it is made, in Python as from JSON."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, kind in _hints(cast(Any, type(self))).items():
            value = typed(kind, plain(getattr(self, name)), f"{type(self).__name__}.{name}")
            object.__setattr__(self, name, value)


def plain(value: Any) -> Any:
    """`value` as JSON has it: dictionaries, lists, strings, numbers."""
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, StrEnum) else value


def typed(kind: Any, value: Any, path: str) -> Any:
    """`value` from JSON as the annotated type `kind`, or a ValueError that names `path`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _typed_dataclass(kind, value, path)
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise ValueError(f"{path} is {shown(value)}; it must be an object")
        return {key: typed(arguments[1], entry, f"{path}[{key!r}]") for key, entry in value.items()}
    if origin is Literal:
        if value in arguments and isinstance(value, str):
            return value
        raise ValueError(f"{path} is {shown(value)}; allowed: {', '.join(map(repr, arguments))}")
    if origin is tuple and arguments[-1] is Ellipsis:
        if not isinstance(value, list):
            raise ValueError(f"{path} is {shown(value)}; it must be a list")
        return tuple(
            typed(arguments[0], entry, f"{path}[{index}]") for index, entry in enumerate(value)
        )
    if origin is tuple:
        if not isinstance(value, list) or len(value) != len(arguments):
            raise ValueError(f"{path} is {shown(value)}; it must be a list of {len(arguments)}")
        return tuple(
            typed(argument, entry, f"{path}[]")
            for argument, entry in zip(arguments, value, strict=True)
        )
    if arguments:  # a union: the first member that fits
        if value is None and type(None) in arguments:
            return None
        failures = []
        for argument in arguments:
            if argument is type(None):
                continue
            try:
                return typed(argument, value, path)
            except ValueError as error:
                failures.append(error)
        raise failures[-1]
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        try:
            return kind(value)
        except ValueError:
            raise ValueError(f"{path} is {shown(value)}; allowed: {', '.join(kind)}") from None
    if type(value) is not kind:
        raise ValueError(f"{path} is {shown(value)}; it must be a {kind.__name__}")
    return value


@functools.cache
def _hints(kind: Any) -> Mapping[str, Any]:
    """The types of a dataclass's fields."""
    return typing.get_type_hints(kind)


def _typed_dataclass(kind: Any, value: Any, path: str) -> Any:
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
        if name not in value and (f.default, f.default_factory) == required
    ]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}")
    return kind(
        **{name: typed(hints[name], entry, f"{path}.{name}") for name, entry in value.items()}
    )


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names differ: of two with one name, `json` would silently keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{shown(twice)} comes twice in one object")
    return found
