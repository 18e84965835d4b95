"""Write the table of docs/nvidia-reference.md: NVIDIA's PyTorch reference against NVIDIA's kernels, on the same inputs.

Run from the root of the checkout, some minutes: python docs/nvidia_reference.py
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flamia_ref.attention import RECIPES, backward, float64, forward  # noqa: E402

PAGE = ROOT / "docs" / "nvidia-reference.md"
START, END = "<!-- table, by docs/nvidia_reference.py -->\n", "<!-- end -->\n"

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 1024, 4, 2, 64
FACTORS, SEEDS = (1, 2, 3), (0, 1, 2, 3)
NAMES = ("cudnn-mxfp8-reference", "cudnn-mxfp8")

Results = dict[str, Any]


def inputs(factor: float, seed: int) -> list[Any]:
    """q, k, v and dO of normal values in bfloat16, q and k times a factor."""
    rng = np.random.default_rng(seed)
    q, k, v, dout = (
        rng.standard_normal((TOKENS, heads, HEAD_DIM))
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    return [x.astype(ml_dtypes.bfloat16) for x in (q * factor, k * factor, v, dout)]


def run(name: str, q: Any, k: Any, v: Any, dout: Any) -> Results:
    """All that is compared of one recipe, by name."""
    import jax.numpy as jnp

    arrays = [jnp.asarray(x) for x in (q, k, v, dout)]
    ahead = forward(*arrays[:3], RECIPES[name], trace=("s", "p", "p.o.codes"))
    stages = ("p.dv.codes", "delta", "ds.dq.codes", "ds.dk.codes")
    back = backward(*arrays, ahead, trace=stages)
    found = {**ahead.trace, **back.trace, "out": ahead.out}
    found |= {"dq": back.dq, "dk": back.dk, "dv": back.dv}
    return {stage: np.asarray(x[0] if isinstance(x, list) else x) for stage, x in found.items()}


class Sums:
    """What is added up over seeds: numbers of elements, and squares of differences and of values."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    def add(self, name: str, *values: float) -> None:
        """Add to the sums of a name."""
        kept = self.found.setdefault(name, [0.0] * len(values))
        self.found[name] = [a + b for a, b in zip(kept, values, strict=True)]

    def share(self, name: str) -> str:
        """The first sum over the second, in percent."""
        some, of = self.found[name]
        return f"{100 * some / of:.2g}%"

    def count(self, name: str) -> str:
        """The first sum of the second."""
        some, of = self.found[name]
        return f"{some:.0f} of {of:.0f}"

    def relative(self, name: str) -> str:
        """The root of the first sum over the second."""
        some, of = self.found[name]
        return f"{(some / of) ** 0.5:.2g}"


def measured(factor: float) -> Sums:
    """Both recipes on the inputs of all seeds."""
    sums = Sums()
    seen = np.tril(np.ones((TOKENS, TOKENS), dtype=bool))
    for seed in SEEDS:
        given = inputs(factor, seed)
        mine, theirs = (run(name, *given) for name in NAMES)
        ahead = float64.forward(*given[:3])
        exact = {"out": ahead.out} | {
            name: getattr(float64.backward(*given), name) for name in ("dq", "dk", "dv")
        }
        for name in ("p.o.codes", "p.dv.codes", "ds.dq.codes", "ds.dk.codes"):
            one, other = (x[name][:, seen] for x in (mine, theirs))
            sums.add(name, float((one != other).sum()), one.size)
        high = (mine["p"] * 16 > 448) if mine["p"].max() < 64 else (mine["p"] > 448)
        high = high[:, seen]
        lost = high & (mine["p.o.codes"][:, seen] == 0)
        sums.add("lost", float(lost.sum()), float(high.sum()))
        rows = np.zeros((HEADS, TOKENS, TOKENS), dtype=bool)
        rows[:, seen] = lost
        sums.add("rows", float(rows.any(axis=2).sum()), HEADS * TOKENS)
        for name in ("s", "delta", "out", "dq", "dk", "dv"):
            one, other = (x[name].astype(np.float64) for x in (mine, theirs))
            if name == "s":
                one, other = one[:, seen], other[:, seen]
            sums.add(name, float(((one - other) ** 2).sum()), float((other**2).sum()))
            if name in exact:
                norm = float((exact[name] ** 2).sum())
                for which, x in (("reference", one), ("kernels", other)):
                    sums.add(f"{name}.{which}", float(((x - exact[name]) ** 2).sum()), norm)
    return sums


def rows(sums: list[Sums]) -> Iterator[tuple[str, ...]]:
    """The rows of the table, a column a factor."""
    yield ("", *(f"q, k x {factor}" for factor in FACTORS))
    yield ("---",) * (1 + len(FACTORS))
    yield ("S, relative L2", *(x.relative("s") for x in sums))
    yield ("codes of P in O that differ", *(x.share("p.o.codes") for x in sums))
    yield ("P above 448 that are zeroed", *(x.count("lost") for x in sums))
    yield ("rows that lose a P", *(x.count("rows") for x in sums))
    yield ("codes of P in dV that differ", *(x.share("p.dv.codes") for x in sums))
    yield ("delta, relative L2", *(x.relative("delta") for x in sums))
    yield ("codes of dS in dQ that differ", *(x.share("ds.dq.codes") for x in sums))
    yield ("codes of dS in dK that differ", *(x.share("ds.dk.codes") for x in sums))
    for name, shown in (("out", "O"), ("dq", "dQ"), ("dk", "dK"), ("dv", "dV")):
        cells = (
            f"{x.relative(name)} ({x.relative(f'{name}.reference')}, {x.relative(f'{name}.kernels')})"
            for x in sums
        )
        yield (f"{shown}, relative L2", *cells)


def main() -> None:
    """Write the table of the page anew."""
    found = [measured(factor) for factor in FACTORS]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows(found))
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{START}\n{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
