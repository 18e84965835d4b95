"""Headers of safetensors files that mean harm, in packs and in the results of kernels."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from flamia_ref import golden
from flamia_ref.golden.files import tensors_from_bytes, tensors_to_bytes
from flamia_ref.golden.header import canonical_header, parse_header, require_whole
from flamia_ref.golden.manifest import TensorEntry
from tests.golden.fuzz.refusals import ends_well, refused
from tests.golden.packs import FIRST, forge, read_safetensors, results, typed, write_safetensors

FILE = f"{FIRST}.safetensors"
few = settings(max_examples=100, suppress_health_check=list(HealthCheck))

Header = dict[str, Any]
Change = Callable[[Header], Any]


def file_of(header: Any, payload: bytes, length: int | None = None) -> bytes:
    """The bytes of a safetensors file with any header, as text or as JSON data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + payload


def split(data: bytes) -> tuple[Header, bytes]:
    """The header and the payload of a file."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def put(name: str, **values: Any) -> Change:
    return lambda header: header[name].update(values)


def text(change: Callable[[bytes], bytes]) -> Change:
    """A change of the text of a header instead of its data."""
    return lambda header: change(json.dumps(header).encode())


HUGE = 1 << 60
# "lse" is F32 [2, 37], of 296 bytes.
CHANGES: dict[str, Change] = {
    "no tensors": lambda header: header.clear(),
    "out of range": put("lse", data_offsets=[HUGE, HUGE + 296]),
    "behind the end": lambda header: header["lse"].update(
        data_offsets=[at + (1 << 20) for at in header["lse"]["data_offsets"]]
    ),
    "overlapping": lambda header: header["lse"].update(
        data_offsets=[at - 4 for at in header["lse"]["data_offsets"]]
    ),
    "negative": put("lse", data_offsets=[-296, 0]),
    "backwards": lambda header: header["lse"]["data_offsets"].reverse(),
    "too small": put("lse", data_offsets=[0, 0]),
    "three offsets": put("lse", data_offsets=[0, 0, 296]),
    "float offsets": put("lse", data_offsets=[0.0, 296.0]),
    "true offsets": put("lse", data_offsets=[False, True]),
    "no offsets": lambda header: header["lse"].pop("data_offsets"),
    "more fields": put("lse", strides=[1, 2]),
    "unknown dtype": put("lse", dtype="F33"),
    "dtype of no text": put("lse", dtype=32),
    "long dtype": put("lse", dtype="F" * 100_000),
    "another dtype": put("lse", dtype="I32"),
    "huge shape": put("lse", shape=[HUGE, HUGE]),
    "product that overflows": put("lse", shape=[1 << 32, 1 << 32]),
    "product that is zero in 64 bits": put("lse", shape=[1 << 62, 4, 74]),
    "empty and huge": put("lse", shape=[0, HUGE], data_offsets=[0, 0]),
    "negative shape": put("lse", shape=[-2, -37]),
    "100 axes": put("lse", shape=[1] * 98 + [2, 37]),
    "10^5 axes": put("lse", shape=[1] * 100_000),
    "shape of text": put("lse", shape="2, 37"),
    "scalar": put("lse", shape=[]),
    "tensor that is none": lambda header: header.update(lse=None),
    "tensor that is a list": lambda header: header.update(lse=[1, 2]),
    "metadata": lambda header: header.update(__metadata__={"a": "b"}),
    "metadata of any type": lambda header: header.update(__metadata__=[1]),
    "name of a path": lambda header: header.update({"../../up": header.pop("lse")}),
    "name with control characters": lambda header: header.update({"l\n\x1b[2J": header.pop("lse")}),
    "long name": lambda header: header.update({"l" * 100_000: header.pop("lse")}),
    "surrogate": lambda header: header.update({"\ud800": header.pop("lse")}),
    "list": text(lambda data: b"[" + data + b"]"),
    "twice": text(lambda data: data[:-1] + b', "lse": ' + data.split(b'"lse": ')[1]),
    "no utf-8": text(lambda data: data.replace(b"lse", b"l\xffe")),
    "utf-16": text(lambda data: data.decode().encode("utf-16")),
    "byte order mark": text(lambda data: b"\xef\xbb\xbf" + data),
    "deep": text(lambda data: b'{"a":' * 100_000),
    "deep lists": text(lambda data: data.replace(b"[2, 37]", b"[" * 100_000)),
    "10^6 digits": text(lambda data: data.replace(b"[2, 37]", b"[" + b"9" * 1_000_000 + b"]")),
    "nan": text(lambda data: data.replace(b"[2, 37]", b"[NaN, 37]")),
    "truncated": text(lambda data: data[:-1]),
    "empty": text(lambda data: b""),
    "zeros": text(lambda data: bytes(len(data))),
}
LENGTHS = (0, 1, 7, 1 << 20, 1 << 27, 1 << 31, HUGE, (1 << 63) - 1, (1 << 64) - 8, (1 << 64) - 1)


def forged(pack: Path, data: bytes) -> None:
    """Put a file in a pack, and make its size and its digest fit."""
    (pack / FILE).write_bytes(data)
    forge(
        pack,
        lambda document: document["cases"][0].update(
            size=len(data), sha256=hashlib.sha256(data).hexdigest()
        ),
    )


def read_all(pack: Path) -> None:
    for case in golden.load(pack):
        case.verify()
        assert all(array.size >= 0 for array in case.tensors.values())


@pytest.mark.parametrize("what", CHANGES)
def test_a_header_in_a_pack(pack: Path, what: str) -> None:
    header, payload = split((pack / FILE).read_bytes())
    changed = CHANGES[what](header)
    forged(pack, file_of(changed if isinstance(changed, bytes) else header, payload))
    message = refused(lambda: read_all(pack))
    # A header that is too long for the tensors is refused before the file is opened.
    assert FILE in message or "do not fit tensors of" in message


@pytest.mark.parametrize("length", LENGTHS)
def test_a_length_in_a_pack(pack: Path, length: int) -> None:
    header, payload = split((pack / FILE).read_bytes())
    forged(pack, file_of(header, payload, length))
    assert "no whole safetensors file" in refused(lambda: read_all(pack))


@pytest.fixture(scope="module")
def given_file(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of what a perfect kernel gives for the first case."""
    path = tmp_path_factory.mktemp("results") / FILE
    write_safetensors(path, typed(results(golden.load(made)[FIRST])))
    return path


@pytest.mark.parametrize("what", CHANGES)
def test_a_header_in_results(made: Path, given_file: Path, tmp_path: Path, what: str) -> None:
    header, payload = split(given_file.read_bytes())
    changed = CHANGES[what](header)
    (tmp_path / FILE).write_bytes(
        file_of(changed if isinstance(changed, bytes) else header, payload)
    )
    case = golden.load(made)[FIRST]

    def check() -> None:
        report = golden.check(case, tmp_path / FILE, diagnose=False)
        assert report.passed == (what in ("metadata", "more fields"))  # others may write these

    ends_well(check)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_length_in_results(given_file: Path, length: int) -> None:
    header, payload = split(given_file.read_bytes())
    data = file_of(header, payload, length)
    refused(lambda: tensors_from_bytes(data, source="it"))


numbers = st.one_of(st.integers(0, 40), st.sampled_from([-1, HUGE, 1 << 63, 1 << 64, 0.5, None]))
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "U16", "U32", "I32", "F32"]),
        "shape": st.lists(numbers, max_size=3),
        "data_offsets": st.lists(numbers, min_size=1, max_size=3),
    }
)


def whole_by_hand(header: Header, size: int) -> bool:
    """Whether tensors fill a payload end to end, by marking its bytes one at a time."""
    marks = [0] * size
    for entry in header.values():
        begin, end = entry["data_offsets"]
        if end > size:
            return False
        for at in range(begin, end):
            marks[at] += 1
    return marks == [1] * size


@st.composite
def tilings(draw: st.DrawFn) -> tuple[Header, int]:
    """A whole header and its payload's size, then perhaps one number changed."""
    header: Header = {}
    at = 0
    for name in draw(st.lists(st.sampled_from("abcdef"), unique=True, max_size=4)):
        dtype = draw(st.sampled_from(["U8", "U16", "U32", "I32", "F32"]))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        size = int(np.prod(shape, dtype=int)) * {"U8": 1, "U16": 2}.get(dtype, 4)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    if header and draw(st.booleans()):
        entry = header[draw(st.sampled_from(sorted(header)))]
        step = draw(st.sampled_from([1, 2, 4, -1]))
        numbers = entry[draw(st.sampled_from(["shape", "data_offsets"]))]
        if draw(st.booleans()):
            entry["data_offsets"] = [at + step for at in entry["data_offsets"]]
        elif numbers:
            numbers[draw(st.integers(0, len(numbers) - 1))] += step
    return header, max(0, at + draw(st.sampled_from([0, 0, 0, 1, -1])))


def two_of_four_bytes(second: int) -> Header:
    """Two tensors of four bytes, the second from a byte on, and a third one up to byte 8."""
    header = {"a": (0, 4), "b": (second, second + 4), "c": (second + 4, max(8, second + 4))}
    return {
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in header.items()
    }


@few
@given(made=tilings())
@example(made=({"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}, 0))
@example(made=(two_of_four_bytes(2), 8))  # they overlap
@example(made=(two_of_four_bytes(4), 8))
@example(made=(two_of_four_bytes(6), 10))  # a gap
def test_what_is_whole_is_what_the_package_reads(made: tuple[Header, int]) -> None:
    header, size = made
    data = json.dumps(header).encode()
    try:
        safetensors.deserialize(file_of(header, bytes(size)))
        theirs = True
    except safetensors.SafetensorError:
        theirs = False
    message = ends_well(lambda: require_whole(parse_header(data), size))
    assert (message is None) == theirs
    if theirs:
        assert whole_by_hand(header, size)


@few
@given(header=st.dictionaries(st.text(max_size=3), entries, max_size=4), size=st.integers(0, 80))
def test_any_entries(header: Header, size: int) -> None:
    data = json.dumps(header).encode()
    ours = ends_well(lambda: require_whole(parse_header(data), size))
    theirs = ends_well(lambda: tensors_from_bytes(file_of(header, bytes(size)), source="it"))
    if ours is None:
        assert theirs is None


@few
@given(data=st.binary(max_size=100))
def test_any_bytes(data: bytes) -> None:
    ends_well(lambda: parse_header(data))
    ends_well(lambda: tensors_from_bytes(data, source="it"))


ARRAYS = {"U8": "u1", "U16": "u2", "U32": "u4", "I32": "i4", "F32": "f4"}


@few
@given(
    kinds=st.dictionaries(
        st.text("ab.s_9", min_size=1, max_size=6),
        st.tuples(st.sampled_from(sorted(ARRAYS)), st.lists(st.integers(0, 3), max_size=3)),
        min_size=1,
        max_size=6,
    )
)
def test_the_canonical_header_is_that_of_the_package(
    kinds: dict[str, tuple[str, list[int]]],
) -> None:
    written = tensors_to_bytes(
        {name: np.zeros(shape, ARRAYS[dtype]) for name, (dtype, shape) in kinds.items()}
    )
    entries = [
        TensorEntry(name=name, shape=tuple(shape), dtype=dtype, view="", layout="", sha256="")
        for name, (dtype, shape) in kinds.items()
    ]
    header = canonical_header(entries)
    assert written.startswith(len(header).to_bytes(8, "little") + header)


def test_a_file_of_another_writer_is_read_by_its_digest(pack: Path) -> None:
    """Tensors in another order, the header with spaces: the digest of the file covers it."""
    tensors = typed(read_safetensors(pack / FILE))
    write_safetensors(pack / FILE, dict(reversed(tensors.items())))
    forged(pack, (pack / FILE).read_bytes())
    read_all(pack)
    case = golden.load(pack)[FIRST]
    for name, (_, array) in tensors.items():
        assert case.tensors[name].tobytes() == array.tobytes()
    shutil.copy(pack / FILE, pack / "kept")
    forge(pack, lambda document: document["cases"][0].update(sha256="0" * 64))
    assert "outside its tensors" in refused(lambda: read_all(pack))
