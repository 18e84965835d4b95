"""The commands ``flamia-ref schedule``: their options, and what they run. It imports little, as every call does."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flamia_ref import _console
from flamia_ref._errors import shown

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe
    from flamia_ref.schedule.work import Problem

Result = tuple[int, str, str]  # exit status, text, JSON


def add_commands(command: Callable[..., Any], recipe: Callable[[str], Recipe]) -> None:
    """Add `schedule simulate`, `compare`, `validate` and `claim`.

    `command(name, summary, run)` makes a parser; `recipe` reads a recipe by name or from a file.
    """
    one = command(
        "simulate", "run packed documents through the model of a GPU, tile by tile", _simulate
    )
    one.set_defaults(read_recipe=recipe)
    _add_problem(one)
    one.add_argument(
        "--recipe",
        metavar="NAME|FILE",
        required=True,
        help="a recipe by name, or a JSON file of one",
    )
    one.add_argument("--gpu", metavar="NAME", default="B200", help="(default: B200)")
    one.add_argument(
        "--policy", metavar="NAME", help="how tiles are handed out (default: as the library does)"
    )
    one.add_argument(
        "--library",
        metavar="NAME",
        default="cudnn",
        help="whose tiles and constants (default: cudnn)",
    )
    one.add_argument(
        "--deterministic",
        metavar="NAME",
        help="the backward adds to dQ in a fixed order: ascending, spt, descending or shifted",
    )
    one.add_argument("--forward", action="store_true", help="the forward alone")
    one.add_argument("--fused", action="store_true", help="quantization costs nothing")
    one.add_argument("--plot", metavar="FILE", help="also draw the timeline, as a PNG file")

    both = command("compare", "the same documents by several recipes and policies", _compare)
    both.set_defaults(read_recipe=recipe)
    _add_problem(both)
    both.add_argument(
        "--recipe",
        metavar="NAME|FILE",
        action="append",
        help="may be repeated (default: four of them)",
    )
    both.add_argument(
        "--policy", metavar="NAME", action="append", help="may be repeated (default: all that fit)"
    )
    both.add_argument("--gpu", metavar="NAME", default="B200", help="(default: B200)")
    both.add_argument("--library", metavar="NAME", default="cudnn", help="(default: cudnn)")
    both.add_argument("--fused", action="store_true", help="quantization costs nothing")

    table = command(
        "validate", "fit the model and hold it against published measurements", _validate
    )
    table.add_argument(
        "--measurements", metavar="FILE", help="a CSV file in place of the published tables"
    )
    table.add_argument("--groups", action="store_true", help="leave out single cells")

    command(
        "claim",
        "predicted speed-ups over the fastest baseline, against those that are claimed",
        _claim,
    )


def _add_problem(parser: Any) -> None:
    parser.add_argument(
        "--cu-seqlens",
        metavar="FILE|SPEC",
        required=True,
        help="0,512,2048, lengths:512,3x1536, a workload like lognormal:tokens=65536, or a file",
    )
    parser.add_argument(
        "--heads",
        metavar="N|N/N",
        default="32/8",
        help="of queries / of keys and values (default: 32/8)",
    )
    parser.add_argument(
        "--head-dim", metavar="N|N/N", default="128", help="of q and k / of v (default: 128)"
    )
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument(
        "--window", metavar="N", type=int, help="keys to the left that are seen besides the own"
    )


def problem_of(options: argparse.Namespace) -> Problem:
    """The attention that the options say."""
    from flamia_ref.schedule.work import Problem
    from flamia_ref.schedule.workloads import cu_seqlens_of

    heads, kv_heads = _pair("heads", options.heads)
    head_dim, value_dim = _pair("head-dim", options.head_dim)
    window = None
    if options.window is not None:
        window = (options.window, None if options.full else 0)
    return Problem.of(
        cu_seqlens_of(options.cu_seqlens),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        causal=not options.full,
        window=window,
    )


def _pair(name: str, text: str) -> tuple[int, int]:
    parts = text.split("/")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"--{name} is {shown(text)}; it must be a number, or two like 32/8")
    return int(parts[0]), int(parts[-1])


def _simulate(options: argparse.Namespace) -> Result:
    from flamia_ref.schedule import text
    from flamia_ref.schedule.launches import simulate

    if options.plot is not None:
        _console.require_new(options.plot, force=options.force)
    found = simulate(
        problem_of(options),
        options.read_recipe(options.recipe),
        gpu=options.gpu,
        policy=options.policy,
        library=options.library,
        backward=False if options.forward else None,
        fused=options.fused,
        deterministic=options.deterministic,
    )
    shown_text = text.of_simulation(found)
    if options.plot is not None:
        from flamia_ref.schedule.drawing import timeline_png

        _console.write(options.plot, timeline_png(found))
        shown_text += f"\nwrote {options.plot}"
    return 0, shown_text, text.json_of_simulation(found)


def _compare(options: argparse.Namespace) -> Result:
    from flamia_ref.schedule import text
    from flamia_ref.schedule.comparison import compare

    names = options.recipe or ["bf16-fa4", "cudnn-mxfp8", "flamia-mxfp8", "flamia-nvfp4-fp8"]
    with _console.bar() as progress:
        found = compare(
            problem_of(options),
            [options.read_recipe(name) for name in names],
            policies=options.policy,
            gpu=options.gpu,
            library=options.library,
            fused=options.fused,
            progress=progress,
        )
    return 0, text.of_comparison(found), text.json_of_comparison(found)


def _validate(options: argparse.Namespace) -> Result:
    from flamia_ref.schedule.measured import read
    from flamia_ref.schedule.validation import validate

    cells = None if options.measurements is None else read(options.measurements)
    with _console.bar() as progress:
        found = validate(cells, progress=progress)
    return 0, found.to_text(cells=not options.groups), found.to_json()


def _claim(options: argparse.Namespace) -> Result:
    from flamia_ref.schedule import claim_text
    from flamia_ref.schedule.claim import study

    with _console.bar() as progress:
        found = study(progress=progress)
    return 0, claim_text.to_text(found), claim_text.to_json(found)
