"""Errors and warnings that every part of the library shares.

A message is one line: what was given, what is allowed, and the nearest allowed name.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")

_LISTED_NAMES = 12  # longer lists are cut to this many names
_BEGINNING = 3  # characters that are enough to mean the names that begin with them
_SHOWN_CHARACTERS = 60  # longer values are cut to this many characters


class InputRounded(UserWarning):
    """Inputs held values that the recipe's input format cannot represent; they were rounded."""


class UnknownName(ValueError, KeyError):
    """A name that is not in a list of names.

    It is a KeyError too, so that ``in`` and ``get`` of a mapping that raises it work.
    """

    def __str__(self) -> str:
        # KeyError would print the repr of the message.
        return str(self.args[0])


def shown(value: object) -> str:
    """Return the repr of a value as one line of at most about 60 characters."""
    if isinstance(value, str):
        value = value[: _SHOWN_CHARACTERS + 1]
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def printable(text: str) -> str:
    """Return a text with everything escaped that a terminal would not show as it is."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def line(text: str) -> str:
    """Return a text as one printable line."""
    return printable(" ".join(text.split()))


def type_of(x: object) -> str:
    """Return what an array holds, or the type of what is no array, in words for a message."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return type(x).__name__
    if getattr(dtype, "isnative", True):
        return str(dtype)
    return f"{dtype.newbyteorder('=')} in the other byte order ({dtype.str})"


def unknown_name(what: str, given: object, allowed: Iterable[str]) -> UnknownName:
    """Return the error for a name that is not in a list.

    ``what`` says what the name stands for ("preset"). The message names up to three near ones and
    lists what is allowed, a long list in part. The caller raises it.
    """
    names = [str(name) for name in allowed]
    message = f"unknown {what} {shown(given)}"
    near = _near(given, names)
    if near:
        message += f"; did you mean {' or '.join(map(repr, near))}?"
    if not names:
        return UnknownName(f"{message}; there is none to choose from")
    listed = ", ".join(names[:_LISTED_NAMES])
    if len(names) > _LISTED_NAMES:
        listed += f", ... ({len(names)} in all)"
    return UnknownName(f"{message}{' Allowed' if near else '; allowed'}: {listed}")


def _near(given: object, names: list[str]) -> list[str]:
    if not isinstance(given, str):
        return []
    lowered: dict[str, str] = {}
    for name in names:
        lowered.setdefault(name.lower(), name)
    typed = given.lower()
    close = difflib.get_close_matches(typed, lowered)
    # Whoever types the beginning of a name means it, however long the rest is.
    begun = [name for name in lowered if len(typed) >= _BEGINNING and name.startswith(typed)]
    return [lowered[name] for name in [*close, *(n for n in begun if n not in close)][:3]]


class Registry(Mapping[str, T]):
    """A read-only mapping from names to values of one kind.

    ``what`` names the kind in errors ("preset"). Looking up a name that is not there raises
    UnknownName with the near ones. Iteration is in the order of the entries.

    Raises ValueError if a name comes twice.
    """

    __slots__ = ("_entries", "_what")

    def __init__(self, what: str, entries: Iterable[tuple[str, T]]) -> None:
        self._what = what
        self._entries: dict[str, T] = {}
        for name, value in entries:
            if name in self._entries:
                raise ValueError(f"{what} {name!r} is registered twice")
            self._entries[name] = value

    def __getitem__(self, name: str) -> T:
        if name not in self:
            raise unknown_name(self._what, name, self._entries)
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Registry({self._what!r}, {list(self._entries)})"
