"""The package's engine against the interpreter of recipes, bit for bit in every stage of both passes.

They share no code. A case is a feature or a pair of them; every document has several tiles.
"""

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flamia_ref import attention
from flamia_ref.attention import RECIPES, Recipe, backward_stages, forward_stages
from tests.independent import cases, engine
from tests.independent.cases import Case

RECIPES_AS_DATA = {name: json.loads(recipe.to_json()) for name, recipe in RECIPES.items()}


def found(case: Case) -> dict[str, Any]:
    """Every stage that the package traces, and its results."""
    recipe = Recipe.from_json(case.plain(RECIPES_AS_DATA))
    q, k, v, dout = (x.view(ml_dtypes.bfloat16) for x in case.inputs())
    queries, keys = case.bounds()
    sink = None if case.sink is None else np.array(case.sink, np.float32)
    one = attention.forward(
        q,
        k,
        v,
        recipe,
        cu_seqlens=queries,
        cu_seqlens_k=keys,
        sink=sink,
        trace=forward_stages(recipe),
        **case.options,
    )
    other = attention.backward(q, k, v, dout, one, trace=backward_stages(recipe))
    results = {"out": one.out, "lse": one.lse, "dq": other.dq, "dk": other.dk, "dv": other.dv}
    if sink is not None:
        results["dsink"] = other.dsink
    saved = {f"saved.{name}": value for name, value in one.saved.items()}
    return {**one.trace, **other.trace, **results, **saved}


def expected(case: Case) -> dict[str, Any]:
    """The same, from the interpreter."""
    queries, keys = case.bounds()
    sink = None if case.sink is None else np.array(case.sink, np.float32).view(np.uint32)
    q, k, v, dout = case.inputs()
    return engine.run(
        case.plain(RECIPES_AS_DATA),
        q,
        k,
        v,
        dout,
        queries,
        cu_seqlens_k=keys,
        sink=sink,
        **case.options,
    )


def differences(case: Case) -> list[str]:
    """One line for each stage that differs: how many values, and the first place."""
    given, wanted = found(case), expected(case)
    saved = {name for name in wanted if name.startswith("saved.")}
    lines = []
    if {name for name in given if not name.startswith("saved.")} != set(wanted) - saved:
        lines.append(f"stages {sorted(set(given) ^ (set(wanted) - saved))}")
    wanted["saved.o"] = wanted["o"]
    for name, value in given.items():
        if name not in wanted:
            continue
        if name == "saved.row_base":
            lines += _row_base(case, value, wanted)
            continue
        values = value if isinstance(value, list) else [value]
        others = wanted[name] if isinstance(value, list) else [wanted[name]]
        for document, (array, other) in enumerate(zip(values, others, strict=True)):
            lines += _difference(f"{name}[{document}]", np.asarray(array), other)
    return lines


def _bits(array: Any, like: Any) -> Any:
    """Bits of the kind of the interpreter's; a float32 result holds bfloat16 values."""
    if array.dtype == np.float32 and like.dtype == np.uint16:
        bits = array.view(np.uint32)
        assert (np.isnan(array) | (bits & 0xFFFF == 0)).all(), "not bfloat16 values"
        return np.where(np.isnan(array), 0x7FFF, bits >> 16)
    return array.view(like.dtype) if array.dtype.itemsize == like.dtype.itemsize else array


def _difference(name: str, array: Any, other: Any) -> list[str]:
    if array.shape != other.shape:
        return [f"{name}: shape {array.shape}, expected {other.shape}"]
    bits = _bits(array, other)
    places = np.argwhere(bits != other)
    if not len(places):
        return []
    place = tuple(places[0].tolist())
    return [
        f"{name}: {len(places)} of {bits.size} differ, first at {place}:"
        f" {int(bits[place]):#x}, expected {int(other[place]):#x}"
    ]


def _row_base(case: Case, value: Any, wanted: dict[str, Any]) -> list[str]:
    """The bases of the key tiles in which a row sees a key."""
    lines = []
    size = case.plain(RECIPES_AS_DATA)["tiles"]["key"]
    for document, (queries, _) in enumerate(case.documents()):
        p, bases = wanted["p"][document], wanted["saved.row_base"][document]
        for tile in range(bases.shape[2]):
            lives = (p[:, :, tile * size : (tile + 1) * size] != 0).any(axis=2)
            given = np.asarray(value)[:, queries, tile].view(np.uint32)
            if (given != bases[:, :, tile])[lives].any():
                lines.append(f"saved.row_base[{document}], key tile {tile}")
    return lines


CASES = [
    pytest.param(case, id=case.name, marks=[] if case.name in cases.DAILY else pytest.mark.nightly)
    for case in cases.ALL
]


@pytest.mark.parametrize("case", CASES)
def test_every_stage(case: Case) -> None:
    assert differences(case) == []
