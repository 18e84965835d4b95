"""PyTorch's attention behind the kernel protocol, on the GPU if there is one, else on the CPU. Gradients by autograd.

`scaled_dot_product_attention` chooses a backend by itself, or takes the one that is forced on it. It does not return
lse; where its backend is known, a second call of the same kernel does.
"""

import inspect
import math

import numpy as np

from examples.leakage.packed import documents, needed, visible


def torch_sdpa(q, k, v, *, cu_seqlens, causal, softmax_scale, dout=None):
    """`scaled_dot_product_attention`, a call a document, with the backend that torch chooses."""
    return _each_document(q, k, v, dout, cu_seqlens, causal, softmax_scale, backend=None)


def torch_sdpa_math(q, k, v, *, cu_seqlens, causal, softmax_scale, dout=None):
    """The same with the backend MATH: matmuls and a softmax."""
    return _each_document(q, k, v, dout, cu_seqlens, causal, softmax_scale, backend="MATH")


def torch_sdpa_flash(q, k, v, *, cu_seqlens, causal, softmax_scale, dout=None):
    """The same with FLASH_ATTENTION. On a GPU its backward adds dq by atomics."""
    return _each_document(
        q, k, v, dout, cu_seqlens, causal, softmax_scale, backend="FLASH_ATTENTION"
    )


def torch_sdpa_efficient(q, k, v, *, cu_seqlens, causal, softmax_scale, dout=None):
    """The same with EFFICIENT_ATTENTION, on a GPU."""
    return _each_document(
        q, k, v, dout, cu_seqlens, causal, softmax_scale, backend="EFFICIENT_ATTENTION"
    )


def torch_sdpa_cudnn(q, k, v, *, cu_seqlens, causal, softmax_scale, dout=None):
    """The same with CUDNN_ATTENTION, on a GPU."""
    return _each_document(
        q, k, v, dout, cu_seqlens, causal, softmax_scale, backend="CUDNN_ATTENTION"
    )


def torch_sdpa_masked(q, k, v, *, cu_seqlens, causal, softmax_scale, dout=None):
    """`scaled_dot_product_attention` once for the whole pack: documents and causality by a boolean mask."""
    torch = needed("torch")
    device = _device()
    mask = torch.from_numpy(visible(cu_seqlens, causal)).to(device)
    q, k, v = _inputs(q, k, v, dout)
    group = q.shape[1] // k.shape[1]
    heads = (x.transpose(0, 1)[None] for x in (q, *(_repeated(x, group) for x in (k, v))))
    out = torch.nn.functional.scaled_dot_product_attention(
        *heads, attn_mask=mask, scale=softmax_scale
    )
    return _results(out[0].transpose(0, 1), None, (q, k, v), dout)


def torch_varlen(q, k, v, *, cu_seqlens, causal, softmax_scale, dout=None):
    """`torch.nn.attention.varlen.varlen_attn`, flash attention of packed documents by cu_seqlens, on a GPU."""
    torch = needed("torch")
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    if not torch.cuda.is_available():
        raise RuntimeError("torch_varlen needs a GPU, and torch finds none")
    q, k, v = _inputs(q, k, v, dout)
    offsets = torch.from_numpy(np.array(cu_seqlens, dtype=np.int32)).cuda()
    longest = int(np.diff(cu_seqlens).max())
    group = q.shape[1] // k.shape[1]
    # Older releases of torch have is_causal, and no scale but that of the channels.
    known = inspect.signature(varlen_attn).parameters
    window = {"window_size": (-1, 0) if causal else (-1, -1)}
    keywords = window if "window_size" in known else {"is_causal": causal}
    if "scale" in known:
        keywords["scale"] = softmax_scale
    elif not math.isclose(softmax_scale, q.shape[-1] ** -0.5):
        raise ValueError(f"varlen_attn of torch {torch.__version__} takes no softmax_scale")
    out, lse = varlen_attn(
        q,
        *(_repeated(x, group) for x in (k, v)),
        *(offsets, offsets, longest, longest),
        return_aux=AuxRequest(lse=True),
        **keywords,
    )
    return _results(out, lse, (q, k, v), dout)


def on_device(x):
    """A numpy bfloat16 array as a torch tensor on the device."""
    torch = needed("torch")
    bits = np.ascontiguousarray(x).view(np.int16)
    return torch.from_numpy(bits.copy()).view(torch.bfloat16).to(_device())


def to_host(x):
    """A bfloat16 tensor as its bits, uint16; a float32 one as it is."""
    torch = needed("torch")
    x = x.detach().contiguous().cpu()
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()


def _device():
    torch = needed("torch")
    return "cuda" if torch.cuda.is_available() else "cpu"


def _inputs(q, k, v, dout):
    return [on_device(x).requires_grad_(dout is not None) for x in (q, k, v)]


def _repeated(x, group):
    """Key/value heads once for each query head; autograd adds the gradients of a group."""
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _each_document(q, k, v, dout, cu_seqlens, causal, scale, *, backend):
    torch = needed("torch")
    q, k, v = _inputs(q, k, v, dout)
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for start, end in documents(cu_seqlens):
        own = [x[start:end] for x in (q, k, v)]
        own = [own[0], *(_repeated(x, group) for x in own[1:])]
        heads = [x.transpose(0, 1)[None] for x in own]  # [1, heads, tokens, channels]
        with _forced(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                *heads, is_causal=causal, scale=scale
            )
        outs.append(out[0].transpose(0, 1))
        lse = _lse([x.detach() for x in heads], causal, scale, backend)
        if lse is not None:
            lses.append(lse.reshape(len(heads[0][0]), -1)[:, : end - start])
    lse = torch.cat(lses, dim=1) if lses else None
    return _results(torch.cat(outs), lse, (q, k, v), dout)


def _forced(backend):
    import contextlib

    from torch.nn.attention import SDPBackend, sdpa_kernel

    return (
        contextlib.nullcontext() if backend is None else sdpa_kernel(getattr(SDPBackend, backend))
    )


def _lse(heads, causal, scale, backend):
    """lse of a backend by its own operator, None where it gives none."""
    operators = needed("torch").ops.aten
    if backend == "FLASH_ATTENTION":
        if heads[0].is_cuda:
            flash = operators._scaled_dot_product_flash_attention
        else:
            flash = operators._scaled_dot_product_flash_attention_for_cpu
        return flash(*heads, 0.0, causal, scale=scale)[1]
    if backend == "EFFICIENT_ATTENTION":
        efficient = operators._scaled_dot_product_efficient_attention
        return efficient(*heads, None, True, 0.0, causal, scale=scale)[1]
    if backend == "CUDNN_ATTENTION":
        cudnn = operators._scaled_dot_product_cudnn_attention
        return cudnn(*heads, None, True, 0.0, causal, False, scale=scale)[1]
    return None


def _results(out, lse, inputs, dout):
    torch = needed("torch")
    results = {"out": to_host(out)}
    if lse is not None:
        results["lse"] = to_host(lse.float())
    if dout is not None:
        gradients = torch.autograd.grad(out, inputs, on_device(dout))
        results |= zip(("dq", "dk", "dv"), map(to_host, gradients), strict=True)
    return results
