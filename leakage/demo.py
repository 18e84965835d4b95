"""The demonstration of the leak: each witness run on each recipe, unchanged and changed, and compared bit for bit."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flamia_ref._errors import shown
from flamia_ref.attention import RECIPES, Recipe, forward
from flamia_ref.leakage.witness import WITNESSES, Witness

SHOWN = ("cudnn-mxfp8", "cudnn-mxfp8-pv-bf16", "flamia-mxfp8", "flamia-mxfp8-folded")
"""The recipes of the demonstration."""

LEAKS = frozenset({("cudnn-mxfp8", "same-block")})
"""Recipes and witnesses by which they leak: V has one scale for 32 tokens of a channel. No other leaks."""

SCHEMA = "flamia-ref leak demo"
SCHEMA_VERSION = 1


class Verdict(StrEnum):
    """What one trial shows."""

    LEAK = "leak"
    """An output moved that may not depend on the changed token."""
    NONE_FOUND = "none_found"
    """None did, and the controls hold."""
    INCONCLUSIVE = "inconclusive"
    """None did, but a control fails: the trial could not have shown it."""


class Outputs(NamedTuple):
    """What a forward returned: out [tokens, head_dim] and lse [tokens], float32."""

    out: NDArray[np.float32]
    lse: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trial:
    """One witness on one recipe: which outputs moved when its token was changed.

    Attributes:
        recipe: the recipe's name.
        witness: what was changed.
        before, after: the outputs without and with the change.
        expected: the verdict that is known for this recipe.
    """

    recipe: str
    witness: Witness
    before: Outputs
    after: Outputs
    expected: Verdict

    @property
    def moved(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Whether the bits differ: of out [tokens, head_dim], and of lse [tokens]."""
        pairs = zip(self.before, self.after, strict=True)
        out, lse = (one.view(np.uint32) != other.view(np.uint32) for one, other in pairs)
        return out, lse

    @property
    def forbidden(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Where nothing may move: out [tokens, head_dim] before the changed token; lse [tokens], which needs no v."""
        out, lse = (np.zeros(x.shape, dtype=np.bool_) for x in self.before)
        out[: self.witness.token] = True
        lse[:] = True
        return out, lse

    @property
    def leaked(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """What moved and must not, of out [tokens, head_dim] and of lse [tokens]."""
        pairs = zip(self.moved, self.forbidden, strict=True)
        out, lse = (moved & forbidden for moved, forbidden in pairs)
        return out, lse

    @property
    def doubts(self) -> tuple[str, ...]:
        """The controls that fail, as clauses. With one of them, that nothing leaked means nothing."""
        token = self.witness.token
        out, _ = self.moved
        found = []
        if not all(np.isfinite(x).all() for x in (*self.before, *self.after)):
            found.append("an output is not finite")
        if not out[token:].all():
            found.append(f"not every out of token {token} and later moves, which sees the change")
        if not self.before.out[:token].all():
            found.append(f"an out before token {token} is 0 without the change, and cannot vanish")
        return tuple(found)

    @property
    def verdict(self) -> Verdict:
        """What the trial shows."""
        if any(x.any() for x in self.leaked):
            return Verdict.LEAK
        return Verdict.INCONCLUSIVE if self.doubts else Verdict.NONE_FOUND

    @property
    def as_expected(self) -> bool:
        """Whether it shows what is known of this recipe, with every control in order."""
        return self.verdict is self.expected and not self.doubts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Demo:
    """The whole demonstration. `str(demo)` is its text.

    Attributes:
        evidence: each recipe's weakest evidence, by name, in the order shown.
        witnesses: in the order shown.
        trials: every witness on every recipe, recipe by recipe.
    """

    evidence: Mapping[str, str]
    witnesses: tuple[Witness, ...]
    trials: tuple[Trial, ...]

    @property
    def as_expected(self) -> bool:
        """Whether every trial shows what is known of its recipe."""
        return all(trial.as_expected for trial in self.trials)

    @property
    def exit_code(self) -> int:
        """0 if all came out as expected, the known leak included. 1 if a recipe leaks that is known not to, or does not
        where it is known to. 2 if all that is wrong is a control, so that a trial is inconclusive."""
        if self.as_expected:
            return 0
        decided = (one for one in self.trials if one.verdict is not Verdict.INCONCLUSIVE)
        return 1 if any(one.verdict is not one.expected for one in decided) else 2

    def to_text(self) -> str:
        """Return the demonstration for people."""
        from flamia_ref.leakage.description import describe

        return describe(self)

    def to_png(self) -> bytes:
        """Return the heat map of what moved as a PNG file."""
        from flamia_ref.leakage.picture import heat_map

        return heat_map(self).to_png()

    def to_json(self) -> str:
        """Return the demonstration as JSON: counts, tokens and sentences, not the values."""
        document = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "as_expected": self.as_expected,
            "recipes": dict(self.evidence),
            "trials": [_document(trial) for trial in self.trials],
        }
        return json.dumps(document, indent=1, allow_nan=False) + "\n"

    def __str__(self) -> str:
        return self.to_text()


def demo(recipes: Iterable[Recipe | str] = SHOWN) -> Demo:
    """Run every witness on every recipe, in numpy.

    A run is one forward of one head, so nothing but the change can differ between two of them.

    Raises ValueError for an unknown recipe, for two of one name and for none, before any work.
    """
    chosen = [RECIPES[one] if isinstance(one, str) else one for one in recipes]
    names = [recipe.name for recipe in chosen]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"recipes are {shown(names)}; give at least one, and each name once")
    witnesses = tuple(WITNESSES.values())
    return Demo(
        evidence={recipe.name: str(recipe.label) for recipe in chosen},
        witnesses=witnesses,
        trials=tuple(trial for recipe in chosen for trial in _trials(recipe, witnesses)),
    )


def _trials(recipe: Recipe, witnesses: Iterable[Witness]) -> Iterable[Trial]:
    unchanged: dict[tuple[int, int, float], Outputs] = {}  # by all that decides it
    for witness in witnesses:
        key = (witness.tokens, witness.head_dim, witness.first)
        if key not in unchanged:
            unchanged[key] = _run(recipe, witness, changed=False)
        yield Trial(
            recipe=recipe.name,
            witness=witness,
            before=unchanged[key],
            after=_run(recipe, witness, changed=True),
            expected=Verdict.LEAK if (recipe.name, witness.name) in LEAKS else Verdict.NONE_FOUND,
        )


def _run(recipe: Recipe, witness: Witness, *, changed: bool) -> Outputs:
    result = forward(*witness.inputs(changed=changed), recipe)
    return Outputs(np.asarray(result.out)[:, 0], np.asarray(result.lse)[0])


def _document(trial: Trial) -> dict[str, Any]:
    from flamia_ref.leakage.description import sentence

    witness = trial.witness
    outputs = {}
    for name, moved, forbidden in zip(("out", "lse"), trial.moved, trial.forbidden, strict=True):
        leaked = moved & forbidden
        by_token = leaked.reshape(len(leaked), -1).any(axis=1)
        outputs[name] = {
            "forbidden": int(forbidden.sum()),
            "forbidden_moved": int(leaked.sum()),
            "forbidden_moved_tokens": np.flatnonzero(by_token).tolist(),
            "allowed": int((~forbidden).sum()),
            "allowed_moved": int((moved & ~forbidden).sum()),
        }
    return {
        "recipe": trial.recipe,
        "witness": {field: getattr(witness, field) for field in witness.__slots__},
        "verdict": trial.verdict,
        "expected": trial.expected,
        "as_expected": trial.as_expected,
        "doubts": list(trial.doubts),
        **outputs,
        "sentence": sentence(trial),
    }
