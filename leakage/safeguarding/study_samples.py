"""The inputs that errors are measured on: synthetic ones with outliers, or a file of real ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from flamia_ref._errors import shown
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


_ARRAYS = ("q_bits", "k_bits", "v_bits", "dout_bits")
_NEEDED = (*_ARRAYS, "cu_seqlens", "softmax_scale")


def from_file(path: str | Path, tokens: int) -> StudySample:
    """The first query head, and its key/value head, of the documents of a file that begin within `tokens`.

    The file is an .npz with `q_bits` and `dout_bits` [tokens, heads, channels], `k_bits` and `v_bits` [tokens,
    kv_heads, channels], bfloat16 bits as uint16, `cu_seqlens` and `softmax_scale`. A document that goes beyond
    `tokens` is cut there.

    Raises ValueError of one line for another file.
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
    kept = min(tokens, len(q))
    documents = Documents.from_cu_seqlens([*(int(x) for x in offsets if x < kept), kept], kept)
    q, k, v, dout = (np.ascontiguousarray(x[:kept, :1]).view(ml_dtypes.bfloat16) for x in arrays)
    return StudySample(
        name=Path(path).name,
        q=q,
        k=k,
        v=v,
        dout=dout,
        documents=documents,
        softmax_scale=float(found["softmax_scale"]),
    )
