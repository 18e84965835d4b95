"""PyTorch's attention on a GPU, as measurements that the model of schedules is held against.

    python3 -m benchmarks.h200_attention --out FOLDER [--seconds 400] [--dry-run]

Writes FOLDER/h200-torch.csv (documents of one length) and FOLDER/h200-packed.csv (packed documents), a row as soon as
it is measured. A time is the median of CUDA events around one call, after warm-up. Before each few calls the GPU spins
a while, so that the host has queued them all and its own time is in none. No cache is flushed.

The Triton example is left out: its forward spills (30 TFLOP/s, docs/kernels.md) and takes about a minute to compile.
"""

import argparse
import csv
import datetime
import itertools
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from flamia_ref.schedule.measured import COLUMNS
from flamia_ref.schedule.workloads import equal, lognormal, one_long, uniform

TOKENS = 32768
LENGTHS = (32768, 2048, 1024, 4096, 8192, 16384)  # first those that constants are fitted on
BATCH, HEADS, KV_HEADS = 2, 32, 8
LIBRARIES = {"torch-flash": "FLASH_ATTENTION", "torch-cudnn": "CUDNN_ATTENTION"}
WORKLOADS: dict[str, list[int]] = {
    "equal": equal(tokens=TOKENS, length=8192),
    "uniform": uniform(tokens=TOKENS),
    "lognormal": lognormal(tokens=TOKENS),
    "one-long": one_long(tokens=TOKENS, long=TOKENS // 2),
}
ORDERS: dict[str, Callable[[list[int]], list[int]]] = {
    "drawn": list,
    "ascending": sorted,
    "descending": lambda lengths: sorted(lengths, reverse=True),
}
EXTRA = ("clock_mhz", "calls", "note")
AT_ONCE, SPIN = 16, 500_000  # calls queued together, and cycles that the GPU spins for each of them


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention: `batch` documents of `length` each, or packed ones of `lengths`."""

    library: str
    model: str
    causal: bool
    head_dim: int
    kv_heads: int
    batch: int
    length: int
    lengths: tuple[int, ...] = ()

    def row(self, gpu: str, version: str, launch: str) -> dict[str, object]:
        """What the tables say of one pass of it."""
        return {
            "gpu": gpu,
            "model": self.model,
            "library": self.library,
            "library_version": version,
            "format": "bf16",
            "mask": "causal" if self.causal else "none",
            "batch": self.batch,
            "queries": self.length,
            "keys": self.length,
            "heads": HEADS,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "value_dim": self.head_dim,
            "pass": launch,
            "deterministic": False,
            "lengths": " ".join(str(one) for one in self.lengths),
        }


def cases() -> Iterator[Case]:
    """All of them, those that are wanted most first."""
    for head_dim in (128, 64):
        for library in LIBRARIES:
            yield from _dense(library, head_dim)
            if head_dim == 128:
                yield from _packed(library, head_dim)


def _dense(library: str, head_dim: int) -> Iterator[Case]:
    for length, causal in itertools.product(LENGTHS, (True, False)):
        yield Case(
            library=library,
            model=f"d{head_dim}",
            causal=causal,
            head_dim=head_dim,
            kv_heads=KV_HEADS,
            batch=BATCH,
            length=length,
        )


def _packed(library: str, head_dim: int) -> Iterator[Case]:
    for name, drawn in WORKLOADS.items():
        seen = set()
        for order, arrange in ORDERS.items():
            lengths = tuple(arrange(drawn))
            if lengths in seen:
                continue
            seen.add(lengths)
            yield Case(
                library=library,
                model=f"{name}/{order}",
                causal=True,
                head_dim=head_dim,
                kv_heads=HEADS,
                batch=len(lengths),
                length=sum(lengths),
                lengths=lengths,
            )


class Clocks:
    """The clock of the multiprocessors as nvidia-smi says it, ten times a second."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float]] = []
        command = ["nvidia-smi", "--id=0", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
        try:
            self.process: subprocess.Popen[str] | None = subprocess.Popen(
                [*command, "-lms", "100"], stdout=subprocess.PIPE, text=True
            )
        except OSError:
            self.process = None
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process is not None
        for line in self.process.stdout or ():
            if line.strip().isdecimal():
                self.samples.append((time.monotonic(), float(line)))

    def median(self, begin: float, end: float) -> float | str:
        """In MHz over an interval of `time.monotonic`; empty where there is no sample."""
        found = [value for when, value in list(self.samples) if begin <= when <= end]
        return statistics.median(found) if found else ""

    def stop(self) -> None:
        """End nvidia-smi."""
        if self.process is not None:
            self.process.terminate()


def operands(case: Case, torch: Any, device: str) -> tuple[list[Any], Callable[[Any], Any]]:
    """q, k, v and dout, and what turns each into the operand of attention: [batch, heads, length,
    head_dim], jagged where documents are packed."""
    generator = torch.Generator(device).manual_seed(0)
    heads = (HEADS, case.kv_heads, case.kv_heads, HEADS)

    def leaf(count: int) -> Any:
        shape = [case.batch, count, case.length, case.head_dim]
        if case.lengths:
            shape = [case.length, count, case.head_dim]
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    leaves = [leaf(count) for count in heads]
    if not case.lengths:
        return leaves, lambda x: x
    ends = torch.tensor([0, *itertools.accumulate(case.lengths)], device=device)
    least, most = min(case.lengths), max(case.lengths)

    def jagged(values: Any) -> Any:
        nested = torch.nested.nested_tensor_from_jagged(
            values, ends, min_seqlen=least, max_seqlen=most
        )
        return nested.transpose(1, 2)

    return leaves, jagged


def passes(case: Case, torch: Any, device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls of the forward and of the backward. The backward's includes autograd's bookkeeping on the device."""
    from torch.nn.attention import SDPBackend, sdpa_kernel  # type: ignore[import-not-found]

    leaves, wrap = operands(case, torch, device)
    q, k, v = (wrap(x).detach().requires_grad_() for x in leaves[:3])
    dout = wrap(leaves[3])
    grouped = case.kv_heads != HEADS
    backend = getattr(SDPBackend, LIBRARIES[case.library]) if device != "cpu" else SDPBackend.MATH

    def forward() -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.causal, enable_gqa=grouped
            )

    out = forward()
    yield "forward", forward
    yield "backward", lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def measure(call: Callable[[], object], torch: Any, seconds: float) -> list[float]:
    """Milliseconds of calls, at least five, for `seconds`."""
    call()
    torch.cuda.synchronize()
    begun = time.monotonic()
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    one = (time.monotonic() - begun) / 2
    at_once = min(AT_ONCE, max(2, int(seconds / 2 / one)))
    found: list[float] = []
    until = time.monotonic() + seconds
    while len(found) < 5 or time.monotonic() < until:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(at_once)]
        torch.cuda._sleep(SPIN * at_once)
        for begin, end in events:
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        found += [begin.elapsed_time(end) for begin, end in events]
    return found


class Tables:
    """The two files, written row by row."""

    def __init__(self, folder: Path, header: list[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.writers: dict[bool, tuple[TextIO, csv.DictWriter[str]]] = {}
        for packed, name in ((False, "h200-torch.csv"), (True, "h200-packed.csv")):
            columns = [*COLUMNS, *(("lengths",) if packed else ()), *EXTRA]
            file = (folder / name).open("w", encoding="utf-8", newline="")
            file.writelines(f"# {line}\n" for line in header)
            writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            file.flush()
            self.writers[packed] = (file, writer)

    def write(self, row: dict[str, object], packed: bool) -> None:
        """One row."""
        file, writer = self.writers[packed]
        writer.writerow(row)
        file.flush()

    def close(self) -> None:
        """Close both."""
        for file, _ in self.writers.values():
            file.close()


def _driver() -> str:
    command = ["nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return "unknown"


def run(options: argparse.Namespace) -> int:
    """Measure until all is done or the time is up."""
    import torch  # type: ignore[import-not-found]

    until = time.monotonic() + options.seconds
    name = torch.cuda.get_device_name()
    cudnn = torch.backends.cudnn.version()
    versions = {
        "torch-flash": f"torch {torch.__version__}",
        "torch-cudnn": f"torch {torch.__version__} backend {cudnn}",
    }
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    header = [
        "source: python3 -m benchmarks.h200_attention",
        f"{name}, driver {_driver()}, torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {cudnn}, {today}",
        "time_ms: median of CUDA events around one call after warm-up; no cache flushed; clock_mhz: median of"
        " nvidia-smi's clocks.sm meanwhile, spinning between calls too; backward: all that autograd runs",
    ]
    tables = Tables(options.out, header)
    clocks = Clocks()
    gpu = name.removeprefix("NVIDIA ").split()[0]
    try:
        for done, case in enumerate(cases()):
            if time.monotonic() > until:
                print(f"time is up after {done} cases", flush=True)
                break
            for row in _rows(case, torch, gpu, versions[case.library], clocks, options.each):
                tables.write(row, bool(case.lengths))
                shown = [
                    row[x] for x in ("library", "model", "mask", "queries", "kv_heads", "pass")
                ]
                print(*shown, row.get("time_ms", ""), row["clock_mhz"], row["note"], flush=True)
    finally:
        clocks.stop()
        tables.close()
    return 0


def _rows(
    case: Case, torch: Any, gpu: str, version: str, clocks: Clocks, seconds: float
) -> Iterator[dict[str, object]]:
    """The rows of both passes; with as many key/value heads as heads where grouped ones are not taken."""
    launch = "forward"
    try:
        for launch, call in passes(case, torch, "cuda"):
            begin = time.monotonic()
            found = measure(call, torch, seconds)
            yield case.row(gpu, version, launch) | {
                "time_ms": f"{statistics.median(found):.5f}",
                "clock_mhz": clocks.median(begin, time.monotonic()),
                "calls": len(found),
                "note": "",
            }
    except Exception as error:  # noqa: BLE001  what a backend does not take is a row
        note = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        yield case.row(gpu, version, launch) | {"clock_mhz": "", "calls": 0, "note": note}
        torch.cuda.empty_cache()
        if launch == "forward" and case.kv_heads != HEADS:
            yield from _rows(replace(case, kv_heads=HEADS), torch, gpu, version, clocks, seconds)


def main() -> int:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder of the two files")
    parser.add_argument("--seconds", type=float, default=400.0, help="begin nothing after: 400")
    parser.add_argument("--each", type=float, default=0.8, help="seconds of calls a pass: 0.8")
    parser.add_argument("--dry-run", action="store_true", help="list the cases alone")
    options = parser.parse_args()
    if not options.dry_run:
        return run(options)
    for case in cases():
        what = f"{len(case.lengths)} documents" if case.lengths else f"batch {case.batch}"
        mask = "causal" if case.causal else "none"
        print(case.library, case.model, mask, what, case.length, f"{HEADS}/{case.kv_heads}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
