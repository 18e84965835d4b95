"""Inputs and results in one file, or in a dict of arrays, with no pack beside them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flamia_ref import kernels
from flamia_ref._errors import line, shown
from flamia_ref.golden.actual import stored_array
from flamia_ref.golden.arrays import to_host
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.files import Stored, Tensor, read_plain, tensors_from_bytes
from flamia_ref.golden.inputs import Distribution
from flamia_ref.golden.matching.samples import Sample

_LIMIT = 4 << 30  # bytes of a file
_INPUTS = ("q", "k", "v", "dout", "cu_seqlens", "cu_seqlens_k", "sink")
_OF_QUERIES = ("q", "dout")
_LISTS = ("s", "p", "dp", "p.dv", "ds")
_BACKWARD = ("dq", "dk", "dv", "dsink", "delta", "dp", "p.dv", "ds")
_OPTIONS = ("causal", "softmax_scale", "window", "softcap", "alignment")


def read(given: Any, **settings: Any) -> tuple[list[Sample], str, tuple[str, ...]]:
    """The samples of a file, of the files of a folder, or of a dict of arrays; what to call them; notes.

    Raises ValueError or TypeError for what is missing, has another shape or dtype, or cannot be read.
    """
    unknown = [name for name in settings if name not in _OPTIONS]
    if unknown:
        raise TypeError(f"unknown setting {shown(unknown[0])}; allowed: {', '.join(_OPTIONS)}")
    files = None if isinstance(given, Mapping) else _files(given)
    if settings.get("causal") is None:
        raise ValueError(
            "inputs without a pack do not say whether the mask is causal; say causal=True or causal=False (--causal or"
            " --full)"
        )
    if files is None:
        return [_sample("the given arrays", _arrays(given), settings)], "the given arrays", ()
    return [_file(file, settings) for file in files], str(Path(given)), ()


def _files(given: Any) -> list[Path]:
    """The files that a path leads to."""
    if not isinstance(given, str | os.PathLike):
        raise TypeError(
            f"the input is {shown(type(given).__name__)}; give a pack, a file, a folder, or a dict of arrays"
        )
    path = Path(given)
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ValueError(
                f"{path} holds no pack, and no .safetensors file with inputs and results"
            )
        return files
    if os.path.lexists(path):
        return [path]
    raise ValueError(f"there is no file or folder {path}")


def _file(path: Path, settings: Mapping[str, Any]) -> Sample:
    tensors = tensors_from_bytes(read_plain(path, limit=_LIMIT, follow=True), source=str(path))
    return _sample(path.name, tensors, settings)


def _arrays(given: Mapping[str, Any]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for name, value in given.items():
        if isinstance(value, list | tuple) and value and hasattr(value[0], "shape"):
            found |= {f"{name}.{at}": _array(one, f"{name}.{at}") for at, one in enumerate(value)}
        elif value is not None:
            found[str(name)] = _array(value, str(name))
    return found


def _array(value: Any, name: str) -> Stored:
    with kernels.guarded(f"{line(name)} is no array", TypeError):
        array = to_host(value)
    if array.dtype == object:
        raise TypeError(f"{line(name)} is {shown(type(value).__name__)}, which is no array")
    return stored_array(array)


def _sample(name: str, tensors: Mapping[str, Stored], settings: Mapping[str, Any]) -> Sample:
    missing = [one for one in ("q", "k", "v") if one not in tensors]
    if missing:
        raise ValueError(
            f"{name} has no {', '.join(missing)}; give the inputs q, k and v beside the results"
        )
    inputs = {
        one: _bits(name, one, tensors[one]) for one in ("q", "k", "v", "dout") if one in tensors
    }
    q, k, v = (inputs[one] for one in ("q", "k", "v"))
    if k.shape != v.shape:
        raise ValueError(
            f"{name}: k is {list(k.shape)} and v {list(v.shape)}; they must be alike here"
        )
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"{name}: q has head_dim {q.shape[2]} and k {k.shape[2]}")
    results = {one: x for one, x in tensors.items() if one not in _INPUTS}
    if not results:
        raise ValueError(f"{name} holds inputs and no result; give out, lse, dq, dk, dv or stages")
    queries = _lengths(name, "cu_seqlens", tensors, q.shape[0])
    keys = (
        _lengths(name, "cu_seqlens_k", tensors, k.shape[0]) if "cu_seqlens_k" in tensors else None
    )
    if keys is None and k.shape[0] != q.shape[0]:
        raise ValueError(f"{name}: q has {q.shape[0]} tokens and k {k.shape[0]}; give cu_seqlens_k")
    options = _options(name, settings, q.shape, queries, keys)
    sinks: tuple[float, ...] = ()
    if "sink" in tensors:
        sinks = tuple(
            float(x) for x in np.asarray(_floats(name, "sink", tensors["sink"])).reshape(-1)
        )
    spec = CaseSpec(
        name="outputs",
        why="",
        lengths=queries,
        key_lengths=keys,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        distribution=Distribution.BELL,
        seed=0,
        exponent=0,
        flags=("nan",),
        sinks=sinks,
        **options,
    )
    if len(queries) == 1:
        results = {
            f"{one}.0" if one in _LISTS or _is_pair(one) else one: x for one, x in results.items()
        }
    if "dout" not in inputs:
        later = [
            one for one in results if one.partition(".")[0] in _BACKWARD or one.startswith("p.dv")
        ]
        if later:
            raise ValueError(f"{name} has {later[0]} and no dout; give the gradient of out too")
        inputs["dout"] = np.zeros(q.shape, np.uint16)
    elif inputs["dout"].shape != q.shape:
        raise ValueError(
            f"{name}: dout is {list(inputs['dout'].shape)} and q {list(q.shape)}; they must be alike"
        )
    return Sample(name=name, spec=spec, inputs=inputs, given=results, views={})


def _options(
    source: str,
    settings: Mapping[str, Any],
    shape: tuple[int, ...],
    queries: tuple[int, ...],
    keys: tuple[int, ...] | None,
) -> dict[str, Any]:
    """The settings as `attention.forward` takes and refuses them."""
    from flamia_ref.attention.inputs import checked_mask, checked_scale, checked_softcap

    starts = None if keys is None else np.array([0, *itertools.accumulate(keys)], np.int32)
    alignment = settings.get("alignment")
    try:
        checked_mask(
            shape[0],
            None if keys is None else sum(keys),
            np.array([0, *itertools.accumulate(queries)], np.int32),
            starts,
            causal=settings["causal"],
            window=settings.get("window"),
            alignment="bottom_right" if alignment is None else alignment,
        )
        scale = checked_scale(settings.get("softmax_scale"), shape[2])
        softcap = checked_softcap(settings.get("softcap"))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{source}: {error}") from error
    return {
        "causal": bool(settings["causal"]),
        "softmax_scale": scale,
        "softcap": softcap,
        "window": None if settings.get("window") is None else tuple(settings["window"]),
        "alignment": "bottom_right" if alignment is None else alignment,
    }


def _is_pair(name: str) -> bool:
    """Whether a stage without the number of its document is one of pairs."""
    stem, _, last = name.rpartition(".")
    return last in ("codes", "scales") and stem.split(".")[0] in ("p", "ds")


def _bits(source: str, name: str, given: Stored) -> Tensor:
    """bfloat16 bits [tokens, heads, head_dim] of an input."""
    array = given.array
    if array.ndim != 3 or 0 in array.shape[1:]:
        raise ValueError(
            f"{source}: {name} is {list(array.shape)}; it must be [tokens, heads, head_dim], documents one after"
            " another"
        )
    if given.dtype in ("BF16", "U16"):
        return array.astype(np.uint16, copy=False)
    if given.dtype == "F32":
        bits = np.ascontiguousarray(array).view(np.uint32)
        if not np.any(bits & np.uint32(0xFFFF)):
            return (bits >> np.uint32(16)).astype(np.uint16)
        raise ValueError(
            f"{source}: {name} is float32 with values that are no bfloat16; every recipe takes bfloat16, round it first"
        )
    raise ValueError(f"{source}: {name} is {given.dtype}; accepted: BF16, U16 (its bits), F32")


def _floats(source: str, name: str, given: Stored) -> Tensor:
    if given.dtype != "F32":
        raise ValueError(f"{source}: {name} is {given.dtype}; it must be F32")
    return given.array


def _lengths(source: str, name: str, tensors: Mapping[str, Stored], tokens: int) -> tuple[int, ...]:
    if name not in tensors:
        return (tokens,)
    given = tensors[name]
    if given.dtype not in ("I32", "I64") or given.array.ndim != 1 or given.array.size < 2:
        raise ValueError(
            f"{source}: {name} is {given.dtype} {list(given.array.shape)}; it must be I32 [documents + 1]"
        )
    starts = [int(x) for x in given.array]
    lengths = tuple(b - a for a, b in itertools.pairwise(starts))
    if starts[0] != 0 or starts[-1] != tokens or min(lengths) < 0:
        raise ValueError(
            f"{source}: {name} is {shown(starts)}; it must rise from 0 to the {tokens} tokens"
        )
    return lengths
