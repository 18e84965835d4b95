"""The options of `flamia-ref leak hunt`. It imports little, as every call of the command does."""

from __future__ import annotations

import argparse
from typing import Any

from flamia_ref.leakage.setting_options import add_documents, add_heads

EPILOG = (
    "Exit status: 0 none found, and every planted leak was; 1 a leak was found; 2 bad usage or input, or inconclusive:"
    " the search could not have shown a leak, and it says why."
)

FILES = ("junit", "html", "png")
"""Options that name a file for another form of the report."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `leak hunt`, but for the subject's."""
    add_documents(parser, [64])
    add_heads(parser)
    parser.add_argument("--forward-only", action="store_true", help="leave the gradients out")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the cases (default: 0)"
    )
    parser.add_argument("--calls", type=int, metavar="N", help="kernel calls it may take")
    parser.add_argument("--seconds", type=float, metavar="S", help="time it may take")
    parser.add_argument("--enough", type=int, metavar="N", help="stop after N leaks")
    parser.add_argument(
        "--severity",
        action="append",
        metavar="NAME",
        help="what counts as a leak: forward, cross_document, backward, past; may be repeated (default: all but past)",
    )
    parser.add_argument(
        "--trace", action="append", metavar="STAGE", help="a stage of scales to ask the kernel for"
    )
    for name, what in (
        ("junit", "also write JUnit XML"),
        ("html", "also write a page with the heat map"),
        ("png", "also draw the heat map, as a PNG file"),
    ):
        parser.add_argument(f"--{name}", metavar="FILE", help=what)
    parser.add_argument(
        "--force", action="store_true", help="replace existing files of these, and of --json"
    )


def arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `hunt` that the options say."""
    return {
        "lengths": options.lengths,
        "head_dim": options.head_dim,
        "heads": options.heads,
        "kv_heads": options.kv_heads,
        "causal": not options.full,
        "window": options.window,
        "backward": not options.forward_only,
        "seed": options.seed,
        "calls": options.calls,
        "seconds": options.seconds,
        "enough": options.enough,
        "severities": options.severity,
        "trace": tuple(options.trace or ()),
    }


def files(options: argparse.Namespace) -> dict[str, str]:
    """The files that the options name, by form."""
    return {name: file for name in FILES if (file := getattr(options, name)) is not None}
