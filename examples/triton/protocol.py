"""The kernels behind flamia_ref's protocol, numpy arrays in and out: as one call, and stage by stage.

`attention` is the kernel as a whole. This module is a staged kernel too (`quantize`, `forward`, `backward`): each is
given the pack's own codes and scales, so that what one does wrong does not hide the next.

    flamia-ref golden check pack --kernel examples.triton.protocol:attention
"""

import numpy as np
import torch
import triton

from examples.triton import packed
from examples.triton.mistakes import Mistake
from examples.triton.packed import BY_KEY, BY_QUERY, PAIRS, Documents, Operand, Rows, Settings

_WIDEST = 256


def attention(
    q, k, v, *, cu_seqlens, causal, softmax_scale, dout=None, trace=(), mistake=Mistake.NONE
):
    """Both passes, or without `dout` the forward, with every stage where `trace` names one.

    Raises ValueError for shapes that the kernels do not take.
    """
    documents = _documents(cu_seqlens, q)
    settings = _settings(causal, softmax_scale, trace, mistake)
    operands = {name: packed.quantize(_tensor(x)) for name, x in zip("qkv", (q, k, v), strict=True)}
    results = packed.forward(**operands, documents=documents, settings=settings)
    if settings.trace:
        results |= _coded(operands)
    if dout is not None:
        rows = packed.before_backward(_tensor(dout), results["out"], results["lse"])
        results |= _of_rows(rows) if settings.trace else {}
        results |= packed.backward(**operands, rows=rows, documents=documents, settings=settings)
    return _returned(results, documents, q.shape[1])


def quantize(q, k, v, *, cu_seqlens, dout, lse):
    """The codes and scales of q, k, v and, scaled by what `lse` says, of dO."""
    documents = _documents(cu_seqlens, q)
    operands = {name: packed.quantize(_tensor(x)) for name, x in zip("qkv", (q, k, v), strict=True)}
    # With a dead row or without, dO' is 0 where lse is -infinity, so that zeros stand in for out.
    rows = packed.before_backward(_tensor(dout), _tensor(np.zeros_like(dout)), _floats(lse))
    return _returned(_coded(operands | {"do": rows.do}), documents, q.shape[1])


def forward(operands, *, cu_seqlens, causal, softmax_scale, trace=()):
    """out, lse and the stages between from the pack's codes."""
    documents = _documents(cu_seqlens, operands["q.codes"])
    settings = _settings(causal, softmax_scale, trace, Mistake.NONE)
    results = packed.forward(*(_operand(operands, name) for name in "qkv"), documents, settings)
    return _returned(results, documents, operands["q.codes"].shape[1])


def backward(operands, *, cu_seqlens, causal, softmax_scale, out, lse, dout, trace=()):
    """dq, dk, dv and the stages between from the pack's codes, out and lse."""
    documents = _documents(cu_seqlens, operands["q.codes"])
    settings = _settings(causal, softmax_scale, trace, Mistake.NONE)
    made = packed.before_backward(_tensor(dout), _tensor(out), _floats(lse))
    rows = Rows(do=_operand(operands, "do"), base=made.base, delta=made.delta)
    parts = (_operand(operands, name) for name in "qkv")
    results = packed.backward(*parts, rows, documents, settings)
    results |= {"delta": rows.delta} if settings.trace else {}
    return _returned(results, documents, operands["q.codes"].shape[1])


def instruction() -> str | None:
    """What adds the products here: on Hopper, which has no block-scaled instruction, that of bfloat16."""
    on_hopper = device() != "cpu" and torch.cuda.get_device_capability()[0] == 9
    return "sm90.wgmma.bf16" if on_hopper else None


def device() -> str:
    """Where the kernels run."""
    return "cpu" if triton.knobs.runtime.interpret else "cuda"


def _documents(cu_seqlens, q) -> Documents:
    _, heads, channels = q.shape
    if channels % 32 or channels > _WIDEST:
        raise ValueError(
            f"head_dim is {channels}; these kernels take multiples of 32 up to {_WIDEST}"
        )
    return Documents.of(cu_seqlens, heads, device())


def _settings(causal, softmax_scale, trace, mistake) -> Settings:
    return Settings(
        causal=bool(causal),
        softmax_scale=float(softmax_scale),
        trace=bool(trace),
        mistake=Mistake(mistake),
    )


def _tensor(x) -> torch.Tensor:
    """A bfloat16 array as a tensor; numpy's bfloat16 is no type of torch, so its bits travel."""
    bits = np.array(x).view(np.int16)
    return torch.from_numpy(bits).to(device()).view(torch.bfloat16)


def _floats(x) -> torch.Tensor:
    return torch.from_numpy(np.array(x, np.float32)).to(device())


def _operand(operands, name: str) -> Operand:
    codes, scales = (operands[f"{name}.{part}"] for part in ("codes", "scales"))
    return Operand(
        codes=torch.from_numpy(np.array(codes)).to(device()),
        scales=torch.from_numpy(np.array(scales[:, :, 0])).to(device()),
    )


def _coded(operands: dict[str, Operand]) -> dict[str, torch.Tensor]:
    found = {}
    for name, operand in operands.items():
        found[f"{name}.codes"] = operand.codes
        found[f"{name}.scales"] = operand.scales[:, :, None]
    return found


def _of_rows(rows: Rows) -> dict[str, torch.Tensor]:
    return _coded({"do": rows.do}) | {"delta": rows.delta}


def _returned(results: dict[str, torch.Tensor], documents: Documents, heads: int):
    """Results as the protocol has them: bfloat16 as bits, stages of pairs as a list with an array a document."""
    return {name: _array(name, x, documents, heads) for name, x in results.items()}


def _array(name: str, x: torch.Tensor, documents: Documents, heads: int):
    bits = x.dtype == torch.bfloat16
    array = (x.view(torch.int16) if bits else x).cpu().numpy()
    array = array.view(np.uint16) if bits else array
    tensor, _, part = name.rpartition(".")
    coded = tensor in (*BY_QUERY, *BY_KEY)
    if name not in PAIRS and not coded:
        return array
    parts, first = [], 0
    for length in documents.lengths:
        count = -(-length // 32)
        shape = (heads, length, length)
        if coded and part == "scales":
            shape = (heads, length, count) if tensor in BY_QUERY else (heads, count, length)
        size = shape[0] * shape[1] * shape[2]
        parts.append(array[first : first + size].reshape(shape))
        first += size
    return parts
