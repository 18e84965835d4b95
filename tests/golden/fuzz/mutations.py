"""What somebody who means harm puts into JSON and into headers, as Hypothesis strategies."""

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from tests.golden.packs import canonical

DEEP: Any = 0
for _ in range(200):
    DEEP = [DEEP]

BITS_OF_NAN = {"bits": "0x7ff8000000000000", "repr": "nan"}

# Each is JSON data; what json.dumps does not write is in `TOKENS`.
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1 << 24,
    1 << 60,
    1 << 63,
    1 << 64,
    10**4000,
    -(10**4000),
    0.5,
    BITS_OF_NAN,
    {"bits": "0x7ff0000000000000", "repr": "inf"},
    {"bits": "0x3ff0000000000000", "repr": "1.0"},
    "",
    "all",
    "../../../etc/passwd",
    "/dev/zero",
    "a\0b",
    "two\nlines\x1b[2J",
    "\ud800",
    "\u202e",
    "x" * 100_000,
    [],
    {},
    [1 << 60],
    [1 << 60] * 3,
    [0] * 1000,
    {"two\nlines\ud800": {}},
    {"x" * 10_000: {}},
    DEEP,
)

# Texts in place of a value: none of them is canonical JSON, most are no JSON.
TOKENS = (
    "NaN",
    "-Infinity",
    "1e999999999",
    "-0.0",
    "9" * 1_000_000,
    "0." + "9" * 1_000_000,
    "[" * 100_000,
    '{"a":' * 50_000,
    '{"a": 1, "a": 2}',
    '"\\ud800"',
    '"\ud800"',
    "'x'",
    "",
    "\x00",
    "//",
    "__import__('os').system('false')",
)


def paths(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where each value of JSON data is."""
    yield path
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from paths(value, (*path, key))
        else:
            yield (*path, key)


def changed(document: Any, path: tuple[Any, ...], how: str, value: Any) -> Any:
    """Return JSON data with one value put, dropped, doubled or moved under another key."""
    document = copy.deepcopy(document)
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    last = path[-1]
    match how:
        case "put":
            holder[last] = value
        case "drop":
            del holder[last]
        case "double" if isinstance(holder, list):
            holder.append(holder[last])
        case _ if isinstance(holder, dict):
            holder[value if isinstance(value, str) else "other"] = holder.pop(last)
        case _:
            holder.insert(0, value)
    return document


def documents(original: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """JSON data with up to three changes."""
    hows = st.sampled_from(["put", "put", "put", "drop", "double", "rename"])

    @st.composite
    def strategy(draw: st.DrawFn) -> dict[str, Any]:
        document = original
        for _ in range(draw(st.integers(1, 3))):
            inside = [path for path in paths(document) if path]
            if not inside:
                break
            path = draw(st.sampled_from(inside))
            document = changed(document, path, draw(hows), draw(st.sampled_from(ODD)))
        return document

    return strategy()


def texts(original: dict[str, Any]) -> st.SearchStrategy[str]:
    """Canonical text in which one value is a text that is no canonical JSON."""
    mark = "\x7fhere"

    @st.composite
    def strategy(draw: st.DrawFn) -> str:
        path = draw(st.sampled_from([path for path in paths(original) if path]))
        text = canonical(changed(original, path, "put", mark))
        return text.replace(json.dumps(mark), draw(st.sampled_from(TOKENS)), 1)

    return strategy()
