"""Run the kernels on a GPU against a golden pack, right and then with each mistake, and write what the check says.

    PYTHONPATH=. python3 examples/triton/run_device.py [--pack DIR] --out DIR

Writes DIR/report.json, and DIR/results/MISTAKE/CASE.safetensors, which `flamia-ref golden check PACK --actual` reads on
any machine. Compiling takes most of the time: a process for each kernel that differs.
"""

import argparse
import ast
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from fnmatch import fnmatch
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import triton

from examples.triton import packed, protocol
from examples.triton.mistakes import Mistake
from examples.triton.packed import Documents, Settings
from flamia_ref import golden

_RECIPE = "flamia-mxfp8-folded"


def main() -> int:
    """Run what the command line says; 0 where the right kernel passes and every mistake is caught."""
    options = _parser().parse_args()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    folder = options.pack
    if folder is None:
        folder = str(out / "pack")
        if not os.path.exists(folder):
            golden.make(folder, recipes=(_RECIPE,), suite=options.suite)
    pack = golden.load(folder)
    cases = [case for case in pack if case.entry.recipe == _RECIPE and _takes(case)]
    cases = [case for case in cases if fnmatch(case.name, options.cases)]
    settings = dict(one.split("=", 1) for one in options.check)
    settings = {name: _literal(value) for name, value in settings.items()}
    report = {"environment": _environment(), "product": _product_error(), "pack": pack_line(pack)}
    tasks = [(Mistake.NONE, names) for names in _by_shape(cases)]
    names = _for_mistakes(cases)
    tasks += [(Mistake[mistake], names) for mistake in options.mistakes.split(",") if mistake]
    arguments = [(folder, mistake, names, settings, str(out)) for mistake, names in tasks]
    found: dict[str, list[dict[str, object]]] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        for done in as_completed([pool.submit(_checked, one) for one in arguments]):
            mistake, results = done.result()
            found.setdefault(mistake, []).extend(results)
            print(
                f"{time.monotonic() - started:6.1f} s  {mistake}: {_summary(results)}", flush=True
            )
            report["checks"] = found
            (out / "report.json").write_text(json.dumps(report, indent=1))
    if options.timings:
        report["timings"] = [_timed(**shape) for shape in _SHAPES]
        for one in report["timings"]:
            print(one)
    report["seconds"] = time.monotonic() - started
    (out / "report.json").write_text(json.dumps(report, indent=1))
    right = all(one["status"] == "pass" for one in found[Mistake.NONE.name])
    missed = [
        name
        for name, results in found.items()
        if name != Mistake.NONE.name and all(one["status"] == "pass" for one in results)
    ]
    named = [name for name, results in found.items() if any(one["diagnoses"] for one in results)]
    print(f"right kernel passes: {right}; mistakes missed: {missed}; diagnosed: {named}")
    return 0 if right and not missed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="the Triton kernels against a golden pack")
    parser.add_argument("--pack", help="the folder of a pack; one is made if it is not given")
    parser.add_argument("--suite", default="smoke", help="of the pack that is made: smoke")
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="where to write: $OUT")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--cases", default="*", help="names like this alone: *")
    every = ",".join(one.name for one in Mistake if one is not Mistake.NONE)
    parser.add_argument("--mistakes", default=every, help="names, or none: all of them")
    parser.add_argument("--no-timings", dest="timings", action="store_false")
    parser.add_argument(
        "--check",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a keyword of golden.check, such as the instruction that this device has",
    )
    return parser


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def pack_line(pack: object) -> dict[str, object]:
    """What a report says of a pack."""
    return {"folder": str(pack.folder), "cases": [case.name for case in pack]}


def _takes(case: object) -> bool:
    """Whether the kernels take a case: no window, soft cap, sink, or other key lengths."""
    spec = case.spec
    plain = not any(
        getattr(spec, name, None) for name in ("key_lengths", "window", "softcap", "sinks")
    )
    return (
        plain
        and spec.head_dim <= 256
        and getattr(spec, "alignment", "bottom_right") == "bottom_right"
    )


def _by_shape(cases: list[object]) -> list[list[str]]:
    """Names of cases, those that take one compiled kernel together."""
    shapes: dict[object, list[str]] = {}
    for case in cases:
        shapes.setdefault((case.spec.head_dim, case.spec.causal), []).append(case.name)
    return list(shapes.values())


def _for_mistakes(cases: list[object]) -> list[str]:
    """Cases where every mistake shows, of one shape of kernel: several documents and heads, and several tiles."""
    fit = [
        case
        for case in cases
        if case.spec.causal and case.spec.head_dim == 64 and "nan" not in case.spec.flags
    ]
    grouped = [case for case in fit if 1 < case.spec.kv_heads < case.spec.heads]
    tiles = [case for case in fit if max(case.spec.lengths) > 128]
    several = [case for case in fit if len(case.spec.lengths) > 1]
    chosen = [next(iter(some), None) for some in (grouped, tiles, several)]
    names = dict.fromkeys(case.name for case in chosen if case is not None)
    return list(names) or [case.name for case in cases]


def _checked(task: tuple) -> tuple[str, list[dict[str, object]]]:
    """In a process of its own: what the check says of some cases, with one mistake."""
    folder, mistake, names, settings, out = task
    pack = golden.load(folder)
    made: dict[str, object] = {}

    def kernel(q, k, v, *, cu_seqlens, causal, softmax_scale, dout=None, trace=()):
        made.clear()
        results = protocol.attention(
            q,
            k,
            v,
            cu_seqlens=cu_seqlens,
            causal=causal,
            softmax_scale=softmax_scale,
            dout=dout,
            trace=trace,
            mistake=mistake,
        )
        made.update(results)
        return results

    results = []
    for case in pack:
        if case.name not in names:
            continue
        began = time.monotonic()
        try:
            report = golden.check(case, kernel, **settings)
            results.append(_verdict(report.cases[0]))
            _save(made, Path(out) / "results" / mistake.name / f"{case.name}.safetensors")
        except Exception as error:  # noqa: BLE001  a kernel that fails is a finding
            results.append(
                {"case": case.name, "status": f"{type(error).__name__}: {error}", "diagnoses": []}
            )
        results[-1]["seconds"] = time.monotonic() - began
    return mistake.name, results


def _verdict(case: object) -> dict[str, object]:
    tensors = [
        {
            "name": one.name,
            "status": str(one.status),
            "elements": one.elements,
            "differing": one.differing,
            "inside": getattr(one, "inside", 0),
            "steps": one.largest_steps,
            "largest": one.largest,
            "note": one.note,
        }
        for one in case.tensors
    ]
    diagnoses = [
        {
            "mistake": one.mistake,
            "sentence": one.sentence,
            "explained": one.explained,
            "of": one.failing,
        }
        for one in getattr(case, "diagnoses", ())
    ]
    return {
        "case": case.name,
        "status": str(case.status),
        "departs": case.departs,
        "diagnoses": diagnoses,
        "equal": sum(one["differing"] == 0 for one in tensors),
        "tensors": [one for one in tensors if one["differing"] or one["status"] != "pass"],
    }


def _save(results: dict[str, object], path: Path) -> None:
    from safetensors.numpy import save_file

    arrays = {}
    for name, value in results.items():
        parts = enumerate(value) if isinstance(value, list) else [(None, value)]
        for document, array in parts:
            arrays[name if document is None else f"{name}.{document}"] = np.ascontiguousarray(array)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(arrays, path)


def _summary(results: list[dict[str, object]]) -> str:
    parts = []
    for one in results:
        named = ", ".join(str(found["mistake"]) for found in one["diagnoses"])
        at = f" at {one['departs']}" if one.get("departs") else ""
        parts.append(
            f"{one['case'].split('.')[0]} {one['status']}{at}{f' ({named})' if named else ''}"
        )
    return "; ".join(parts)


def _environment() -> dict[str, object]:
    found = {"python": sys.version.split()[0], "torch": torch.__version__}
    found |= {"triton": triton.__version__, "numpy": np.__version__}
    if torch.cuda.is_available():
        found |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    return found


def _product_error() -> dict[str, float]:
    """How far S is from the exact sums of products, over the sum of their magnitudes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(8)
    x = [
        torch.randn((128, 1, 128), generator=generator).to(torch.bfloat16).to(device)
        for _ in range(3)
    ]
    q, k, v = (packed.quantize(one) for one in x)
    documents = Documents.of([0, 128], 1, device)
    settings = Settings(causal=False, softmax_scale=0.1, trace=True)
    s = packed.forward(q, k, v, documents, settings)["s"].reshape(128, 128).double().cpu()
    left, right = (_values(one) for one in (q, k))
    error = (s - left @ right.T).abs()
    return {"largest": float((error / (left.abs() @ right.abs().T)).max())}


def _values(operand: object) -> torch.Tensor:
    codes = operand.codes[:, 0].cpu().view(torch.float8_e4m3fn).double()
    return codes * torch.exp2(operand.scales[:, :1].cpu().double() - 127)


_SHAPES = (
    {"lengths": (2048,) * 4, "heads": 16, "kv_heads": 4, "channels": 128},
    {"lengths": (8192,), "heads": 16, "kv_heads": 4, "channels": 128},
    {"lengths": (8192,), "heads": 16, "kv_heads": 4, "channels": 64},
)


def _timed(
    *, lengths: tuple[int, ...], heads: int, kv_heads: int, channels: int
) -> dict[str, object]:
    """Milliseconds of both passes from codes, causal, and of torch's attention in bfloat16 on as many pairs."""
    from triton.testing import do_bench

    device, tokens = "cuda", sum(lengths)
    generator = torch.Generator(device).manual_seed(1)
    shapes = ((tokens, heads, channels), (tokens, kv_heads, channels))
    q, dout = (
        torch.randn(shapes[0], device=device, generator=generator).bfloat16() for _ in range(2)
    )
    k, v = (torch.randn(shapes[1], device=device, generator=generator).bfloat16() for _ in range(2))
    documents = Documents.of(np.cumsum((0, *lengths)), heads, device)
    settings = Settings(causal=True, softmax_scale=channels**-0.5)
    operands = [packed.quantize(x) for x in (q, k, v)]
    ahead = packed.forward(*operands, documents, settings)
    out, lse = ahead["out"], ahead["lse"]
    dense = [x.unflatten(0, (len(lengths), lengths[0])).transpose(1, 2) for x in (q, k, v)]
    attend = torch.nn.functional.scaled_dot_product_attention
    pairs = sum(n * (n + 1) / 2 for n in lengths) * heads
    taken = {
        "quantize": do_bench(lambda: [packed.quantize(x) for x in (q, k, v)]),
        "forward": do_bench(lambda: packed.forward(*operands, documents, settings)),
        "backward": do_bench(
            lambda: packed.backward(
                *operands, packed.before_backward(dout, out, lse), documents, settings
            ),
            warmup=50,
            rep=200,
        ),
        "sdpa_bf16_forward": do_bench(lambda: attend(*dense, is_causal=True, enable_gqa=True)),
    }
    near = attend(*dense, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)
    error = (out.float() - near.float()).square().mean() / near.float().square().mean()
    return {
        "lengths": lengths,
        "heads": heads,
        "kv_heads": kv_heads,
        "channels": channels,
        "milliseconds": taken,
        "forward_tflops": 4 * channels * pairs / taken["forward"] / 1e9,
        "backward_tflops": 10 * channels * pairs / taken["backward"] / 1e9,
        "out_against_bf16": float(error.sqrt()),
    }


if __name__ == "__main__":
    raise SystemExit(main())
