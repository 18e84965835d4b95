"""Measure the envelopes that docs/envelopes.md speaks of: run `python docs/envelopes.py`, which takes minutes.

It prints the tables: how wide envelopes are, how long they take, and faults beside the tolerances of today.
"""

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from flamia_ref.attention import RECIPES, Recipe, backward, forward
from flamia_ref.golden.bitwise import values
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.envelope.judging import permitted
from flamia_ref.golden.inputs import Distribution
from flamia_ref.golden.stage import View

OUTPUTS = ("out", "lse", "dq", "dk", "dv")


def case(tokens: int, head_dim: int) -> CaseSpec:
    """One causal document, one head, values like a normal distribution."""
    return CaseSpec(
        name=f"one-document-{tokens}",
        why="the width of envelopes",
        lengths=(tokens,),
        heads=1,
        kv_heads=1,
        head_dim=head_dim,
        causal=True,
        softmax_scale=1 / math.sqrt(head_dim),
        distribution=Distribution.BELL,
        seed=1,
        exponent=-8,
    )


def simulated(spec: CaseSpec, recipe: Recipe, **changed: Any) -> dict[str, Any]:
    """Inputs and outputs by name as bits, with some arguments of the simulator, or inputs, changed."""
    bits = spec.inputs()
    q, k, v, dout = (
        changed.pop(name, bits[name].view(ml_dtypes.bfloat16)) for name in ("q", "k", "v", "dout")
    )
    arguments = {"causal": spec.causal, "softmax_scale": spec.softmax_scale} | changed
    ahead = forward(q, k, v, recipe, cu_seqlens=spec.cu_seqlens, **arguments)
    back = backward(q, k, v, dout, ahead)
    found = {"out": ahead.out, "lse": ahead.lse, "dq": back.dq, "dk": back.dk, "dv": back.dv}
    return bits | {name: np.asarray(x).view(np.uint32) for name, x in found.items()}


def narrow(name: str, bits: Any) -> Any:
    """float32 bits as the pack stores them."""
    return bits if name == "lse" else (bits >> np.uint32(16)).astype(np.uint16)


def ends(spec: CaseSpec, recipe: Recipe, expected: dict[str, Any]) -> dict[str, Any]:
    """The envelopes of the outputs, of the gradients given out and lse."""
    stored = {name: narrow(name, x) if name in OUTPUTS else x for name, x in expected.items()}
    given = {name: stored[name] for name in ("out", "lse")}
    return permitted(spec, recipe, stored, given, OUTPUTS)


def of(name: str, bits: Any) -> Any:
    """Bits of an output as numbers."""
    return values(bits, View.F32 if name == "lse" else View.BF16)


def widths(names: tuple[str, ...], sizes: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """The table of widths, line by line."""
    yield "| recipe | tokens | head_dim | out | lse | dQ | dK | dV | ambiguous out | time |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name in names:
        for tokens, head_dim in sizes:
            spec, recipe = case(tokens, head_dim), RECIPES[name]
            begin = time.perf_counter()
            expected = simulated(spec, recipe)
            plain = time.perf_counter() - begin
            begin = time.perf_counter()
            found = ends(spec, recipe, expected)
            mine = time.perf_counter() - begin
            cells = []
            for output in OUTPUTS:
                low, high = of(output, found[output].low), of(output, found[output].high)
                exact = of(output, narrow(output, expected[output]))
                cells.append(f"{np.mean(high - low) / np.sqrt(np.mean(exact**2)):.1e}")
                if output == "out":
                    unsure = int(np.count_nonzero(low < high))
            yield (
                f"| {name} | {tokens} | {head_dim} | {' | '.join(cells)} | {unsure} of {tokens * head_dim} | "
                f"{mine / plain:.1f}x |"
            )


def faults(recipe: Recipe, spec: CaseSpec) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Mistakes by name, and what a kernel that makes them returns."""
    bits = spec.inputs()
    k, v = (bits[name].view(ml_dtypes.bfloat16).astype(np.float32) for name in ("k", "v"))
    last = spec.tokens - 1

    def doubled(x: Any, token: int) -> Any:
        changed = x.copy()
        changed[token] *= 2
        return changed.astype(ml_dtypes.bfloat16)

    yield (
        "V's scale of one token off by one",
        lambda: simulated(spec, recipe, v=doubled(v, last // 2)),
    )
    yield (
        "K's scale of one token off by one",
        lambda: simulated(spec, recipe, k=doubled(k, last // 2)),
    )
    yield (
        "softmax scale in bfloat16 with an ulp too much",
        lambda: simulated(spec, recipe, softmax_scale=spec.softmax_scale * (1 + 2.0**-7)),
    )
    yield (
        "P rounded to e4m3 by the floor rule",
        lambda: simulated(spec, with_p(recipe, "ocp-mx-floor-e4m3")),
    )
    yield (
        "the oldest key of the window left out",
        lambda: simulated(spec, recipe, window=(last - 1, 0)),
    )
    yield "P in e5m2", lambda: simulated(spec, with_p(recipe, "te-mx-e5m2"))


def with_p(recipe: Recipe, preset: str) -> Recipe:
    """The recipe with P in another block format."""
    left = dataclasses.replace(recipe.o.left, format=preset)
    return dataclasses.replace(
        recipe, name="changed", o=dataclasses.replace(recipe.o, left=left), schedules=()
    )


TOLERANCES = {
    # Source, outputs, absolute and relative tolerance: facts of public test suites.
    "cudnn-frontend MXFP8": {
        "out": (0.12, 0.20),
        "lse": (0.05, 0.05),
        "dq": (0.08, 0.20),
        "dk": (0.08, 0.20),
        "dv": (0.08, 0.20),
    },
    "CUTLASS 77 FP8": {
        "out": (0.1, 0.0),
        "lse": (0.1, 0.0),
        "dq": (0.1, 0.0),
        "dk": (0.1, 0.0),
        "dv": (0.1, 0.0),
    },
}


def caught(names: tuple[str, ...], tokens: int) -> Iterator[str]:
    """The table of faults, line by line."""
    yield f"| recipe | fault | {' | '.join(TOLERANCES)} | envelope: elements outside |"
    yield f"|---|---|{'---|' * len(TOLERANCES)}---|"
    for name in names:
        spec, recipe = case(tokens, 64), RECIPES[name]
        expected = simulated(spec, recipe)
        for fault, run in faults(recipe, spec):
            given = run()
            cells = []
            for tolerances in TOLERANCES.values():
                passes = True
                for output, (absolute, relative) in tolerances.items():
                    exact = of(output, narrow(output, expected[output]))
                    mine = of(output, narrow(output, given[output]))
                    passes &= bool(
                        (np.abs(mine - exact) <= absolute + relative * np.abs(exact)).all()
                    )
                cells.append("passes" if passes else "fails")
            stored = {n: narrow(n, x) if n in OUTPUTS else x for n, x in expected.items()}
            own = {n: narrow(n, given[n]) for n in ("out", "lse")}
            found = permitted(spec, recipe, stored, own, OUTPUTS)
            outside = []
            for output in OUTPUTS:
                mine = of(output, narrow(output, given[output]))
                low, high = of(output, found[output].low), of(output, found[output].high)
                count = int(np.count_nonzero((mine < low) | (mine > high)))
                if count:
                    outside.append(f"{count} of {output}")
            yield f"| {name} | {fault} | {' | '.join(cells)} | {', '.join(outside) or 'none'} |"


def main() -> None:
    """Print both tables."""
    quick = "--quick" in sys.argv
    sizes = ((128, 64),) if quick else ((2048, 64),)
    names = (
        tuple(RECIPES)
        if quick
        else ("flamia-mxfp8-folded", "flamia-mxfp8", "cudnn-mxfp8", "bf16-fa4", "flamia-nvfp4-fp8")
    )
    for line in widths(names, sizes):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    sys.stdout.write("\n")
    for line in caught(("flamia-mxfp8-folded",), 128 if quick else 512):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
