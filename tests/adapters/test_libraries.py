"""FlashAttention-4, FlashInfer, Transformer Engine and SageAttention3 behind stand-ins that compute in float64.

A stand-in has the published name and the recorded parameters of what it stands for, and takes what it is given at its
word: offsets, layouts, payloads. So a document, a head, a scale or an argument in the wrong place gives wrong results.
"""

import inspect
import itertools
import json
import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from flamia_ref.adapters import flash_attention_4, flashinfer, sage_attention_3, transformer_engine
from flamia_ref.adapters.refusal import Refused
from flamia_ref.adapters.whole import operands_of
from tests.adapters import attention64, cases, signatures

torch = pytest.importorskip("torch")
RECORDED = json.loads(signatures.FILE.read_text())
MODULES = (flash_attention_4, flashinfer, sage_attention_3, transformer_engine)


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    """Every device is the CPU."""
    for module in MODULES:
        monkeypatch.setattr(module, "cuda", lambda *_, **__: torch.device("cpu"))


@pytest.fixture
def install(monkeypatch):
    """Put modules in the place of libraries."""

    def made(**modules):
        for name, contents in modules.items():
            module = ModuleType(name.replace("__", "."))
            vars(module).update(contents)
            monkeypatch.setitem(sys.modules, module.__name__, module)
            # A package must be there before its modules.
            parent = module.__name__.rpartition(".")[0]
            while parent:
                if parent not in sys.modules:
                    monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
                parent = parent.rpartition(".")[0]

    return made


def named(package, function, implementation):
    """A function with the recorded parameters that hands what it is given on, by name."""
    parameters, kind = [], inspect.Parameter.POSITIONAL_OR_KEYWORD
    for name in RECORDED[package]["functions"][function]:
        if name == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
        elif name != "**":
            parameters.append(inspect.Parameter(name, kind, default=None))
    signature = inspect.Signature(parameters)
    return lambda *args, **keywords: implementation(**signature.bind(*args, **keywords).arguments)


def host(x):
    return x.detach().double().numpy()


class Attention(torch.autograd.Function):
    """Packed attention in float64 whose backward is float64's."""

    @staticmethod
    def forward(ctx, q, k, v, offsets, offsets_k, scale, mask):
        ctx.case = (offsets, offsets_k, scale, mask)
        ctx.save_for_backward(q, k, v)
        found = attention64.packed(
            host(q), host(k), host(v), np.zeros(q.shape), offsets, offsets_k, scale, **mask
        )
        lse = torch.tensor(found["lse"], dtype=torch.float32)
        ctx.mark_non_differentiable(lse)
        return torch.tensor(found["out"]).to(torch.bfloat16), lse

    @staticmethod
    def backward(ctx, gradient, _):
        offsets, offsets_k, scale, mask = ctx.case
        q, k, v = map(host, ctx.saved_tensors)
        found = attention64.packed(q, k, v, host(gradient), offsets, offsets_k, scale, **mask)
        gradients = (torch.tensor(found[name]).to(torch.bfloat16) for name in ("dq", "dk", "dv"))
        return (*gradients, None, None, None, None)


def lengths_agree(offsets, longest):
    return longest == max(b - a for a, b in itertools.pairwise(offsets))


@pytest.mark.parametrize("name", ["causal", "full", "window", "band", "no-keys"])
def test_flash_attention_4(name, install):
    def run(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_size, **more):
        assert more["return_lse"]
        assert more["deterministic"]
        assert more["softcap"] == 0.0
        offsets, offsets_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        assert lengths_agree(offsets, more["max_seqlen_q"])
        assert lengths_agree(offsets_k, more["max_seqlen_k"])
        mask = {"causal": causal, "window": window_size}
        return Attention.apply(q, k, v, offsets, offsets_k, softmax_scale, mask)

    function = named("flash-attn-4", "flash_attn_varlen_func", run)
    install(flash_attn__cute={"flash_attn_varlen_func": function})
    inputs, dout, keywords = cases.made(name)
    results = flash_attention_4.bf16(*inputs, dout=dout, **keywords)
    cases.assert_near(results, cases.exact(name, inputs, dout))


def test_flash_attention_4_in_fp8(install):
    """Descales are [documents, kv_heads]; each document and head is scaled apart by powers of two."""

    def run(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, **more):
        assert q.dtype == torch.float8_e4m3fn
        group = q.shape[1] // k.shape[1]
        values = []
        for x, offsets, name, repeat in (
            (q, cu_seqlens_q, "q_descale", group),
            (k, cu_seqlens_k, "k_descale", 1),
            (v, cu_seqlens_k, "v_descale", 1),
        ):
            scales = host(more[name]).repeat(np.diff(offsets.tolist()), 0).repeat(repeat, 1)
            values.append(torch.tensor(host(x.float()) * scales[:, :, None]))
        offsets = (cu_seqlens_q.tolist(), cu_seqlens_k.tolist())
        return (
            *Attention.apply(*values, *offsets, softmax_scale, {"causal": causal}),
            None,
            None,
            None,
        )

    function = named("flash-attn-4", "_flash_attn_fwd", run)
    install(flash_attn__cute__interface={"_flash_attn_fwd": function})
    inputs, dout, keywords = cases.made("causal")
    apart = 2.0 ** np.arange(4).reshape(1, 4, 1)
    inputs = [(x.astype(np.float64) * apart[:, : x.shape[1]]).astype(x.dtype) for x in inputs]
    results = flash_attention_4.fp8(*inputs, **keywords)
    expected = cases.exact("causal", inputs, dout)
    error = results["out"].astype(np.float64) - expected["out"]
    assert np.linalg.norm(error) < 0.12 * np.linalg.norm(expected["out"])


@pytest.mark.parametrize("name", ["causal", "full", "window", "bottom-right", "no-keys"])
def test_flashinfer(name, install):
    class Wrapper:
        def __init__(self, *args, **keywords):
            named("flashinfer-python", "BatchPrefillWithRaggedKVCacheWrapper.__init__", dict)(
                *args, **keywords
            )

        def plan(self, **keywords):
            plan = "BatchPrefillWithRaggedKVCacheWrapper.plan"
            self.given = SimpleNamespace(**named("flashinfer-python", plan, dict)(**keywords))

        def run(self, q, k, v, *, return_lse, lse_base, lse_layout):
            assert (return_lse, lse_base, lse_layout) == (True, "ln", "HN")
            one = self.given
            assert (one.num_qo_heads, one.num_kv_heads) == (q.shape[1], k.shape[1])
            left = None if one.window_left < 0 else one.window_left
            mask = {"causal": one.causal, "window": (left, None)}
            offsets = (one.qo_indptr.tolist(), one.kv_indptr.tolist())
            return Attention.apply(q, k, v, *offsets, one.sm_scale, mask)

    install(flashinfer__prefill={"BatchPrefillWithRaggedKVCacheWrapper": Wrapper})
    inputs, dout, keywords = cases.made(name)
    results = flashinfer.bf16(*inputs, **keywords)
    expected = cases.exact(name, inputs, dout)
    cases.assert_near(results, {x: expected[x] for x in ("out", "lse")})


class Backend(IntEnum):
    F16_arbitrary_seqlen = 1
    FP8 = 2


class Fused:
    """`fused_attn_fwd` and `fused_attn_bwd` of Transformer Engine."""

    def __init__(self, packed):
        self.packed = packed  # whether stats are [tokens, heads, 1], as newer cuDNNs have it
        self.FusedAttnBackend = Backend
        package = "transformer_engine"
        self.fused_attn_fwd = named(package, "fused_attn_fwd", self.forward)
        self.fused_attn_bwd = named(package, "fused_attn_bwd", self.backward)

    @staticmethod
    def mask(kind, queries, keys):
        assert kind.startswith("padding") or queries == keys
        return {"causal": "causal" in kind}

    def forward(self, q, k, v, cu_seqlens_q, cu_seqlens_kv, attn_scale, attn_mask_type, **more):
        assert more["is_training"]
        assert more["qkv_layout"] == "thd_thd_thd"
        assert more["fused_attention_backend"] is Backend.F16_arbitrary_seqlen
        offsets = (cu_seqlens_q.tolist(), cu_seqlens_kv.tolist())
        assert lengths_agree(offsets[0], more["max_seqlen_q"])
        mask = self.mask(attn_mask_type, *offsets)
        out, lse = Attention.apply(q, k, v, *offsets, attn_scale, mask)
        stats = lse.T[:, :, None]
        if not self.packed:
            stats = torch.full(
                (len(offsets[0]) - 1, q.shape[1], more["max_seqlen_q"], 1), torch.nan
            )
            for n, (a, b) in enumerate(zip(offsets[0], offsets[0][1:], strict=False)):
                stats[n, :, : b - a, 0] = lse[:, a:b]
        return out, [stats, torch.zeros(2)]

    def backward(
        self, q, k, v, o, d_o, cu_seqlens_q, cu_seqlens_kv, attn_scale, attn_mask_type, **more
    ):
        assert more["aux_ctx_tensors"][0].ndim == (3 if self.packed else 4)
        offsets = (cu_seqlens_q.tolist(), cu_seqlens_kv.tolist())
        mask = self.mask(attn_mask_type, *offsets)
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out, _ = Attention.apply(*inputs, *offsets, attn_scale, mask)
        return *torch.autograd.grad(out, inputs, d_o), None


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["causal", "full", "no-keys"])
def test_transformer_engine(name, packed, install):
    install(transformer_engine__pytorch__cpp_extensions__fused_attn=vars(Fused(packed)))
    inputs, dout, keywords = cases.made(name)
    results = transformer_engine.bf16(*inputs, dout=dout, **keywords)
    cases.assert_near(results, cases.exact(name, inputs, dout))


def test_transformer_engine_is_given_the_bytes_of_the_pack(install):
    """Payloads [1, rows, heads, channels]; scales filled up to 4 blocks of channels, or 128 channels, planes first."""
    seen = {}

    def forward(q, k, v, **more):
        seen.update(q=q, k=k, v=v, more=more)
        return torch.zeros(1, 128, 4, 192, dtype=torch.bfloat16), [torch.zeros(1, 4, 128, 1)]

    fused = {
        "FusedAttnBackend": Backend,
        "fused_attn_fwd": named("transformer_engine", "fused_attn_fwd", forward),
    }
    tensors = {
        "MXFP8Quantizer": lambda *_, **__: None,
        "MXFP8Tensor": lambda **given: SimpleNamespace(**given),
    }
    install(
        transformer_engine__pytorch__cpp_extensions__fused_attn=fused,
        transformer_engine__pytorch__tensor__mxfp8_tensor=tensors,
        transformer_engine__pytorch__constants={"DType": SimpleNamespace(kFloat8E4M3=7)},
    )
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((128, h, 192)).astype(ml_dtypes.bfloat16) for h in (4, 2, 2))
    pack = operands_of(q, k, v, "cudnn-mxfp8", cu_seqlens=[0, 128])
    settings = {"cu_seqlens": np.int32([0, 128]), "causal": True, "softmax_scale": 0.1}
    transformer_engine.mxfp8.forward(pack, **settings)
    assert np.array_equal(seen["q"].rowwise_data.numpy()[0], pack["q.s.codes"])
    assert seen["q"].rowwise_scale_inv.shape == (4 * 128, 8)
    assert np.array_equal(
        seen["q"].rowwise_scale_inv.numpy().ravel(), pack["q.s.scales.tiled"][0].ravel()
    )
    assert seen["v"].rowwise_data is None
    assert seen["v"].columnwise_scale_inv.shape == (2 * 4, 256)
    planes = pack["v.o.scales.tiled_transposed"][0].transpose(1, 0, 2, 3)  # channels, heads
    assert np.array_equal(seen["v"].columnwise_scale_inv.numpy().ravel(), planes.ravel())
    assert seen["v"].with_gemm_swizzled_scales
    assert seen["more"]["qkv_scale_inv_format"] == "bhsd"
    with pytest.raises(Refused, match="multiples of 128"):
        transformer_engine.mxfp8.forward(
            pack, **{**settings, "cu_seqlens": np.int32([0, 100, 128])}
        )


def test_sage_attention_3(install):
    def run(q, k, v, is_causal):
        out, _ = Attention.apply(
            *(x[0].transpose(0, 1) for x in (q, k, v)),
            [0, q.shape[2]],
            [0, k.shape[2]],
            q.shape[3] ** -0.5,
            {"causal": is_causal},
        )
        return out.transpose(0, 1)[None]

    install(sageattn3={"sageattn3_blackwell": run})
    inputs, dout, keywords = cases.made("causal")
    results = sage_attention_3.nvfp4(*inputs, **keywords)
    cases.assert_near(results, {"out": cases.exact("causal", inputs, dout)["out"]})
    with pytest.raises(Refused, match="takes no softmax_scale but"):
        sage_attention_3.nvfp4(*inputs, **{**keywords, "softmax_scale": 0.1})


def test_a_top_left_mask_is_refused_where_the_library_has_none(install):
    install(
        flash_attn__cute={},
        flashinfer__prefill={},
        transformer_engine__pytorch__cpp_extensions__fused_attn={},
    )
    inputs, _, keywords = cases.made("top-left")
    for kernel in (flash_attention_4.bf16, flashinfer.bf16, transformer_engine.bf16):
        with pytest.raises(Refused) as refused:
            kernel(*inputs, **keywords)
        assert refused.value.note.endswith("mask at the bottom right, the case at the top left")
