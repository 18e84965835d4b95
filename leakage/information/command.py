"""The options of `flamia-ref leak capacity`. It imports little, as every call of the command does."""

from __future__ import annotations

import argparse
from typing import Any

from flamia_ref.leakage.setting_options import numbers

EPILOG = (
    "Exit status: 0 every bound is 0 and nothing was seen, but for the past of a document; 1 bits can get through, or"
    " did; 2 bad usage or input."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `leak capacity`."""
    parser.add_argument(
        "--recipe",
        metavar="NAME|FILE",
        required=True,
        help="a recipe by name, or a JSON file of one",
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=64,
        metavar="N",
        help="draws of each family, 8 times as many for the probe (default: 64)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    parser.add_argument("--head-dim", type=int, default=32, metavar="N", help="(default: 32)")
    parser.add_argument(
        "--lengths",
        type=numbers,
        default=[256, 84],
        metavar="N,N,...",
        help="documents that the bounds are of, beside those that are drawn (default: 256,84)",
    )
    parser.add_argument("--picture", metavar="FILE", help="also draw what moved, as a PNG file")
    parser.add_argument(
        "--force", action="store_true", help="replace an existing picture, and file of --json"
    )


def arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `capacity` that the options say."""
    return {
        "samples": options.samples,
        "seed": options.seed,
        "head_dim": options.head_dim,
        "lengths": options.lengths,
    }
