"""The entropy of what must not move, over draws of what it must not depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref.attention.recipe import Recipe
from flamia_ref.leakage.information.changes import (
    Drawn,
    change_of,
    drawn_inputs,
)
from flamia_ref.leakage.information.entropy import Entropy, entropy
from flamia_ref.leakage.information.simulating import TOGETHER, simulate, spans_heads
from flamia_ref.leakage.legal import Severity
from flamia_ref.leakage.search.setting import Bools, Setting

FAMILIES_OF = {
    Drawn.SUFFIX: ("bell", "token_wide", "outliers", "document"),
    Drawn.PAST_QUERIES: ("token_wide", "outliers"),
    Drawn.OTHER_DOCUMENT: ("token_wide", "outliers"),
}
"""The families in which each kind of tokens is drawn."""

OF_FINITE_MASKS = "low_scores"
"""One more for the suffix, of recipes whose masked scores are a finite number."""

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EntropyFigure:
    """The entropy of the bits of an output that must not move: everything above 0 is a proof of a leak.

    It is a lower bound of what gets through, up to its interval: of one prefix, and of this family of draws.

    Attributes:
        drawn, family: what is drawn anew, and how.
        output: whose bits are looked at.
        severities: of what they show.
        entropy: the entropy of the bits of all observed tokens, as one outcome.
        observed: which tokens of the output those are.
        moved: which elements [tokens, channels] have other bits in some draw than in the first, of all tokens.
    """

    drawn: Drawn
    family: str
    output: str
    severities: tuple[Severity, ...]
    entropy: Entropy
    observed: Bools
    moved: Bools

    @property
    def rows(self) -> int:
        """How many tokens of the output are looked at."""
        return int(self.observed.sum())

    @property
    def leaks(self) -> bool:
        """Whether two draws differ in bits that must not move: a proof."""
        return self.entropy.distinct > 1


def measured(
    recipe: Recipe,
    *,
    head_dim: int,
    cut: int,
    length: int,
    samples: int,
    seed: int,
    families: Sequence[str] | None = None,
    tell: Progress = lambda _: None,
) -> Iterator[EntropyFigure]:
    """The entropy of every output over every kind of draws.

    Args:
        recipe: the recipe.
        head_dim: channels of the one head.
        cut: where the suffix begins, inside the blocks of the recipe.
        length: tokens of the document; those from the cut on are another document where that is drawn.
        samples: draws.
        seed: of all numbers.
        families: only these; None for all of `FAMILIES_OF`, and `OF_FINITE_MASKS` where it belongs.
        tell: is told what comes next.
    """
    for drawn in Drawn:
        other = drawn is Drawn.OTHER_DOCUMENT
        setting = Setting.of(
            lengths=[cut, length - cut] if other else [length],
            head_dim=head_dim,
            heads=1,
            kv_heads=1,
            causal=True,
            window=None,
            alignment="bottom_right",
            softmax_scale=None,
            backward=recipe.has_backward,
        )
        change = change_of(drawn, setting, cut)
        together: int | None = None
        finite = recipe.softmax.mask_value is not None and drawn is Drawn.SUFFIX
        for family in (*FAMILIES_OF[drawn], *([OF_FINITE_MASKS] if finite else [])):
            if families is not None and family not in families:
                continue
            tell(f"{drawn.replace('_', ' ')}, {family}")
            inputs = drawn_inputs(setting, change, family, samples, seed)
            if together is None:
                together = 1 if spans_heads(recipe, setting, inputs) else TOGETHER
            found = simulate(recipe, setting, inputs, together=together)
            for output in setting.outputs:
                rows = change.observed(setting, output)
                if not rows.any():
                    continue
                every = found[output]
                seen = np.ascontiguousarray(every[:, rows])
                yield EntropyFigure(
                    drawn=drawn,
                    family=family,
                    output=output,
                    severities=change.severities(setting, output),
                    entropy=entropy([one.tobytes() for one in seen], seed=seed),
                    observed=rows,
                    moved=_moved(every),
                )


def _moved(found: NDArray[Any]) -> Bools:
    """Which elements [tokens, channels] of bits [samples, tokens, heads, channels] differ between samples."""
    moved: Bools = (found != found[:1]).any(axis=0)
    return moved.reshape(len(moved), -1)
