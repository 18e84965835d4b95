"""The cases of a hunt, in order: what is changed, in which inputs. The strongest come first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flamia_ref.leakage.search.bases import Base, Draws
from flamia_ref.leakage.search.edits import POISONS, Action, Edit
from flamia_ref.leakage.search.setting import Setting

EPOCH = 24  # rounds that share the seed of their inputs, so that these run once

FEWEST_ROUNDS = 40  # of the tactics of `TACTICS`
MOST_ROUNDS = 400

_BEFORE = 4  # rounds before the first that goes through the tokens one by one


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One perturbation: inputs, and one change of one operand of them."""

    index: int
    base: Base
    edit: Edit


@dataclass(frozen=True, kw_only=True, slots=True)
class Tactic:
    """A kind of case: a family of inputs, an action with its least and its largest amount, and which tokens."""

    family: str
    action: Action
    least: int = 0
    most: int = 0
    tokens: str = "token"


def _t(family: str, action: Action, *rest: int | str) -> Tactic:
    amounts = [one for one in rest if isinstance(one, int)]
    tokens = next((one for one in rest if isinstance(one, str)), "token")
    least, most = amounts if amounts else (0, 0)
    return Tactic(family=family, action=action, least=least, most=most, tokens=tokens)


# Of q: the rows' own scales, P's scales by rows that turn round, dK's.
_Q = (
    _t("bell", Action.TIMES, 16, 20),
    _t("near_1", Action.NEGATE),
    _t("far_32", Action.NEGATE),
    _t("near_32", Action.NEGATE),
    _t("far_1", Action.NEGATE),
    _t("token_wide", Action.TIMES, 10, 20),
    _t("bell", Action.TIMES, 2, 6),
)
_K = (
    _t("bell", Action.TIMES, 16, 20),
    _t("near_1", Action.NEGATE),
    _t("low_scores", Action.NEGATE),
    _t("token_wide", Action.TIMES, 10, 20),
    _t("far_32", Action.NEGATE),
    _t("bell", Action.TIMES, 2, 6),
)
_V = (
    _t("uniform", Action.TIMES, 18, 20),
    _t("bell", Action.TIMES, 16, 20),
    _t("low_scores", Action.TIMES, 4, 16),
    _t("token_wide", Action.TIMES, 10, 20),
)
_DOUT = (
    _t("bell", Action.TIMES, 16, 20),
    _t("uniform", Action.TIMES, 18, 20),
    _t("token_wide", Action.TIMES, 10, 20),
)
# Of every operand.
_ANY = (
    _t("element_wide", Action.TIMES, 8, 20, "suffix"),
    _t("element_wide", Action.RESAMPLE, 0, 4),
    _t("loud_end", Action.ZERO, "suffix"),
    _t("edges", Action.RESAMPLE, -4, 8),
    _t("bell", Action.TIMES, 12, 20, "element"),
    _t("edges", Action.TIMES, 1, 4),
    _t("token_wide", Action.SWAP, "pair"),
    _t("loud_end", Action.TIMES, -20, -8, "suffix"),
    _t("element_wide", Action.TIMES, 10, 20, "document"),
    _t("bell", Action.TIMES, 14, 20, "prefix"),
    _t("bell", Action.NEGATE, "suffix"),
    _t("token_wide", Action.RESAMPLE, -8, 8, "half"),
    _t("element_wide", Action.ZERO),
    _t("token_wide", Action.TIMES, -12, -4),
)

TACTICS = {"q": _Q + _ANY, "k": _K + _ANY, "v": _V + _ANY, "dout": _DOUT + _ANY}
"""What is tried on each operand, in order, over and over at other tokens."""

# Of each token alone. A product by 2^16 or more is also, read backwards, a token that held the amax and is lowered.
# In wide inputs most tokens hold the amax of some channel, which goes with them where they are zeroed.
_ALONE = {
    "q": (
        _t("bell", Action.TIMES, 16, 20),
        _t("far_32", Action.NEGATE),
        _t("element_wide", Action.ZERO),
    ),
    "k": (
        _t("bell", Action.TIMES, 16, 20),
        _t("near_1", Action.NEGATE),
        _t("element_wide", Action.ZERO),
    ),
    "v": (
        _t("bell", Action.TIMES, 16, 20),
        _t("near_32", Action.NEGATE),
        _t("element_wide", Action.ZERO),
    ),
    "dout": (
        _t("bell", Action.TIMES, 16, 20),
        _t("far_32", Action.NEGATE),
        _t("element_wide", Action.ZERO),
    ),
}
# Of each token of a block that the end of its document cuts, besides: few rows are in it, so few cases can show it.
_TAIL = {
    "q": (
        _t("bell", Action.TIMES, 16, 20),
        _t("near_1", Action.NEGATE),
        _t("token_wide", Action.TIMES, 16, 20),
    ),
    "k": (
        _t("bell", Action.TIMES, 16, 20),
        _t("far_32", Action.NEGATE),
        _t("bell", Action.TIMES, 16, 20),
    ),
    "v": (
        _t("uniform", Action.TIMES, 18, 20),
        _t("low_scores", Action.TIMES, 4, 16),
        _t("token_wide", Action.TIMES, 16, 20),
    ),
    "dout": (
        _t("uniform", Action.TIMES, 18, 20),
        _t("far_32", Action.TIMES, 16, 20),
        _t("token_wide", Action.TIMES, 16, 20),
    ),
}

_EXACT = (
    _t("two_hot", Action.TIMES, 16, 20),
    _t("two_hot", Action.ZERO),
    _t("two_hot", Action.RESAMPLE, 8, 16),
    _t("two_hot", Action.TIMES, 16, 20, "suffix"),
    _t("two_hot", Action.TIMES, 16, 20, "prefix"),
    _t("two_hot", Action.TIMES, 16, 20, "document"),
)


def cases(
    setting: Setting, operands: Sequence[str], *, seed: int, exact: bool = False
) -> list[Case]:
    """The cases of a hunt, round by round, each operand in each round.

    Every token of every operand is changed alone by every tactic of `_ALONE`, as far as `MOST_ROUNDS` rounds go, those
    of blocks that are cut first. `exact`: only inputs whose every sum is exact, and every token alone once.
    """
    if not setting.tokens or not operands:
        return []
    if exact:
        count = max(FEWEST_ROUNDS, 2 * setting.tokens)
    else:
        count = _round_of_last(len(_singles(setting, operands[0], seed)))
    found = rounds(setting, operands, seed=seed, exact=exact)
    return [case for some in itertools.islice(found, min(count, MOST_ROUNDS)) for case in some]


def rounds(
    setting: Setting, operands: Sequence[str], *, seed: int, exact: bool = False
) -> Iterator[list[Case]]:
    """Rounds of cases without an end. There must be a token and an operand.

    At first one round in three, then four in five, go through the tokens one by one; the others are `TACTICS` in turn.
    """
    order = {name: _places(setting, Draws(seed, 1, *name.encode())) for name in operands}
    singles = {name: [] if exact else _singles(setting, name, seed) for name in operands}
    turn = dict.fromkeys(operands, 0)
    general, alone = itertools.count(), itertools.count()
    for number in itertools.count():
        made: list[Case] = []
        single = _is_single(number) and not exact
        place = next(alone) if single else next(general)
        for name in operands:
            draws = Draws(seed, 2, number, *name.encode())
            if single:
                token, tactic = singles[name][place % len(singles[name])]
            else:
                tactics = _EXACT if exact else TACTICS[name]
                tactic = tactics[place % len(tactics)]
                token = order[name][turn[name] % setting.tokens]
            tokens = _tokens(setting, tactic.tokens, token, draws)
            if len(tokens) == 1 and not single:
                turn[name] += 1
            edit = Edit(
                operand=name,
                tokens=tokens,
                action=tactic.action,
                amount=int(draws.integers(tactic.least, tactic.most)),
                seed=int(draws.integers(0, 2**31 - 1)),
                **_element(setting, name, tactic.tokens, draws),
            )
            # Few inputs serve all tokens, but not one: what shows at a token hangs on the rows about it.
            of_seed = -1 - int(draws.integers(0, 5)) if single else number // EPOCH
            base = Base(family=tactic.family, seed=_seed(seed, of_seed))
            index = number * len(operands) + len(made)
            made.append(Case(index=index, base=base, edit=edit))
        yield made


def _is_single(number: int) -> bool:
    """Whether a round goes through the tokens one by one."""
    if number < _BEFORE:
        return False
    return number % 3 == 1 if number < EPOCH else number % 5 != 0


def _round_of_last(singles: int) -> int:
    """Rounds until so many have gone through the tokens one by one, and `FEWEST_ROUNDS` others are done."""
    alone = others = number = 0
    while alone < singles or others < FEWEST_ROUNDS:
        alone, others = alone + _is_single(number), others + (not _is_single(number))
        number += 1
    return number


def _singles(setting: Setting, name: str, seed: int) -> list[tuple[int, Tactic]]:
    """Tokens and what is done to each alone: tokens of cut blocks first, from their ends, then the others, mixed."""
    draws = Draws(seed, 4, *name.encode())
    order = np.argsort(draws.raw((setting.tokens,)), kind="stable").tolist()
    tail = tail_tokens(setting)
    rest = [one for one in order if one not in set(tail)]
    found = [(token, tactic) for tactic in (*_ALONE[name], *_TAIL[name]) for token in tail]
    return found + [(token, tactic) for tactic in _ALONE[name] for token in rest]


def tail_tokens(setting: Setting) -> list[int]:
    """The tokens of the last block of 16 of each document, the shorter first, each from its end; at most 64."""
    ends = setting.cu_seqlens.tolist()
    tails = []
    for first, last in itertools.pairwise(ends):
        if last - first > 1:
            size = min(last - first, (last - first) % 16 or 16)
            # A single token alone shares nothing: the block before it is then looked at too.
            tails.append(range(last - max(size, 2), last))
    found = [token for some in sorted(tails, key=len) for token in reversed(some)]
    return found[:64]


def poisons(setting: Setting, operands: Sequence[str], *, seed: int) -> list[Case]:
    """NaN and infinity in single tokens and in the last tokens of documents: where masked values must not count."""
    made: list[Case] = []
    if not setting.tokens:
        return made
    for number, (name, action) in enumerate(
        (name, action) for action in POISONS for name in operands
    ):
        draws = Draws(seed, 3, number)
        places = _places(setting, draws)
        for kind, token in (("token", places[0]), ("suffix", places[1 % len(places)])):
            edit = Edit(operand=name, tokens=_tokens(setting, kind, token, draws), action=action)
            base = Base(family="bell", seed=_seed(seed, 0))
            made.append(Case(index=len(made), base=base, edit=edit))
    return made


def _seed(seed: int, epoch: int) -> int:
    return seed * 1000003 + epoch % 1000003


def _places(setting: Setting, draws: Draws) -> list[int]:
    """All tokens once: first token 16 of the first document or its middle, then others strictly inside blocks, mixed,
    then those at the beginnings of blocks of 16."""
    count = setting.tokens
    order = np.argsort(draws.raw((count,)), kind="stable")
    inside = setting.place[order] % 16 != 0
    mixed = [*order[inside].tolist(), *order[~inside].tolist()]
    length = setting.lengths[0] if setting.lengths else 0
    first = min(17, length // 2)
    return [first, *(one for one in mixed if one != first)] if first < count else mixed


def _tokens(setting: Setting, kind: str, token: int, draws: Draws) -> tuple[int, ...]:
    """The tokens of a case by their kind, about one token."""
    every = np.arange(setting.tokens)
    own = setting.document == setting.document[token]
    match kind:
        case "suffix":
            chosen = own & (every >= token)
        case "prefix":
            chosen = own & (every <= token)
        case "document":
            chosen = own
        case "pair":
            chosen = (every == token) | (every == (token + 1) % setting.tokens)
        case "half":
            chosen = own & (draws.integers(0, 1, (setting.tokens,)) == 1)
            chosen[token] = True
        case _:
            chosen = every == token
    return tuple(int(one) for one in every[chosen])


def _element(
    setting: Setting, name: str, kind: str, draws: Draws
) -> dict[str, tuple[int, ...] | None]:
    if kind != "element":
        return {}
    heads = setting.heads if name in ("q", "dout") else setting.kv_heads
    return {
        "heads": (int(draws.integers(0, heads - 1)),),
        "channels": (int(draws.integers(0, setting.head_dim - 1)),),
    }
