"""Devices that are none: the independent implementation in the place of a GPU, right or with a planted fault."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from flamia_ref.arithmetic import fused_dot
from flamia_ref.device.probes import ProductProbe
from flamia_ref.device.tiles import Tiles
from tests.independent import codes, machine
from tests.independent.machine import Rules
from tests.independent.tensor_cores import INSTRUCTIONS

ELEMENTS = {e.name: e for e in (*codes.NARROW, codes.BF16, codes.FP16, codes.TF32)}


def _output(rules: Rules, **changes: Any) -> Rules:
    return dataclasses.replace(rules, output=dataclasses.replace(rules.output, **changes))


FAULTS: dict[str, Callable[[Rules], Rules]] = {
    "one fraction bit fewer": lambda r: dataclasses.replace(r, fraction_bits=r.fraction_bits - 1),
    "one fraction bit more": lambda r: dataclasses.replace(r, fraction_bits=r.fraction_bits + 1),
    "floor one lower": lambda r: dataclasses.replace(r, floor=r.floor - 1),
    "floor one higher": lambda r: dataclasses.replace(r, floor=r.floor + 1),
    "the other rounding": lambda r: _output(r, nearest=not r.output.nearest),
    "half the terms": lambda r: dataclasses.replace(r, terms=r.terms // 2),
    "groups of 8": lambda r: dataclasses.replace(r, group=8),
}
"""What may be wrong with a model, by name."""


def applies(name: str, probe: ProductProbe) -> bool:
    """Whether a fault can be planted in the machine of a probe."""
    grouped = probe.kind.startswith("mxf4")
    if name == "groups of 8":
        return grouped
    # Half of an instruction with one scale for all its products would need the scale twice.
    return not (name == "half the terms" and probe.scaling is not None)


def results(
    probe: ProductProbe,
    tiles: Tiles,
    fault: str | None = None,
    chosen: npt.NDArray[Any] | None = None,
) -> npt.NDArray[np.uint32]:
    """What the device gives, [tiles, m, n]; of `chosen` [rows, 3] only those results, [rows]."""
    rules = INSTRUCTIONS[probe.instruction].rules
    if fault is not None:
        rules = FAULTS[fault](rules)
    elements = ELEMENTS[probe.a_format], ELEMENTS[probe.b_format]
    scaling = {}
    if probe.scaling is not None:
        scaling = {"scale_format": probe.scaling.format, "block": probe.scaling.block}

    def one(tile: int, i: int, j: int) -> int:
        return machine.chain(
            tiles.a[tile, :, i].ravel().tolist(),
            tiles.b[tile, :, j].ravel().tolist(),
            int(tiles.c[tile, i, j]),
            rules,
            elements=elements,
            a_scales=tiles.a_scales[tile, :, i].ravel().tolist(),
            b_scales=tiles.b_scales[tile, :, j].ravel().tolist(),
            **scaling,
        )[-1]

    if chosen is not None:
        return np.array([one(*at) for at in chosen.tolist()], dtype=np.uint32)
    found = [one(*at) for at in np.ndindex(tiles.c.shape)]
    return np.array(found, dtype=np.uint32).reshape(tiles.c.shape)


def model(
    probe: ProductProbe, tiles: Tiles, chosen: npt.NDArray[Any]
) -> npt.NDArray[np.unsignedinteger[Any]]:
    """What the model gives for `chosen` [rows, 3] results, [rows]."""
    tile, i, j = chosen.T
    scaling = probe.scaling

    def flat(codes: npt.NDArray[Any], at: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return codes[tile, :, at].reshape(len(chosen), -1)

    c = tiles.c[tile, i, j]
    result = fused_dot(
        flat(tiles.a, i),
        flat(tiles.b, j),
        c.astype(np.uint16) if probe.half else c,
        probe.instruction,
        a_format=probe.a_format,
        b_format=probe.b_format,
        a_scales=flat(tiles.a_scales, i) if scaling else None,
        b_scales=flat(tiles.b_scales, j) if scaling else None,
        scale_format=scaling.format if scaling else None,
    )
    return np.asarray(result)
