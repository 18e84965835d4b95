"""Probes of matrix instructions: operands to the device, its results beside the model's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flamia_ref.arithmetic import INSTRUCTIONS
from flamia_ref.device import operands, shrinking
from flamia_ref.device.outcomes import Outcome, Status
from flamia_ref.device.probes import ProductProbe
from flamia_ref.device.tiles import (
    Row,
    Tiles,
    Words,
    expected,
    expected_of,
    from_file,
    row_of,
    tiles_of,
    to_file,
)
from flamia_ref.evidence import weakest
from flamia_ref.formats import FORMATS

Run = Callable[[Sequence[bytes]], list[bytes]]
"""Runs the probe's program: files of operands in, files of results out."""

_STEPS = (1, 4)  # instructions in a row, of the two halves of the operands
_LOOKED_AT = 200  # mismatches of a family among which the smallest is looked for


def probe_product(
    probe: ProductProbe, run: Run, *, rows: int, seed: int, note: str = ""
) -> Outcome:
    """Compare about `rows` results of an instruction, at least a tile a family, with its model.

    Raises ProgramFailed where the program stops with an error.
    """
    model = INSTRUCTIONS[probe.instruction]
    wanted = -(-rows // (probe.m * probe.n * len(_STEPS)))
    families: dict[str, tuple[int, int]] = {}
    smallest: tuple[int, str, Row] | None = None
    for steps in _STEPS:
        named = list(operands.tiles(probe, wanted, steps, seed))
        files = run([to_file(probe, tiles) for _, tiles in named])
        for (name, tiles), data in zip(named, files, strict=True):
            got = from_file(probe, tiles, data)
            wrong = np.argwhere(got != expected(probe, tiles))
            seen, bad = families.get(name, (0, 0))
            families[name] = (seen + got.size, bad + len(wrong))
            for at in wrong[:_LOOKED_AT].tolist():
                row = row_of(tiles, *at)
                size = shrinking.products(row)
                if smallest is None or size < smallest[0]:
                    smallest = (size, name, row)
    counterexample = None
    if smallest is not None:
        counterexample = _counterexample(probe, run, smallest[1], smallest[2])
    return Outcome(
        probe=probe.name,
        status=Status.CONFIRMED if smallest is None else Status.REFUTED,
        model=probe.instruction,
        evidence=str(weakest(model.evidence.values())),
        results=sum(seen for seen, _ in families.values()),
        mismatches=sum(bad for _, bad in families.values()),
        families=families,
        counterexample=counterexample,
        reason=note,
    )


def _counterexample(probe: ProductProbe, run: Run, family: str, row: Row) -> Mapping[str, Any]:
    def differs(rows: Sequence[Row]) -> list[bool]:
        tiles = tiles_of(probe, list(rows))
        got = _device(probe, run, tiles)[:, 0, 0]
        return [int(word) != expected_of(probe, one) for word, one in zip(got, rows, strict=True)]

    neutral = 127
    if probe.scaling is not None and probe.scaling.format != "e8m0":
        scale = FORMATS[probe.scaling.format]
        neutral = scale.bias << scale.mantissa_bits
    shrunk = shrinking.shrink(row, differs, neutral_scale=neutral)
    shown = row if shrunk is None else shrunk
    got = int(_device(probe, run, tiles_of(probe, [shown]))[0, 0, 0])
    return described(probe, family, shown, got) | {"seen_again": shrunk is not None}


def _device(probe: ProductProbe, run: Run, tiles: Tiles) -> Words:
    return from_file(probe, tiles, run([to_file(probe, tiles)])[0])


def described(probe: ProductProbe, family: str, row: Row, got: int) -> dict[str, Any]:
    """A counterexample as plain data: hexadecimal codes of the places that are not zero, and both results."""
    present = np.argwhere((row.a != 0) | (row.b != 0)).tolist()
    found: dict[str, Any] = {
        "family": family,
        "steps": len(row.a),
        "products": [
            [f"step {step}", f"k {k}", hex(int(row.a[step, k])), hex(int(row.b[step, k]))]
            for step, k in present
        ],
    }
    if probe.scaling is not None:
        found["a_scales"] = [[hex(int(x)) for x in step] for step in row.a_scales]
        found["b_scales"] = [[hex(int(x)) for x in step] for step in row.b_scales]
    digits = 4 if probe.half else 8
    for name, word in (("c", row.c), ("expected", expected_of(probe, row)), ("got", got)):
        found[name] = f"{word:#0{digits + 2}x}"
    return found
