"""Fits: constants that cells were made with come back, and the file of constants is what a fit gives today."""

import dataclasses
import json
from importlib import resources

import numpy as np
import pytest

from flamia_ref.schedule.cost import Constants
from flamia_ref.schedule.fitting import _RATIOS, LONG, SHORT, Group, fit, predicted
from flamia_ref.schedule.launches import constants_of
from flamia_ref.schedule.measured import Cell, published
from flamia_ref.schedule.work import Pass


def cell(length: int, *, launch: Pass = Pass.FORWARD, causal: bool = True, **changes) -> Cell:
    shape = {"heads": 16, "kv_heads": 2, "head_dim": 128, "value_dim": 128, "format": "bf16"}
    return Cell(
        table="made",
        gpu="GB200",
        model="made",
        library="cudnn",
        version="made",
        causal=causal,
        batch=1,
        length=length,
        launch=launch,
        deterministic=False,
        milliseconds=1.0,
        **{**shape, **changes},
    )


@pytest.mark.parametrize(
    ("launch", "format", "slowest", "efficiency", "ratio"),
    [
        # Cycles of a product by hand: exp2 less a quarter and conversions 768 + 256, both below the tensor core's
        # 1024 or equal to it.
        (Pass.FORWARD, "bf16", 1024.0, 0.7, _RATIOS[20]),
        (Pass.FORWARD, "mxfp8", 1024.0, 0.9, _RATIOS[10]),
        # Shared memory: 28 and 19 times 128, as in test_cost.
        (Pass.BACKWARD, "bf16", 28 * 128.0, 0.5, _RATIOS[25]),
        (Pass.BACKWARD, "mxfp8", 19 * 128.0, 0.6, _RATIOS[15]),
    ],
)
def test_planted_constants_are_found(
    launch: Pass, format: str, slowest: float, efficiency: float, ratio: float
) -> None:
    planted = Constants(efficiency=efficiency, overhead=slowest / efficiency * ratio)
    shapes = [
        cell(length, launch=launch, causal=causal, format=format)
        for length in (LONG, 8192, SHORT)
        for causal in (True, False)
    ]
    cells = [dataclasses.replace(x, milliseconds=predicted(x, planted)) for x in shapes]
    # One that is deterministic and far off is not fitted.
    cells.append(dataclasses.replace(cells[0], deterministic=True, milliseconds=1e6))
    (found,) = fit(cells).values()
    assert found.constants.efficiency == pytest.approx(efficiency, rel=1e-3)
    assert found.constants.overhead == pytest.approx(planted.overhead, rel=1e-3)
    assert found.spread < 1e-3
    assert (found.long, found.short) == (2, 1)


def test_between_two_values_the_nearer_is_taken() -> None:
    ratio = 0.9 * _RATIOS[20] + 0.1 * _RATIOS[21]
    planted = Constants(efficiency=0.7, overhead=1024 / 0.7 * ratio)
    cells = [
        dataclasses.replace(x, milliseconds=predicted(x, planted)) for x in map(cell, (LONG, SHORT))
    ]
    (found,) = fit(cells).values()
    assert found.constants.overhead == pytest.approx(1024 / 0.7 * _RATIOS[20], rel=0.01)


def test_groups() -> None:
    # Without a cell of 32768 tokens nothing is fitted; without one of 2048 the overhead is 4 products.
    assert fit([cell(8192)]) == {}
    (found,) = fit([cell(LONG)]).values()
    assert found.constants.overhead * found.constants.efficiency == pytest.approx(4 * 1024)
    assert len(fit([cell(LONG), cell(LONG, format="fp8")])) == 2


def test_one_product_at_a_time() -> None:
    # One document and head of 256 tokens: one tile of two stages, 2 + 2 products, and its overhead.
    one = cell(256, heads=1, kv_heads=1)
    constants = Constants(efficiency=0.5, overhead=1000.0)
    # The overhead is rounded to a ten-thousandth of a product.
    assert predicted(one, constants) == pytest.approx(
        (4 * 1024 / 0.5 + 1000) / 2.062e9 * 1e3, rel=1e-4
    )


def test_the_file_of_constants_is_todays_fit() -> None:
    folder = resources.files("flamia_ref.schedule") / "published"
    rows = json.loads((folder / "constants.json").read_text("utf-8"))
    row = next(x for x in rows if x["library"] == "fa4" and x["pass"] == "backward")
    cells = [x for x in published() if Group.of(x)[:4] == ("GB200", "fa4", "", Pass.BACKWARD)]
    assert row["gpu"] == "GB200"
    ((group, found),) = fit(cells).items()
    assert group.format == row["format"] == "bf16"
    assert row["efficiency"] == round(found.constants.efficiency, 4)
    assert row["overhead"] == round(found.constants.overhead)
    assert row["spread"] == round(found.spread, 4)
    assert constants_of("GB200", "fa4", Pass.BACKWARD, "bf16")[0] == Constants(
        efficiency=row["efficiency"], overhead=row["overhead"]
    )
    # Of a B200 there are no measurements: the cycles of its chip.
    taken, words = constants_of("B200", "fa4", Pass.BACKWARD, "bf16")
    assert (taken.efficiency, words) == (row["efficiency"], "fa4 bf16 on GB200")
    with pytest.raises(ValueError, match="nothing was fitted for the backward of fa4 in mxfp8"):
        constants_of("B200", "fa4", Pass.BACKWARD, "mxfp8")


def test_groups_are_whole_in_the_file() -> None:
    folder = resources.files("flamia_ref.schedule") / "published"
    rows = json.loads((folder / "constants.json").read_text("utf-8"))
    listed = {(x["gpu"], x["library"], x["version"], x["pass"], x["format"]) for x in rows}
    wanted = {tuple(Group.of(x)) for x in published() if x.length == LONG and not x.deterministic}
    assert listed == {(*x[:3], x[3].value, x[4]) for x in wanted}
    assert all(np.isfinite(x["efficiency"]) for x in rows)
