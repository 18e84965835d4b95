"""The claim's study as text and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence

import numpy as np

from flamia_ref.schedule.claim import CANDIDATES, CLAIMED, Result, Time


def to_text(found: Sequence[Result]) -> str:
    """A row a workload and GPU, then what of the abstract's ranges the model reproduces."""
    return "\n".join((*_rows(found), "", *verdict(found)))


def to_json(found: Sequence[Result]) -> str:
    """The same as JSON, every time with it."""
    return json.dumps(
        {
            "schema": "flamia-ref schedule claim",
            "version": 1,
            "results": [_document(one) for one in found],
            "verdict": list(verdict(found)),
        },
        indent=1,
    )


def _document(one: Result) -> dict[str, object]:
    def shown(time: Time) -> dict[str, object]:
        names = ("recipe", "library", "policy", "forward", "backward", "quantization", "spread")
        return {name: getattr(time, name) for name in names}

    return {
        "gpu": one.gpu,
        "workload": one.workload,
        "heads": one.heads,
        "kv_heads": one.kv_heads,
        "fastest": shown(one.fastest),
        "baselines": [shown(time) for time in one.baselines],
        "candidates": [
            {
                **shown(time),
                "speedup": one.speedup(time),
                "speedup_fused": one.speedup(time, fused=True),
                "log_spread": one.spread(time),
            }
            for time in one.candidates
        ],
    }


def best(one: Result, recipe: str, policy: str = "lpt") -> Time:
    """The candidate of one recipe and policy."""
    return next(x for x in one.candidates if (x.recipe, x.policy) == (recipe, policy))


def without_fp8(one: Result) -> Time:
    """The fastest baseline but per-tensor FP8."""
    return min((x for x in one.baselines if x.recipe != "fp8-fa4"), key=lambda x: x.seconds())


def _rows(found: Sequence[Result]) -> Iterator[str]:
    yield (
        f"{'gpu':6} {'workload':34} {'heads':6} {'fastest baseline':22} {'ms':>8}"
        f" {'mxfp8':>6} {'+-':>5} {'fused':>6} {'folded':>6} {'nvfp4':>6} {'no lpt':>6} {'not fp8':>7}"
    )
    for one in found:
        fastest, main = one.fastest, best(one, CANDIDATES[0])
        ratios = [
            one.speedup(best(one, CANDIDATES[1])),
            one.speedup(best(one, CANDIDATES[2])),
            one.speedup(best(one, CANDIDATES[0], "library")),
            one.speedup(main, baseline=without_fp8(one)),
        ]
        yield (
            f"{one.gpu:6} {one.workload:34} {one.heads}/{one.kv_heads:<3} {fastest.recipe + ' ' + fastest.library:22}"
            f" {1e3 * fastest.seconds():8.3f} {one.speedup(main):6.3f} {math.expm1(one.spread(main)):5.0%}"
            f" {one.speedup(main, fused=True):6.3f} {ratios[0]:6.3f} {ratios[1]:6.3f} {ratios[2]:6.3f} {ratios[3]:7.3f}"
        )
    yield (
        "Speed-ups over the fastest baseline, quantization included; mxfp8 is flamia-mxfp8 with lpt; fused: its"
        " quantization costs nothing; not fp8: over the fastest baseline but per-tensor FP8."
    )
    yield (
        "+-: one standard deviation of the fits' residuals, forward and backward weighted by time, both sides in"
        " quadrature."
    )


def verdict(found: Sequence[Result]) -> Iterator[str]:
    """What of the abstract's ranges the model reproduces, and what moves its speed-ups."""
    for gpu, (least, most) in CLAIMED.items():
        own = [one for one in found if one.gpu == gpu]
        if not own:
            continue
        yield f"{gpu}, claimed {least:.2f} to {most:.2f}:"
        for label, fused, fp8 in (
            ("quantization apart", False, True),
            ("quantization fused", True, True),
            ("quantization apart, no per-tensor FP8 among baselines", False, False),
            ("quantization fused, no per-tensor FP8 among baselines", True, False),
        ):
            ratios = np.array(
                [
                    one.speedup(
                        best(one, CANDIDATES[0]),
                        fused=fused,
                        baseline=one.fastest if fp8 else without_fp8(one),
                    )
                    for one in own
                ]
            )
            inside = int(((ratios >= least) & (ratios <= most)).sum())
            yield (
                f"- {label}: {ratios.min():.2f} to {ratios.max():.2f}, median {np.median(ratios):.2f};"
                f" {inside} of {len(own)} inside"
            )
        gain = [
            best(one, CANDIDATES[0], "library").seconds() / best(one, CANDIDATES[0]).seconds()
            for one in own
        ]
        share = [
            best(one, CANDIDATES[0]).quantization / best(one, CANDIDATES[0]).seconds()
            for one in own
        ]
        yield (
            f"- lpt against the library's policy: {min(gain):.3f} to {max(gain):.3f}; quantization is"
            f" {np.median(share):.1%} of the time in the median"
        )
