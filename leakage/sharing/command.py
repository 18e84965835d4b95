"""The options of `flamia-ref leak structure`. It imports little, as every call of the command does."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from flamia_ref.leakage.setting_options import add_documents, numbers

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe
    from flamia_ref.leakage.sharing.structures import Structure

EPILOG = (
    "Exit status: 0 nothing is illegal, or only in the past of its document; 1 an output can depend on a token that it"
    " must not see; 2 bad usage."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `leak structure`."""
    parser.add_argument(
        "--recipe",
        metavar="NAME|FILE",
        required=True,
        help="a recipe by name, or a JSON file of one, also one that is not computed here",
    )
    add_documents(parser, [64, 20])
    parser.add_argument("--lengths-k", type=numbers, metavar="N,N,...", help="of their keys")
    parser.add_argument("--top-left", action="store_true", help="the mask's alignment")
    parser.add_argument(
        "--grid",
        choices=("document", "pack"),
        default="document",
        help="where blocks are counted from (default: document, as in every recipe here)",
    )
    parser.add_argument(
        "--png", metavar="FILE", help="also draw every pair of tokens, as a PNG file"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace an existing picture, and file of --json"
    )


def run(recipe: Recipe, options: argparse.Namespace) -> Structure:
    """The structure that the options ask for."""
    from flamia_ref.leakage.sharing.structures import structure

    return structure(
        recipe,
        lengths=options.lengths,
        lengths_k=options.lengths_k,
        causal=not options.full,
        window=options.window,
        alignment="top_left" if options.top_left else "bottom_right",
        grid=options.grid,
    )
