"""The host's side: operands, packed documents, and the launches over them."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
import triton

from examples.triton import kernel
from examples.triton.mistakes import Mistake

KEY_TILE = 128  # the recipe's: P's scales are relative to the maximum of the key tiles so far
_ROWS, _BACKWARD_KEYS, _BACKWARD_ROWS = 64, 64, 64
_QUANTIZED_ROWS, _REDUCED = 32, 1024
_LOG2_E = Fraction("1.442695040888963407359924681001892137426645954152985934135")
# The mistakes that each kernel has a place for; the others are the host's.
_BOTH = (
    Mistake.NEIGHBOUR_SCALE,
    Mistake.MASK_OFF_BY_ONE,
    Mistake.HEADS_MODULO,
)
_FORWARD = (*_BOTH, Mistake.FLOOR_SCALE, Mistake.V_NOT_FOLDED, Mistake.DOCUMENTS_JOINED)
_QUERIES = (*_BOTH, Mistake.DOCUMENTS_JOINED, Mistake.NO_DELTA)
_KEYS = (*_BOTH, Mistake.NO_DELTA, Mistake.STALE_PADDING)
PAIRS = ("s", "p", "dp", "p.dv", "ds")
BY_QUERY, BY_KEY = ("p.o", "ds.dq"), ("p.dv", "ds.dk")  # codes with scales of a row, of a column


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Packed documents on a device.

    `starts` int32 [documents + 1]; `pairs` and `blocks` int64 [documents]: where a document's stages [heads, queries,
    keys], and the scales of such, begin in one flat array.
    """

    lengths: tuple[int, ...]
    starts: torch.Tensor
    pairs: torch.Tensor
    blocks: torch.Tensor

    @classmethod
    def of(cls, cu_seqlens, heads: int, device: str) -> "Documents":
        """The documents of `cu_seqlens` [documents + 1]."""
        starts = np.asarray(cu_seqlens, np.int64)
        lengths = np.diff(starts)
        pairs = heads * lengths * lengths
        blocks = heads * lengths * -(-lengths // 32)
        return cls(
            lengths=tuple(int(n) for n in lengths),
            starts=torch.tensor(starts, dtype=torch.int32, device=device),
            pairs=torch.tensor(np.cumsum(pairs) - pairs, device=device),
            blocks=torch.tensor(np.cumsum(blocks) - blocks, device=device),
        )

    @property
    def longest(self) -> int:
        """The length of the longest document."""
        return max(self.lengths, default=0)

    def holding_nan(self, *operands: "Operand") -> torch.Tensor:
        """int32 [documents]: whether one of the operands has a NaN code there."""
        count = torch.zeros_like(self.starts[:-1])
        for one in operands:
            of_tokens = ((one.codes & 0x7F) == 0x7F).flatten(1).any(1)
            sums = torch.nn.functional.pad(of_tokens.cumsum(0), (1, 0))
            found = sums[self.starts[1:].long()] - sums[self.starts[:-1].long()]
            count |= (found > 0).to(torch.int32)
        return count


@dataclass(frozen=True, kw_only=True)
class Operand:
    """E4M3 codes [tokens, heads, channels] and E8M0 bytes [tokens, heads], uint8."""

    codes: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a call is told beside its operands. `mistake`: what it does wrong."""

    causal: bool
    softmax_scale: float
    trace: bool = False
    mistake: Mistake = Mistake.NONE

    @property
    def factor(self) -> float:
        """What S is multiplied by to be in log2 units: the exact product, rounded once to float32."""
        scale = Fraction(self.softmax_scale)
        if self.mistake is Mistake.NO_SOFTMAX_SCALE:
            scale = Fraction(1)
        exact = scale if self.mistake is Mistake.NATURAL_EXPONENT else scale * _LOG2_E
        return _float32(exact)

    @property
    def scale(self) -> float:
        """The softmax scale in float32."""
        return float(np.float32(self.softmax_scale))


def _float32(exact: Fraction) -> float:
    """The nearest float32 of a positive number, rounded once."""
    near = np.float32(float(exact))
    around = [np.nextafter(near, np.float32(0)), near, np.nextafter(near, np.float32(np.inf))]
    return float(min(around, key=lambda x: abs(Fraction(float(x)) - exact)))


def quantize(x: torch.Tensor) -> Operand:
    """Codes and scales of bfloat16 [tokens, heads, channels], one scale a token and head."""
    tokens, heads, channels = x.shape
    made = Operand(
        codes=torch.empty(x.shape, dtype=torch.uint8, device=x.device),
        scales=torch.empty((tokens, heads), dtype=torch.uint8, device=x.device),
    )
    rows = tokens * heads
    if rows:
        kernel.quantize[(triton.cdiv(rows, _QUANTIZED_ROWS),)](
            x,
            made.codes,
            made.scales,
            rows,
            CHANNELS=channels,
            D=_width(channels),
            ROWS=_QUANTIZED_ROWS,
            enable_fp_fusion=False,
        )
    return made


def forward(
    q: Operand, k: Operand, v: Operand, documents: Documents, settings: Settings
) -> dict[str, torch.Tensor]:
    """out [tokens, heads, channels] and lse [heads, tokens] from codes; with `trace` the stages by name, flat."""
    tokens, heads, channels = q.codes.shape
    device = q.codes.device
    made = {
        "out": torch.empty((tokens, heads, channels), dtype=torch.bfloat16, device=device),
        "lse": torch.empty((heads, tokens), dtype=torch.float32, device=device),
    }
    stages = _stages(documents, heads, device, ("s", "p"), BY_QUERY[:1], settings.trace)
    if settings.trace:
        stages |= {name: torch.empty_like(made["lse"]) for name in ("row_max", "row_sum")}
        stages["o"] = torch.empty((tokens, heads, channels), device=device)
    names = ("s", "p", "p.o.codes", "p.o.scales", "row_max", "row_sum", "o")
    if tokens:
        kernel.forward[(triton.cdiv(documents.longest, _ROWS), heads, len(documents.lengths))](
            *_parts(q, k, v),
            made["out"],
            made["lse"],
            documents.starts,
            documents.holding_nan(q, k, v),
            tokens,
            heads,
            heads // k.codes.shape[1],
            settings.factor,
            documents.pairs,
            documents.blocks,
            *(stages.get(name, made["lse"]) for name in names),
            ROWS=_ROWS,
            KEYS=KEY_TILE,
            num_warps=4 if channels <= 64 else 8,
            **_constants(channels, settings, _FORWARD),
        )
    return made | stages


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What the rows bring to the backward: dO' as codes, and b and delta' [heads, tokens]."""

    do: Operand
    base: torch.Tensor
    delta: torch.Tensor


def before_backward(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Rows:
    """dO', b and delta' from dout and out [tokens, heads, channels] in bfloat16 and lse [heads, tokens]."""
    tokens, heads, channels = dout.shape
    made = Rows(
        do=Operand(
            codes=torch.empty(dout.shape, dtype=torch.uint8, device=dout.device),
            scales=torch.empty((tokens, heads), dtype=torch.uint8, device=dout.device),
        ),
        base=torch.empty_like(lse),
        delta=torch.empty_like(lse),
    )
    if tokens:
        kernel.before_backward[(triton.cdiv(tokens * heads, _QUANTIZED_ROWS),)](
            dout,
            out,
            lse,
            made.do.codes,
            made.do.scales,
            made.base,
            made.delta,
            tokens * heads,
            tokens,
            heads,
            CHANNELS=channels,
            D=_width(channels),
            ROWS=_QUANTIZED_ROWS,
            enable_fp_fusion=False,
        )
    return made


def backward(
    q: Operand, k: Operand, v: Operand, rows: Rows, documents: Documents, settings: Settings
) -> dict[str, torch.Tensor]:
    """dq, dk and dv from codes and what the rows bring; with `trace` the stages by name, flat."""
    tokens, heads, channels = q.codes.shape
    kv_heads = k.codes.shape[1]
    device = q.codes.device
    do, base, delta = rows.do, rows.base, rows.delta
    made = {
        name: torch.empty(like.codes.shape, dtype=torch.bfloat16, device=device)
        for name, like in (("dq", q), ("dk", k), ("dv", v))
    }
    coded = (*BY_QUERY[1:], *BY_KEY)
    stages = _stages(documents, heads, device, PAIRS[2:], coded, settings.trace)
    if not tokens:
        return made | stages
    whole = documents.holding_nan(q, k, v, do)
    operands = _parts(q, k, v, do)
    names = ("dp", "p.dv", "ds", "ds.dq.codes", "ds.dq.scales")
    kernel.backward_queries[(triton.cdiv(documents.longest, _ROWS), heads, len(documents.lengths))](
        *operands,
        base,
        delta,
        made["dq"],
        documents.starts,
        whole,
        tokens,
        heads,
        heads // kv_heads,
        settings.factor,
        settings.scale,
        documents.pairs,
        documents.blocks,
        *(stages.get(name, base) for name in names),
        ROWS=_ROWS,
        KEYS=_BACKWARD_KEYS,
        num_warps=8,
        **_constants(channels, settings, _QUERIES),
    )
    parts = [torch.empty((tokens, heads, channels), device=device) for _ in range(2)]
    names = ("p.dv.codes", "p.dv.scales", "ds.dk.codes", "ds.dk.scales")
    tiles = triton.cdiv(documents.longest, _BACKWARD_KEYS)
    kernel.backward_keys[(tiles, heads, len(documents.lengths))](
        *operands,
        base,
        delta,
        *parts,
        documents.starts,
        whole,
        tokens,
        heads,
        heads // kv_heads,
        settings.factor,
        documents.pairs,
        documents.blocks,
        *(stages.get(name, base) for name in names),
        ROWS=_BACKWARD_ROWS,
        KEYS=_BACKWARD_KEYS,
        num_warps=8,
        **_constants(channels, settings, _KEYS),
    )
    unscaled = settings.mistake is Mistake.DK_WITHOUT_SCALE
    factors = (1.0 if unscaled else settings.scale, 1.0)
    for part, name, factor in zip(parts, ("dk", "dv"), factors, strict=True):
        elements = made[name].numel()
        kernel.add_heads[(triton.cdiv(elements, _REDUCED),)](
            part,
            made[name],
            elements,
            factor,
            heads // kv_heads,
            CHANNELS=channels,
            SIZE=_REDUCED,
            enable_fp_fusion=False,
        )
    return made | stages


def _stages(documents, heads, device, floats, coded, wanted) -> dict[str, torch.Tensor]:
    """Flat arrays of zeros for stages of pairs: what a kernel skips stays 0."""
    if not wanted:
        return {}
    pairs = sum(heads * n * n for n in documents.lengths)
    blocks = sum(heads * n * -(-n // 32) for n in documents.lengths)
    made = {name: torch.zeros(pairs, device=device) for name in floats}
    for name in coded:
        made[f"{name}.codes"] = torch.zeros(pairs, dtype=torch.uint8, device=device)
        made[f"{name}.scales"] = torch.zeros(blocks, dtype=torch.uint8, device=device)
    return made


def _parts(*operands: Operand):
    return [part for one in operands for part in (one.codes, one.scales)]


def _width(channels: int) -> int:
    """Channels of a tile: a power of two, and as many as Triton's scaled product takes."""
    return max(64, triton.next_power_of_2(channels))


def _constants(
    channels: int, settings: Settings, mistakes: tuple[Mistake, ...]
) -> dict[str, object]:
    return {
        "CHANNELS": channels,
        "D": _width(channels),
        "CAUSAL": settings.causal,
        "TRACE": settings.trace,
        "MISTAKE": int(settings.mistake if settings.mistake in mistakes else Mistake.NONE),
        "enable_fp_fusion": False,
    }
