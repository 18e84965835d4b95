"""JSON in one canonical form, and reading it without trust.

Canonical: sorted keys, ASCII, an indent of one space, one newline at the end, and every float an
object ``{"bits": "0x...", "repr": "..."}`` of its float64 bits and its shortest decimal form.
"""

import hashlib
import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flamia_ref._errors import line, shown

# Long texts are looked at before they are parsed, which would take 30 times their bytes: in the
# canonical form every value has a line, and of manifests a line has 25 bytes and more on average.
_LONG = 1 << 20
_SHORTEST_LINE = 12
_STRING = r'"(?:[^"\\\n]++|\\.)*+"'
_VALUE = rf"(?:{_STRING}|[-+.0-9a-zA-Z]++|\[\]|\{{\}}|[\[\]{{}}])"
_LINES = re.compile(rf"(?: *+(?:{_STRING}: )?+{_VALUE},?+\n)*+\Z")
_NAME = 160  # characters of a field's name that an error shows as it is; a case has so many

_BITS = re.compile(r"0x[0-9a-f]{16}\Z")


def sha256(data: bytes) -> str:
    """Return the SHA-256 of bytes in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def render(document: Any) -> str:
    """Return the canonical text of JSON data, floats included.

    Raises ValueError for NaN and infinities.
    """
    plain = _floats_written(document)
    return json.dumps(plain, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def parse(text: str, *, source: str) -> dict[str, Any]:
    """Return the object that a canonical text holds. `source` names it in errors.

    Raises ValueError for text that is no JSON object, or not exactly what `render` writes.
    """
    if len(text) > _LONG:
        _check_lines(text, source)
    try:
        document = _floats_read(json.loads(text, object_pairs_hook=unique))
        canonical = render(document)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is no JSON that can be read: {line(str(error))}") from error
    except MemoryError as error:
        raise ValueError(
            f"{source} is JSON of {len(text)} bytes; there is no memory to read it"
        ) from error
    if not isinstance(document, dict):
        raise ValueError(f"{source} holds no JSON object")
    if canonical != text:
        raise ValueError(f"{source} was changed since it was written: its form is not canonical")
    return document


def _check_lines(text: str, source: str) -> None:
    """Raise ValueError for a text with several values on a line, or more lines than any manifest."""
    if text.count("\n") > len(text) // _SHORTEST_LINE:
        raise ValueError(f"{source} holds more values than any {source} of {len(text)} bytes")
    if not _LINES.match(text):
        raise ValueError(f"{source} was changed since it was written: its form is not canonical")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object, as the `object_pairs_hook` of `json.loads`.

    Raises ValueError where a key comes twice.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def _floats_written(value: Any) -> Any:
    match value:
        case float():
            # json refuses NaN and infinities itself, but not inside a string.
            if not abs(value) < float("inf"):
                raise ValueError(f"{value} is no JSON number")
            return {"bits": f"0x{struct.pack('>d', value).hex()}", "repr": repr(value)}
        case Mapping():
            return {str(key): _floats_written(item) for key, item in value.items()}
        case list() | tuple():
            return [_floats_written(item) for item in value]
        case str():
            return str(value)  # a string enum as a plain string
        case _:
            return value


def _floats_read(value: Any) -> Any:
    match value:
        case {"bits": str(bits), "repr": str(text), **others} if not others:
            if not _BITS.match(bits):
                raise ValueError(f"{shown(bits)} are no float64 bits")
            (number,) = struct.unpack(">d", bytes.fromhex(bits[2:]))
            if repr(number) != text:
                raise ValueError(f"bits {bits} are not {shown(text)}")
            return number
        case dict():
            return {key: _floats_read(item) for key, item in value.items()}
        case list():
            return [_floats_read(item) for item in value]
        case _:
            return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """JSON data that is read field by field, with an error that names the field.

    `path` says where the data is. Every method raises ValueError where the data is not as asked.
    """

    data: Any
    path: str

    def _wrong(self, wanted: str) -> ValueError:
        return ValueError(f"{self.path} is {shown(self.data)}; it must be {wanted}")

    def fields(self, *names: str) -> None:
        """Require an object with exactly these fields."""
        if not isinstance(self.data, dict):
            raise self._wrong("an object")
        for name in names:
            if name not in self.data:
                raise ValueError(f"{self.path} has no field {name!r}")
        for name in self.data:
            if name not in names:
                raise ValueError(f"{self.path} has a field {shown(name)}, which is unknown")

    def __getitem__(self, name: str) -> "Reader":
        if not isinstance(self.data, dict) or name not in self.data:
            raise ValueError(f"{self.path} has no field {name!r}")
        return Reader(data=self.data[name], path=f"{self.path}: {name}")

    def items(self) -> Iterator[tuple[str, "Reader"]]:
        """Yield the fields of an object."""
        if not isinstance(self.data, dict):
            raise self._wrong("an object")
        for name, value in self.data.items():
            # Whoever wrote the data chose the name, its length and its characters.
            plain = name if name.isprintable() and len(name) <= _NAME else shown(name)
            yield name, Reader(data=value, path=f"{self.path}: {plain}")

    def entries(self) -> Iterator["Reader"]:
        """Yield the entries of a list."""
        if not isinstance(self.data, list):
            raise self._wrong("a list")
        for index, value in enumerate(self.data):
            yield Reader(data=value, path=f"{self.path}: {index}")

    def text(self) -> str:
        """Return a string."""
        if not isinstance(self.data, str):
            raise self._wrong("a string")
        return self.data

    def integer(self) -> int:
        """Return an integer in [0, 2^64)."""
        if type(self.data) is not int or not 0 <= self.data < 2**64:
            raise self._wrong("an integer of at most 64 bits, not negative")
        return self.data

    def signed(self) -> int:
        """Return an integer in [-2^31, 2^31)."""
        if type(self.data) is not int or not -(2**31) <= self.data < 2**31:
            raise self._wrong("an integer of at most 32 bits")
        return self.data

    def number(self) -> float:
        """Return a float."""
        if type(self.data) is not float:
            raise self._wrong("a float")
        return self.data

    def boolean(self) -> bool:
        """Return a boolean."""
        if type(self.data) is not bool:
            raise self._wrong("true or false")
        return self.data

    def digest(self) -> str:
        """Return a SHA-256 in hexadecimal."""
        if not isinstance(self.data, str) or not re.match(r"[0-9a-f]{64}\Z", self.data):
            raise self._wrong("64 hexadecimal digits")
        return self.data
