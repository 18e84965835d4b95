"""A recipe with other safeguards: the choices of its groups put into its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flamia_ref.attention.copies import OVER_CHANNELS
from flamia_ref.attention.product import Guard, Operand, Product, Scope, Use
from flamia_ref.attention.recipe import Recipe, Step
from flamia_ref.evidence import Evidence
from flamia_ref.formats import FORMATS, PRESETS
from flamia_ref.leakage.safeguarding.alternatives import GUARDS, Alternative, Group, tensor_of
from flamia_ref.leakage.sharing.coupling import PAIR_USES, product_of

_HIGH = Operand(format="bf16", scope=Scope.UNIT)
_HIGH_INSTRUCTION = "sm100.tcgen05.f16"
_RULE = "te-mx-e4m3"
_UNIT = 127  # the e8m0 code of 1
_OVER_KEYS = (Use.O_P, Use.DQ_DS)
_OVER_TOKENS = ("o", "dv", "dq", "dk")
_PARTNERS = {
    Use.O_V: Use.O_P,
    Use.DV_DO: Use.DV_P,
    Use.DQ_K: Use.DQ_DS,
    Use.DK_Q: Use.DK_DS,
}
_LEFT = (Use.S_Q, Use.O_P, Use.DP_DO, Use.DV_P, Use.DQ_DS, Use.DK_DS)
_CHOSEN = Step(evidence=Evidence.ASSUMED, source="a safeguard in place of the recipe's own")

Choices = Mapping[str, Alternative]
"""The alternative of each group by its name."""


def applied(
    recipe: Recipe,
    groups: Sequence[Group],
    choices: Choices,
    constants: Mapping[str, int],
    name: str,
) -> Recipe:
    """The recipe with the choices of its groups.

    `constants`: the e8m0 codes of constant scales of "q", "k", "v", "do" and "ds".

    Raises ValueError of one line where the choices contradict each other, or no recipe has such an operand.
    """
    draft = _Draft(recipe, constants)
    for group in groups:
        if not group.of_pairs:
            draft.choose(group.uses, choices[group.name])
    draft.give_token_scales_a_taker()
    for group in groups:
        if group.of_pairs:
            draft.choose_pairs(group.uses, choices[group.name])
    return draft.finished(name)


class _Draft:
    """Operands by use on their way to a recipe."""

    def __init__(self, recipe: Recipe, constants: Mapping[str, int]) -> None:
        self.recipe, self.constants = recipe, constants
        self.operands: dict[Use, Operand] = dict(recipe.uses())
        self.high: set[str] = set()
        self.guard_operands: str | None = None
        rules = [one.format for one in self.operands.values() if _is_rule(one)]
        self.rule = _RULE if _RULE in rules or not rules else rules[0]

    def choose(self, uses: Sequence[Use], choice: Alternative) -> None:
        """Give uses of an input an alternative."""
        if choice is Alternative.AS_IS:
            for use in uses:
                if self.operands[use].guard is not Guard.NONE:
                    self._guard_from(self.recipe.guard_operands)
        for place, use in enumerate(uses):
            operand = self.operands[use]
            alone = Operand(format=self._rule_of(use), block=(1, 32))
            if choice is Alternative.SHARED:
                self.operands[use] = self._shared(uses, place)
            elif choice in GUARDS:
                self._guard_from("inputs" if choice is Alternative.GUARDED else "codes")
                self.operands[use] = replace(
                    self._shared(uses, place), guard=Guard.HIGH_PRECISION_WHERE_CUT
                )
            elif choice is Alternative.FOLDED:
                self.operands[use] = replace(
                    alone,
                    block=(1, "all"),
                    scope=Scope.TOKEN,
                    scale_folded_into=_PARTNERS.get(use),
                    same_codes_as=uses[0] if place else None,
                )
            elif choice is Alternative.PREVIOUS:
                self.operands[use] = replace(
                    self._shared(uses, place),
                    scope=Scope.PREVIOUS_BLOCK,
                    static_scale=self._constant(use),
                )
            elif choice is Alternative.STATIC:
                self.operands[use] = replace(
                    self._static(use, operand), same_codes_as=uses[0] if place else None
                )
            elif choice is Alternative.HIGH_OVER_TOKENS and use in OVER_CHANNELS:
                self.operands[use] = alone
            elif choice in (Alternative.HIGH_OVER_TOKENS, Alternative.HIGH):
                self.high.add(product_of(use))

    def choose_pairs(self, uses: Sequence[Use], choice: Alternative) -> None:
        """Give uses of P or dS an alternative."""
        for use in uses:
            if product_of(use) in self.high:
                continue
            if choice is Alternative.ONE_ROW:
                self.operands[use] = self._one_row(use)
            elif choice is Alternative.STATIC:
                takes = [one for one, into in _PARTNERS.items() if into is use]
                if any(self.operands[one].scale_folded_into is use for one in takes):
                    raise ValueError(
                        f"{use} takes the scale of {takes[0]} and has a constant one; values with the scale of a token"
                        " need a scale of their own, give it blocks of one row"
                    )
                self.operands[use] = self._static(use, self.operands[use])
            elif choice is Alternative.HIGH:
                self.high.add(product_of(use))

    def give_token_scales_a_taker(self) -> None:
        """Operands that take the scale of a token are quantized in blocks of one row."""
        for use, partner in _PARTNERS.items():
            folded = use in self.operands and self.operands[use].scale_folded_into is partner
            if folded and product_of(use) not in self.high:
                taker = self.operands[partner]
                if not _is_rule(taker) or taker.block is None or 1 not in taker.block:
                    self.operands[partner] = self._one_row(partner)

    def finished(self, name: str) -> Recipe:
        """The recipe."""
        for product in self.high:
            for use in self.operands:
                if product_of(use) == product:
                    self.operands[use] = _HIGH
        self._separate()
        products: dict[str, Any] = {
            product: self._product(product, one) for product, one in self.recipe.products()
        }
        changed = [x for x, one in self.recipe.products() if products[x] != one]
        parts: dict[str, Any] = {
            "softmax": replace(
                self.recipe.softmax,
                p_offset=self._offset(
                    Use.O_P, self.recipe.softmax.p_offset, 8 - self.recipe.softmax.rescale_threshold
                ),
            )
        }
        if self.recipe.has_backward:
            gradient = self.recipe.backward.gradient
            twice = gradient.normalisation == "fold_into_dout"
            parts["gradient"] = replace(
                gradient, p_offset=self._offset(Use.DV_P, gradient.p_offset, 8 - twice)
            )
        if self.guard_operands is not None:
            parts["guard_operands"] = self.guard_operands
        if any(product in self.high for product in _OVER_TOKENS):
            # Tiles that no row sees are zeros; of bfloat16 operands they are only computed by leaving them out.
            parts["tiles"] = replace(self.recipe.tiles, masked="skipped")
        return replace(
            self.recipe,
            name=name,
            schedules=(),
            steps=_steps(self.recipe, changed),
            **products,
            **parts,
        )

    def _guard_from(self, operands: str) -> None:
        if self.guard_operands not in (None, operands):
            raise ValueError(
                "guarded blocks take inputs in one use and codes in another; a recipe has one kind of guard_operands"
            )
        self.guard_operands = operands

    def _rule_of(self, use: Use) -> str:
        own = self.operands[use]
        return own.format if _is_rule(own) else self.rule

    def _constant(self, use: Use) -> int:
        return self.constants[tensor_of(use)]

    def _shared(self, uses: Sequence[Use], place: int) -> Operand:
        """An operand with a scale for 32 tokens: in one copy for both directions also for 32 channels."""
        use = uses[place]
        own = self.operands[use]
        spans = _is_rule(own) and own.block is not None and own.block[0] == 32
        square = len(uses) > 1 or use in OVER_CHANNELS
        return Operand(
            format=self._rule_of(use),
            block=own.block if spans else ((32, 32) if square else (32, 1)),
            same_codes_as=uses[0] if place else None,
        )

    def _one_row(self, use: Use) -> Operand:
        return Operand(format=self._rule_of(use), block=(1, 32) if use in _OVER_KEYS else (32, 1))

    def _static(self, use: Use, operand: Operand) -> Operand:
        if operand.scope in (Scope.HEAD, Scope.UNIT):
            return Operand(format="e4m3", scope=Scope.UNIT)
        if use is Use.O_P:
            return Operand(format="e4m3", scope=Scope.STATIC, static_scale=_UNIT)
        if use is Use.DV_P:
            gradient = self.recipe.backward.gradient
            reach = 8 - (gradient.normalisation == "fold_into_dout")
            return Operand(format="e4m3", scope=Scope.STATIC, static_scale=_UNIT - reach)
        return Operand(format="e4m3", scope=Scope.STATIC, static_scale=self._constant(use))

    def _separate(self) -> None:
        """Give a use codes of its own that differs from the one whose codes it takes, or takes a scale."""
        for use, operand in self.operands.items():
            source = operand.same_codes_as
            if source is None:
                continue
            other = self.operands[source]
            same = all(
                getattr(operand, field) == getattr(other, field)
                for field in ("format", "block", "scope", "static_scale")
            )
            if use in PAIR_USES:
                guarded = any(
                    one.guard is not Guard.NONE
                    for at, one in self.operands.items()
                    if product_of(at) == product_of(source)
                )
                folded = any(
                    one.scale_folded_into in (use, source) for one in self.operands.values()
                )
                same = same and not guarded and not folded
            if not same:
                self.operands[use] = replace(operand, same_codes_as=None)

    def _product(self, name: str, product: Product) -> Product:
        left, right = (
            next(
                operand
                for use, operand in self.operands.items()
                if product_of(use) == name and (use in _LEFT) is side
            )
            for side in (True, False)
        )
        guarded = Guard.HIGH_PRECISION_WHERE_CUT in (left.guard, right.guard)
        instruction = _HIGH_INSTRUCTION if name in self.high else product.instruction
        guard = (product.guard_instruction or _HIGH_INSTRUCTION) if guarded else None
        return replace(
            product, left=left, right=right, instruction=instruction, guard_instruction=guard
        )

    def _offset(self, use: Use, own: int, most: int) -> int:
        """The powers of two that P is lifted by: for a constant scale as many as it holds, else none."""
        operand, before = self.operands[use], self.recipe.operand(use)
        if operand == before:
            return own
        return most if operand.scope is Scope.STATIC else 0


def _is_rule(operand: Operand) -> bool:
    """Whether an operand has block scales of an 8-bit element."""
    if operand.format not in PRESETS:
        return False
    return PRESETS[operand.format].element.bits == FORMATS["e4m3"].bits


def _steps(recipe: Recipe, changed: Sequence[str]) -> dict[str, Step]:
    """The evidence, where products are no longer those of the recipe: they are chosen here."""
    steps = {
        path: step
        for path, step in recipe.steps.items()
        if path.split(".")[0] not in changed or path.endswith(".instruction")
    }
    return steps | dict.fromkeys(changed, _CHOSEN)
