"""The options of `flamia-ref leak prove`. It imports little, as every call of the command does."""

from __future__ import annotations

import argparse
from typing import Any

from flamia_ref.leakage.setting_options import add_documents, add_heads, numbers

EPILOG = (
    "Exit status: 0 proved, or all that is illegal is in the past of its document; 1 not proved; 2 bad usage, or"
    " primitives without a rule are in the way. --json FILE writes the certificate, which `leak verify` reads."
)
VERIFY_EPILOG = "Exit status: 0 made anew it says the same, 1 it does not, 2 it cannot be made anew, or is none."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `leak prove`, but for the subject's."""
    add_documents(parser, [64])
    parser.add_argument("--lengths-k", type=numbers, metavar="N,N,...", help="of their keys")
    add_heads(parser)
    parser.add_argument("--value-dim", type=int, metavar="N", help="(default: that of --head-dim)")
    parser.add_argument("--top-left", action="store_true", help="the mask's alignment")
    parser.add_argument("--softcap", type=float, metavar="X")
    parser.add_argument("--sink", action="store_true", help="give each head a sink")
    parser.add_argument("--forward-only", action="store_true", help="leave the gradients out")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="assume nothing of values: follow NaN and infinity too",
    )
    parser.add_argument(
        "--dtype", default="bfloat16", metavar="NAME", help="of the inputs: bfloat16 or float32"
    )


def arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `prove` that the options say."""
    return {
        "lengths": options.lengths,
        "lengths_k": options.lengths_k,
        "head_dim": options.head_dim,
        "value_dim": options.value_dim,
        "heads": options.heads,
        "kv_heads": options.kv_heads,
        "causal": not options.full,
        "window": options.window,
        "alignment": "top_left" if options.top_left else "bottom_right",
        "softcap": options.softcap,
        "sink": options.sink,
        "backward": not options.forward_only,
        "strict": options.strict,
        "dtype": options.dtype,
    }
