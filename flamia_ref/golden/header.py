"""The header of a safetensors file, read without trust: names, dtypes, shapes and places of tensors.

A file is the header's length in 8 bytes, the header in JSON, and the tensors end to end (the format:
https://github.com/huggingface/safetensors#format). The package of that name reads a file whole, or
maps it; `flamia_ref.golden.case_file` says why neither will do.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from flamia_ref._errors import line, shown
from flamia_ref.golden.canonical import unique

PREFIX = 8  # bytes that hold the header's length

_ITEM_BYTES = {"F32": 4, "U32": 4, "I32": 4, "U16": 2, "U8": 1}  # the dtypes of packs
_ORDER = tuple(_ITEM_BYTES)  # in which the safetensors package writes them


class Listed(Protocol):
    """A tensor as a manifest lists it."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def dtype(self) -> str:
        """The name of its dtype in safetensors."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A tensor as a header lists it: its bytes are those from `begin` to `end` behind the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def parse_header(data: bytes) -> tuple[Span, ...]:
    """Return what a header lists, in the order of the bytes.

    Raises ValueError where it is no object of tensors, has metadata, or lists a tensor twice. Names,
    dtypes and shapes may be any; `require_whole` checks the places.
    """
    if not data.startswith(b"{"):
        raise ValueError("its header is no JSON object")
    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is no JSON: {line(str(error))}") from error
    spans = (_span(name, entry) for name, entry in document.items())
    return tuple(sorted(spans, key=lambda span: (span.begin, span.end)))


def canonical_header(tensors: Iterable[Listed]) -> bytes:
    """Return the header that packs are written with, from what a manifest lists.

    It is that of `flamia_ref.golden.files.tensors_to_bytes`: wide dtypes first, names in order,
    spaces up to a multiple of 8 bytes.
    """
    listed = sorted(tensors, key=lambda one: (_ORDER.index(one.dtype), one.name))
    document, at = {}, 0
    for one in listed:
        size = _bytes(one.dtype, one.shape)
        shape = list(one.shape)
        document[one.name] = {"dtype": one.dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    return text + b" " * (-len(text) % 8)


def require_whole(spans: Iterable[Span], size: int) -> None:
    """Raise ValueError where tensors of the dtypes of packs do not fill `size` bytes, end to end."""
    at = 0
    for span in spans:
        held, needed = span.end - span.begin, _bytes(span.dtype, span.shape)
        if held != needed:
            raise ValueError(f"tensor {shown(span.name)} has {held} bytes, not {needed}")
        if span.begin != at:
            raise ValueError(f"tensor {shown(span.name)} begins at byte {span.begin}, not at {at}")
        at = span.end
    if at != size:
        raise ValueError(f"its tensors end at byte {at} of {size}")


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * _ITEM_BYTES[dtype]


def _span(name: str, entry: Any) -> Span:
    if name == "__metadata__":
        raise ValueError("its header has metadata; packs have none, its order is random")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {shown(name)} has not just a dtype, a shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise ValueError(f"tensor {shown(name)} has dtype {shown(dtype)}")
    for what, value in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(value, list) or any(
            type(number) is not int or not 0 <= number < 2**64 for number in value
        ):
            raise ValueError(f"tensor {shown(name)} has {what} {shown(value)}")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"tensor {shown(name)} has data_offsets {shown(offsets)}")
    return Span(name=name, dtype=dtype, shape=tuple(shape), begin=offsets[0], end=offsets[1])
