"""Decisions that an interval straddles: every way through them is in the envelope."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest

from flamia_ref.attention import RECIPES
from flamia_ref.golden.case_fields import Fill
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.envelope import forward as forward_envelope
from flamia_ref.golden.envelope.judging import permitted
from flamia_ref.golden.inputs import Distribution
from flamia_ref.golden.simulation import simulate

CHANNELS = 96
TALL = [0x3F90, 0x3FE0, 0x3D10]  # bfloat16 of 1.125, 1.75 and 0.035, over the channels of a key
QUERY = [0x3710, 0x3FB0, 0x3FB0, 0x3E50, 0x3E50]


def case(softmax_scale: float, tokens: int = 300) -> CaseSpec:
    """Equal queries. The first key of each tile is one and the same, all others are far below it."""

    def rows(tensor: str, first: int, end: int, bits: list[int], lower: int) -> list[Fill]:
        return [
            Fill(
                tensor=tensor,
                tokens=(first, end),
                heads=(0, 1),
                channels=(channel, channel + 1),
                bits=bits[channel % len(bits)] - lower,
            )
            for channel in range(CHANNELS)
        ]

    keys = [
        part
        for first in range(0, tokens, 128)
        for part in (
            *rows("k", first, first + 1, TALL, 0),
            *rows("k", first + 1, min(first + 128, tokens), TALL, 0x118),
        )
    ]
    return CaseSpec(
        name="straddled",
        why="a maximum between two integers",
        lengths=(tokens,),
        heads=1,
        kv_heads=1,
        head_dim=CHANNELS,
        causal=False,
        softmax_scale=softmax_scale,
        distribution=Distribution.BELL,
        seed=3,
        exponent=-8,
        fills=(*rows("q", 0, tokens, QUERY, 0), *keys),
    )


def straddling(recipe: str) -> CaseSpec:
    """The case with the softmax scale that puts the greatest score, in log2 units, on an integer."""
    chosen = case(1.0, tokens=33)
    stored = simulate(chosen, RECIPES[recipe])
    found = permitted(chosen, RECIPES[recipe], stored, {}, ("s.0",))["s.0"]
    low, high = (float(x.view(np.float32)[0, 0, 0]) for x in (found.low, found.high))
    assert low < high
    return case(20 / (0.5 * (low + high) * math.log2(math.e)))


def test_the_same_number_straddled_in_three_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = "flamia-mxfp8"
    chosen = straddling(recipe)
    walked: list[tuple[bool, ...]] = []
    own: list[Any] = []
    real = forward_envelope.ForwardEnvelope._way

    def way(self: Any, tiles: Any, keys: Any, taken: tuple[bool, ...], rows: Any) -> Any:
        walked.append(taken)
        if taken == ():
            none = np.zeros((len(tiles), tiles.rows), dtype=bool)
            for other in itertools.product((False, True), repeat=3):
                state = real(self, tiles, keys, other, none)
                own.append((tiles, self._end(tiles, tiles.bounds(self.run.mask), state)[0]))
        return real(self, tiles, keys, taken, rows)

    monkeypatch.setattr(forward_envelope.ForwardEnvelope, "_way", way)
    stored = simulate(chosen, RECIPES[recipe])
    found = permitted(chosen, RECIPES[recipe], stored, {}, ("o", "row_max"))
    # Up in the first tile, in the second, in the third, or in none: of a maximum there are no more.
    assert set(walked) == {(), (True,), (False, True), (False, False, True)}
    of = found["o"]
    low, high = of.low.view(np.float32), of.high.view(np.float32)
    assert np.isfinite(low).all()
    assert np.isfinite(high).all()
    for tiles, o in own:
        tokens = tiles.query_tokens()
        inside = tokens >= 0
        least, most = (x.view(np.float32)[inside] for x in (o.low, o.high))
        at = tokens[inside]
        assert (least >= low[at, 0]).all()
        assert (most <= high[at, 0]).all()


def test_rows_beyond_what_is_followed_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = "flamia-mxfp8"
    chosen = dataclasses.replace(straddling(recipe), lengths=(300,))
    monkeypatch.setattr(forward_envelope, "_MOST_WAYS", 2)
    stored = simulate(chosen, RECIPES[recipe])
    found = permitted(chosen, RECIPES[recipe], stored, {}, ("o",))["o"]
    assert np.isneginf(found.low.view(np.float32)).all()
    assert np.isposinf(found.high.view(np.float32)).all()
