"""All known mistakes, those that cost least to try first."""

from flamia_ref.golden.mistakes import gradients, masks, operands, rules, softmaxes
from flamia_ref.golden.mistakes.mistake import Mistake

MISTAKES: tuple[Mistake, ...] = (
    *softmaxes.MISTAKES,
    *gradients.MISTAKES,
    *masks.MISTAKES,
    *rules.MISTAKES,
    *operands.MISTAKES,
)
