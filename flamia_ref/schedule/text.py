"""Simulations and comparisons as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from flamia_ref.schedule.comparison import Comparison
from flamia_ref.schedule.launches import Launch, Simulation
from flamia_ref.schedule.work import Problem


def of_simulation(found: Simulation) -> str:
    """A simulation as lines of text, without a newline at the end."""
    return "\n".join(_lines(found))


def of_comparison(found: Comparison) -> str:
    """A comparison as lines of text, the fastest policy of each recipe marked."""
    return "\n".join(_table(found))


def json_of_simulation(found: Simulation) -> str:
    """A simulation as JSON."""
    return json.dumps(
        {"schema": "flamia-ref schedule simulation", "version": 1, **_document(found)}, indent=1
    )


def json_of_comparison(found: Comparison) -> str:
    """A comparison as JSON."""
    entries = [{"asked": policy or "library", **_document(one)} for _, policy, one in found.entries]
    return json.dumps(
        {"schema": "flamia-ref schedule comparison", "version": 1, "entries": entries}, indent=1
    )


def _lines(found: Simulation) -> Iterator[str]:
    yield f"{found.recipe.name} on {found.gpu.name}, modelled: {_problem(found.problem)}"
    yield ""
    yield (
        f"{'launch':14} {'ms':>9} {'at best':>9} {'tiles':>8} {'products':>9} {'used':>6} {'tail ms':>8} policy,"
        " and what bounds a product"
    )
    for one, traffic in zip(found.launches, found.quantization, strict=True):
        if traffic.written:
            cost = 0.0 if found.fused else 1e3 * traffic.seconds(found.gpu)
            megabytes = (traffic.read + traffic.written) / 1e6
            yield f"{'quantization':14} {cost:9.4f} {cost:9.4f} {'':8} {'':9} {'':6} {'':8} {megabytes:.1f} MB"
        timeline = one.timeline
        waited = timeline.waited.sum() / max(timeline.sms * timeline.makespan, 1.0)
        waits = f", waits {100 * waited:.1f}%" if waited > 5e-4 else ""
        yield (
            f"{one.work.launch.value:14} {1e3 * one.seconds:9.4f} {1e3 * one.bound_seconds:9.4f} {len(one.work):8}"
            f" {int(one.work.products.sum()):9} {100 * timeline.utilisation:5.1f}%"
            f" {1e3 * timeline.tail / one.clock:8.4f} {one.policy}, {one.terms.bound_by}{waits}"
        )
    yield f"{'all':14} {1e3 * found.seconds:9.4f}"
    yield ""
    for one in found.launches:
        yield (
            f"constants of the {one.work.launch.value}: {one.fitted}, efficiency {one.constants.efficiency:.3f},"
            f" overhead {one.constants.overhead:.0f} cycles a tile"
        )
    yield "At best: the longest chain, or all work shared evenly, with these tiles. Times are a model's, of no device."


def _table(found: Comparison) -> Iterator[str]:
    yield f"{found.gpu}, {found.library}, modelled: {_problem(found.problem)}"
    yield ""
    yield (
        f"{'recipe':26} {'policy':20} {'all ms':>9} {'quantize':>9} {'forward':>9} {'used':>6} {'backward':>9}"
        f" {'used':>6}"
    )
    best = {
        name: min(one.seconds for other, _, one in found.entries if other == name)
        for name, _, _ in found.entries
    }
    for name, policy, one in found.entries:
        columns = [
            f"{1e3 * x.seconds:9.4f} {100 * x.timeline.utilisation:5.1f}%" for x in one.launches
        ]
        mark = " *" if one.seconds == best[name] else ""
        yield (
            f"{name:26} {policy or 'library: ' + one.launches[0].policy:20} {1e3 * one.seconds:9.4f}"
            f" {1e3 * one.quantization_seconds:9.4f} {' '.join(columns)}{mark}"
        )
    yield "* the fastest of its recipe"


def _problem(problem: Problem) -> str:
    lengths = problem.mask.queries.lengths
    return (
        f"{len(lengths)} documents of {min(lengths, default=0)} to {max(lengths, default=0)} tokens,"
        f" {sum(lengths)} in all, {problem.heads}/{problem.kv_heads} heads, head_dim"
        f" {problem.head_dim}/{problem.value_dim}"
    )


def _document(found: Simulation) -> dict[str, Any]:
    lengths = found.problem.mask.queries.lengths
    return {
        "recipe": found.recipe.name,
        "gpu": found.gpu.name,
        "documents": len(lengths),
        "tokens": sum(lengths),
        "heads": found.problem.heads,
        "kv_heads": found.problem.kv_heads,
        "head_dim": found.problem.head_dim,
        "value_dim": found.problem.value_dim,
        "fused": found.fused,
        "seconds": found.seconds,
        "quantization_seconds": found.quantization_seconds,
        "quantization_bytes": [one.read + one.written for one in found.quantization],
        "launches": [_launch(one) for one in found.launches],
    }


def _launch(one: Launch) -> dict[str, Any]:
    timeline = one.timeline
    return {
        "pass": one.work.launch.value,
        "policy": one.policy,
        "fitted": one.fitted,
        "efficiency": one.constants.efficiency,
        "overhead_cycles": one.constants.overhead,
        "bound_by": one.terms.bound_by,
        "tiles": len(one.work),
        "products": int(one.work.products.sum()),
        "masked_products": int(one.work.masked.sum()),
        "guarded_blocks": int(one.work.guarded.sum()),
        "seconds": one.seconds,
        "bound_seconds": one.bound_seconds,
        "utilisation": timeline.utilisation,
        "tail_seconds": timeline.tail / one.clock,
        "waited_seconds": float(timeline.waited.sum()) / one.clock,
    }
