"""The tensors of a case, each read from the file when it is used and checked by its digest.

The file is not mapped into memory: whoever shortens a mapped file kills the process that reads it
(SIGBUS), and what is written into it after its digest was checked is in the array. It is read in
chunks instead, and the bytes that were hashed are those that are returned. Arrays live as long as
somebody holds them; beside these, the ones used last stay, up to `KEPT_BYTES` in the whole process.
"""

import hashlib
import io
import itertools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flamia_ref._errors import shown, unknown_name
from flamia_ref.golden.files import Tensor, fill, open_plain
from flamia_ref.golden.header import PREFIX, Span, parse_header, require_whole

if TYPE_CHECKING:
    from flamia_ref.golden.manifest import CaseEntry

KEPT_BYTES = 64 << 20  # the last tensor used stays even where it is larger

_CHUNK = 1 << 20  # of a read and a hash
_AHEAD = 8 * _CHUNK  # what the system may fetch before it is asked for
_HEADER_BYTES_A_TENSOR = 512
_DTYPES = {"U8": "u1", "U16": "<u2", "I32": "<i4", "F32": "<f4"}


class CaseFile(Mapping[str, Tensor]):
    """The tensors of a case file by name, in dataflow order: read-only arrays of the stored types.

    The header is read now, and must list the tensors that the manifest lists. A tensor is read, and its
    SHA-256 checked, when it is looked up. The SHA-256 of the file, which covers the header too, is
    checked by `verify`, and else when all tensors have been looked up.

    Raises ValueError, now or at a look-up, where the file is not what the manifest says.
    """

    def __init__(self, path: Path, entry: "CaseEntry") -> None:
        self._path = path
        self._entry = entry
        self._lock = threading.RLock()
        self._alive: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()
        self._unread = set(entry.tensors)
        with self._open() as file:
            length, spans = _header(file, path, entry)
        self._start = PREFIX + length
        self._spans = {span.name: span for span in spans}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise unknown_name("tensor", name, self._entry.tensors)
        with self._lock:
            owner = self._alive.get(name)
            if owner is None:
                with self._open() as file:
                    span = self._spans[name]
                    file.seek(self._start + span.begin)
                    owner = self._array(name)
                    self._take(file, span, _bytes_of(owner))
                self._alive[name] = owner
                self._read(name)
            _KEPT.used(owner)
            # A view: unlike an array that owns its data it cannot be made writeable again.
            return owner[...]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._entry.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._entry.tensors)

    def __len__(self) -> int:
        return len(self._entry.tensors)

    def __repr__(self) -> str:
        return f"CaseFile({str(self._path)!r}, {len(self)} tensors)"

    def verify(self) -> None:
        """Read the file once, from its first byte to its last, and check all digests.

        Memory is bounded by `KEPT_BYTES`, whatever the size. Raises ValueError where the file is not
        what the manifest says.
        """
        with self._lock, self._open() as file, _Digest() as whole:
            _through(file, self._start, self._path, whole)
            for name, span in self._spans.items():
                if span.end - span.begin > KEPT_BYTES // 4:
                    self._take(file, span, None, whole)
                    continue
                owner = self._array(name)
                self._take(file, span, _bytes_of(owner), whole)
                self._alive[name] = owner
                _KEPT.used(owner)
            self._require(whole)
            self._unread.clear()

    def _read(self, name: str) -> None:
        """Check the digest of the file once all its tensors have been read one by one."""
        if name not in self._unread:
            return
        if self._unread == {name}:
            with self._open() as file, _Digest() as whole:
                _through(file, self._entry.size, self._path, whole)
                self._require(whole)
        self._unread.discard(name)

    def _require(self, whole: "_Digest") -> None:
        if whole.hexdigest() != self._entry.sha256:
            raise ValueError(f"{self._path} was changed since it was written, outside its tensors")

    @contextmanager
    def _open(self) -> Iterator[io.FileIO]:
        with open_plain(self._path, limit=self._entry.size) as (file, size):
            if size != self._entry.size:
                raise ValueError(
                    f"{self._path} has {size} bytes; the manifest says {self._entry.size}"
                )
            yield file

    def _array(self, name: str) -> Tensor:
        listed = self._entry.tensors[name]
        try:
            return np.empty(listed.shape, _DTYPES[listed.dtype])
        except MemoryError as error:
            raise ValueError(
                f"{self._path}: there is no memory for tensor {name}, {listed.dtype} "
                f"{list(listed.shape)}"
            ) from error

    def _take(
        self, file: io.FileIO, span: Span, into: memoryview | None, whole: "_Digest | None" = None
    ) -> None:
        """Read the bytes of a tensor from here on and check their digest."""
        digest = hashlib.sha256()
        for part in _parts(file, span.end - span.begin, self._path, into):
            if whole is not None:
                whole.update(part)
            digest.update(part)
        if digest.hexdigest() != self._entry.tensors[span.name].sha256:
            raise ValueError(f"{self._path}: tensor {span.name} was changed since it was written")


class _Kept:
    """Holds the arrays that were used last, so that a look-up in a loop does not read each time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrays: OrderedDict[int, Tensor] = OrderedDict()
        self._bytes = 0

    def used(self, array: Tensor) -> None:
        """Hold an array, and let go of those used longest ago while there are too many bytes."""
        with self._lock:
            if id(array) in self._arrays:
                self._arrays.move_to_end(id(array))
                return
            array.flags.writeable = False
            self._arrays[id(array)] = array
            self._bytes += array.nbytes
            while self._bytes > KEPT_BYTES and len(self._arrays) > 1:
                self._bytes -= self._arrays.popitem(last=False)[1].nbytes


_KEPT = _Kept()


class _Digest:
    """SHA-256 in a thread of its own, beside the one of a tensor: hashing is slower than a good disk."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None

    def __enter__(self) -> "_Digest":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def update(self, part: memoryview) -> None:
        """Add bytes. They may not change before the next but one call."""
        if self._last is not None:
            self._last.result()
            self._last = None
        if len(part) < _CHUNK:
            self._digest.update(part)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1)
        self._last = self._pool.submit(self._digest.update, part)

    def hexdigest(self) -> str:
        """The digest of all bytes so far."""
        self.update(memoryview(b""))
        return self._digest.hexdigest()


def _parts(
    file: io.FileIO, size: int, path: Path, into: memoryview | None = None
) -> Iterator[memoryview]:
    """Read so many bytes and yield them in chunks: into a buffer, or two that take turns."""
    at = file.tell()
    # A chunk is still being hashed by another thread while the next one is read.
    turns = itertools.cycle([memoryview(bytearray(min(size, _CHUNK))) for _ in range(2)])
    for start in range(0, size, _CHUNK):
        count = min(_CHUNK, size - start)
        part = next(turns)[:count] if into is None else into[start : start + count]
        if hasattr(os, "posix_fadvise") and size > _CHUNK:
            os.posix_fadvise(file.fileno(), at + start, _AHEAD, os.POSIX_FADV_WILLNEED)
        fill(file, part, source=path)
        yield part


def _through(file: io.FileIO, size: int, path: Path, whole: _Digest) -> None:
    for part in _parts(file, size, path):
        whole.update(part)


def _bytes_of(array: Tensor) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def _header(file: io.FileIO, path: Path, entry: "CaseEntry") -> tuple[int, tuple[Span, ...]]:
    """Return the length of the header and what it lists, which is what the manifest lists."""
    try:
        limit = min(entry.size - PREFIX, _HEADER_BYTES_A_TENSOR * (len(entry.tensors) + 1))
        prefix = memoryview(bytearray(PREFIX))
        fill(file, prefix, source=path)
        length = int.from_bytes(prefix, "little")
        if length > limit:
            raise ValueError(f"it claims a header of {length} bytes, of at most {limit}")
        header = memoryview(bytearray(length))
        fill(file, header, source=path)
        spans = parse_header(bytes(header))
    except ValueError as error:
        raise ValueError(f"{path} is no whole safetensors file: {error}") from error
    found = {span.name: span for span in spans}
    for name in found:
        if name not in entry.tensors:
            raise ValueError(f"{path} holds tensor {shown(name)}, which the manifest does not list")
    for name, listed in entry.tensors.items():
        if name not in found:
            raise ValueError(f"{path} lacks tensor {name}, which the manifest lists")
        span = found[name]
        if (span.dtype, span.shape) != (listed.dtype, listed.shape):
            raise ValueError(
                f"{path}: tensor {name} is {shown(span.dtype)} {shown(list(span.shape))}; "
                f"the manifest says {listed.dtype} {list(listed.shape)}"
            )
        size = _size(listed)
        if span.end - span.begin != size:
            raise ValueError(
                f"{path} is no whole safetensors file: tensor {name} has {span.end - span.begin} "
                f"bytes, not {size}"
            )
    try:
        require_whole(spans, entry.size - PREFIX - length)
    except ValueError as error:
        raise ValueError(f"{path} is no whole safetensors file: {error}") from error
    return length, spans


def _size(listed: Any) -> int:
    count = np.dtype(_DTYPES[listed.dtype]).itemsize
    for extent in listed.shape:
        count *= extent
    return int(count)
