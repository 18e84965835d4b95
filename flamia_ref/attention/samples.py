"""Inputs that the consistency of a recipe is measured on: bfloat16, made from integers, so the same everywhere."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from flamia_ref.packing import Documents

Inputs = npt.NDArray[Any]  # bfloat16

_SPREAD = 2.0**-8  # of a sum of eight bytes less its mean: a standard deviation of 0.82
_PEAKED = 4.0  # of q, so that rows differ in how many keys count
_BINADES = 25  # a block in e4m3 keeps nothing smaller than 2^-18 of its largest element


class Sample(NamedTuple):
    """q and dout [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], and the documents."""

    name: str
    q: Inputs
    k: Inputs
    v: Inputs
    dout: Inputs
    documents: Documents

    def taken(self, order: tuple[int, ...]) -> Sample:
        """Some of the documents, packed in another order."""
        parts = [list(self.documents)[index] for index in order]
        offsets = np.cumsum([0, *(part.stop - part.start for part in parts)])
        q, k, v, dout = (
            np.concatenate([x[part] for part in parts]) for x in (self.q, self.k, self.v, self.dout)
        )
        return Sample(self.name, q, k, v, dout, Documents(tuple(map(int, offsets))))


def bell(lengths: tuple[int, ...], heads: int, kv_heads: int, head_dim: int) -> Sample:
    """Bell-shaped values; scores have a standard deviation of about 2.7 for the default softmax scale."""
    return _sample("bell", lengths, heads, kv_heads, head_dim, binades=1)


def wide(lengths: tuple[int, ...], heads: int, kv_heads: int, head_dim: int) -> Sample:
    """The same, every other element times 2^0 to 2^-24, so that what shares a scale is seen in the codes."""
    return _sample("wide", lengths, heads, kv_heads, head_dim, binades=_BINADES)


def public_witness() -> Sample:
    """The public witness of MXFP8's leak: q = k = 1; v is 2^-20 at token 0 and 1 at token 16, else 0.

    With one scale for 32 tokens of v, the first tokens' output is 0 instead of a share of 2^-20.
    Source: NVIDIA/TransformerEngine issue 3248.
    """
    ones = np.ones((128, 1, 128), dtype=ml_dtypes.bfloat16)
    v = np.zeros_like(ones)
    v[0], v[16] = 2.0**-20, 1
    return Sample("public witness", ones, ones, v, ones, Documents((0, 128)))


def key_witness() -> Sample:
    """Keys of about 2^-18 and a key of 1 at token 16, for queries of 2^18.

    Where 32 tokens of k share a scale, the first tokens' scores vanish, or what dS times k adds up to.
    """
    tokens, channels = 32, 64
    bell_shaped = bell((tokens,), 1, 1, channels)
    q = np.full_like(bell_shaped.q, 2.0**18)
    k = (bell_shaped.k.astype(np.float32) * np.float32(2.0**-18)).astype(ml_dtypes.bfloat16)
    k[16] = 1
    return bell_shaped._replace(name="key witness", q=q, k=k)


def _sample(
    name: str, lengths: tuple[int, ...], heads: int, kv_heads: int, head_dim: int, *, binades: int
) -> Sample:
    documents = Documents(tuple(int(x) for x in np.cumsum([0, *lengths])))
    arrays = []
    for seed, (count, factor) in enumerate(
        ((heads, _PEAKED), (kv_heads, 1.0), (kv_heads, 1.0), (heads, 1.0))
    ):
        shape = (documents.tokens, count, head_dim)
        # The raw bits of a bit generator are the same in every version of numpy, its distributions are not.
        bits = np.random.PCG64(seed).random_raw(2 * int(np.prod(shape))).reshape(2, *shape)
        bell = bits[0][..., None].view(np.uint8).astype(np.int32).sum(axis=-1) - 1020
        powers = (bits[1] >> np.uint64(1)) % np.uint64(binades) * (bits[1] & np.uint64(1))
        values = np.ldexp(bell * factor * _SPREAD, -powers.astype(np.int32))
        arrays.append(values.astype(ml_dtypes.bfloat16))
    q, k, v, dout = arrays
    return Sample(name, q, k, v, dout, documents)
