"""The parts of cuDNN's front end that adapters use, computed in float64 from the bytes that are bound.

Arguments are bound to the signatures of the published module. Scales are read at the place of the 128x4 tiling that its
kernels read: byte (r % 32) 16 + (r % 128 // 32) 4 + c % 4 of a tile of 512; over channels the matrix of a head is
[rows, blocks], tiles of a row of tiles one after another; over tokens it is [channels, heads x blocks], so that planes
of 128 channels lie outermost. Source: nvidia-cudnn-frontend 1.32.0, sdpa/kernels/_mxfp8_sf.py.
"""

import json
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np

from tests.adapters import attention64

SIGNATURES = json.loads(Path(__file__).with_name("signatures.json").read_text())

data_type = Enum("data_type", "FLOAT BFLOAT16 FP8_E4M3 FP8_E8M0")
diagonal_alignment = Enum("diagonal_alignment", "TOP_LEFT BOTTOM_RIGHT")
tensor_reordering = Enum("tensor_reordering", "F8_128x4")
heur_mode = Enum("heur_mode", "A FALLBACK")


class cudnnGraphNotSupportedError(Exception):
    """What the front end raises for a graph without a kernel."""


class Tensor:
    def __init__(self, dim=None, stride=None, data_type=None, reordering_type=None, name=""):
        self.dim, self.stride, self.kind, self.name = dim, stride, data_type, name
        self.reordering, self.is_output = reordering_type, False

    def set_output(self, value):
        self.is_output = value
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def set_data_type(self, kind):
        self.kind = kind
        return self

    def get_dim(self):
        return self.dim

    def get_stride(self):
        return self.stride


class pygraph:
    unsupported = None  # where not None, what `build_plans` says

    def __init__(self, io_data_type, intermediate_data_type, compute_data_type, handle=None):
        self.node, self.given, self.results = None, {}, {}

    def tensor(self, dim, stride, data_type, name, reordering_type=None):
        return Tensor(dim, stride, data_type, reordering_type, name)

    def __getattr__(self, name):
        parameters = SIGNATURES["nvidia-cudnn-frontend"]["functions"].get(name)
        if parameters is None:
            raise AttributeError(name)
        outputs = {
            "sdpa": ("o", "stats"),
            "sdpa_fp8": ("o", "stats", "amax_s", "amax_o"),
            "sdpa_mxfp8": ("o", "stats", "amax_o"),
            "sdpa_backward": ("dq", "dk", "dv"),
            "sdpa_fp8_backward": ("dq", "dk", "dv", "amax_dq", "amax_dk", "amax_dv", "amax_dp"),
            "sdpa_mxfp8_backward": ("dq", "dk", "dv", "amax_dq", "amax_dk", "amax_dv"),
        }[name]

        def node(**given):
            assert set(given) <= set(parameters), set(given) - set(parameters)
            self.node, self.given = name, given
            self.results = {one: Tensor() for one in outputs}
            return list(self.results.values())

        return node

    def validate(self):
        for tensor in (*self.given.values(), *self.results.values()):
            if isinstance(tensor, Tensor) and tensor.dim is not None:
                assert len(tensor.dim) == len(tensor.stride) == 4

    def build_operation_graph(self):
        pass

    def create_execution_plans(self, modes):
        assert modes

    def check_support(self):
        pass

    def build_plans(self):
        if self.unsupported:
            raise cudnnGraphNotSupportedError(self.unsupported)

    def get_workspace_size(self):
        return 0

    def execute(self, bound, workspace, handle=None):
        """Compute what is bound, and write it into the tensors bound to the outputs."""
        host = {
            name: bound[x] for name, x in self.given.items() if isinstance(x, Tensor) and x in bound
        }
        write = {name: bound[x] for name, x in self.results.items() if x in bound}
        for name, values in _Node(self.node, self.given, host).results().items():
            if name in write:
                view = write[name]
                view.copy_(view.new_tensor(np.ascontiguousarray(values).astype(np.float32)))


class _Node:
    def __init__(self, name, given, host):
        self.name, self.given, self.host = name, given, host

    def results(self):
        q = self.value("q")
        pairs = self.pairs(len(q), len(self.value("k")))
        scale = self.given["attn_scale"]
        if not self.name.endswith("backward"):
            out, lse = attention64.forward(
                q, self.value("k"), self.value("v", tokens=True), pairs, scale
            )
            return {"o": out.transpose(1, 0, 2)[None], "stats": lse[None, :, :, None], **_AMAX}
        mx = "mxfp8" in self.name
        other = {name: f"{name}_T" if mx else name for name in ("q", "k", "dO")}
        one = {
            "q.s": q,
            "k.s": self.value("k"),
            "q.dk": self.value(other["q"], tokens=True),
            "k.dq": self.value(other["k"], tokens=True),
            "v.dp": self.value("v"),
            "do.dp": self.value("dO"),
            "do.dv": self.value(other["dO"], tokens=True),
        }
        o, gradient = (self.value(x) for x in (("o_f16", "dO_f16") if mx else ("o", "dO")))
        stats = self.host["stats"].double().numpy()[0, :, :, 0]
        delta = (o * gradient).sum(2).T
        found = attention64.backward(one, pairs, scale, stats, delta)
        return {
            **{
                n: x.transpose(1, 0, 2)[None]
                for n, x in zip(("dq", "dk", "dv"), found, strict=True)
            },
            **_AMAX,
        }

    def pairs(self, queries, keys):
        given = self.given
        left = given.get("diagonal_band_left_bound", given.get("left_bound"))
        right = given.get("diagonal_band_right_bound", given.get("right_bound"))
        top = given["diagonal_alignment"] is diagonal_alignment.TOP_LEFT
        window = (None if left is None else left - 1, right)
        alignment = "top_left" if top else "bottom_right"
        return attention64.visible(queries, keys, causal=False, window=window, alignment=alignment)

    def value(self, name, *, tokens=False):
        """The values of an operand, [rows, heads, channels], read by the strides that the graph declares."""
        tensor, data = self.given[name], self.host[name]
        _, heads, rows, channels = tensor.dim
        if str(data.dtype).endswith("float8_e4m3fn"):
            flat = data.contiguous().view(-1).view(_uint8(data)).numpy()
            flat = flat.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        else:
            # What lies in memory, not what the tensor's own shape says.
            flat = (
                data.double().as_strided((data.numel(),), (1,)).numpy() if data.dim() == 3 else None
            )
            if flat is None:
                return data[0].double().numpy().transpose(1, 0, 2)
        itemsize = flat.itemsize
        strides = [itemsize * tensor.stride[axis] for axis in (2, 1, 3)]
        values = np.lib.stride_tricks.as_strided(flat, (rows, heads, channels), strides).copy()
        descale = self.host.get(f"descale_{name}")
        if descale is None:
            return values
        if descale.numel() == 1:
            return values * float(descale)
        raw = descale.numpy()
        assert raw.size == np.prod(self.given[f"descale_{name}"].dim)
        r, h, c = np.ogrid[:rows, :heads, :channels]
        if not tokens:
            down, across = -(-rows // 128), -(-channels // 128)
            tile = (h * down + r // 128) * across + c // 128
            place = _byte(r, c // 32)
        else:
            across = -(-rows // 128)
            tile = ((c // 128) * heads + h) * across + r // 128
            place = _byte(c, r // 32)
        return values * np.exp2(raw[tile * 512 + place].astype(np.float64) - 127)


def _byte(row, column):
    return (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4


def _uint8(tensor):
    import torch

    return torch.uint8


_AMAX = {f"amax_{name}": np.full((1, 1, 1, 1), 2.0) for name in ("o", "dq", "dk", "dv", "dp")}

module = SimpleNamespace(
    data_type=data_type,
    diagonal_alignment=diagonal_alignment,
    tensor_reordering=tensor_reordering,
    heur_mode=heur_mode,
    pygraph=pygraph,
    cudnnGraphNotSupportedError=cudnnGraphNotSupportedError,
)
