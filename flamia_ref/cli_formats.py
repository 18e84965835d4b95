"""The commands ``flamia-ref formats``: list, show, quantize, diff, identify."""

import argparse
import dataclasses
import json
import math
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from flamia_ref import _console
from flamia_ref._errors import shown

# Everything else is imported by the command that needs it, so that --help is quick.
if TYPE_CHECKING:
    from flamia_ref.formats import BlockFormat

Result = tuple[int, str, str]  # exit status, text, JSON

_FILES = "a .npy, .npz or .safetensors file"


def add_commands(command: Callable[..., Any]) -> None:
    """Add the commands. `command(name, summary, run, more)` makes a parser with ``--json``."""
    command("list", "list scalar formats, and presets by library", _list)
    one = command("show", "show all that a scalar format or a preset is", _show)
    one.add_argument("name", metavar="NAME")

    made = command(
        "quantize",
        "quantize an array, and write its codes, scales and tensor scale",
        _quantize,
    )
    made.add_argument("input", metavar="IN", help=f"{_FILES} with one array, [..., rows, columns]")
    made.add_argument("output", metavar="OUT", help="a .npz or .safetensors file to write")
    made.add_argument("--preset", metavar="NAME", required=True)
    _add_block(made)
    _add_amax(made)
    made.add_argument(
        "--force", action="store_true", help="replace existing files: OUT, and that of --json"
    )

    two = command(
        "diff",
        "say on which input two presets differ, and in which step",
        _diff,
        "Without --input the smallest inputs of each kind are searched at the boundaries of both rules. Exit status 1"
        " if a difference was found.",
    )
    two.add_argument("one", metavar="A", help="the first preset")
    two.add_argument("other", metavar="B", help="the second preset")
    two.add_argument("--input", metavar="FILE", help=f"compare on the array of {_FILES}")
    two.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="the type of the inputs that are searched (default: float32)",
    )
    _add_block(two)
    _add_amax(two)

    found = command(
        "identify",
        "say which presets explain the output of a kernel, and where the nearest others depart",
        _identify,
        "Exit status 1 if no preset explains every block.",
    )
    found.add_argument("input", metavar="IN", help=f"what was quantized: {_FILES} with one array")
    found.add_argument(
        "output",
        metavar="OUT",
        help="a .npz or .safetensors file with `codes`, `scales`, and `tensor_scale` if there is one:"
        " one code in a byte, scales neither tiled nor padded",
    )
    _add_block(found)
    _add_amax(found)


def _add_block(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--block",
        nargs=2,
        metavar=("ROWS", "COLUMNS"),
        type=_extent,
        help="what shares a scale; `all` for a whole extent (default: as the presets say)",
    )


def _extent(text: str) -> int | str:
    if text == "all":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor `all`") from None


def _add_amax(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tensor-amax",
        metavar="X",
        type=float,
        help="what tensor scales are made from (default: the amax of the array)",
    )


def _amax(options: argparse.Namespace) -> Any:
    """The tensor amax as a float32, which it must be."""
    import numpy as np

    given = options.tensor_amax
    if given is None:
        return None
    with np.errstate(over="ignore"):
        narrow = np.float32(given)
    if not (np.isfinite(narrow) and narrow >= 0):
        raise ValueError(f"--tensor-amax {given} must be finite and 0 or more")
    return narrow


def _list(_: argparse.Namespace) -> Result:
    from flamia_ref.formats import FORMATS, PRESETS

    lines = ["scalar formats:", f"    {', '.join(FORMATS)}"]
    libraries: dict[str, dict[str, dict[str, Any]]] = {}
    for name, one in PRESETS.items():
        libraries.setdefault(one.library, {})[name] = {
            "element": one.element.name,
            "scale": one.scale.name,
            "block": list(one.block),
            "rule": _rule(one),
            "evidence": one.evidence.value,
        }
    width = max(map(len, PRESETS))
    for library, names in libraries.items():
        lines += ["", f"{library} ({len(names)}):"]
        for name, data in names.items():
            block = "x".join(map(str, data["block"]))
            lines.append(
                f"    {name:<{width}}  {data['element']:<4} {block:<6} {data['scale']:<5}"
                f" {data['evidence']:<9} {data['rule']}"
            )
    document = {"formats": list(FORMATS), "presets": list(PRESETS), "libraries": libraries}
    return 0, "\n".join(lines), _json(document)


def _rule(block_format: "BlockFormat") -> str:
    from flamia_ref.formats.diagnosis.trace import rule_in_words

    return rule_in_words(block_format)


_PARTS = {
    "what it is": ("name", "element", "scale", "block", "blocks", "partial"),
    "arithmetic": ("arithmetic", "subnormals", "narrow"),
    "before anything else": ("signs", "zero_below", "prepared"),
    "tensor scale": ("tensor_scale", "tensor_divides", "tensor_extent"),
    "scale of a block": (
        *("rule", "quotient", "scale_rounding", "exponent", "even_bits", "log2", "by_log2"),
        *("smallest_amax", "smallest_quotient", "scale_range", "row_span", "choice", "decoded"),
    ),
    "scale of an odd block": (
        *("zero_scale", "underflow_scale", "infinity_scale", "even_overflow", "nan", "nan_scale"),
    ),
    "elements": (
        *("scaled", "scale_values", "rounding", "half_added", "stochastic", "element_log2"),
        "overflow",
    ),
    "odd elements": ("nan_codes", "nan_element", "nan_block_code", "zero_sign"),
    "where it is from": ("source", "version", "evidence"),
    "contract": ("nan_in_contract", "infinity_in_contract", "out_of_contract"),
}


def _show(options: argparse.Namespace) -> Result:
    from flamia_ref._errors import unknown_name
    from flamia_ref.formats import FORMATS, PRESETS

    known: dict[str, Any] = {**FORMATS, **PRESETS}
    if options.name not in known:
        raise unknown_name("format", options.name, known)
    found = known[options.name]
    names = [field.name for field in dataclasses.fields(found)]
    if options.name in FORMATS:
        names += ["bits", "max", "smallest_normal", "smallest"]
    data = {name: _plain(getattr(found, name)) for name in names}
    if options.name in FORMATS:
        lines = [f"{name}: {_words(value)}" for name, value in data.items()]
    else:
        lines = [f"name: {found.name}", f"scale rule in words: {_rule(found)}"]
        data["rule_in_words"] = _rule(found)
        parts = dict(_PARTS)
        listed = {name for part in parts.values() for name in part}
        parts["other"] = tuple(name for name in names if name not in listed)
        for title, part in parts.items():
            here = [name for name in part if name in data and name != "name"]
            if here:
                lines += ["", f"{title}:"]
                lines += [f"    {name}: {_field(name, data[name])}" for name in here]
    return 0, "\n".join(lines), _json(data)


def _plain(value: Any) -> Any:
    """A value as JSON has it: enums as text, formats by name, infinities and NaN as text."""
    if hasattr(value, "mantissa_bits"):
        return value.name
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value.value if isinstance(value, StrEnum) else value


def _field(name: str, value: Any) -> str:
    """The value of a field of a preset in words."""
    if name == "block":
        return "x".join(map(str, value))
    if name == "blocks":
        return ", ".join("x".join(map(str, block)) for block in value)
    return _words(value)


def _words(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        inner = [f"({_words(one)})" if isinstance(one, list) else _words(one) for one in value]
        return ", ".join(inner) or "none"
    return str(value) if value != "" else "none"


def _quantize(options: argparse.Namespace) -> Result:
    import numpy as np

    from flamia_ref.formats import quantize
    from flamia_ref.golden import array_files

    suffix = array_files.suffix(options.output, (".npz", ".safetensors"))
    _console.require_new(options.output, force=options.force)
    if options.json not in (None, "-"):
        _console.require_new(options.json, force=options.force)
    if options.json not in (None, "-") and _console.same_file(options.output, options.json):
        raise ValueError(f"the codes and the JSON are both to be {options.json}; give two names")
    if _console.same_file(options.input, options.output):
        raise ValueError(f"IN and OUT are both {options.output}; give two names")
    x = array_files.one_array(options.input)
    tensor = quantize(x, options.preset, block=options.block, tensor_amax=_amax(options))
    arrays = {"codes": np.asarray(tensor.codes), "scales": np.asarray(tensor.scales)}
    if tensor.tensor_scale is not None:
        arrays["tensor_scale"] = np.asarray(tensor.tensor_scale, np.float32)
    _console.write(options.output, array_files.to_bytes(arrays, suffix))
    rows, columns = tensor.block
    document = {
        "output": options.output,
        "preset": options.preset,
        "block": [rows, columns],
        "arrays": {n: {"dtype": str(a.dtype), "shape": list(a.shape)} for n, a in arrays.items()},
    }
    lines = [f"wrote {options.output}: {options.preset}, blocks of {rows}x{columns}"]
    lines += [f"    {name}: {a.dtype} {list(a.shape)}" for name, a in arrays.items()]
    return 0, "\n".join(lines), _json(document)


def _diff(options: argparse.Namespace) -> Result:
    from flamia_ref.formats import compare, smallest

    if options.input is None:
        if options.tensor_amax is not None:
            raise ValueError("--tensor-amax goes with --input; the search has amaxes of its own")
        searched = smallest(
            options.one,
            options.other,
            block=options.block,
            dtype=options.dtype or "float32",
        )
        return searched.exit_code, searched.to_text(), searched.to_json()
    if options.dtype is not None:
        raise ValueError("--dtype is for the search; with --input the type is that of the array")
    from flamia_ref.golden import array_files

    x = array_files.one_array(options.input)
    compared = compare(
        x, options.one, options.other, block=options.block, tensor_amax=_amax(options)
    )
    return compared.exit_code, compared.to_text(), compared.to_json()


def _identify(options: argparse.Namespace) -> Result:
    from flamia_ref.formats import identify
    from flamia_ref.golden import array_files

    x = array_files.one_array(options.input)
    array_files.suffix(options.output, (".npz", ".safetensors"))
    arrays = array_files.arrays(options.output)
    missing = [name for name in ("codes", "scales") if name not in arrays]
    if missing:
        raise ValueError(
            f"{options.output} has no {' and no '.join(missing)}; it has {shown(sorted(arrays))}"
        )
    found = identify(
        x,
        arrays["codes"],
        arrays["scales"],
        tensor_scale=arrays.get("tensor_scale"),
        block=options.block,
        tensor_amax=_amax(options),
    )
    return found.exit_code, found.to_text(), found.to_json()


def _json(document: object) -> str:
    return json.dumps(document, indent=1, default=str) + "\n"
