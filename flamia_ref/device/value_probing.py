"""Probes of conversions and special functions: one value in, one out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flamia_ref.arithmetic import SPECIAL_MODELS, special
from flamia_ref.device.outcomes import Outcome, Status
from flamia_ref.device.probes import ConversionProbe, SpecialProbe
from flamia_ref.device.tiles import MAGIC, VERSION
from flamia_ref.device.toolchain import ProgramFailed
from flamia_ref.evidence import Evidence
from flamia_ref.formats import encode

Words = npt.NDArray[np.uint32]
Run = Callable[[Sequence[bytes]], list[bytes]]
Model = Callable[[Words, Words], Words]

_RANGE, _LIST, _RUNS = range(3)  # the modes of cuda/inputs.cuh
_ALL = 1 << 32
_CHUNK = 1 << 24  # inputs that a program is asked for at once
_AT_ONCE = 1 << 18  # inputs that a model works on at once
_ROUNDINGS = {
    "rn": "nearest_even",
    "rz": "toward_zero",
    "rm": "down",
    "rp": "up",
    "rna": "nearest_away",
    "rs": "stochastic",
}
# Where what a model is told may change although its result goes up or down with the input elsewhere.
_EDGES = (0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x80000000, 0xFF800000, 0xFF800001, 0xFFFFFFFF)
# Bit patterns that are whole tables of the special function unit: [0.5, 2).
_BINADES = (0x3F000000, 0x40000000)


def request(number: int, mode: int, start: int, count: int, words: Words | None = None) -> bytes:
    """The file that a program of single inputs reads."""
    header = np.array([MAGIC, VERSION, number, mode, start, count, 0, 0], dtype="<u4")
    return header.tobytes() + (b"" if words is None else words.astype("<u4").tobytes())


def probe_conversion(probe: ConversionProbe, run: Run, *, rows: int, seed: int) -> Outcome:
    """Compare a conversion with `encode`: every float32, or `rows` of them where random bits decide.

    Raises ProgramFailed where the program stops with an error.
    """
    _, rounding, *satfinite = probe.conversion.split(".")

    def model(x: Words, random: Words) -> Words:
        stochastic = probe.stochastic
        codes = encode(
            x.view(np.float32),
            probe.format,
            rounding=_ROUNDINGS[rounding],
            overflow="saturate" if satfinite else "native",
            random_bits=random.astype(np.uint16) if stochastic else None,
        )
        found = np.asarray(codes).astype(np.uint32)
        if probe.conversion == "tf32.rna":
            # Seen on sm_90a: this one instruction does not make its NaN the usual one.
            found = np.where((x & 0x7FFFFFFF) > 0x7F800000, x & np.uint32(0xFFFFE000), found)
        return found

    label = f"encode to {probe.format}, {_ROUNDINGS[rounding]}, " + (
        "saturating" if satfinite else "native overflow"
    )
    if probe.conversion == "tf32.rna":
        label += "; of a NaN the low 13 bits are cut, so that one with no others becomes infinity"
    if probe.stochastic:
        x, random = _stochastic_inputs(rows, seed)
        words = np.stack([x, random], axis=1)
        got = _words(run([request(probe.number, _LIST, 0, x.size, words)])[0])
        wanted = model(x, random)
        return _compared(probe.name, label, x, got, wanted, random)
    found = _words(run([request(probe.number, _RUNS, 0, 0)])[0])
    return _compared_runs(probe.name, label, found, model)


def probe_special(
    probe: SpecialProbe, run: Run, *, capability: str, rows: int, seed: int, exhaustive: bool
) -> Outcome:
    """Compare a function with its model on every float32, or on its tables and `rows` others.

    `capability` is the device's, "9.0": by it the evidence is looked up.

    Raises ProgramFailed where the program stops with an error.
    """
    model_of = SPECIAL_MODELS[probe.model]
    label = f"{probe.function} by {probe.model}"
    if probe.function not in model_of.functions:
        reason = f"{probe.model} has no {probe.function}"
        return Outcome(probe=probe.name, status=Status.NOT_RUN, model=label, reason=reason)
    function: Callable[..., Any] = getattr(special, probe.function)
    known = model_of.evidence.get("sm_" + capability.replace(".", ""), Evidence.ASSUMED)

    def model(x: Words) -> Words:
        # A part at a time, so that the temporaries stay in the cache.
        parts = (x[start : start + _AT_ONCE] for start in range(0, x.size, _AT_ONCE))
        found = [np.asarray(function(part.view(np.float32), probe.model)) for part in parts]
        return np.concatenate(found).view(np.uint32)

    if not exhaustive:
        x = _special_inputs(probe.function, rows, seed)
        words = np.stack([x, np.zeros_like(x)], axis=1)
        got = _words(run([request(probe.number, _LIST, 0, x.size, words)])[0])
        return replace(_compared(probe.name, label, x, got, model(x)), evidence=str(known))

    def part(start: int) -> Outcome:
        x = np.arange(start, start + _CHUNK, dtype=np.uint64).astype(np.uint32)
        got = _words(run([request(probe.number, _RANGE, start, _CHUNK)])[0])
        return _compared(probe.name, label, x, got, model(x))

    model(np.zeros(1, dtype=np.uint32))  # builds the tables once, before the threads
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        whole = _together(list(threads.map(part, range(0, _ALL, _CHUNK))))
    return replace(whole, evidence=str(known))


def _words(data: bytes) -> Words:
    if len(data) % 4:
        raise ProgramFailed(f"a program wrote {len(data)} bytes of results; they are words of 4")
    return np.frombuffer(data, dtype="<u4").astype(np.uint32, copy=False)


def _compared(
    name: str, label: str, x: Words, got: Words, wanted: Words, random: Words | None = None
) -> Outcome:
    if got.shape != x.shape:
        raise ProgramFailed(f"the program of {name} gave {got.size} results for {x.size} inputs")
    wrong = np.flatnonzero(got != wanted)
    counterexample = None
    if wrong.size:
        # Of the inputs that differ the one of least magnitude, positive before negative.
        magnitude, sign = x[wrong] & np.uint32(0x7FFFFFFF), x[wrong] >> np.uint32(31)
        at = wrong[np.lexsort((sign, magnitude))[0]]
        counterexample = {"input": f"{x[at]:#010x}"}
        if random is not None:
            counterexample["random_bits"] = f"{random[at]:#06x}"
        counterexample |= {"expected": hex(int(wanted[at])), "got": hex(int(got[at]))}
    return Outcome(
        probe=name,
        status=Status.REFUTED if wrong.size else Status.CONFIRMED,
        model=label,
        results=x.size,
        mismatches=int(wrong.size),
        counterexample=counterexample,
    )


def _compared_runs(name: str, label: str, found: Words, model: Model) -> Outcome:
    """Compare all 2^32 results, given as the places where they change, at both ends of each run.

    Between the ends the model cannot differ where it does not at them: its codes go one way as magnitudes grow, over
    numbers and over NaNs; the places between those are looked at besides.
    """
    if found.size < 3 or found.size % 2 == 0:
        raise ProgramFailed(f"the program of {name} gave {found.size} words, not a count and pairs")
    total, pairs = int(found[0]), found[1:].reshape(-1, 2)
    pairs = pairs[np.argsort(pairs[:, 0])]
    starts, codes = pairs[:, 0], pairs[:, 1]
    if total != len(pairs):
        # More runs than any right conversion has: what is there is compared value by value.
        outcome = _compared(name, label, starts, codes, model(starts, starts))
        if outcome.status is Status.CONFIRMED:
            raise ProgramFailed(
                f"{name} changes its result {total} times, more than can be recorded"
            )
        return outcome
    if starts[0]:
        raise ProgramFailed(f"the program of {name} says nothing of inputs below {starts[0]:#x}")
    ends = np.append(starts[1:], np.uint32(0)) - np.uint32(1)
    edges = np.array([x + d for x in _EDGES for d in (-1, 0)], dtype=np.uint32)
    at_edges = codes[np.searchsorted(starts, edges, side="right") - 1]
    x = np.concatenate([starts, ends, edges])
    got = np.concatenate([codes, codes, at_edges])
    outcome = _compared(name, label, x, got, model(x, x))
    if outcome.status is Status.CONFIRMED:
        return Outcome(
            probe=name, status=Status.CONFIRMED, model=label, results=_ALL, reason="every float32"
        )
    reason = f"mismatches counted at the ends of {len(pairs)} runs of equal results"
    return Outcome(
        probe=name,
        status=outcome.status,
        model=label,
        results=_ALL,
        mismatches=outcome.mismatches,
        counterexample=outcome.counterexample,
        reason=reason,
    )


def _stochastic_inputs(rows: int, seed: int) -> tuple[Words, Words]:
    """Float32 bits within reach of the narrow formats for the most part, and 16 random bits each."""
    rng = np.random.default_rng([seed, 1])
    exponents = rng.integers(127 - 24, 127 + 20, rows)
    near = exponents << 23 | rng.integers(0, 1 << 23, rows) | rng.integers(0, 2, rows) << 31
    x = np.where(rng.random(rows) < 0.9, near, rng.integers(0, _ALL, rows)).astype(np.uint32)
    random = np.where(rng.random(rows) < 0.2, 0xFFFF, rng.integers(0, 1 << 16, rows))
    return x, random.astype(np.uint32)


def _special_inputs(function: str, rows: int, seed: int) -> Words:
    """The inputs that show a function's whole table, edges, and any others."""
    rng = np.random.default_rng([seed, 2])
    if function == "exp2":
        table = (np.arange(1 << 23) / (1 << 23)).astype(np.float32).view(np.uint32)
    else:
        table = np.arange(*_BINADES, dtype=np.uint32)
    edges = np.array([(x + d) % _ALL for x in (0, 0x00800000, *_EDGES) for d in (-1, 0, 1)])
    any_bits = rng.integers(0, _ALL, rows)
    return np.concatenate([table, edges.astype(np.uint32), any_bits.astype(np.uint32)])


def _together(parts: list[Outcome]) -> Outcome:
    """One outcome of parts in ascending order of their inputs."""
    worst = next((part for part in parts if part.counterexample is not None), parts[0])
    return Outcome(
        probe=worst.probe,
        status=worst.status,
        model=worst.model,
        results=sum(part.results for part in parts),
        mismatches=sum(part.mismatches for part in parts),
        counterexample=worst.counterexample,
        reason="every float32" if worst.status is Status.CONFIRMED else "",
    )
