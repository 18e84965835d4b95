"""The inputs that errors are measured on: synthetic ones with outliers, or a file of real ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from flamia_ref._errors import shown, type_of
from flamia_ref.attention.samples import bell
from flamia_ref.packing import Documents

Values = npt.NDArray[Any]  # bfloat16

_OUTLIERS = 8.0
_OUTLIER_CHANNELS = 16  # one of as many
_POWERS = np.array([-2, 0, 1, -1, 2, 0, -1, 1, 0, -2, 1, 0])  # of two, of tokens in turn


class StudySample(NamedTuple):
    """q and dout [tokens, heads, channels], k and v [tokens, kv_heads, channels], in bfloat16, and their documents."""

    name: str
    q: Values
    k: Values
    v: Values
    dout: Values
    documents: Documents
    softmax_scale: float

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document."""
        return self.documents.lengths


def synthetic(lengths: Sequence[int], head_dim: int) -> StudySample:
    """One head of bell-shaped values. One channel of k in 16 is 8 times as large, tokens of v and of dout differ by
    powers of two, those of dout by 2^8 from the largest to the smallest: what makes a shared scale cost precision."""
    drawn = bell(tuple(lengths), 1, 1, head_dim)
    channels = np.where(np.arange(head_dim) % _OUTLIER_CHANNELS == 3, _OUTLIERS, 1.0)
    powers = np.resize(_POWERS, drawn.documents.tokens)[:, None, None]
    return StudySample(
        name="synthetic, with outliers",
        q=_times(drawn.q, 0.5 / channels**0.5),
        k=_times(drawn.k, channels),
        v=_times(drawn.v, 2.0**powers),
        dout=_times(drawn.dout, 4.0**powers),
        documents=drawn.documents,
        softmax_scale=1 / math.sqrt(head_dim),
    )


def _times(x: Values, factor: Any) -> Values:
    found: Values = (x.astype(np.float64) * factor).astype(ml_dtypes.bfloat16)
    return found


def check_sample(sample: Any) -> None:
    """Refuse what is no sample that a study can measure: TypeError or ValueError of one line that names the array."""
    if not isinstance(sample, StudySample):
        raise TypeError(
            f"sample is {shown(sample)}; it must be a StudySample, or None for synthetic inputs"
        )
    if not isinstance(sample.documents, Documents):
        raise TypeError(
            f"documents of sample {sample.name} is {shown(sample.documents)}; it must be Documents"
        )
    arrays = {"q": sample.q, "k": sample.k, "v": sample.v, "dout": sample.dout}
    for name, x in arrays.items():
        if getattr(x, "dtype", None) != ml_dtypes.bfloat16 or np.ndim(x) != 3 or not x.size:
            raise ValueError(
                f"{name} of sample {sample.name} is {type_of(x)} {list(np.shape(x))}; it must be bfloat16 [tokens,"
                " heads, channels] with values"
            )
    q, k, v, _ = arrays.values()
    tokens = sample.documents.tokens
    shapes = {"k": (tokens, k.shape[1], q.shape[2]), "v": (tokens, k.shape[1], v.shape[2])}
    shapes |= {"q": (tokens, *q.shape[1:]), "dout": (tokens, q.shape[1], v.shape[2])}
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise ValueError(
                f"{name} of sample {sample.name} is {list(arrays[name].shape)}; beside the others, and documents of"
                f" {tokens} tokens, it must be {list(shape)}"
            )
    check_finite(f"sample {sample.name}", arrays, sample.softmax_scale)


def check_finite(where: str, arrays: Mapping[str, Values], softmax_scale: Any) -> None:
    """Refuse NaN and infinity: ValueError of one line that names the array and says how many there are."""
    for name, x in arrays.items():
        lost = int(np.count_nonzero(~np.isfinite(x.astype(np.float32))))
        if lost:
            raise ValueError(
                f"{name} of {where} has {lost} of {x.size} values that are NaN or infinite; errors are measured on"
                " finite inputs"
            )
    number = np.asarray(softmax_scale)
    if number.ndim or number.dtype.kind not in "fiu" or not 0 < number < math.inf:
        raise ValueError(
            f"softmax_scale of {where} is {shown(softmax_scale)}; it must be one finite number above 0"
        )


_ARRAYS = ("q_bits", "k_bits", "v_bits", "dout_bits")
_NEEDED = (*_ARRAYS, "cu_seqlens", "softmax_scale")


def from_file(path: str | Path, tokens: int, *, given_by: str = "tokens") -> StudySample:
    """The first query head, and its key/value head, of the first `tokens` tokens of a file, in its own documents.

    The file is an .npz with `q_bits` and `dout_bits` [tokens, heads, channels], `k_bits` and `v_bits` [tokens,
    kv_heads, channels], bfloat16 bits as uint16, `cu_seqlens` and `softmax_scale`. A document that goes beyond
    `tokens` is cut there.

    `given_by`: what `tokens` is called in errors.

    Raises ValueError of one line for another file, one with fewer tokens, and one with NaN or infinity in them.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in _NEEDED if name in file}
    except (ValueError, EOFError, TypeError) as error:
        raise ValueError(f"{path} is no .npz file of arrays: {error}") from None
    missing = [name for name in _NEEDED if name not in found]
    if missing:
        raise ValueError(
            f"{path} has no {', '.join(missing)}; it must be an .npz file with {', '.join(_NEEDED)}"
        )
    arrays = [found[name] for name in _ARRAYS]
    q, k, v, dout = arrays
    if any(x.dtype != np.uint16 or x.ndim != 3 or not x.size for x in arrays) or not (
        len({len(x) for x in arrays}) == 1 and q.shape == dout.shape and k.shape[:2] == v.shape[:2]
    ):
        shapes = ", ".join(f"{x.dtype} {list(x.shape)}" for x in arrays)
        raise ValueError(
            f"{path} has {', '.join(_ARRAYS)} of {shapes}; they must be uint16 [tokens, heads, channels], q and dout"
            " alike, k and v alike"
        )
    offsets = found["cu_seqlens"]
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or offsets[-1:].tolist() != [len(q)]:
        raise ValueError(
            f"{path} has cu_seqlens {shown(offsets.tolist())}; it must end with {len(q)}"
        )
    if len(q) < tokens:
        raise ValueError(
            f"{path} has {len(q)} tokens, and {given_by} asks for {tokens}; give {len(q)} or fewer"
        )
    kept = tokens
    try:
        documents = Documents.from_cu_seqlens([*(int(x) for x in offsets if x < kept), kept], kept)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    q, k, v, dout = (np.ascontiguousarray(x[:kept, :1]).view(ml_dtypes.bfloat16) for x in arrays)
    scale = found["softmax_scale"]
    check_finite(str(path), dict(zip(_ARRAYS, (q, k, v, dout), strict=True)), scale)
    return StudySample(
        name=Path(path).name,
        q=q,
        k=k,
        v=v,
        dout=dout,
        documents=documents,
        softmax_scale=float(scale),
    )
