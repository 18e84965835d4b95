"""Lengths, masks, heads, head dimensions and distributions, crossed.

Their digests are in data/exhaustive.json: whoever makes this suite on another machine knows by them that
the bits are the same. A case that changes needs its digests anew, `python -m tests.golden.exhaustive`.
"""

import itertools
from collections.abc import Iterator

from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.inputs import Distribution
from flamia_ref.golden.suites.synthetic import synthetic

_LENGTHS = (1, 2, 31, 32, 33, 64, 96, 127, 128, 129, 160, 200)
_DISTRIBUTIONS = {"bell": -7, "outliers": -14, "wide": -8, "ladder": -20}
_HEADS = ((1, 1), (4, 2), (3, 1), (2, 2))
_HEAD_DIMS = (64, 128)
# Queries, keys: shorter, equal and longer, beside and across the ends of blocks and tiles.
_PAIRS = ((1, 33), (5, 128), (31, 32), (33, 1), (64, 129), (129, 64), (128, 31), (3, 3))
_WINDOWS = ((0, 0), (1, 0), (31, 0), (32, 0), (127, 0), (128, 0), (5, 7), (0, 3), (None, 32))
_FIRST_SEED = 1000


def _of_lengths() -> Iterator[CaseSpec]:
    crossed = itertools.product(_LENGTHS, _DISTRIBUTIONS.items(), (True, False))
    for number, (length, (name, exponent), causal) in enumerate(crossed):
        # Heads and head dimensions in turn, with the lengths out of step.
        heads = _HEADS[(number + number // 8) % len(_HEADS)]
        head_dim = _HEAD_DIMS[number // 4 % 2]
        yield synthetic(
            f"grid-{length}-{name}-{'causal' if causal else 'full'}",
            f"{length} tokens and a document of 7, {name}, {heads[0]} heads over {heads[1]}",
            lengths=(length, 7),
            seed=_FIRST_SEED + number,
            heads=heads,
            head_dim=head_dim,
            causal=causal,
            distribution=Distribution(name),
            exponent=exponent,
        )


def _of_masks() -> Iterator[CaseSpec]:
    crossed = itertools.product(_PAIRS, ("bottom_right", "top_left"), (True, False))
    for number, ((queries, keys), alignment, causal) in enumerate(crossed):
        mask = "causal" if causal else "window"
        yield synthetic(
            f"grid-{queries}x{keys}-{alignment.replace('_', '-')}-{mask}",
            f"{queries} queries over {keys} keys, {alignment}, and the reverse",
            lengths=(queries, keys),
            key_lengths=(keys, queries),
            alignment=alignment,
            seed=_FIRST_SEED + 500 + number,
            heads=_HEADS[number % len(_HEADS)],
            causal=causal,
            window=None if causal else (9, 4),
            exponent=-7,
        )


def _of_windows() -> Iterator[CaseSpec]:
    for number, (window, length) in enumerate(itertools.product(_WINDOWS, (33, 140))):
        left, right = window
        heads = _HEADS[number % len(_HEADS)]
        yield synthetic(
            f"grid-window-{left}-{right}-{length}".lower(),
            f"{left} keys before and {right} after, {length} tokens; some with a cap, some with a sink",
            lengths=(length, 4),
            seed=_FIRST_SEED + 700 + number,
            heads=heads,
            causal=right == 0,
            window=window,
            softcap=20.0 if number % 2 else None,
            sinks=tuple(0.5 * head for head in range(heads[0])) if number % 3 == 0 else (),
            exponent=-7,
        )


EXHAUSTIVE: tuple[CaseSpec, ...] = (*_of_lengths(), *_of_masks(), *_of_windows())
