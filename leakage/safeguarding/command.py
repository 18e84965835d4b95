"""The options of `flamia-ref leak safeguards`. It imports little, as every call of the command does."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flamia_ref.leakage.setting_options import add_documents, numbers

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe
    from flamia_ref.leakage.safeguarding.study_report import SafeguardsStudy

EPILOG = (
    "It takes half a minute to two. Alternatives: 'shared scale', 'guarded blocks', 'guarded blocks, codes', 'token"
    " scale', 'previous block', 'static', 'one row a block', 'bfloat16 over tokens', 'bfloat16'. Exit status: 0, or 2"
    " for bad usage, as for more combinations than are allowed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `leak safeguards`."""
    parser.add_argument(
        "--recipe",
        metavar="NAME|FILE",
        required=True,
        help="a recipe by name, or a JSON file of one",
    )
    add_documents(parser, [256])
    parser.add_argument("--head-dim", type=int, default=64, metavar="N", help="(default: 64)")
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="measure errors on the first head of an .npz file with q_bits, k_bits, v_bits, dout_bits, cu_seqlens and"
        " softmax_scale, as many tokens as --lengths have together, in the file's own documents; a file with fewer is"
        " refused",
    )
    parser.add_argument(
        "--at",
        type=numbers,
        default=[2048, 8192],
        metavar="N,N,...",
        help="lengths for which the work is counted; the first counts in the front (default: 2048,8192)",
    )
    parser.add_argument(
        "--group",
        action="append",
        metavar="NAME",
        help="change these groups alone; may be repeated",
    )
    parser.add_argument(
        "--without",
        action="append",
        metavar="ALTERNATIVE",
        help="do not try this alternative; may be repeated",
    )
    parser.add_argument(
        "--exhaustive", action="store_true", help="measure every combination; it can take long"
    )
    parser.add_argument("--most", type=int, metavar="N", help="combinations allowed (4000)")
    parser.add_argument("--runs", type=int, metavar="N", help="runs of the simulator allowed (90)")
    parser.add_argument(
        "--no-proof", action="store_true", help="do not prove the front from its programs"
    )
    parser.add_argument(
        "--picture", metavar="FILE", help="also draw the points and the front, as a PNG file"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace an existing picture, and file of --json"
    )


def run(
    recipe: Recipe,
    options: argparse.Namespace,
    progress: Callable[[int, int, str], None] | None,
) -> SafeguardsStudy:
    """The study that the options ask for."""
    from flamia_ref.leakage.safeguarding.study_samples import from_file
    from flamia_ref.leakage.safeguarding.studying import checked_lengths, safeguards_study

    sample = None
    if options.data is not None:
        tokens = sum(checked_lengths(options.lengths, "lengths"))
        sample = from_file(options.data, tokens, given_by="--lengths")
    limits: dict[str, Any] = {
        name: given for name in ("most", "runs") if (given := getattr(options, name)) is not None
    }
    return safeguards_study(
        recipe,
        sample=sample,
        lengths=options.lengths,
        head_dim=options.head_dim,
        causal=not options.full,
        window=options.window,
        at=options.at,
        groups=options.group,
        without=options.without or (),
        exhaustive=options.exhaustive,
        prove_front=not options.no_proof,
        progress=progress,
        **limits,
    )
