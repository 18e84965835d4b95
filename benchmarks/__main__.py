"""``python -m benchmarks [NAME ...] [--seconds S] [--json [FILE]]``."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import arithmetic, attention, command, formats, golden, leakage
from benchmarks.measure import Result, machine

BENCHMARKS: dict[str, Callable[[float], Iterator[Result]]] = {
    "arithmetic": arithmetic.run,
    "formats": formats.run,
    "attention": attention.run,
    "leakage": leakage.run,
    "help": command.start,
    "golden": golden.run,
}
PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def main() -> int:
    """Run the benchmarks named, all by default, and print a line for each peer."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all by default"
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="time for each pair of calls (default 3)"
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write JSON, to standard output or FILE",
    )
    chosen = parser.parse_args()
    unknown = [name for name in chosen.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}; allowed: {', '.join(BENCHMARKS)}")
    if not 0 < chosen.seconds < 3600:
        parser.error(f"--seconds is {chosen.seconds}; it must be above 0 and below 3600")
    where = machine()
    # JSON on standard output has it for itself.
    out = sys.stderr if chosen.json == "-" else sys.stdout
    print(description(where), file=out)
    results = []
    for name in chosen.names or BENCHMARKS:
        for result in BENCHMARKS[name](chosen.seconds):
            results.append(result)
            print(line(result), file=out, flush=True)
    if chosen.json is not None:
        document = {"machine": where, "results": [result.to_dict() for result in results]}
        text = json.dumps(document, indent=2) + "\n"
        if chosen.json == "-":
            sys.stdout.write(text)
        else:
            Path(chosen.json).write_text(text, encoding="utf-8")
    return 0


def description(where: dict[str, object]) -> str:
    """The machine in a line."""
    packages = dict(where["packages"])
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    return (
        f"{where['cores']} cores of {where['processor']}, load {where['load']:.1f}, "
        f"Python {where['python']}, {versions}"
    )


def line(result: Result) -> str:
    """Figure, peer's figure and ratio."""
    own, best = (figure(x, result.work, result.unit) for x in (result.seconds, result.fastest))
    peer = figure(result.peer_seconds, result.peer_work, result.unit)
    ratio = result.ratio
    speed = f"{ratio:.3g} times as fast as" if ratio >= 1 else f"{1 / ratio:.3g} times slower than"
    bound = ""
    if result.bound is not None:
        part = result.bound / result.seconds
        bound = f", {part:.2f} of the bound of moving its bytes ({result.bound * 1e3:.1f} ms)"
    return f"{result.what}: {own} (best {best}), {speed} {result.peer} ({peer}){bound}, {result.rounds} rounds"


def figure(seconds: float, work: float | None, unit: str) -> str:
    """A rate where there is work, else the time."""
    if work is None:
        return f"{seconds:.3f} s"
    rate = work / seconds
    size, prefix = next(((s, p) for s, p in PREFIXES if rate >= s), PREFIXES[-1])
    return f"{rate / size:.3g} {prefix} {unit}/s".replace("  ", " ")


if __name__ == "__main__":
    sys.exit(main())
