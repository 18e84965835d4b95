"""Evidence that several recipes share, and how a recipe names its parts."""

from __future__ import annotations

from flamia_ref.arithmetic import INSTRUCTIONS
from flamia_ref.attention.knobs import Schedule
from flamia_ref.attention.product import Operand, Scope, TileOrder
from flamia_ref.attention.recipe import Step
from flamia_ref.evidence import Evidence, weakest

MX = "sm100.tcgen05.mxf8f6f4"
F16 = "sm100.tcgen05.f16"
MUFU = "mufu.sm90"

PRODUCTS = ("s", "o", "dp", "dv", "dq", "dk")
PER_HEAD = Operand(format="e4m3", scope=Scope.HEAD)
SIDES = tuple(f"{product}.{side}" for product in PRODUCTS for side in ("left", "right"))


def assumed(source: str) -> Step:
    """A step that nothing public settles."""
    return Step(evidence=Evidence.ASSUMED, source=source)


def read(source: str) -> Step:
    """A step read in a kernel's public source."""
    return Step(evidence=Evidence.SOURCE, source=source)


def derived(source: str) -> Step:
    """A step that follows from others."""
    return Step(evidence=Evidence.DERIVED, source=source)


def instruction(name: str) -> Step:
    """The step of a product's instruction: what the instruction itself rests on."""
    return Step(
        evidence=weakest(INSTRUCTIONS[name].evidence.values()), source=INSTRUCTIONS[name].source
    )


DESCALE = assumed("the kernel takes codes and descales, how they come about is the caller's")
SPECIAL = assumed("measured on every float32 on an H200 (sm_90); on sm_100 assumed")
SPECIAL_FUNCTIONS = {
    f"softmax.{function}": SPECIAL for function in ("exp2", "log2", "reciprocal", "tanh")
}

SCHEDULES = (
    Schedule(name="descending", dq_order=TileOrder.DESCENDING, key_order=TileOrder.DESCENDING),
    Schedule(name="shifted", dq_order=TileOrder.SHIFTED, key_order=TileOrder.SHIFTED),
    Schedule(name="heads descending", heads_order="descending"),
    Schedule(name="two splits", splits=2),
)
"""The schedules of our own recipes besides the ascending one: the deterministic orders of arXiv:2601.21824, and a split
of the keys."""
