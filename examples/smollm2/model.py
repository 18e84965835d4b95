"""The model as transformers loads it from the GGUF file, its tokenizer, and how its attention is replaced."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from examples.smollm2 import adapter
from examples.smollm2.attentions import FLOAT32, OWN
from examples.smollm2.sources import WEIGHTS, located
from flamia_ref.attention import Recipe

Progress = Callable[[int, int, str], None]

_REGISTERED = "flamia-ref"


def tokenizer(folder: Path) -> Any:
    """Text to token ids, without tokens of its own at the beginning."""
    _quiet()
    path = located(WEIGHTS, folder)
    found = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)

    def tokenize(text: str) -> list[int]:
        return found(text, add_special_tokens=False, verbose=False).input_ids

    return tokenize


def model(folder: Path, device: str) -> Any:
    """SmolLM2-135M-Instruct, its weights dequantized to float32, on a device of torch; ready to evaluate."""
    _quiet()
    torch.set_float32_matmul_precision("highest")
    path = located(WEIGHTS, folder)
    found = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return found.eval().to(device)


class Layers:
    """Reports documents that are done, layer by layer, as attention is called in them.

    `report`: called with layers done, of how many, those of each document and pass counted, and the documents that are
    done, in words.
    """

    def __init__(self, model: Any, documents: int, report: Progress, passes: int = 1) -> None:
        self._each, self._documents = model.config.num_hidden_layers * passes, documents
        self._report, self._done, self._layers, self._batch = report, 0, 0, 0

    def begin(self, batch: int) -> None:
        """A batch of so many documents begins; the one before it is done."""
        self._done, self._batch, self._layers = self._done + self._batch, batch, 0
        self._tell()

    def layer(self) -> None:
        """The attention of a layer is done, in one of the passes."""
        self._layers = min(self._layers + 1, self._each)
        self._tell()

    def _tell(self) -> None:
        done = self._done * self._each + self._layers * self._batch
        text = f"{self._done} of {self._documents} documents"
        self._report(done, self._documents * self._each, text)


@contextmanager
def attending(
    model: Any, how: Recipe | str, device: str, watch: adapter.Watch | None = None
) -> Iterator[None]:
    """The model with its attention replaced: by a recipe, by `float32`, or by one of transformers' own."""
    if isinstance(how, str) and how in OWN:
        model.set_attn_implementation(how.removeprefix("transformers-"))
    else:
        packed = adapter.float32 if how == FLOAT32 else adapter.by_recipe(how, device=device)
        AttentionInterface.register(_REGISTERED, adapter.attention_function(packed, watch))
        model.set_attn_implementation(_REGISTERED)
    try:
        yield
    finally:
        model.set_attn_implementation("eager")


def losses(model: Any, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    """The mean next-token loss of each document, in nats. `tokens` [documents, length].

    The head is applied to one document at a time: logits are large.
    """
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    for row, ids in zip(hidden, tokens, strict=True):
        yield torch.nn.functional.cross_entropy(model.lm_head(row[:-1]), ids[1:])


def _quiet() -> None:
    """No progress bars and no advice."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
