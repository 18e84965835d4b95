"""Attention of one document as graphs of the cuDNN front end: bfloat16, FP8 with a scale a tensor, and MXFP8.

A graph says which tensors there are; nothing here needs a device. Tensors lie as in a pack, [rows, heads, channels].
Sources: cuDNN front end 1.32.0, `_pygraph.py` (`_CAPTURED_OPS`), and its tests `test/python/sdpa/{fp16,fp8,mxfp8}.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Any

from flamia_ref.packing import Mask


class Number(StrEnum):
    """What q, k and v are in."""

    BF16 = "bf16"
    FP8 = "fp8"
    MXFP8 = "mxfp8"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One document: its lengths, heads, channels, mask and softmax scale."""

    queries: int
    keys: int
    heads: int
    kv_heads: int
    channels: int
    causal: bool
    window: tuple[int | None, int | None]
    alignment: str
    scale: float
    sink: bool = False

    @classmethod
    def of(
        cls,
        mask: Mask,
        document: int,
        *,
        heads: tuple[int, int],
        channels: int,
        scale: float,
        sink: bool,
    ) -> "Problem":
        """The problem of a document of packed ones; `heads` are those of the queries and of the keys."""
        return cls(
            queries=mask.queries.lengths[document],
            keys=mask.keys.lengths[document],
            heads=heads[0],
            kv_heads=heads[1],
            channels=channels,
            causal=mask.causal,
            window=mask.window,
            alignment=mask.alignment,
            scale=scale,
            sink=sink,
        )

    def band(self, cudnn: ModuleType, prefix: str) -> dict[str, Any]:
        """The mask in cuDNN's words: a left bound counts the own key, so it is the window's left and 1."""
        left, right = self.window
        names = cudnn.diagonal_alignment
        return {
            "diagonal_alignment": names.TOP_LEFT
            if self.alignment == "top_left"
            else names.BOTTOM_RIGHT,
            f"{prefix}left_bound": None if left is None else left + 1,
            f"{prefix}right_bound": 0 if self.causal else right,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """A graph and its tensors by name, inputs and outputs."""

    graph: Any
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]


def forward(cudnn: ModuleType, number: Number, problem: Problem, handle: Any = None) -> Graph:
    """The forward. Inputs q, k, v, scales; outputs o [1, heads, rows, channels] bfloat16, stats, the natural LSE."""
    made = _Builder(cudnn, number, problem, handle)
    for name in "qkv":
        made.operand(name)
    sink = {"sink_token": made.per_head("sink_token")} if problem.sink else {}
    shared = {"attn_scale": problem.scale, "generate_stats": True, **sink}
    q, k, v = (made.inputs[name] for name in "qkv")
    match number:
        case Number.BF16:
            band = problem.band(cudnn, "diagonal_band_")
            o, stats = made.graph.sdpa(q=q, k=k, v=v, **shared, **band)
        case Number.MXFP8:
            scales = {
                "descale_q": made.over_channels("descale_q"),
                "descale_k": made.over_channels("descale_k"),
                "descale_v": made.over_tokens("descale_v"),
            }
            band = problem.band(cudnn, "diagonal_band_")
            o, stats, amax = made.graph.sdpa_mxfp8(q=q, k=k, v=v, **scales, **shared, **band)
            made.scalar_output("amax_o", amax)
        case Number.FP8:
            names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
            scalars = {name: made.scalar(name) for name in names}
            band = problem.band(cudnn, "")
            o, stats, _, amax = made.graph.sdpa_fp8(q=q, k=k, v=v, **scalars, **shared, **band)
            made.scalar_output("amax_o", amax)
    made.output("o", o, "q")
    made.statistics_output("stats", stats)
    return made.done()


def backward(cudnn: ModuleType, number: Number, problem: Problem, handle: Any = None) -> Graph:
    """The backward. Outputs dq, dk, dv in bfloat16, and dsink_token where there is a sink."""
    made = _Builder(cudnn, number, problem, handle)
    for name in ("q", "k", "v", "dO"):
        made.operand(name)
    stats = made.statistics("stats")
    sink = (
        {"sink_token": made.per_head("sink_token"), "dSink_token": made.per_head("dSink_token")}
        if problem.sink
        else {}
    )
    q, k, v, gradient = (made.inputs[name] for name in ("q", "k", "v", "dO"))
    shared = {"stats": stats, "attn_scale": problem.scale, **sink}
    match number:
        case Number.BF16:
            made.half("o", "q")
            band = problem.band(cudnn, "diagonal_band_")
            results = made.graph.sdpa_backward(
                q=q, k=k, v=v, o=made.inputs["o"], dO=gradient, **shared, **band
            )
        case Number.MXFP8:
            for name in ("q_T", "k_T", "dO_T"):
                made.operand(name)
            for name in ("o_f16", "dO_f16"):
                made.half(name, "q")
            rows = {f"descale_{name}": made.over_channels(f"descale_{name}") for name in _ROWS}
            columns = {f"descale_{name}": made.over_tokens(f"descale_{name}") for name in _COLUMNS}
            others = {name: made.inputs[name] for name in ("q_T", "k_T", "dO_T", "o_f16", "dO_f16")}
            band = problem.band(cudnn, "")
            results = made.graph.sdpa_mxfp8_backward(
                q=q, k=k, v=v, dO=gradient, **others, **rows, **columns, **shared, **band
            )
        case Number.FP8:
            made.half("o", "q")
            scalars = {name: made.scalar(name) for name in _FP8_SCALARS}
            band = problem.band(cudnn, "")
            results = made.graph.sdpa_fp8_backward(
                q=q, k=k, v=v, o=made.inputs["o"], dO=gradient, **scalars, **shared, **band
            )
    for name, tensor in zip(("dq", "dk", "dv"), results, strict=False):
        made.output(name, tensor, name[1])
    for name, tensor in zip(
        ("amax_dq", "amax_dk", "amax_dv", "amax_dp"), results[3:], strict=False
    ):
        made.scalar_output(name, tensor)
    if problem.sink:
        made.outputs["dSink_token"] = made.inputs.pop("dSink_token").set_output(True)
    return made.done()


_ROWS = ("q", "k", "v", "dO")
_COLUMNS = ("q_T", "k_T", "dO_T")
_FP8_SCALARS = (
    *("descale_q", "descale_k", "descale_v", "descale_o", "descale_dO", "descale_s", "descale_dP"),
    *("scale_s", "scale_dQ", "scale_dK", "scale_dV", "scale_dP"),
)


class _Builder:
    def __init__(self, cudnn: ModuleType, number: Number, problem: Problem, handle: Any) -> None:
        self.cudnn, self.problem = cudnn, problem
        types = cudnn.data_type
        self.element = types.BFLOAT16 if number is Number.BF16 else types.FP8_E4M3
        self.graph = cudnn.pygraph(
            io_data_type=self.element,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            **({} if handle is None else {"handle": handle}),
        )
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}

    def done(self) -> Graph:
        return Graph(graph=self.graph, inputs=self.inputs, outputs=self.outputs)

    def operand(self, name: str) -> Any:
        return self._input(name, *self._layout(name), self.element)

    def half(self, name: str, like: str) -> Any:
        return self._input(name, *self._layout(like), self.cudnn.data_type.BFLOAT16)

    def scalar(self, name: str) -> Any:
        return self._input(name, (1, 1, 1, 1), (1, 1, 1, 1), self.cudnn.data_type.FLOAT)

    def per_head(self, name: str) -> Any:
        heads = self.problem.heads
        return self._input(name, (1, heads, 1, 1), (heads, 1, 1, 1), self.cudnn.data_type.FLOAT)

    def statistics(self, name: str) -> Any:
        return self._input(name, *self._statistics(), self.cudnn.data_type.FLOAT)

    def over_channels(self, name: str) -> Any:
        """Scales of blocks of channels: rows filled up to 128, blocks to 4."""
        _, heads, rows, _ = self._layout(name.removeprefix("descale_"))[0]
        blocks = -(-self.problem.channels // 32)
        return self._scales(name, (1, heads, _up(rows, 128), _up(blocks, 4)))

    def over_tokens(self, name: str) -> Any:
        """Scales of blocks of tokens: blocks filled up to 4, which are 128 rows, channels to 128."""
        _, heads, rows, channels = self._layout(name.removeprefix("descale_"))[0]
        return self._scales(name, (1, heads, _up(-(-rows // 32), 4), _up(channels, 128)))

    def output(self, name: str, tensor: Any, like: str) -> None:
        shape, strides = self._layout(like)
        self._output(name, tensor, shape, strides, self.cudnn.data_type.BFLOAT16)

    def statistics_output(self, name: str, tensor: Any) -> None:
        self._output(name, tensor, *self._statistics(), self.cudnn.data_type.FLOAT)

    def scalar_output(self, name: str, tensor: Any) -> None:
        self._output(name, tensor, (1, 1, 1, 1), (1, 1, 1, 1), self.cudnn.data_type.FLOAT)

    def _layout(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape [1, heads, rows, channels] and strides of an array [rows, heads, channels]."""
        one = self.problem
        of_keys = name[0] in "kv"
        rows, heads = (one.keys, one.kv_heads) if of_keys else (one.queries, one.heads)
        channels = one.channels
        return (1, heads, rows, channels), (rows * heads * channels, channels, heads * channels, 1)

    def _statistics(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        heads, rows = self.problem.heads, self.problem.queries
        return (1, heads, rows, 1), (heads * rows, rows, 1, 1)

    def _scales(self, name: str, shape: tuple[int, ...]) -> Any:
        _, heads, down, across = shape
        return self._input(
            name,
            shape,
            (heads * down * across, down * across, across, 1),
            self.cudnn.data_type.FP8_E8M0,
            reordering_type=self.cudnn.tensor_reordering.F8_128x4,
        )

    def _input(
        self, name: str, shape: tuple[int, ...], strides: tuple[int, ...], kind: Any, **more: Any
    ) -> Any:
        self.inputs[name] = self.graph.tensor(
            dim=shape, stride=strides, data_type=kind, name=name, **more
        )
        return self.inputs[name]

    def _output(
        self, name: str, tensor: Any, shape: tuple[int, ...], strides: tuple[int, ...], kind: Any
    ) -> None:
        tensor.set_output(True).set_dim(shape).set_stride(strides).set_data_type(kind)
        self.outputs[name] = tensor


def _up(count: int, step: int) -> int:
    return -(-count // step) * step
