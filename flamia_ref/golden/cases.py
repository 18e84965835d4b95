"""A case as data: its shapes, its inputs, and why it exists."""

import itertools
import math
import re
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

import numpy as np
import numpy.typing as npt

from flamia_ref._errors import shown, unknown_name
from flamia_ref.golden.case_fields import Fill as Fill
from flamia_ref.golden.case_fields import Plant as Plant
from flamia_ref.golden.case_fields import Rows as Rows
from flamia_ref.golden.case_fields import Twin as Twin
from flamia_ref.golden.files import tensors_from_bytes
from flamia_ref.golden.flags import FLAGS as FLAGS
from flamia_ref.golden.inputs import MAX_EXPONENT, TENSORS, U16, Distribution, hashed
from flamia_ref.packing import Documents, Mask
from flamia_ref.packing.mask import ALIGNMENTS

# Names become file names on every system, and ids of tests.
PLAIN_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,78}[a-z0-9])?\Z")

RECORDINGS = ("smollm2-layer14", "smollm2-layer28")  # by the seed of a recorded case

LARGEST = 1 << 24  # a bound on each count of a case, so that products stay far from 2^64
MOST_DOCUMENTS = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseSpec:
    """What a case is, without its results.

    `lengths` are those of the documents in tokens. `softmax_scale` multiplies S. `seed` and
    `exponent` parametrise the formulas of `flamia_ref.golden.inputs`; the seed of a recorded case is the
    number of its recording.
    `fills` and then `plants` overwrite elements. `key_lengths`: the keys of each document, None where
    they are the same tokens as the queries; `alignment` and `window`: as in
    `flamia_ref.packing.Mask`. `softcap`: scores become softcap tanh(score / softcap). `sinks`: the
    logit of a key of value 0 for each query head, () for none. `scale_padding`: the byte that the
    padding of tiled scales holds; a kernel must not read it. `twin`: the case that differs from this
    one in a few tokens, and the results that must be equal all the same.

    Raises ValueError for values that no case can have.
    """

    name: str
    why: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    softmax_scale: float
    distribution: Distribution
    seed: int
    exponent: int
    plants: tuple[Plant, ...] = ()
    flags: tuple[str, ...] = field(default=())
    fills: tuple[Fill, ...] = ()
    key_lengths: tuple[int, ...] | None = None
    alignment: str = "bottom_right"
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sinks: tuple[float, ...] = ()
    scale_padding: int = 0
    twin: Twin | None = None

    def __post_init__(self) -> None:
        if not PLAIN_NAME.match(self.name):
            raise ValueError(
                f"case name {shown(self.name)} is not plain; use at most 80 of a-z 0-9 . _ -"
            )
        if not self.why.isprintable():
            raise ValueError(f"case {self.name}: why is {shown(self.why)}; it must be printable")
        counts = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        for what, count in counts.items():
            if not 1 <= count <= LARGEST:
                raise ValueError(f"case {self.name}: {what} is {count}; it must be 1 to {LARGEST}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"case {self.name}: {self.heads} heads do not divide over {self.kv_heads} kv_heads"
            )
        if self.head_dim % 32:
            raise ValueError(f"case {self.name}: head_dim {self.head_dim} is no multiple of 32")
        if len(self.lengths) > MOST_DOCUMENTS:
            raise ValueError(f"case {self.name}: more than {MOST_DOCUMENTS} documents")
        for lengths in (self.lengths, self.lengths_of_keys):
            if any(not 0 <= n <= LARGEST for n in lengths):
                raise ValueError(f"case {self.name}: every length must be 0 to {LARGEST} tokens")
            if sum(lengths) > LARGEST:
                raise ValueError(f"case {self.name}: {sum(lengths)} tokens are more than {LARGEST}")
        if not (math.isfinite(self.softmax_scale) and self.softmax_scale > 0):
            raise ValueError(
                f"case {self.name}: softmax_scale is {self.softmax_scale}; it must be above 0"
            )
        if abs(self.exponent) > MAX_EXPONENT or not 0 <= self.seed < 2**64:
            raise ValueError(f"case {self.name}: seed or exponent is out of range")
        if self.distribution is Distribution.RECORDED and self.seed >= len(RECORDINGS):
            raise ValueError(
                f"case {self.name}: there is no recording {self.seed}; there are {len(RECORDINGS)}"
            )
        for plant in self.plants:
            box = ((at, at + 1) for at in (plant.token, plant.head, plant.channel))
            if not self._inside(plant.tensor, plant.bits, *box):
                raise ValueError(f"case {self.name}: {shown(plant)} lies outside the case")
        for fill in self.fills:
            if not self._inside(fill.tensor, fill.bits, fill.tokens, fill.heads, fill.channels):
                raise ValueError(f"case {self.name}: {shown(fill)} lies outside the case")
        for flag in self.flags:
            if flag not in FLAGS:
                raise ValueError(f"case {self.name}: unknown flag {shown(flag)}")
        self._check_mask()
        self._check_options()

    def _inside(self, tensor: str, bits: int, *ranges: tuple[int, int]) -> bool:
        """Whether bits fit and a box of a tensor holds something, and nothing beyond the tensor."""
        if tensor not in TENSORS or not 0 <= bits < 2**16:
            return False
        sizes = self.shape_of(tensor)
        return all(
            0 <= first < end <= size for (first, end), size in zip(ranges, sizes, strict=True)
        )

    def _check_mask(self) -> None:
        if self.key_lengths is not None and len(self.key_lengths) != len(self.lengths):
            raise ValueError(
                f"case {self.name}: {len(self.key_lengths)} key_lengths, {len(self.lengths)} lengths; "
                "give equally many"
            )
        if self.alignment not in ALIGNMENTS:
            raise unknown_name(f"alignment of case {self.name}", self.alignment, ALIGNMENTS)
        if self.window is None:
            return
        if len(self.window) != 2 or any(
            side is not None and not 0 <= side <= LARGEST for side in self.window
        ):
            raise ValueError(
                f"case {self.name}: window is {shown(self.window)}; "
                f"give two sides, each None or 0 to {LARGEST}"
            )
        if self.causal and self.window[1]:
            raise ValueError(
                f"case {self.name}: window is {shown(self.window)}, and the mask is causal; "
                "its right side must be 0 or None"
            )

    def _check_twin(self, twin: Twin) -> None:
        ends = {name: self.shape_of(name)[0] for name in TENSORS}
        given = {"out": self.tokens, "lse": self.tokens, "dq": self.tokens}
        given |= {"dk": self.key_tokens, "dv": self.key_tokens}
        if not PLAIN_NAME.match(twin.case) or twin.case == self.name:
            raise ValueError(
                f"case {self.name}: twin {shown(twin.case)} is no name of another case"
            )
        if twin.changed.end > ends.get(twin.changed.tensor, 0):
            raise ValueError(f"case {self.name}: {shown(twin.changed)} are no rows of an input")
        for rows in twin.equal:
            if rows.end > given.get(rows.tensor, 0):
                raise ValueError(f"case {self.name}: {shown(rows)} are no rows of a result")

    def _check_options(self) -> None:
        if self.softcap is not None and not 2.0**-64 <= self.softcap <= 2.0**64:
            raise ValueError(
                f"case {self.name}: softcap is {self.softcap}; it must be 2^-64 to 2^64"
            )
        if self.sinks and len(self.sinks) != self.heads:
            raise ValueError(
                f"case {self.name}: {len(self.sinks)} sinks for {self.heads} heads; give one a head"
            )
        for sink in self.sinks:
            if not abs(sink) <= 2.0**64 or float(np.float32(sink)) != sink:
                raise ValueError(
                    f"case {self.name}: sink {sink} is no float32 of at most 2^64 in magnitude"
                )
        if self.twin is not None:
            self._check_twin(self.twin)
        if not 0 <= self.scale_padding < 256:
            raise ValueError(
                f"case {self.name}: scale_padding is {self.scale_padding}; it must be a byte"
            )

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return sum(self.lengths)

    @property
    def lengths_of_keys(self) -> tuple[int, ...]:
        """Keys of each document."""
        return self.lengths if self.key_lengths is None else self.key_lengths

    @property
    def key_tokens(self) -> int:
        """Keys of all documents."""
        return sum(self.lengths_of_keys)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first token of each document, and the number of tokens: `cu_seqlens` as integers."""
        return _starts(self.lengths)

    @property
    def key_starts(self) -> tuple[int, ...]:
        """The first key of each document, and the number of keys."""
        return _starts(self.lengths_of_keys)

    @property
    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """int32 [documents + 1]: where each document starts, and the end."""
        return np.array(self.starts, np.int32)

    @property
    def cu_seqlens_k(self) -> npt.NDArray[np.int32] | None:
        """The same of the keys; None where they are the same tokens as the queries."""
        return None if self.key_lengths is None else np.array(self.key_starts, np.int32)

    @property
    def sink(self) -> npt.NDArray[np.float32] | None:
        """float32 [heads]: the logit of a key of value 0; None without."""
        return np.array(self.sinks, np.float32) if self.sinks else None

    @property
    def mask(self) -> Mask:
        """Which keys each query sees."""
        return Mask(
            Documents(self.starts),
            Documents(self.key_starts),
            causal=self.causal,
            window=(None, None) if self.window is None else self.window,
            alignment=self.alignment,
        )

    def visible(self, document: int) -> npt.NDArray[np.bool_]:
        """Return which [queries, keys] of a document are legal pairs."""
        return self.mask.visible(document)

    def shape_of(self, tensor: str) -> tuple[int, int, int]:
        """Return the shape of q, k, v or dout."""
        if tensor in ("q", "dout"):
            return (self.tokens, self.heads, self.head_dim)
        return (self.key_tokens, self.kv_heads, self.head_dim)

    @property
    def pairs(self) -> int:
        """Query-key pairs of all documents and heads, masked ones too."""
        each = zip(self.lengths, self.lengths_of_keys, strict=True)
        return self.heads * sum(queries * keys for queries, keys in each)

    def inputs(self) -> dict[str, U16]:
        """Make q, dout [tokens, heads, head_dim], k, v [key_tokens, kv_heads, head_dim]: bfloat16 bits."""
        made = {}
        for tensor in TENSORS:
            shape = self.shape_of(tensor)
            if self.distribution is Distribution.RECORDED:
                bits = _recorded(RECORDINGS[self.seed])[tensor].copy()
            else:
                bits = hashed(
                    tensor,
                    shape,
                    seed=self.seed,
                    distribution=self.distribution,
                    exponent=self.exponent,
                )
            if bits.shape != shape:
                raise ValueError(f"case {self.name}: the recording of {tensor} is {bits.shape}")
            for fill in self.fills:
                if fill.tensor == tensor:
                    _fill(bits, fill)
            for plant in self.plants:
                if plant.tensor == tensor:
                    bits[plant.token, plant.head, plant.channel] = plant.bits
            made[tensor] = bits
        return made


def _starts(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(lengths, initial=0))


def _fill(bits: U16, fill: Fill) -> None:
    boxes = (fill.tokens, fill.heads, fill.channels)
    places = np.ogrid[tuple(slice(first, end) for first, end in boxes)]
    token, head, channel = (at - first for at, (first, _) in zip(places, boxes, strict=True))
    values = (
        fill.bits + token * fill.steps[0] + head * fill.steps[1] + channel // 32 * fill.steps[2]
    )
    box = tuple(slice(first, end) for first, end in boxes)
    bits[box] = (values & 0xFFFF).astype(np.uint16)


@cache
def _recorded(recording: str) -> dict[str, U16]:
    name = f"{recording}.safetensors"
    data = resources.files("flamia_ref.golden") / "data" / name
    stored = tensors_from_bytes(data.read_bytes(), source=name)
    return {tensor: np.asarray(stored[tensor].array, np.uint16) for tensor in TENSORS}
