"""A recipe: everything that decides the bits of one attention path, as data.

A recipe composes three nouns: `Operand` (one use of one tensor in a matrix product), `Product` (S, O, dP, dV, dQ, dK:
two operands and an instruction) and `Softmax`; the backward adds `Gradient`. Enumerations hold only what is computed.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

from flamia_ref._errors import Registry, shown, unknown_name
from flamia_ref.attention.data import Data, check_name, once, plain, typed
from flamia_ref.attention.knobs import Gradient, Schedule, Softmax, Tiles
from flamia_ref.attention.product import Operand, Product, Scope, Use
from flamia_ref.evidence import Evidence, weakest
from flamia_ref.formats import FORMATS

RECIPE_SCHEMA = 2
"""The version of a recipe's JSON, raised when fields come, go or change their meaning."""

_WITHOUT_BACKWARD = 1
"""The schema whose recipes all have a backward, and none of the fields that came with the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step(Data):
    """One step of a recipe: what it rests on."""

    evidence: Evidence
    source: str


class BackwardParts(NamedTuple):
    """The parts of a recipe that only its backward has."""

    dp: Product
    dv: Product
    dq: Product
    dk: Product
    gradient: Gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe(Data):
    """An attention path to the last bit. Equal data, equal bits.

    Attributes:
        name: the registry name: 1 to 100 printable characters, without / and \\.
        s, o: the products of the forward.
        dp, dv, dq, dk: those of the backward; None, all four and `gradient`, in a recipe that has no backward.
        softmax, gradient, tiles: what is between them.
        guard_operands: what guarded blocks take: "inputs", the bfloat16 values before quantization, or "codes", the
            values of the codes in bfloat16, which depend on all that shares their scale.
        schedules: other orders of work that are the same path; each gives the bits of `scheduled(name)`.
        input, output: scalar formats of q, k, v, dout and of out, dq, dk, dv.
        steps: evidence and source of each part, by its dotted path ("softmax.exp2", or "s" for all of s).
    """

    name: str
    s: Product
    o: Product
    dp: Product | None = None
    dv: Product | None = None
    dq: Product | None = None
    dk: Product | None = None
    softmax: Softmax
    gradient: Gradient | None = None
    steps: Mapping[str, Step] = field(hash=False)
    tiles: Tiles = field(default_factory=Tiles)
    guard_operands: Literal["inputs", "codes"] = "inputs"
    input: str = "bf16"
    output: str = "bf16"
    schedules: tuple[Schedule, ...] = ()

    def __post_init__(self) -> None:
        Data.__post_init__(self)
        check_name("recipe.name", self.name)
        names = [schedule.name for schedule in self.schedules]
        if len(set(names)) < len(names):
            raise ValueError(
                f"recipe {self.name!r} has two schedules of one name: {', '.join(names)}"
            )
        for scalar in (self.input, self.output):
            FORMATS[scalar]
        given = [name for name in BackwardParts._fields if getattr(self, name) is not None]
        if given and len(given) < len(BackwardParts._fields):
            missing = [name for name in BackwardParts._fields if name not in given]
            raise ValueError(
                f"recipe {self.name!r} has {', '.join(given)} and no {', '.join(missing)}; a backward needs all of"
                f" {', '.join(BackwardParts._fields)}, a recipe without one has none of them"
            )
        self._check_range()
        object.__setattr__(self, "steps", Registry("step", self.steps.items()))
        leaves = _leaves(self)
        parts = {
            leaf.rsplit(".", depth)[0] for leaf in leaves for depth in range(leaf.count(".") + 1)
        }
        for path in self.steps:
            if path not in parts:
                raise unknown_name("part with evidence", path, leaves)
        uncovered = [path for path in leaves if self._step(path) is None]
        if uncovered:
            raise ValueError(
                f"recipe {self.name!r} has no evidence for {', '.join(uncovered)}; add steps for them"
            )
        for name in names:
            try:
                self.scheduled(name)
            except ValueError as error:
                raise ValueError(
                    f"recipe {self.name!r} has a schedule {name!r} that makes no recipe: {error}"
                ) from None

    def _check_range(self) -> None:
        """Refuse a P that its format does not hold: with a constant scale, nothing else keeps it in range."""
        reaches = [
            (
                "P",
                self.o.left,
                self._reach_of_p(),
                "softmax.rescale_threshold and softmax.p_offset together",
            )
        ]
        if self.has_backward:
            gradient = self.backward.gradient
            # P is below 2 where its base is the floor of a logarithm, below 1 up to rounding where it is the logarithm.
            twice = gradient.normalisation == "fold_into_dout"
            reaches.append(
                ("dV's P", self.backward.dv.left, gradient.p_offset + twice, "gradient.p_offset")
            )
        for name, operand, reach, knobs in reaches:
            most = FORMATS[operand.format].emax if operand.format in FORMATS else None
            fixed = operand.scope in (Scope.STATIC, Scope.UNIT)
            if fixed and most is not None and reach > most:
                raise ValueError(
                    f"recipe {self.name!r} lets {name} reach 2^{reach:.4g} by {knobs}; {operand.format} holds 2^{most},"
                    " lower it"
                )

    def _reach_of_p(self) -> float:
        """The largest binary logarithm of the P that is encoded for O; -inf where it may pass its element."""
        softmax, static = self.softmax, self.o.left.static_scale
        if softmax.p_overflow != "refused":
            return -math.inf
        reach: float = softmax.rescale_threshold
        if softmax.threshold_unit == "natural":
            reach *= math.log2(math.e)
        if softmax.p_scaling == "static_scale" and static is not None:
            reach += 127 - static
        reach += softmax.p_offset
        return reach if softmax.p_scale == 1 else reach + math.log2(softmax.p_scale)

    def operand(self, use: Use | str) -> Operand:
        """The operand of one use, by its name such as "dk.q"."""
        try:
            use = Use(use)
        except ValueError:
            raise unknown_name("use", use, Use) from None
        product = self.product(use.split(".")[0])
        return product.left if use in _LEFT else product.right

    def product(self, name: str) -> Product:
        """One product by its name, such as "dk"."""
        product: Product | None = getattr(self, name)
        return getattr(self.backward, name) if product is None else product

    def uses(self) -> Iterator[tuple[Use, Operand]]:
        """All uses with their operands, in the order of the dataflow: twelve, four in a recipe without a backward."""
        return ((use, self.operand(use)) for use in Use if self.has_use(use))

    def has_use(self, use: Use) -> bool:
        """Whether the recipe has a product with this use."""
        return self.has_backward or use.split(".")[0] in ("s", "o")

    def products(self) -> Iterator[tuple[str, Product]]:
        """The products by name, in the order of the dataflow."""
        names = ("s", "o", "dp", "dv", "dq", "dk") if self.has_backward else ("s", "o")
        return ((name, self.product(name)) for name in names)

    @property
    def has_backward(self) -> bool:
        """Whether the recipe says how gradients are computed."""
        return self.gradient is not None

    @property
    def lse_of_smoothed_scores(self) -> bool:
        """Whether lse is that of the smoothed scores, of k less its document's mean: no output that users know, which
        kernels need not return."""
        return self.s.right.smoothing != "none"

    @property
    def backward(self) -> BackwardParts:
        """The parts of the backward; ValueError for a recipe without one."""
        dp, dv, dq, dk, gradient = self.dp, self.dv, self.dq, self.dk, self.gradient
        if dp is None or dv is None or dq is None or dk is None or gradient is None:
            raise ValueError(
                f"recipe {self.name!r} has no backward: none is public; take a recipe that has one"
            )
        return BackwardParts(dp, dv, dq, dk, gradient)

    def evidence(self, path: str) -> Step:
        """The evidence of one part, by its dotted path."""
        step = self._step(path)
        if step is None:
            raise unknown_name("part", path, _leaves(self))
        return step

    def scheduled(self, name: str) -> Recipe:
        """The recipe by another of its schedules."""
        found = {schedule.name: schedule for schedule in self.schedules}
        if name not in found:
            raise unknown_name("schedule", name, found)
        schedule = found[name]
        changes: dict[str, Any] = {}
        for product, order in (
            ("o", schedule.o_order),
            ("dq", schedule.dq_order),
            ("dk", schedule.key_order),
            ("dv", schedule.key_order),
        ):
            if order is not None:
                changes[product] = replace(self.product(product), tile_order=order)
        if schedule.heads_order is not None:
            changes["gradient"] = replace(self.backward.gradient, heads_order=schedule.heads_order)
        if schedule.splits is not None:
            changes["tiles"] = replace(self.tiles, splits=schedule.splits)
        return replace(self, name=f"{self.name}, {name}", schedules=(), **changes)

    @property
    def label(self) -> Evidence:
        """The weakest evidence of its steps: all that the recipe as a whole may claim."""
        return weakest(step.evidence for step in self.steps.values())

    def _step(self, path: str) -> Step | None:
        while path:
            if path in self.steps:
                return self.steps[path]
            path = path.rpartition(".")[0]
        return None

    def to_json(self) -> str:
        """The recipe as JSON text, keys sorted, with its "schema": equal recipes give equal text."""
        document = {"schema": RECIPE_SCHEMA, **plain(self)}
        return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | Mapping[str, Any]) -> Recipe:
        """The recipe that `to_json` wrote, from the text or the data in it.

        Every field that had come with its "schema" must be there, and those that came later have their defaults; so
        have all, in a recipe without a "schema".

        Raises ValueError for anything else, naming the field, and for another schema.
        """
        if isinstance(text, (bytes, bytearray)):
            raise ValueError(f"recipe is {type(text).__name__}; decode it as UTF-8 first")
        if isinstance(text, str):
            if text.startswith("\ufeff"):
                raise ValueError(
                    "recipe begins with a byte order mark; take it off, as Python's utf-8-sig does"
                )
            try:
                text = json.loads(text, object_pairs_hook=once)
            except json.JSONDecodeError as error:
                raise ValueError(f"recipe is not JSON: {error}") from None
            except RecursionError:
                raise ValueError("recipe is nested too deeply to be one") from None
        schema = None
        if isinstance(text, Mapping) and "schema" in text:
            schema = text["schema"]
            if type(schema) is not int or schema not in (_WITHOUT_BACKWARD, RECIPE_SCHEMA):
                raise ValueError(
                    f"recipe has schema {shown(schema)} and this version reads schema {_WITHOUT_BACKWARD} and"
                    f" {RECIPE_SCHEMA}; read it with the version that wrote it"
                )
            text = {name: value for name, value in text.items() if name != "schema"}
        return cast(Recipe, typed(Recipe, text, "recipe", schema=schema))


_LEFT = {Use.S_Q, Use.O_P, Use.DP_DO, Use.DV_P, Use.DQ_DS, Use.DK_DS}


def _leaves(value: Any, path: str = "") -> list[str]:
    """Dotted paths of everything in a recipe that decides bits."""
    if not dataclasses.is_dataclass(value):
        return [path]
    names = (
        f.name
        for f in dataclasses.fields(value)
        if not (path == "" and f.name in ("name", "steps", "schedules"))
        and not (path == "" and getattr(value, f.name) is None)  # a backward there is not
    )
    return [
        leaf
        for name in names
        for leaf in _leaves(getattr(value, name), f"{path}.{name}".lstrip("."))
    ]
