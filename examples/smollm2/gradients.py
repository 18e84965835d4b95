"""The gradients of one training step, with one attention after another, compared layer by layer.

The step's loss is the mean next-token loss of all documents. Compared are the gradients by q, k and v as attention
takes them (after RoPE) and by its output, and those by the parameters of each layer: the four projections, the MLP's
three matrices together, the two norms together; besides the embedding, which is the head too, and all parameters as one
vector.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from examples.smollm2.comparison import Gradients
from examples.smollm2.model import Layers, Progress, attending, losses
from examples.smollm2.texts import Document
from flamia_ref.attention import Recipe

BATCH = {"cpu": 2, "cuda": 4}  # documents in one call of the model
INPUTS = {"q": "dq", "k": "dk", "v": "dv", "out": "dout"}


def step(
    model: Any,
    found: Sequence[Document],
    how: Recipe | str,
    device: str,
    report: Progress | None = None,
) -> tuple[Gradients, dict[str, Any]]:
    """The gradients of one step by group and layer, flat, and its loss and seconds.

    transformers' own attention is not watched: its gradients are those of parameters alone. `report`: told of every
    layer, forward and backward, of transformers' own attention of every batch.
    """
    start, used = time.perf_counter(), time.process_time()
    tokens = torch.tensor([document.tokens for document in found], device=device)
    seen: dict[str, dict[int, list[torch.Tensor]]] = defaultdict(lambda: defaultdict(list))

    layers = Layers(model, len(found), report or (lambda *_: None), passes=2)

    def watch(layer: int, tensors: dict[str, torch.Tensor]) -> None:
        for name, x in tensors.items():
            kept = seen[INPUTS[name]][layer]
            x.register_hook(lambda gradient, kept=kept: kept.append(gradient.detach().flatten()))
        layers.layer()
        tensors["out"].register_hook(lambda _: layers.layer())

    total = 0.0
    model.zero_grad(set_to_none=True)
    with torch.enable_grad(), attending(model, how, device, watch):
        for batch in tokens.split(BATCH[device]):
            layers.begin(len(batch))
            loss = torch.stack(list(losses(model, batch))).sum() / len(found)
            loss.backward()
            total += float(loss.detach())
    gradients = {
        name: [torch.cat(layers[layer]) for layer in sorted(layers)]
        for name, layers in seen.items()
    }
    gradients |= by_parameters(model)
    model.zero_grad(set_to_none=True)
    return gradients, {
        "loss": total,
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - used, 1),
    }


def by_parameters(model: Any) -> Gradients:
    """The gradients of parameters by group and layer."""
    found: Gradients = defaultdict(list)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found[name].append(_flat(getattr(layer.self_attn, name)))
        found["mlp"].append(_flat(layer.mlp))
        found["norms"].append(_flat(layer.input_layernorm, layer.post_attention_layernorm))
    found["embedding"].append(_flat(model.model.embed_tokens))
    found["all parameters"].append(_flat(model))
    return dict(found)


def _flat(*modules: torch.nn.Module) -> torch.Tensor:
    return torch.cat([x.grad.detach().flatten() for one in modules for x in one.parameters()])
