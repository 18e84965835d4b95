"""Inputs that a hunt starts from: families of data in which a shared scale shows, made from integers alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from flamia_ref._errors import Registry
from flamia_ref.leakage.search.setting import Setting

Values = NDArray[np.float64]
Inputs = Mapping[str, NDArray[Any]]  # bfloat16, by operand

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LARGEST = 2.0**128 - 2.0**120  # the largest bfloat16

_BELL = 2.0**-8  # of a sum of eight bytes less its mean: a standard deviation of 0.82


class Draws:
    """Random integers from the raw bits of a generator, which are the same in every version of numpy."""

    def __init__(self, *seed: int) -> None:
        self._source = np.random.PCG64(list(seed))

    def raw(self, shape: tuple[int, ...]) -> NDArray[np.uint64]:
        """64 random bits for each element."""
        count = int(np.prod(shape))
        return np.asarray(self._source.random_raw(count), dtype=np.uint64).reshape(shape)

    def integers(self, low: int, high: int, shape: tuple[int, ...] = ()) -> NDArray[np.int64]:
        """Integers from `low` to `high`, both among them."""
        span = np.uint64(high - low + 1)
        return ((self.raw(shape) >> np.uint64(11)) % span).astype(np.int64) + low

    def bell(self, shape: tuple[int, ...]) -> Values:
        """Bell-shaped values of a standard deviation of 0.82: eight bytes added up."""
        summed = self.raw(shape)[..., None].view(np.uint8).astype(np.int64).sum(axis=-1)
        return np.asarray((summed - 1020) * _BELL, dtype=np.float64)

    def signs(self, shape: tuple[int, ...]) -> Values:
        """-1 and 1."""
        return np.asarray(1 - 2 * self.integers(0, 1, shape), dtype=np.float64)


def rounded(x: Values) -> NDArray[Any]:
    """Values as bfloat16, those that are too large as the largest of their sign."""
    with np.errstate(over="ignore"):
        return np.clip(x, -LARGEST, LARGEST).astype(BFLOAT16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """Inputs by how they are made.

    Attributes:
        family: a name in `FAMILIES`.
        seed: of the family's numbers.
        changes: what is done to them after that, one after another, in `simplifications`: name, operand, and numbers.
    """

    family: str
    seed: int
    changes: tuple[tuple[str | int | float, ...], ...] = ()

    def inputs(self, setting: Setting) -> dict[str, NDArray[Any]]:
        """The inputs that the setting has, bfloat16. Their arrays may not be written to."""
        return dict(_made(self, setting))


@functools.lru_cache(maxsize=64)
def _made(base: Base, setting: Setting) -> Mapping[str, NDArray[Any]]:
    """The inputs of a base; those of the last few are kept."""
    from flamia_ref.leakage.search.simplifications import changed

    if base.changes:
        before = Base(family=base.family, seed=base.seed, changes=base.changes[:-1])
        inputs = changed(before.inputs(setting), base.changes[-1])
    else:
        values = FAMILIES[base.family](setting, Draws(base.seed, *base.family.encode()))
        inputs = {name: rounded(values[name]) for name in setting.operands}
    for x in inputs.values():
        x.setflags(write=False)
    return inputs


def _bells(setting: Setting, draws: Draws) -> dict[str, Values]:
    return {name: draws.bell(_shape(setting, name)) for name in ("q", "k", "v", "dout")}


def _shape(setting: Setting, name: str) -> tuple[int, int, int]:
    return setting.shape("q" if name == "dout" else name)


def _uniform(setting: Setting, draws: Draws) -> dict[str, Values]:
    """q = k = 1, so that all tokens seen weigh alike; v and dout are small powers of two.

    Source: the public witness, NVIDIA/TransformerEngine issue 3248.
    """
    made = {name: np.ones(_shape(setting, name)) for name in ("q", "k")}
    for name in ("v", "dout"):
        shape = _shape(setting, name)
        made[name] = draws.signs(shape) * 2.0**-20
    return made


def _bell(setting: Setting, draws: Draws) -> dict[str, Values]:
    """Bell-shaped values."""
    return _bells(setting, draws)


def _token_wide(setting: Setting, draws: Draws) -> dict[str, Values]:
    """Bell-shaped, times a power of two from 2^-20 to 2^4 for each token."""
    made = _bells(setting, draws)
    return {name: np.ldexp(x, draws.integers(-20, 4, (len(x), 1, 1))) for name, x in made.items()}


def _element_wide(setting: Setting, draws: Draws) -> dict[str, Values]:
    """Bell-shaped, times a power of two from 2^-20 to 2^4 for each element."""
    made = _bells(setting, draws)
    return {name: np.ldexp(x, draws.integers(-20, 4, x.shape)) for name, x in made.items()}


def _loud_end(setting: Setting, draws: Draws) -> dict[str, Values]:
    """Bell-shaped; the last tokens of each document are 2^20 times as large, so that they hold every amax."""
    made = _bells(setting, draws)
    cut = draws.integers(1, 31, (len(setting.lengths),))
    starts = np.maximum(np.array(setting.lengths, dtype=np.int64) - cut, 1)
    loud = setting.place >= starts[setting.document] if setting.tokens else setting.place > 0
    power = np.where(loud, 6, -14)[:, None, None]
    return {name: np.ldexp(x, power) for name, x in made.items()}


_MANTISSAS = np.array([1.0, 1.125, 1.5, 1.75, 1.7578125, 1.875, 1.9921875])
_DEPTHS = np.array([0, 0, -13, -14, -15, -16, -17, -18, -19])


def _edges(setting: Setting, draws: Draws) -> dict[str, Values]:
    """Values at the edges of e4m3: at its largest, beyond it by a rounding, and about its subnormals."""
    made = {}
    for name in ("q", "k", "v", "dout"):
        shape = _shape(setting, name)
        mantissa = _MANTISSAS[draws.integers(0, len(_MANTISSAS) - 1, shape)]
        depth = _DEPTHS[draws.integers(0, len(_DEPTHS) - 1, shape)]
        made[name] = draws.signs(shape) * np.ldexp(mantissa, depth)
    return made


def _alternating(run: int, side: int) -> Callable[[Setting, Draws], dict[str, Values]]:
    """Rows that give all their weight to every other run of `run` keys, so that P is tiny on the rest.

    v is 0 where the weight is: what rows return is tiny P times v, and vanishes where a scale of P is shared with a
    row that weighs those keys. Negating the query of a row makes it one. Source: derived.
    """

    def made(setting: Setting, draws: Draws) -> dict[str, Values]:
        far = (setting.place // run) % 2 == 0
        power = int(draws.integers(0, 2))
        # The two kinds of scores are 2 x depth apart, in natural units.
        depth = (6.0, 12.0, 18.0)[power]
        per_channel = depth / (setting.softmax_scale * setting.head_dim)
        k = np.where(far, -1.0, 1.0)[:, None, None] * np.ones(_shape(setting, "k"))
        q = np.full(_shape(setting, "q"), side * per_channel)
        v = draws.bell(_shape(setting, "v"))
        weighed = ~far if side > 0 else far
        v[weighed] = 0
        return {"q": q, "k": k, "v": v, "dout": draws.bell(_shape(setting, "dout"))}

    return made


def _low_scores(setting: Setting, draws: Draws) -> dict[str, Values]:
    """Scores far below any finite value that a mask may give to a masked pair, all alike."""
    return {
        "q": np.full(_shape(setting, "q"), 2.0**18),
        "k": np.full(_shape(setting, "k"), -(2.0**18)),
        "v": draws.bell(_shape(setting, "v")),
        "dout": draws.bell(_shape(setting, "dout")),
    }


def _two_hot(setting: Setting, draws: Draws) -> dict[str, Values]:
    """Each row gives half its weight to each of two keys, and nothing to the others; v and dout are small integers.

    Every product and every partial sum is exact, so the order of addition decides no bit.
    """
    channels, place = setting.head_dim, setting.place
    code = place // 2
    coded = code < channels
    k = np.zeros(_shape(setting, "k"))
    strength = 512.0 / setting.softmax_scale
    power = 2.0 ** round(np.log2(strength) / 2)
    k[np.flatnonzero(coded), :, code[coded]] = power
    q = np.zeros(_shape(setting, "q"))
    # The last pair that a row sees whole, or one before it.
    back = draws.integers(0, 2, (setting.tokens,))
    aim = np.clip((place + 1) // 2 - 1 - back, 0, channels - 1)
    q[np.arange(setting.tokens), :, aim] = power
    integers = {
        name: draws.integers(1, 7, _shape(setting, name)) * draws.signs(_shape(setting, name))
        for name in ("v", "dout")
    }
    return {"q": q, "k": k, **integers}


FAMILIES: Mapping[str, Callable[[Setting, Draws], dict[str, Values]]] = Registry(
    "family of inputs",
    (
        ("uniform", _uniform),
        ("bell", _bell),
        ("token_wide", _token_wide),
        ("element_wide", _element_wide),
        ("loud_end", _loud_end),
        ("edges", _edges),
        ("near_1", _alternating(1, 1)),
        ("near_32", _alternating(32, 1)),
        ("far_1", _alternating(1, -1)),
        ("far_32", _alternating(32, -1)),
        ("low_scores", _low_scores),
        ("two_hot", _two_hot),
    ),
)
"""How inputs are made: by name, a function of the setting and of random numbers."""

EXACT_FAMILIES = ("two_hot",)
"""Families whose every sum is exact, in whatever order it is added up."""
