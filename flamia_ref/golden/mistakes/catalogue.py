"""All known mistakes."""

from flamia_ref.golden.mistakes import gradients, masks, operands, padding, pairs, rules, softmaxes
from flamia_ref.golden.mistakes.mistake import Mistake

GROUPS: tuple[tuple[Mistake, ...], ...] = (
    softmaxes.MISTAKES,
    gradients.MISTAKES,
    (*masks.MISTAKES, *padding.MISTAKES),  # with one tile for all tokens they can give the same
    pairs.MISTAKES,
    rules.MISTAKES,
    operands.MISTAKES,
)
"""By what they are mistakes of, those that cost least to try first."""

MISTAKES: tuple[Mistake, ...] = tuple(mistake for group in GROUPS for mistake in group)
