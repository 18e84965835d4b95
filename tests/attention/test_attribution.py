"""What each quantizer adds, against attention written out on whole matrices with the quantizers put in by hand.

The quantizers themselves are those of `flamia_ref.formats`, which its own tests hold to other libraries. One document
of one tile and one head, so that every base is the maximum of its row.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from flamia_ref import attention
from flamia_ref.attention import RECIPES, attribution, float64, inputs, samples
from flamia_ref.attention.product import Use
from flamia_ref.formats import dequantize, quantize
from flamia_ref.packing import Documents, Mask

TOKENS, CHANNELS, BLOCK = 70, 64, 32
SCALE, LOG2_E = CHANNELS**-0.5, math.log2(math.e)
PLACE = np.arange(TOKENS)
SEEN = PLACE[:, None] >= PLACE
RESULTS = ("out", "dq", "dk", "dv")


def mx(block, name="te-mx-e4m3"):
    return lambda x: dequantize(quantize(np.float32(x), name, block=block), np.float64)


def scales(x):
    """The exponents of the scales of whole tokens."""
    return quantize(np.float32(x), "te-mx-e4m3", block=(1, "all")).scales.astype(np.int64) - 127


def element(bits, smallest, largest):
    """Rounding to a number of significant bits, ties to even, down to a smallest exponent, cut at the largest."""

    def rounded(x):
        x = np.float64(np.float32(x))
        step = np.exp2(np.maximum(np.frexp(x)[1] - 1, smallest) - (bits - 1))
        return np.clip(np.round(x / step) * step, -largest, largest)

    return rounded


e4m3, bf16 = element(4, -6, 448), element(8, -126, np.inf)


def guarded():
    """Blocks of 32 by 32 with a visible and a masked pair, keys past the end masked."""
    size = -(-TOKENS // BLOCK) * BLOCK
    place = np.arange(size)
    seen = (place[:, None] >= place) & (place < TOKENS)
    seen[TOKENS:] = seen[TOKENS - 1]  # queries past the end do not count
    cut = np.zeros((size, size), dtype=bool)
    for i in range(0, size, BLOCK):
        for j in range(0, size, BLOCK):
            block = seen[i : i + BLOCK, j : j + BLOCK]
            cut[i : i + BLOCK, j : j + BLOCK] = block.any() and not block.all()
    return cut[:TOKENS, :TOKENS]


@dataclass
class Written:
    """q, k, v, dout [tokens, channels], and `on`, the uses whose quantizers are on."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    on: frozenset

    def take(self, use, x, quantizer):
        return quantizer(x) if use in self.on else x


def softmax(s, ceiling, offset):
    """P relative to the base, times 2^offset; the base and lse in log2 units."""
    t = np.where(SEEN, s * SCALE * LOG2_E, -np.inf)
    base = (np.ceil(t) if ceiling else t).max(axis=1, keepdims=True)
    p = np.exp2(t - base + offset)
    return t, p, base - offset + np.log2(p.sum(axis=1, keepdims=True))


def cudnn(x):
    rows, columns = mx((1, 32)), mx((32, 1))
    s = x.take("s.q", x.q, rows) @ x.take("s.k", x.k, rows).T
    t, p, lse = softmax(s, False, 4)
    out = x.take("o.p", p, e4m3) @ x.take("o.v", x.v, columns) / p.sum(axis=1, keepdims=True)
    p = np.exp2(t - lse)
    dp = x.take("dp.do", x.dout, rows) @ x.take("dp.v", x.v, rows).T
    ds = p * (dp - (x.dout * out).sum(axis=1, keepdims=True))
    left = x.take("dv.p", 256 * p, e4m3) / 256
    dv = left.T @ x.take("dv.do", x.dout, columns)
    by_keys, by_queries = mx((1, 32), "cudnn-mx-e4m3"), mx((32, 1), "cudnn-mx-e4m3")
    dq = SCALE * x.take("dq.ds", ds, by_keys) @ x.take("dq.k", x.k, columns)
    dk = SCALE * x.take("dk.ds", ds, by_queries).T @ x.take("dk.q", x.q, columns)
    return out, dq, dk, dv


def folded(x):
    token, by_keys, by_queries = mx((1, "all")), mx((1, 32)), mx((32, 1))
    s = x.take("s.q", x.q, token) @ x.take("s.k", x.k, token).T
    t, p, lse = softmax(s, True, 0)
    of_v = scales(x.v).T
    weights = x.take("o.p", np.ldexp(p, of_v), by_keys)
    out = weights @ np.ldexp(x.take("o.v", x.v, token), -of_v.T) / p.sum(axis=1, keepdims=True)
    base = np.floor(lse)
    dout = x.dout * np.exp2(base - lse)
    p = np.exp2(t - base)
    dp = x.take("dp.do", dout, token) @ x.take("dp.v", x.v, token).T
    ds = p * (dp - (dout * out).sum(axis=1, keepdims=True))
    of_do, of_k, of_q = scales(dout), scales(x.k), scales(x.q)
    left = x.take("dv.p", np.ldexp(p, of_do), by_queries)
    dv = left.T @ np.ldexp(x.take("dv.do", dout, token), -of_do)
    left = x.take("dq.ds", np.ldexp(ds, of_k.T), by_keys)
    dq = SCALE * left @ np.ldexp(x.take("dq.k", x.k, token), -of_k)
    left = x.take("dk.ds", np.ldexp(ds, of_q), by_queries)
    dk = SCALE * left.T @ np.ldexp(x.take("dk.q", x.q, token), -of_q)
    return out, dq, dk, dv


def with_guards(x):
    token, square, by_keys, by_queries = mx((1, "all")), mx((32, 32)), mx((1, 32)), mx((32, 1))
    cut = guarded()
    s = x.take("s.q", x.q, token) @ x.take("s.k", x.k, square).T
    t, p, lse = softmax(np.where(cut, x.q @ x.k.T, s), True, 8)
    outer = x.take("o.p", np.where(cut, 0, p), e4m3) @ x.take("o.v", x.v, square)
    inner = x.take("o.p", np.where(cut, p, 0), bf16) @ x.v
    out = (outer + inner) / p.sum(axis=1, keepdims=True)
    base = np.floor(lse)
    dout = x.dout * np.exp2(base - lse)
    p = np.exp2(t - base)
    dp = x.take("dp.do", dout, token) @ x.take("dp.v", x.v, square).T
    dp = np.where(cut, x.take("dp.do", dout, bf16) @ x.v.T, dp)
    ds = p * (dp - (dout * out).sum(axis=1, keepdims=True))
    of_do, of_q = scales(dout), scales(x.q)
    left = x.take("dv.p", np.ldexp(p, of_do), by_queries)
    dv = left.T @ np.ldexp(x.take("dv.do", dout, token), -of_do)
    outer = x.take("dq.ds", np.where(cut, 0, ds), by_keys) @ x.take("dq.k", x.k, square)
    inner = x.take("dq.ds", np.where(cut, ds, 0), bf16) @ x.k
    left = x.take("dk.ds", np.ldexp(ds, of_q), by_queries)
    dk = SCALE * left.T @ np.ldexp(x.take("dk.q", x.q, token), -of_q)
    return out, SCALE * (outer + inner), dk, dv


WRITTEN = {"cudnn-mxfp8": cudnn, "flamia-mxfp8-folded": folded, "flamia-mxfp8": with_guards}
EVERY = frozenset(Use)
SETS = [
    frozenset(),
    EVERY,
    *(frozenset({use}) for use in Use),
    *(EVERY - {use} for use in Use),
]


@pytest.fixture(scope="module")
def arrays():
    """q, k, v, dout [tokens, channels] in float64, exact in bfloat16."""
    sample = samples.bell((TOKENS,), 1, 1, CHANNELS)
    return [x[:, 0].astype(np.float64) for x in (sample.q, sample.k, sample.v, sample.dout)]


def modelled(arrays, name, on):
    shape = inputs.Shape(Mask(Documents((0, TOKENS)), Documents((0, TOKENS))), SCALE, None)
    wide = tuple(x[:, None] for x in arrays)
    found = attribution.modelled(wide, RECIPES[name], shape, None, on)
    return {result: x[:, 0] for result, x in found.items()}


def exact(arrays):
    wide = [x[:, None] for x in arrays]
    found = float64.backward(*wide)._asdict() | {"out": float64.forward(*wide[:3]).out}
    return {result: found[result][:, 0] for result in RESULTS}


@pytest.mark.parametrize(
    "name",
    ["flamia-mxfp8-folded", "flamia-mxfp8", pytest.param("cudnn-mxfp8", marks=pytest.mark.nightly)],
)
def test_the_model_with_any_quantizers_is_the_one_written_out(arrays, name):
    wanted = exact(arrays)
    for on in SETS:
        found = modelled(arrays, name, on)
        for result, written in zip(RESULTS, WRITTEN[name](Written(*arrays, on)), strict=True):
            size = np.linalg.norm(wanted[result])
            assert np.linalg.norm(found[result] - written) < 1e-9 * size, (result, sorted(on))
            if not on:
                assert np.linalg.norm(found[result] - wanted[result]) < 1e-12 * size


def test_every_use_matters_where_it_can(arrays):
    """A quantizer of the forward reaches O and all gradients but dV's, which only S reaches; one of the backward the
    gradients of its product."""
    reached = {
        "s": {"out", "dq", "dk", "dv"},
        "o": {"out", "dq", "dk"},
        "dp": {"dq", "dk"},
        "dv": {"dv"},
        "dq": {"dq"},
        "dk": {"dk"},
    }
    none = modelled(arrays, "cudnn-mxfp8", frozenset())
    for use in Use:
        found = modelled(arrays, "cudnn-mxfp8", frozenset({use}))
        differ = {x for x in RESULTS if np.abs(found[x] - none[x]).max() > 1e-6}
        assert differ == reached[use.split(".")[0]], use


@pytest.mark.parametrize(
    "name", ["cudnn-mxfp8", pytest.param("flamia-mxfp8", marks=pytest.mark.nightly)]
)
def test_the_figures(arrays, name):
    narrow = [x[:, None].astype(np.float32) for x in arrays]
    found = attention.error(*narrow[:3], name, dout=narrow[3], attribution=True)
    told, wanted, whole = found.attribution, exact(arrays), WRITTEN[name](Written(*arrays, EVERY))
    forward = attention.forward(*narrow[:3], name)
    simulated = attention.backward(*narrow, forward)
    assert told.uses == tuple(map(str, Use))
    assert told.results == RESULTS
    for at, result in enumerate(RESULTS):
        reference, size = wanted[result], np.linalg.norm(wanted[result])
        for use in Use:
            alone = WRITTEN[name](Written(*arrays, frozenset({use})))[at] - reference
            others = WRITTEN[name](Written(*arrays, EVERY - {use}))[at] - reference
            assert told.only[result][use] == pytest.approx(np.linalg.norm(alone) / size, abs=1e-9)
            assert told.without[result][use] == pytest.approx(
                np.linalg.norm(others) / size, abs=1e-9
            )
            slope = (alone * reference).sum() / size**2
            assert told.slope[result][use] == pytest.approx(slope, abs=1e-9)
        real = forward.out if result == "out" else getattr(simulated, result)
        rest = np.linalg.norm(real[:, 0] - whole[at]) / size
        assert told.arithmetic[result] == pytest.approx(rest, abs=1e-9)
        assert told.quantizers[result] == pytest.approx(
            np.linalg.norm(whole[at] - reference) / size, abs=1e-9
        )
        assert told.total[result] == pytest.approx(found.relative_l2[result], rel=1e-9)
    text = str(found)
    assert "dk.q" in text
    assert found.attribution.to_dict()["only"]["out"]["s.q"] == told.only["out"]["s.q"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "flamia-nvfp4-fp8" else pytest.mark.nightly)
        for name in RECIPES
    ],
)
def test_the_simulator_is_the_model_but_for_its_arithmetic(name):
    """The rounding of results is 0.0017 of them, that of the O of delta more. Where P is in FP4, a row sum in bfloat16
    moves some of it to other codes in dV. Quantizers add ten times as much."""
    sample = samples.bell((150, 1, 45), 2, 1, 64)
    offsets = np.array(sample.documents.offsets, dtype=np.int32)
    narrow = (sample.q, sample.k, sample.v)
    found = attention.error(*narrow, name, dout=sample.dout, cu_seqlens=offsets)
    shape = inputs.Shape(Mask(sample.documents, sample.documents), SCALE, None)
    wide = (x.astype(np.float64) for x in narrow)
    dout = sample.dout.astype(np.float64) if RECIPES[name].has_backward else None
    model = attribution.modelled((*wide, dout), RECIPES[name], shape, None, EVERY)
    ahead = attention.forward(*narrow, name, cu_seqlens=offsets)
    real = {"out": ahead.out}
    if dout is not None:
        back = attention.backward(*narrow, sample.dout, ahead)
        real |= {result: getattr(back, result) for result in ("dq", "dk", "dv")}
    assert set(real) == set(model) == set(found.results) - {"lse"}
    for result, x in model.items():
        rest = np.linalg.norm(real[result] - x) / np.linalg.norm(x)
        assert rest < (0.01 if result == "out" else 0.03), result
