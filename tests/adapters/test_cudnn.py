"""The cuDNN adapter against a front end that computes in float64 from the bytes that it is bound."""

import importlib
import itertools

import ml_dtypes
import numpy as np
import pytest

from flamia_ref.adapters.refusal import Refused
from flamia_ref.adapters.whole import operands_of
from tests.adapters import attention64, cases, fake_cudnn

torch = pytest.importorskip("torch")
adapter = importlib.import_module("flamia_ref.adapters.cudnn")


@pytest.fixture(autouse=True)
def session(monkeypatch):
    """The adapter on the CPU, with the fake front end."""

    def made(kernel, **_):
        one = object.__new__(adapter.Session)
        one.kernel, one.torch, one.cudnn = kernel, torch, fake_cudnn.module
        one.device, one.handle, one.built = torch.device("cpu"), None, {}
        return one

    monkeypatch.setattr(adapter, "_session", made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.parametrize("name", [x for x in cases.MASKS if x != "bottom-right"])
def test_bf16(name):
    inputs, dout, keywords = cases.made(name)
    results = adapter.bf16(*inputs, dout=dout, **keywords)
    assert results["out"].dtype == ml_dtypes.bfloat16
    cases.assert_near(results, cases.exact(name, inputs, dout))


@pytest.mark.parametrize("name", ["causal", "top-left"])
def test_fp8_scales_come_off_again(name):
    """E4M3 keeps 4 bits: results are off by a tenth, and by a factor where a scale is forgotten."""
    inputs, dout, keywords = cases.made(name)
    # Three powers of two apart, so that a scale on the wrong tensor is seen.
    inputs = tuple(
        (x.astype(np.float32) * s).astype(x.dtype) for x, s in zip(inputs, (1, 2, 8), strict=True)
    )
    results = adapter.fp8(*inputs, dout=dout, **keywords)
    for key, values in cases.exact(name, inputs, dout).items():
        finite = np.isfinite(values)
        error = results[key].astype(np.float64)[finite] - values[finite]
        assert np.linalg.norm(error) < 0.12 * np.linalg.norm(values[finite]), key


OFFSETS = (0, 37, 37, 200)
USES = ("q.s", "k.s", "v.o", "q.dk", "k.dq", "v.dp", "do.dp", "do.dv")


@pytest.fixture(scope="module")
def pack():
    """Operands of the recipe with two planes of channels, several heads and documents, scales far apart."""
    rng = np.random.default_rng(1)
    q, k, v, dout = (
        (rng.standard_normal((200, h, 192)) * np.exp2(rng.integers(-4, 4, (200, h, 192)))).astype(
            ml_dtypes.bfloat16
        )
        for h in (4, 2, 2, 4)
    )
    return operands_of(q, k, v, "cudnn-mxfp8", cu_seqlens=OFFSETS, dout=dout)


def values(pack, use, document):
    """The values of an operand, from the scales before they are tiled."""
    rows = slice(*OFFSETS[document : document + 2])
    codes = pack[f"{use}.codes"].view(ml_dtypes.float8_e4m3fn).astype(np.float64)[rows]
    scales = np.exp2(pack[f"{use}.scales"].astype(np.float64) - 127)
    if scales.shape[0] == 200:
        return codes * scales[rows].repeat(32, 2)
    first = sum(-(-(b - a) // 32) for a, b in itertools.pairwise(OFFSETS[: document + 1]))
    return codes * scales[first : first + -(-len(codes) // 32)].repeat(32, 0)[: len(codes)]


SETTINGS = {"cu_seqlens": np.int32(OFFSETS), "causal": True, "softmax_scale": 0.001}


def test_mxfp8_forward_reads_the_bytes_of_the_pack(pack):
    results = adapter.mxfp8.forward(pack, **SETTINGS)
    for document in (0, 2):
        rows = slice(*OFFSETS[document : document + 2])
        one = {use: values(pack, use, document) for use in USES}
        count = len(one["q.s"])
        pairs = attention64.visible(count, count, causal=True)
        out, lse = attention64.forward(one["q.s"], one["k.s"], one["v.o"], pairs, 0.001)
        assert np.array_equal(
            results["out"][rows], out.astype(np.float32).astype(ml_dtypes.bfloat16)
        )
        assert np.array_equal(results["lse"][:, rows], lse.astype(np.float32))


def test_mxfp8_backward_reads_the_bytes_of_the_pack(pack):
    out = adapter.mxfp8.forward(pack, **SETTINGS)
    found = adapter.mxfp8.backward(pack, **SETTINGS, **out, dout=pack["dout"])
    for document in (0, 2):
        rows = slice(*OFFSETS[document : document + 2])
        one = {use: values(pack, use, document) for use in USES}
        count = len(one["q.s"])
        pairs = attention64.visible(count, count, causal=True)
        half = out["out"][rows].astype(np.float64) * pack["dout"][rows].astype(np.float64)
        lse = out["lse"][:, rows].astype(np.float64)
        expected = attention64.backward(one, pairs, 0.001, lse, half.sum(2).T)
        for name, gradient in zip(("dq", "dk", "dv"), expected, strict=True):
            rounded = gradient.astype(np.float32).astype(ml_dtypes.bfloat16)
            assert np.array_equal(found[name][rows], rounded), name


def test_whole_is_both_stages_after_our_quantizer(pack):
    q, k, v, dout = (pack[name] for name in ("q", "k", "v", "dout"))
    whole = adapter.mxfp8_whole(q, k, v, dout=dout, **SETTINGS)
    forward = adapter.mxfp8.forward(pack, **SETTINGS)
    backward = adapter.mxfp8.backward(pack, **SETTINGS, **forward, dout=dout)
    for name, expected in {**forward, **backward}.items():
        assert np.array_equal(whole[name], expected), name


def test_a_recipe_without_the_operand_is_refused(pack):
    folded = {name: x for name, x in pack.items() if not name.startswith("v.o.")}
    with pytest.raises(Refused) as refused:
        adapter.mxfp8.forward(folded, **SETTINGS)
    assert refused.value.note == (
        "takes v in MXFP8 with scales along tokens in the product o, which the recipe has not"
    )


def test_a_graph_without_a_kernel_is_refused(pack, monkeypatch):
    monkeypatch.setattr(fake_cudnn.pygraph, "unsupported", "no engine for head_dim 192")
    with pytest.raises(Refused, match="is not supported by cuDNN here: no engine for head_dim 192"):
        adapter.mxfp8.forward(pack, **SETTINGS)
