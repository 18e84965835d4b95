"""The tensors of a case, each read from the file when it is used and checked by its digest.

The file is not mapped into memory: whoever shortens a mapped file kills the process that reads it
(SIGBUS), and what is written into it after its digest was checked is in the array. It is read in
chunks instead, and the bytes that were hashed are those that are returned. Arrays live as long as
somebody holds them; beside these, the ones used last stay, up to `KEPT_BYTES` in the whole process.
"""

import hashlib
import io
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flamia_ref._errors import line, shown, unknown_name
from flamia_ref.golden.files import Tensor, fill, open_plain
from flamia_ref.golden.header import PREFIX, Span, canonical_header, parse_header, require_whole

if TYPE_CHECKING:
    from flamia_ref.golden.manifest import CaseEntry

KEPT_BYTES = 64 << 20  # the last tensor used stays even where it is larger

_CHUNK = 1 << 18  # of a read and a hash; fits a core's cache
_AHEAD = 8 << 20  # what the system fetches before it is asked for, at least
_SMALL = KEPT_BYTES // 4  # files of fewer bytes stay in memory when they are verified
_THREADS = min(4, os.cpu_count() or 1)
_HEADER_BYTES_A_TENSOR = 512
_DTYPES = {"U8": "u1", "U16": "<u2", "I32": "<i4", "F32": "<f4"}


class CaseFile(Mapping[str, Tensor]):
    """The tensors of a case file by name, in dataflow order: read-only arrays of the stored types.

    The header is read now, and must list the tensors that the manifest lists. A tensor is read, and its
    SHA-256 checked, when it is looked up. So every byte is checked before it is used: a header that is
    not as packs are written is covered by the SHA-256 of the file, which then is computed now.

    Raises ValueError, now or at a look-up, where the file is not what the manifest says.
    """

    def __init__(self, path: Path, entry: "CaseEntry") -> None:
        self._path = path
        self._entry = entry
        self._lock = threading.RLock()
        self._alive: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()
        with self._open() as file:
            header, spans = _header(file, path, entry)
            if header != canonical_header(entry.tensors.values()):
                self._require_digest(file)
        self._start = PREFIX + len(header)
        self._spans = {span.name: span for span in spans}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise unknown_name("tensor", name, self._entry.tensors)
        with self._lock:
            owner = self._alive.get(name)
            if owner is None:
                self._alive[name] = owner = self._read(name)
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
        """Read the whole file again, the header too, and check all digests.

        Memory does not grow with the file. Raises ValueError where the file is not what the manifest
        says.
        """
        fresh = CaseFile(self._path, self._entry)
        if self._entry.size <= _SMALL:
            for name in fresh._spans:
                array = fresh._read(name)
                with self._lock:
                    # Whoever holds an array is known by it: `check` refuses the pack's own.
                    array = self._alive.setdefault(name, array)
                    _KEPT.used(array)
        else:
            # Hashing is slower than a good disk, and leaves the interpreter to other threads.
            with ThreadPoolExecutor(_THREADS) as pool:
                for _ in pool.map(fresh._check, fresh._spans):
                    pass
        self._start, self._spans = fresh._start, fresh._spans

    def _read(self, name: str) -> Tensor:
        """Return a tensor as a new array."""
        listed = self._entry.tensors[name]
        try:
            array = np.empty(listed.shape, _DTYPES[listed.dtype])
        except MemoryError as error:
            raise ValueError(
                f"{self._path}: there is no memory for tensor {name}, {listed.dtype} "
                f"{list(listed.shape)}"
            ) from error
        self._check(name, _bytes_of(array))
        array.flags.writeable = False
        return array

    def _check(self, name: str, into: memoryview | None = None) -> None:
        """Read the bytes of a tensor, and check their digest."""
        span = self._spans[name]
        digest = hashlib.sha256()
        with self._open() as file:
            file.seek(self._start + span.begin)
            for part in _parts(file, span.end - span.begin, self._path, into):
                digest.update(part)
        if digest.hexdigest() != self._entry.tensors[name].sha256:
            raise ValueError(f"{self._path}: tensor {name} was changed since it was written")

    def _require_digest(self, file: io.FileIO) -> None:
        digest = hashlib.sha256()
        file.seek(0)
        for part in _parts(file, self._entry.size, self._path):
            digest.update(part)
        if digest.hexdigest() != self._entry.sha256:
            raise ValueError(f"{self._path} was changed since it was written, outside its tensors")

    @contextmanager
    def _open(self) -> Iterator[io.FileIO]:
        with open_plain(self._path, limit=self._entry.size) as (file, size):
            if size != self._entry.size:
                raise ValueError(
                    f"{self._path} has {size} bytes; the manifest says {self._entry.size}"
                )
            yield file


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
            self._arrays[id(array)] = array
            self._bytes += array.nbytes
            while self._bytes > KEPT_BYTES and len(self._arrays) > 1:
                self._bytes -= self._arrays.popitem(last=False)[1].nbytes


_KEPT = _Kept()


def _parts(
    file: io.FileIO, size: int, path: Path, into: memoryview | None = None
) -> Iterator[memoryview]:
    """Read so many bytes and yield them in chunks: parts of a buffer, or one chunk again and again."""
    at = file.tell()
    scratch = memoryview(bytearray(min(size, _CHUNK) if into is None else 0))
    for start in range(0, size, _CHUNK):
        count = min(_CHUNK, size - start)
        part = scratch[:count] if into is None else into[start : start + count]
        if size > _CHUNK and start % _AHEAD == 0 and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), at + start, 2 * _AHEAD, os.POSIX_FADV_WILLNEED)
        fill(file, part, source=path)
        yield part


def _bytes_of(array: Tensor) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _header(file: io.FileIO, path: Path, entry: "CaseEntry") -> tuple[bytes, tuple[Span, ...]]:
    """Return the header of a file and what it lists, which is what the manifest lists."""
    with _whole(path):
        limit = min(entry.size - PREFIX, _HEADER_BYTES_A_TENSOR * (len(entry.tensors) + 1))
        prefix = memoryview(bytearray(PREFIX))
        fill(file, prefix, source=path)
        length = int.from_bytes(prefix, "little")
        if length > limit:
            raise ValueError(f"it claims a header of {length} bytes, at most {limit} are expected")
        header = bytearray(length)
        fill(file, memoryview(header), source=path)
        spans = parse_header(bytes(header))
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
                f"{path}: tensor {name} is {line(span.dtype[:20])} {shown(list(span.shape))}; "
                f"the manifest says {listed.dtype} {list(listed.shape)}"
            )
    with _whole(path):
        require_whole(spans, entry.size - PREFIX - length)
    return bytes(header), spans


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path} is no whole safetensors file: {error}") from error
