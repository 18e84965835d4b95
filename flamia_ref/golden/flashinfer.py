"""Packs as data sets of flashinfer-bench: definitions, and workloads with their inputs.

The schema is that of https://github.com/flashinfer-ai/flashinfer-bench, release 0.1.2. A folder holds

- ``definitions/attention_forward/NAME.json``: axes, inputs, outputs, and the reference as a program;
- ``workloads/attention_forward/NAME.jsonl``: a case a line;
- ``blob/workloads/attention_forward/NAME/CASE.safetensors``: its inputs.

There is a definition for each recipe, and one more for each set of inputs that its cases have besides
(other keys, a window, a soft cap, sinks). All axes are variable, and the forward is exported alone.
The reference computes out and lse by `flamia_ref.attention`, bit for bit those of the pack, on the CPU.
flashinfer-bench judges by tolerances; `flamia_ref.golden.check` by bits.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flamia_ref.golden.files import little_endian
from flamia_ref.golden.pack import Case, Pack, load
from flamia_ref.golden.stage import View

OP_TYPE = "attention_forward"

_AXES = {
    "tokens": "query tokens of all documents, one document after another",
    "key_tokens": "keys of all documents",
    "starts": "documents + 1",
    "heads": "query heads",
    "kv_heads": "key/value heads",
    "head_dim": "channels",
}
_TYPES = {View.BF16: "bfloat16", View.I32: "int32", View.F32: "float32"}
_INPUTS = {
    "q": (("tokens", "heads", "head_dim"), View.BF16, "queries"),
    "k": (("key_tokens", "kv_heads", "head_dim"), View.BF16, "keys"),
    "v": (("key_tokens", "kv_heads", "head_dim"), View.BF16, "values"),
    "cu_seqlens": (("starts",), View.I32, "the first token of each document, and the end"),
}
_EXTRAS = {
    "cu_seqlens_k": (("starts",), View.I32, "the first key of each document, and the end"),
    "sink": (("heads",), View.F32, "the logit of a key of value 0"),
}
_OUTPUTS = {
    "out": (("tokens", "heads", "head_dim"), View.BF16, "softmax(scale q k^T) v"),
    "lse": (("heads", "tokens"), View.F32, "natural logarithm of the sum of exp(scale q k^T)"),
}

_REFERENCE = '''\
"""{recipe}, bit for bit, by flamia-ref (pip install flamia-ref torch)."""

import numpy as np
import torch

from flamia_ref import attention
from flamia_ref.golden.arrays import to_host

RECIPE = attention.Recipe.from_json({text!r})


@torch.no_grad()
def run({arguments}):
    result = attention.forward(
        *(to_host(x) for x in (q, k, v)),
        RECIPE,
        cu_seqlens=to_host(cu_seqlens),
        causal=bool(causal),
        softmax_scale=float(softmax_scale),
{settings}    )
    out, lse = (torch.from_numpy(np.array(x)).to(q.device) for x in (result.out, result.lse))
    return {{"out": out.to(torch.bfloat16), "lse": lse}}
'''


def export_flashinfer(pack: Pack | str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Write the cases of a pack as a data set of flashinfer-bench. The same pack gives the same bytes.

    Files that are there are written over. Raises ValueError for a damaged pack, and where the folder
    cannot be written.
    """
    opened = pack if isinstance(pack, Pack) else load(pack)
    root = Path(folder)
    found: dict[str, list[Case]] = {}
    for case in opened:
        found.setdefault(_name(case), []).append(case)
    try:
        for name, cases in found.items():
            definition = root / "definitions" / OP_TYPE / f"{name}.json"
            _write(definition, _json(_definition(name, cases[0]), indent=2).encode())
            lines = [_json(_workload(name, case)) for case in cases]
            _write(root / "workloads" / OP_TYPE / f"{name}.jsonl", "".join(lines).encode())
            for case in cases:
                _write(root / _blob(name, case), _stored(case))
    except OSError as error:
        raise ValueError(f"cannot write {root}: {error.strerror or error}") from error


def _name(case: Case) -> str:
    """Return the name of a definition: that of the recipe, and what its inputs have besides."""
    return "-".join((case.entry.recipe, *_besides(case)))


def _besides(case: Case) -> Iterator[str]:
    spec = case.spec
    if spec.key_lengths is not None:
        yield "keys"
    if spec.alignment != "bottom_right":
        yield spec.alignment
    if spec.window is not None:
        yield "window"
    if spec.softcap is not None:
        yield "softcap"
    if spec.sinks:
        yield "sink"


def _definition(name: str, case: Case) -> dict[str, Any]:
    inputs = {key: _tensor(*one) for key, one in _tensors(case).items()}
    inputs |= {key: _scalar(value) for key, value in _scalars(case).items()}
    used = {axis for one in _tensors(case).values() for axis in one[0]}
    axes = {axis: {"type": "var", "description": _AXES[axis]} for axis in _AXES if axis in used}
    return {
        "name": name,
        "op_type": OP_TYPE,
        "description": (
            f"Forward attention over packed documents by recipe {case.entry.recipe}; "
            f"evidence: {case.recipe.evidence}."
        ),
        "tags": [f"recipe:{case.entry.recipe}", f"numerics_version:{case.numerics_version}"],
        "axes": axes,
        "inputs": inputs,
        "outputs": {key: _tensor(*one) for key, one in _OUTPUTS.items()},
        "reference": _reference(case),
    }


def _reference(case: Case) -> str:
    extra = [name for name in (*_tensors(case), *_scalars(case)) if name not in _ALWAYS]
    settings = {name: name for name in extra}
    for name in ("cu_seqlens_k", "sink"):
        if name in settings:
            settings[name] = f"to_host({name})"
    if case.spec.window is not None:
        for side in ("window_left", "window_right"):
            settings.pop(side)
        sides = (f"None if window_{side} < 0 else int(window_{side})" for side in ("left", "right"))
        settings["window"] = f"({', '.join(sides)})"
    if case.spec.alignment != "bottom_right":
        settings["alignment"] = repr(case.spec.alignment)
    return _REFERENCE.format(
        recipe=case.entry.recipe,
        text=json.dumps(dict(case.recipe.recipe), sort_keys=True),
        arguments=", ".join((*_tensors(case), *_scalars(case))),
        settings="".join(f"        {name}={value},\n" for name, value in settings.items()),
    )


_ALWAYS = (*_INPUTS, "causal", "softmax_scale")


def _tensors(case: Case) -> dict[str, tuple[tuple[str, ...], View, str]]:
    """Return the input tensors of a case: axes, what the bits mean, in words."""
    tensors = dict(_INPUTS)
    if case.spec.key_lengths is None:
        for name in ("k", "v"):
            axes, view, words = tensors[name]
            tensors[name] = (("tokens", *axes[1:]), view, words)
    return tensors | {name: one for name, one in _EXTRAS.items() if name in case.tensors}


def _scalars(case: Case) -> dict[str, bool | int | float]:
    """Return the inputs of a case that are numbers. A side of a window without a bound is -1."""
    spec = case.spec
    found: dict[str, bool | int | float] = {
        "causal": spec.causal,
        "softmax_scale": spec.softmax_scale,
    }
    if spec.window is not None:
        left, right = (-1 if side is None else side for side in spec.window)
        found |= {"window_left": left, "window_right": right}
    if spec.softcap is not None:
        found["softcap"] = spec.softcap
    return found


def _tensor(axes: tuple[str, ...], view: View, words: str) -> dict[str, Any]:
    return {"shape": list(axes), "dtype": _TYPES[view], "description": words}


def _scalar(value: bool | int | float) -> dict[str, Any]:
    kinds = {bool: "bool", int: "int32", float: "float32"}
    return {"shape": None, "dtype": kinds[type(value)]}


def _workload(name: str, case: Case) -> dict[str, Any]:
    tensors = _tensors(case)
    axes = {
        axis: size
        for key, one in tensors.items()
        for axis, size in zip(one[0], case.tensors[key].shape, strict=True)
    }
    path = _blob(name, case)
    inputs: dict[str, Any] = {
        key: {"type": "safetensors", "path": path, "tensor_key": key} for key in tensors
    }
    inputs |= {key: {"type": "scalar", "value": value} for key, value in _scalars(case).items()}
    return {
        "definition": name,
        "workload": {"axes": axes, "inputs": inputs, "uuid": _uuid(case)},
        "solution": None,
        "evaluation": None,
    }


def _uuid(case: Case) -> str:
    """Return an id that is always the same for the same case: its name and the start of its digest."""
    text = f"{case.name} {case.entry.sha256}"
    return f"{case.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _blob(name: str, case: Case) -> str:
    return f"blob/workloads/{OP_TYPE}/{name}/{case.name}.safetensors"


def _stored(case: Case) -> bytes:
    """Return the inputs as a safetensors file. The package's numpy side has no bfloat16."""
    header: dict[str, Any] = {}
    data = b""
    for key in _tensors(case):
        raw = little_endian(case.tensors[key])
        header[key] = {
            "dtype": str(case.places[key].stage.view),
            "shape": list(case.tensors[key].shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def _json(document: Mapping[str, Any], indent: int | None = None) -> str:
    return json.dumps(document, indent=indent, ensure_ascii=True, allow_nan=False) + "\n"


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
