"""Arrays in files, for the command line: .npy, .npz and .safetensors."""

import io
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from flamia_ref._errors import shown
from flamia_ref.golden.files import read_plain, tensors_from_bytes, tensors_to_bytes

Arrays = dict[str, npt.NDArray[Any]]

_LIMIT = 1 << 34  # bytes
_WANTED = "save arrays of numbers with numpy.save or numpy.savez"
_READ = (".npy", ".npz", ".safetensors")


def suffix(file: str, allowed: tuple[str, ...]) -> str:
    """The ending of a file's name. Raises ValueError where it is not among those allowed."""
    if file.endswith(("/", "\\")):
        raise ValueError(f"{file} is the name of a folder; give that of a file")
    found = Path(file).suffix.lower()
    if found not in allowed:
        raise ValueError(f"{file} is no {' or '.join(allowed)} file by its name")
    return found


def one_array(file: str) -> npt.NDArray[Any]:
    """The array of a file that has one, or that is named `x` there.

    Raises ValueError where the file cannot be read, or has several arrays and none of that name.
    """
    found = arrays(file)
    if len(found) == 1:
        return next(iter(found.values()))
    if "x" in found:
        return found["x"]
    raise ValueError(f"{file} has {len(found)} arrays, {shown(sorted(found))}; name one of them x")


def arrays(file: str) -> Arrays:
    """The arrays of a file by name; that of a .npy file is `x`. Floats of 8 bits are their codes.

    Raises ValueError where the file cannot be read.
    """
    kind = suffix(file, _READ)
    data = read_plain(Path(file), limit=_LIMIT, follow=True)
    if kind == ".safetensors":
        tensors = tensors_from_bytes(data, source=file)
        return {
            name: one.array.view(ml_dtypes.bfloat16) if one.dtype == "BF16" else one.array
            for name, one in tensors.items()
        }
    try:
        if kind == ".npz":
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                if sum(member.file_size for member in archive.infolist()) > _LIMIT:
                    raise ValueError(f"it holds more than {_LIMIT} bytes")
        loaded = np.load(io.BytesIO(data), allow_pickle=False)
        if kind == ".npy":
            return {"x": _typed(loaded)}
        with loaded:
            return {name: _typed(loaded[name]) for name in loaded.files}
    except MemoryError:
        raise ValueError(f"{file} is no whole {kind} file, or too large for the memory") from None
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, AttributeError) as error:
        why = str(error)
        if "allow_pickle" in why or "pickle" in why:  # advice that is not for the command line
            why = f"it does not begin as one, or holds Python objects; {_WANTED}"
        raise ValueError(f"{file} is no whole {kind} file: {why}") from error


def _typed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An array of a file of numpy's, which keeps bfloat16 as two bytes without a name."""
    if not isinstance(array, np.ndarray):  # another member of a .npz archive
        raise ValueError(f"it has a member that is no array; {_WANTED}")
    if array.dtype.kind == "V" and array.dtype != np.dtype("V2"):
        raise ValueError(
            f"it has an array of {array.dtype.itemsize} bytes an element without a type, such as"
            " float8; save a view of it as uint8, or use .safetensors"
        )
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array


def to_bytes(found: Arrays, kind: str) -> bytes:
    """The bytes of a .npz or .safetensors file: the same for the same arrays."""
    if kind == ".safetensors":
        return tensors_to_bytes(found)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **found)
    return buffer.getvalue()
