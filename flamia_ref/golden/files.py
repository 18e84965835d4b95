"""Reading files that nobody vouches for: plain files, bounded sizes, safetensors without pickle."""

import io
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from flamia_ref._errors import line, shown
from flamia_ref.golden.canonical import unique

Tensor = npt.NDArray[Any]

# What each safetensors dtype is read as. Narrow floats are their bits.
_STORAGE: dict[str, type[np.generic]] = {
    "U8": np.uint8,
    "U16": np.uint16,
    "U32": np.uint32,
    "U64": np.uint64,
    "I32": np.int32,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "BF16": np.uint16,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "F8_E8M0": np.uint8,
}

_REASON = 200  # characters of another package's message, which may quote a name of the file

# Typed here because the package leaves it untyped. safetensors.numpy.load refuses narrow floats.
_deserialize: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = safetensors.deserialize


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A tensor as it lies in a file: the name of its dtype there, and its array.

    The array of a dtype that numpy has not holds the bits (BF16, F8_E4M3), or, for one that this
    package does not use, the raw bytes.
    """

    dtype: str
    array: Tensor


@contextmanager
def open_plain(path: Path, *, limit: int, follow: bool = False) -> Iterator[tuple[io.FileIO, int]]:
    """Open a regular file of at most `limit` bytes: the open file, unbuffered, and its size.

    Raises ValueError where the file is missing, unreadable (here or while it is open), longer, no
    regular file (a pipe, a device, a folder), or, unless `follow`, a symbolic link.
    """
    # A pipe without a writer would block at open.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    if not follow:
        if path.is_symlink():
            raise ValueError(f"{path} is a symbolic link; a pack holds plain files only")
        flags |= getattr(os, "O_NOFOLLOW", 0)
    try:
        with open(os.open(path, flags), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{path} is not a regular file")
            if status.st_size > limit:
                raise ValueError(f"{path} has {status.st_size} bytes; at most {limit} are expected")
            yield file, status.st_size
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error


def read_plain(path: Path, *, limit: int, follow: bool = False) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes.

    Memory is that of the file, whatever the limit. Raises ValueError as `open_plain` does, and where
    the file grows or shrinks while it is read.
    """
    with open_plain(path, limit=limit, follow=follow) as (file, size):
        data = bytearray(size)
        fill(file, memoryview(data), source=path)
        if file.read(1):
            raise ValueError(
                f"{path} has more than the {size} bytes that it had; it is being written"
            )
        return bytes(data)


def fill(file: io.FileIO, part: memoryview, *, source: Path) -> None:
    """Read the next bytes of a file into the whole of a buffer.

    Raises ValueError where the file ends before.
    """
    done = 0
    while done < len(part):
        count = file.readinto(part[done:])
        if not count:
            raise ValueError(f"{source} ended {len(part) - done} bytes early; it is being written")
        done += count


def tensors_from_bytes(data: bytes, *, source: str) -> dict[str, Stored]:
    """Return the tensors of a safetensors file. `source` names it in errors.

    The arrays are read-only. Raises ValueError where the data is not a whole safetensors file, or
    has a shape that numpy does not.
    """
    try:
        entries = _deserialize(data)
        # The package takes the last of two tensors of one name; other readers take the first.
        json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")], object_pairs_hook=unique)
    except (safetensors.SafetensorError, ValueError, RecursionError) as error:
        reason = line(str(error))[:_REASON]
        raise ValueError(f"{source} is no whole safetensors file: {reason}") from error
    tensors = {}
    for name, entry in sorted(entries):
        storage = _STORAGE.get(entry["dtype"])
        raw = np.frombuffer(entry["data"], np.uint8)
        if storage is not None:
            try:
                raw = raw.view(np.dtype(storage).newbyteorder("<")).reshape(entry["shape"])
            except ValueError as error:
                raise ValueError(
                    f"{source}: tensor {shown(name)} has shape {shown(entry['shape'])}: {error}"
                ) from error
            raw = raw.astype(storage, copy=False)
        raw.flags.writeable = False
        tensors[name] = Stored(dtype=entry["dtype"], array=raw)
    return tensors


def tensors_to_bytes(tensors: dict[str, Tensor]) -> bytes:
    """Return the bytes of a safetensors file without header metadata, whose order is random.

    Raises TypeError for a dtype that the package does not write exactly and canonically.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in (np.uint8, np.uint16, np.uint32, np.int32, np.float32):
            raise TypeError(f"tensor {shown(name)} is {tensor.dtype}; packs hold no such dtype")
    # Not ascontiguousarray, which makes a scalar a list of one.
    contiguous = {name: np.asarray(tensors[name], order="C") for name in sorted(tensors)}
    return safetensors.numpy.save(contiguous)


def little_endian(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor as a file holds them."""
    return np.asarray(tensor, tensor.dtype.newbyteorder("<")).tobytes()
