"""Hunt for leaks in the kernels of this machine, prove those that are JAX, print a table and write what was found.

    python examples/leakage/run.py --json leakage.json --date 2026-11-30

Run from anywhere. A kernel is called once before it is hunted in, so that what it compiles takes none of its seconds.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch wants memory of the GPU too
os.environ.setdefault("OMP_NUM_THREADS", "1")  # more only wait for each other on calls so small

from examples.leakage.kernels import KERNELS, missing  # noqa: E402
from flamia_ref.leakage import hunt, prove  # noqa: E402
from flamia_ref.leakage.search.bases import Base  # noqa: E402
from flamia_ref.leakage.search.setting import Setting  # noqa: E402

SHORT, LONG = (40, 24), (300, 84)
SHAPE = {"head_dim": 64, "heads": 2, "kv_heads": 1}
PROVED = {"lengths": SHORT, "head_dim": 32}
SCHEMA = "flamia-ref leak examples"


def main(arguments=None):
    """Run; the exit status is 0, whatever leaks: a table of what is known to leak is the purpose."""
    options = _options(arguments)
    records = []
    for name in options.kernels:
        example = KERNELS[name]
        lacking = missing(example)
        if lacking:
            records.append({"kernel": name, "missing": lacking})
            print(row(records[-1]), flush=True)
            continue
        for lengths in (SHORT, LONG) if example.long and gpu() else (SHORT,):
            records.append(look(name, example, lengths, seconds=options.seconds))
            print(row(records[-1]), flush=True)
    if options.json:
        written = document(records, options)
        path = Path(options.json)
        if path.is_dir() or options.json.endswith("/"):
            path = path / "leakage.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        print(f"written: {path}")
    return 0


def look(name, example, lengths, *, seconds):
    """What a hunt finds in a kernel, and a proof where it is JAX; a failure is a finding too."""
    start = time.perf_counter()
    where = gpu() if example.on_gpu else None
    record = {"kernel": name, "device": where or "CPU", "lengths": list(lengths)}
    # A name that the command line takes, whatever module the function is written in.
    record["command"] = (
        f"flamia-ref leak hunt --kernel examples.leakage.kernels:{name} --lengths {','.join(map(str, lengths))}"
        f" --head-dim {SHAPE['head_dim']} --heads {SHAPE['heads']} --kv-heads {SHAPE['kv_heads']}"
        + ("" if example.backward else " --forward-only")
    )
    try:
        _warm(example, lengths)
        warm = time.perf_counter() - start
        report = hunt(
            example.kernel,
            lengths=lengths,
            backward=example.backward,
            seconds=seconds,
            **SHAPE,
        )
    except Exception as error:  # noqa: BLE001  a kernel may fail in any way
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return record | {
            "failed": re.sub(r"(?<![\w.])/\S*/", "", reason)
        }  # no path of this machine
    record |= {"warm": round(warm, 2), "hunt": json.loads(report.to_json())}
    if example.proof and lengths == SHORT:
        record["proof"] = _proof(example)
    return record


def _warm(example, lengths):
    setting = Setting.of(
        lengths=lengths,
        causal=True,
        window=None,
        alignment="bottom_right",
        softmax_scale=None,
        backward=example.backward,
        **SHAPE,
    )
    inputs = Base(family="bell", seed=0).inputs(setting)
    example.kernel(
        **inputs, cu_seqlens=setting.cu_seqlens, causal=True, softmax_scale=setting.softmax_scale
    )


def _proof(example):
    import jax

    with jax.default_device(jax.devices("cpu")[0]):
        found = {}
        for strict in (False, True):
            one = prove(example.kernel, backward=example.backward, strict=strict, **PROVED)
            found["strict" if strict else "finite"] = {
                "verdict": str(one.verdict),
                "severities": {str(kind): count for kind, count in one.severities.items()},
                "assumptions": dict(one.assumptions),
            }
    return found


def row(record):
    """A line of the table."""
    name = record["kernel"].ljust(28)
    if "missing" in record:
        return f"{name} not run: {record['missing']}"
    lengths = ",".join(map(str, record["lengths"])).ljust(7)
    if "failed" in record:
        return f"{name} {lengths} failed: {record['failed']}"
    found = record["hunt"]
    line = (
        f"{name} {lengths} {found['verdict']:13} {found['calls']:5} calls {found['seconds']:6.1f} s"
    )
    if "proof" in record:
        line += f"  proof: {record['proof']['finite']['verdict']}"
    lines = [line, *(f"    {one['sentence']}" for one in found["witnesses"])]
    return "\n".join([*lines, *(f"    inconclusive: {one}" for one in found["reasons"])])


def gpu():
    """The name of the GPU that torch finds, or JAX where torch is not there; None without one."""
    if importlib.util.find_spec("torch"):
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else None
    with contextlib.suppress(ImportError, RuntimeError):
        import jax

        return jax.devices("gpu")[0].device_kind
    return None


def _placeless(options):
    """The arguments given, without the folder that the JSON is written to."""
    return [Path(one).name if one == options.json else one for one in options.given]


def document(records, options):
    """All that is written."""
    versions = {"python": platform.python_version()}
    for package in ("numpy", "ml_dtypes", "torch", "triton", "jax"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "schema": SCHEMA,
        "schema_version": 1,
        "date": options.date,
        "device": gpu() or "CPU",
        "versions": versions,
        "interpreted": os.environ.get("TRITON_INTERPRET") == "1",
        "command": f"python examples/leakage/run.py {shlex.join(_placeless(options))}".strip(),
        "kernels": records,
    }


def _options(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--kernels", type=_names, default=list(KERNELS), metavar="NAME,NAME", help="(default: all)"
    )
    parser.add_argument(
        "--seconds", type=float, default=12, help="for each hunt (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="where what was found is written")
    parser.add_argument("--date", help="of the run, written to the file")
    options = parser.parse_args(arguments)
    options.given = list(sys.argv[1:] if arguments is None else arguments)
    return options


def _names(text):
    names = text.split(",")
    for name in names:
        if name not in KERNELS:
            raise argparse.ArgumentTypeError(f"no kernel {name!r}; there are {', '.join(KERNELS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
