"""All known mistakes."""

from flamia_ref.golden.mistakes import gradients, masks, operands, rules, softmaxes
from flamia_ref.golden.mistakes.mistake import Mistake

GROUPS: tuple[tuple[Mistake, ...], ...] = (
    softmaxes.MISTAKES,
    gradients.MISTAKES,
    masks.MISTAKES,
    rules.MISTAKES,
    operands.MISTAKES,
)
"""By what they are mistakes of, those that cost least to try first."""

MISTAKES: tuple[Mistake, ...] = tuple(mistake for group in GROUPS for mistake in group)
