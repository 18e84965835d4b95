"""The options of `flamia-ref recipes match`. It imports little, as every call of the command does."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flamia_ref._errors import shown

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe
    from flamia_ref.golden.matching.matches import Match

EPILOG = (
    "PACK alone matches the results that it holds. OUTPUTS, a .safetensors file or a folder of them, hold the inputs"
    " q, k, v, and dout where there is something of a backward, cu_seqlens for more than one document, and beside them"
    " what the kernel gave: out, lse, dq, dk, dv, stages. Exit status: 0 a recipe gives every bit, 1 none does, and the"
    " closest is shown, 2 bad usage or input."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `recipes match`."""
    parser.add_argument("given", metavar="PACK|OUTPUTS", help="a pack, or inputs with results")
    actual = parser.add_mutually_exclusive_group()
    actual.add_argument(
        "--actual", metavar="PATH", help="a folder of CASE.safetensors, or one such file"
    )
    actual.add_argument("--kernel", metavar="MODULE:FUNCTION", help="a Python callable")
    parser.add_argument(
        "--case",
        metavar="NAME",
        action="append",
        help="only cases of this name or pattern (* and ?); may be repeated",
    )
    parser.add_argument(
        "--recipe",
        metavar="NAME|FILE",
        action="append",
        help="only these recipes, by name, or a JSON file of one; may be repeated (default: all)",
    )
    parser.add_argument(
        "--no-knobs", action="store_true", help="do not try changes of the closest recipes"
    )
    parser.add_argument(
        "--write", metavar="FILE", help="write the recipe that gives every bit, if there is one"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace an existing file, and that of --json"
    )
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument(
        "--causal", action="store_true", default=None, help="OUTPUTS: later keys are hidden"
    )
    mask.add_argument("--full", action="store_true", help="OUTPUTS: there is no causal mask")
    parser.add_argument(
        "--softmax-scale",
        type=float,
        metavar="X",
        help="OUTPUTS: what S is multiplied by (default: 1 / sqrt(head_dim))",
    )
    parser.add_argument(
        "--window",
        type=_window,
        metavar="LEFT,RIGHT",
        help="OUTPUTS: a sliding window, a side empty or -1 for none",
    )
    parser.add_argument("--softcap", type=float, metavar="X", help="OUTPUTS: the soft cap")
    parser.add_argument(
        "--top-left", action="store_true", help="OUTPUTS: the mask's alignment (bottom right)"
    )


def _window(text: str) -> tuple[int | None, int | None]:
    sides = text.split(",")
    if len(sides) != 2:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no window; give LEFT,RIGHT")
    try:
        left, right = (None if side.strip() in ("", "-1") else int(side) for side in sides)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no window; give LEFT,RIGHT") from None
    return left, right


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of outputs without a pack that the options say."""
    found: dict[str, Any] = {}
    if options.causal or options.full:
        found["causal"] = bool(options.causal)
    for name in ("softmax_scale", "window", "softcap"):
        if getattr(options, name) is not None:
            found[name] = getattr(options, name)
    if options.top_left:
        found["alignment"] = "top_left"
    return found


def run(
    options: argparse.Namespace, recipe: Callable[[str], Recipe], progress: Any | None
) -> Match:
    """The match that the options ask for."""
    from flamia_ref import kernels
    from flamia_ref.golden.matching.searching import match

    chosen = None if options.recipe is None else [recipe(one) for one in options.recipe]
    # What a kernel prints must not end up in the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        actual = options.actual if options.kernel is None else kernels.load(options.kernel)
        return match(
            options.given,
            actual,
            recipes=chosen,
            cases=options.case,
            knobs=not options.no_knobs,
            progress=progress,
            **settings(options),
        )
