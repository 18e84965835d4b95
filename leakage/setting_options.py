"""The options that commands about leakage share: documents, mask, heads. It imports little, as every call does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from flamia_ref._errors import shown


def add_documents(parser: argparse.ArgumentParser, lengths: Sequence[int]) -> None:
    """The options of documents, by default of these `lengths`, and of their mask."""
    parser.add_argument(
        "--lengths",
        type=numbers,
        default=list(lengths),
        metavar="N,N,...",
        help=f"tokens of each document (default: {','.join(map(str, lengths))})",
    )
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument(
        "--window", type=window, metavar="L,R", help="keys seen to the left and right; -1 for all"
    )


def add_heads(parser: argparse.ArgumentParser) -> None:
    """The options of heads and their channels."""
    parser.add_argument("--head-dim", type=int, default=64, metavar="N", help="(default: 64)")
    parser.add_argument("--heads", type=int, default=1, metavar="N", help="(default: 1)")
    parser.add_argument("--kv-heads", type=int, default=1, metavar="N", help="(default: 1)")


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between them."""
    try:
        return [int(one) for one in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} must be whole numbers with commas between them"
        ) from None


def window(text: str) -> tuple[int, ...]:
    """Two whole numbers with a comma between them."""
    found = numbers(text)
    if len(found) != 2:
        raise argparse.ArgumentTypeError(f"{shown(text)} must be two whole numbers, LEFT,RIGHT")
    return tuple(found)
