"""How many bits get through a recipe: `capacity`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flamia_ref.attention import backward, forward
from flamia_ref.attention.computed import computed_recipe
from flamia_ref.attention.recipe import Recipe
from flamia_ref.leakage.information.bounds import (
    Floats,
    sample,
    use_bounds,
)
from flamia_ref.leakage.information.drawing import FAMILIES_OF, measured
from flamia_ref.leakage.information.probing import probe
from flamia_ref.leakage.information.report import CapacityReport, Settings
from flamia_ref.leakage.information.rows import severity_bounds
from flamia_ref.leakage.safeguarding.studying import checked_lengths
from flamia_ref.leakage.search.bases import BFLOAT16
from flamia_ref.leakage.search.setting import whole
from flamia_ref.leakage.sharing.coupling import PAIR_USES
from flamia_ref.leakage.sharing.structures import Structure, structure

LENGTH, CUT = 32, 20
"""Tokens of the document that is drawn, and where its suffix begins: inside blocks of 16 and of 32."""

GROWTHS = (4, 16)
"""Powers of two by which the amax of blocks is raised, in the bounds of elements."""

_PROBES = 8  # sequences of the probe for each draw
_LARGEST = 1 << 20  # draws

Progress = Callable[[int, int, str], None]


def capacity(
    recipe: Recipe | str,
    *,
    lengths: Sequence[int] = (256, 84),
    head_dim: int = 32,
    samples: int = 64,
    seed: int = 0,
    growths: Sequence[int] = GROWTHS,
    progress: Progress | None = None,
) -> CapacityReport:
    """How many bits get through to tokens that must not have them, causal, of one head.

    Bounds: where the recipe's structure has nothing illegal the bound is 0, which is a proof; else log2 of how many
    values a row of an output can take, by all scales that it sees and illegal tokens can change (`RowBound`).
    Entropy: of the bits that must not move, over draws of what they must not depend on; above 0 it is a proof of a
    leak. A probe: what a small model gains.

    Args:
        recipe: a recipe that is computed here, or its name.
        lengths: documents that the bounds are of, beside those that are drawn: entropy and probe are of one of 32
            tokens, or of 20 and 12, whatever is given here.
        head_dim: channels of the head.
        samples: draws of each family, which can show log2(samples) bits; the probe has 8 times as many sequences.
        seed: of everything random.
        growths: powers of two, for the bounds of elements whose block's amax is raised so far.
        progress: told of (done, all, what comes next).

    Returns: a `CapacityReport`. Equal arguments give equal figures.

    Raises: ValueError or TypeError of one line.
    Source: derived; `docs/leakage.md` says what each figure means.
    """
    chosen = computed_recipe(recipe)
    samples = _limited(whole("samples", samples, least=2))
    seed = whole("seed", seed, least=0)
    head_dim = whole("head_dim", head_dim, least=1)
    growths = tuple(whole("growths", one, least=0) for one in growths)
    asked = checked_lengths(lengths, "lengths")
    block = _block(structure(chosen, lengths=asked))
    # Of the documents that are drawn too, or what was seen and what is bounded could not be compared.
    drawn = tuple(dict.fromkeys((LENGTH, CUT, LENGTH - CUT, block)))
    shared = structure(chosen, lengths=(*asked, *drawn))
    steps = 2 + sum(map(len, FAMILIES_OF.values())) + (chosen.softmax.mask_value is not None)
    done = 0

    def tell(name: str) -> None:
        nonlocal done
        if progress is not None:
            progress(done, steps, name)
        done += 1

    tell("bounds")
    values = sample(head_dim=head_dim, seed=seed) | _pairs(shared, head_dim, seed)
    uses = use_bounds(shared, values, head_dim=head_dim, growths=growths)
    entropies = tuple(
        measured(
            chosen,
            head_dim=head_dim,
            cut=CUT,
            length=LENGTH,
            samples=samples,
            seed=seed,
            tell=tell,
        )
    )
    tell("probe")
    probes = probe(
        chosen,
        head_dim=head_dim,
        block=block,
        rows=(0, block // 2 - 1, block - 2),
        samples=_PROBES * samples,
        seed=seed,
    )
    return CapacityReport(
        recipe=chosen.name,
        evidence=chosen.label,
        settings=Settings(
            lengths=asked,
            drawn=drawn,
            head_dim=head_dim,
            length=LENGTH,
            cut=CUT,
            samples=samples,
            probe_samples=_PROBES * samples,
            seed=seed,
        ),
        uses=uses,
        severities=severity_bounds(uses, shared),
        entropies=entropies,
        probes=tuple(probes),
    )


def _limited(samples: int) -> int:
    if samples > _LARGEST:
        raise ValueError(f"samples is {samples}; allowed: 2 to {_LARGEST}")
    return samples


def _block(shared: Structure) -> int:
    """Tokens of the probe's block: those that share a scale of V, or 32."""
    extents = [
        sharing.rows
        for use, coupled in shared.coupling.uses.items()
        if str(use) == "o.v"
        for sharing in coupled.sharings
    ]
    return min((one for one in extents if isinstance(one, int) and one > 2), default=LENGTH)


def _pairs(shared: Structure, head_dim: int, seed: int) -> dict[str, Floats]:
    """P and dS [queries, keys] of the simulator on bell-shaped values, where a use of them couples tokens."""
    recipe = shared.recipe
    if not any(one.illegal and one.use in PAIR_USES for one in shared.uses):
        return {}
    tokens = 4 * LENGTH
    made: dict[str, Any] = {
        name: x[:tokens, None].astype(BFLOAT16)
        for name, x in sample(head_dim=head_dim, seed=seed + 1).items()
    }
    ahead = forward(made["q"], made["k"], made["v"], recipe, trace=("p",))
    found = {"p": np.asarray(ahead.trace["p"][0][0])}
    if recipe.has_backward:
        back = backward(made["q"], made["k"], made["v"], made["do"], ahead, trace=("ds",))
        found["ds"] = np.asarray(back.trace["ds"][0][0])
    return {name: np.nan_to_num(x.astype(np.float32)) for name, x in found.items()}
