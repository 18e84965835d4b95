"""float64 attention on every mask, with soft caps and sinks, against exactly added sums and JAX."""

import math
import tracemalloc

import numpy as np
import pytest

from flamia_ref.attention import float64
from flamia_ref.packing import Mask
from tests.attention import added_sums
from tests.attention.masks import DOCUMENTS, MASKS, offsets, visible

SMALL = [(5, 2), (0, 3), (2, 5), (3, 0), (9, 12)]
SINK = np.float32([0.5, -np.inf, 3.0, -2.0])
EXTRAS = {"plain": {}, "soft cap": {"softcap": 1.5}, "sink": {"sink": SINK}}
EXTRAS["both"] = EXTRAS["soft cap"] | EXTRAS["sink"]
NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")


def inputs(documents, channels: int = 6, v_channels: int = 4):
    """q, k, v and dout in float64, 4 query heads and 2 key/value heads."""
    rng = np.random.default_rng(1)
    tokens, keys = (sum(column) for column in zip(*documents, strict=True))
    shapes = ((tokens, 4, channels), (keys, 2, channels), (keys, 2, v_channels))
    return [rng.standard_normal(x) * 1.5 for x in (*shapes, (tokens, 4, v_channels))]


def run(given, documents, **options):
    """The results by name; dsink only with a sink."""
    lengths = zip(*documents, strict=True)
    options |= dict(zip(("cu_seqlens", "cu_seqlens_k"), map(offsets, lengths), strict=True))
    results = [*float64.forward(*given[:3], **options), *float64.backward(*given, **options)]
    return {name: x for name, x in zip(NAMES, results, strict=True) if x is not None}


def expected_sums(given, mask, documents=SMALL, **extras):
    lengths = [offsets(column) for column in zip(*documents, strict=True)]
    results = added_sums.attention(
        *given, *lengths, mask=mask, scale=given[0].shape[2] ** -0.5, **extras
    )
    return dict(zip(NAMES, results, strict=True))


def compare(found, expected, tolerance: float = 1e-12) -> None:
    for name, a in found.items():
        b = expected[name]
        assert (np.isneginf(a) == np.isneginf(b)).all(), name
        a, b = (np.where(np.isneginf(x), 0, x) for x in (a, b))
        assert np.abs(a - b).max() < tolerance * np.abs(b).max(), name


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("mask", MASKS)
def test_against_exactly_added_sums(mask: str, extras: str) -> None:
    given = inputs(SMALL)
    found = run(given, SMALL, **MASKS[mask], **EXTRAS[extras])
    assert ("dsink" in found) == ("sink" in EXTRAS[extras])
    compare(found, expected_sums(given, MASKS[mask], **EXTRAS[extras]))


def test_gradients_against_jax() -> None:
    import jax
    import jax.numpy as jnp

    given = inputs(DOCUMENTS, 8, 8)
    finite = np.float32([0.5, -7.0, 3.0, -2.0])

    def attention(q, k, v, sink, seen):
        k, v = (jnp.repeat(x, 2, axis=1) for x in (k, v))
        s = jnp.einsum("ihd,jhd->hij", q, k) * np.float64(8**-0.5)
        s = jnp.where(seen, np.float64(1.5) * jnp.tanh(s / np.float64(1.5)), -jnp.inf)
        column = jnp.broadcast_to(sink[:, None, None], (4, len(q), 1))
        p = jax.nn.softmax(jnp.concatenate([s, column], axis=2), axis=2)
        return jnp.einsum("hij,jhd->ihd", p[:, :, :-1], v)

    pull = jax.jit(lambda dout, seen, *x: jax.vjp(lambda *y: attention(*y, seen), *x)[1](dout))
    for mask in MASKS.values():
        rows, first = [], 0
        for queries, keys in DOCUMENTS:
            row = np.zeros((queries, sum(keys for _, keys in DOCUMENTS)), bool)
            row[:, first : first + keys] = visible(queries, keys, **mask)
            rows.append(row)
            first += keys
        with jax.enable_x64(True):
            q, k, v, dout, sink = (jnp.asarray(x.astype(np.float64)) for x in (*given, finite))
            expected = pull(dout, jnp.asarray(np.concatenate(rows)), q, k, v, sink)
            expected = dict(zip(NAMES[2:], map(np.asarray, expected), strict=True))
        found = run(given, DOCUMENTS, softcap=1.5, sink=finite, **mask)
        compare({name: found[name] for name in NAMES[2:]}, expected, 1e-13)


def test_sums_over_several_blocks_of_rows_are_those_of_each_pair() -> None:
    documents = [(300, 150), (270, 400)]
    given = inputs(documents)
    for mask in (MASKS["causal"], MASKS["left window, top-left"], MASKS["window, bottom-right"]):
        found = run(given, documents, sink=SINK, **mask)
        start = first = 0
        for queries, keys in documents:
            seen = visible(queries, keys, **mask)
            q, k = given[0][start : start + queries, 2], given[1][first : first + keys, 1]
            s = np.where(seen, q @ k.T / math.sqrt(6), -np.inf)
            weights = np.exp(s)
            total = weights.sum(axis=1, keepdims=True) + np.exp(SINK[2].astype(np.float64))
            out = weights / total @ given[2][first : first + keys, 1]
            assert np.abs(found["out"][start : start + queries, 2] - out).max() < 1e-13
            start, first = start + queries, first + keys


@pytest.mark.parametrize("sink", [None, -np.inf, 2.0])
def test_dead_rows(sink) -> None:
    # facts/bug-log B29 (b) and B35: no key by alignment, and none in the document.
    documents = [(5, 2), (2, 0), (0, 3)]
    given = inputs(documents)
    given[3][:3] = np.nan  # what is not seen is not multiplied
    options = {} if sink is None else {"sink": np.full(4, sink, np.float32)}
    found = run(given, documents, **options)
    dead = [0, 1, 2, 5, 6]
    assert (found["out"][dead] == 0).all()
    assert (found["lse"][:, dead] == (-np.inf if sink is None else sink)).all()
    assert (found["dq"][dead] == 0).all()
    assert (found["dk"][2:] == 0).all()
    assert (found["dv"][2:] == 0).all()
    assert all(np.isfinite(x).all() for name, x in found.items() if name != "lse")
    assert np.isfinite(found["lse"][:, 3:5]).all()


def test_uniform_rows_of_unequal_lengths() -> None:
    # facts/bug-log B29 and B33, worked by hand: O is the mean of the visible V.
    zeros = np.zeros((5, 1, 1))
    powers = np.array([1.0, 2, 4, 8, 16]).reshape(5, 1, 1)
    result = float64.forward(zeros[:2], zeros, powers, cu_seqlens=[0, 2], cu_seqlens_k=[0, 5])
    assert np.allclose(result.out[:, 0, 0], [3.75, 6.2], rtol=1e-15)
    assert np.allclose(result.lse[0], np.log([4, 5]), rtol=1e-15)
    top = float64.forward(
        zeros[:2], zeros, powers, cu_seqlens=[0, 2], cu_seqlens_k=[0, 5], alignment="top_left"
    )
    assert np.allclose(top.out[:, 0, 0], [1, 1.5], rtol=1e-15)
    v = np.array([1.0, 3]).reshape(2, 1, 1)
    result = float64.forward(zeros, zeros[:2], v, cu_seqlens=[0, 5], cu_seqlens_k=[0, 2])
    assert np.allclose(result.out[:, 0, 0], [0, 0, 0, 1, 2], rtol=1e-15)
    assert result.lse[0, :3].tolist() == [-np.inf] * 3
    result = float64.forward(zeros, zeros, powers, window=(2, 0))
    assert np.allclose(np.exp(result.lse[0]), [1, 2, 3, 3, 3], rtol=1e-15)


def test_a_sink_is_one_weight() -> None:
    # Three keys of score 0 and a sink of log 2: five equal shares.
    zeros, ones = np.zeros((3, 1, 1)), np.ones((3, 1, 1))
    sink = np.float32([np.log(2)])
    result = float64.forward(zeros, zeros, ones, causal=False, sink=sink)
    assert np.allclose(result.out, 3 / 5, rtol=1e-7)  # the sink is a float32
    assert np.allclose(result.lse, np.log(5), rtol=1e-7)
    found = float64.backward(zeros, zeros, ones, ones, causal=False, sink=sink)
    assert np.allclose(found.dsink, -3 * 2 / 5 * 3 / 5, rtol=1e-7)


WRONG_WINDOWS = {
    "left side of the window off by one": lambda window: (window[0] + 1, window[1]),
    "right side of the window off by one": lambda window: (window[0], window[1] - 1),
    "sides of the window swapped": lambda window: window[::-1],
}


@pytest.mark.parametrize("what", [*WRONG_WINDOWS, "alignment swapped", "document off by one"])
def test_a_wrong_mask_is_seen(what: str, monkeypatch) -> None:
    given, mask, right = (
        inputs(SMALL),
        MASKS["window, bottom-right"] | {"window": (2, 1)},
        Mask.bounds,
    )
    expected = expected_sums(given, mask)

    def wrong(self, document, place):
        if what in WRONG_WINDOWS:
            window = WRONG_WINDOWS[what](self.window)
            self = Mask(self.queries, self.keys, self.causal, window, self.alignment)
        elif what == "alignment swapped":
            self = Mask(self.queries, self.keys, self.causal, self.window, "top_left")
        else:
            place = place + 1
        return right(self, document, place)

    compare(run(given, SMALL, **mask), expected)
    monkeypatch.setattr(Mask, "bounds", wrong)
    with pytest.raises(AssertionError, match="out"):
        compare(run(given, SMALL, **mask), expected)


@pytest.mark.parametrize("what", ["sink twice", "sink of another head", "no slope of the soft cap"])
def test_a_wrong_softmax_is_seen(what: str, monkeypatch) -> None:
    given, extras = inputs(SMALL), EXTRAS["both"]
    expected = expected_sums(given, MASKS["causal"], **extras)
    right_row, right_cap = float64._row, float64.capped

    def row(part, given):
        if what == "sink of another head":
            given.sink = np.roll(SINK.astype(np.float64), 1)
        elif what == "sink twice":
            given.sink = SINK.astype(np.float64) + np.log(2)
        return right_row(part, given)

    def capped(s, softcap):
        found, slope = right_cap(s, softcap)
        return found, np.ones_like(slope) if what == "no slope of the soft cap" else slope

    monkeypatch.setattr(float64, "_row", row)
    monkeypatch.setattr(float64, "capped", capped)
    with pytest.raises(AssertionError, match="out" if "sink" in what else "dq"):
        compare(run(given, SMALL, **MASKS["causal"], **extras), expected)


def test_memory_is_that_of_a_window() -> None:
    tokens = 30_000
    x = np.zeros((tokens, 1, 1))
    tracemalloc.start()
    float64.backward(x, x, x, x, window=(300, 0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (
        peak < 256 * tokens * 8 / 4
    )  # one float64 for each pair of a block of rows would be 61 MB
