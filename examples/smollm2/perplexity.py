"""The next-token loss of the model by document, with one attention after another."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from examples.smollm2.model import Layers, Progress, attending, losses
from examples.smollm2.texts import Document
from flamia_ref.attention import Recipe

BATCH = {"cpu": 10, "cuda": 25}  # documents in one call of the model


def measured(
    model: Any,
    found: Sequence[Document],
    how: Recipe | str,
    device: str,
    report: Progress | None = None,
) -> dict[str, Any]:
    """The mean loss of each document, in nats a token; the seconds that all took, compiling included, and those
    of all cores together. `report`: told of every layer, of transformers' own attention of every batch."""
    start, used = time.perf_counter(), time.process_time()
    tokens = torch.tensor([document.tokens for document in found], device=device)
    layers = Layers(model, len(found), report or (lambda *_: None))
    values = []
    with torch.inference_mode(), attending(model, how, device, lambda *_: layers.layer()):
        for batch in tokens.split(BATCH[device]):
            layers.begin(len(batch))
            values += [float(loss) for loss in losses(model, batch)]
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - used, 1),
        "document_nll": values,
    }
