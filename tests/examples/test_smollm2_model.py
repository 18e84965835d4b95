"""The model's side of examples/smollm2 on a small Llama with random weights, where transformers is installed."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("jax")

import torch
import transformers

from examples.smollm2 import comparison, gradients, perplexity
from examples.smollm2.texts import Document

LAYERS, LENGTH = 2, 24


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=48,
        intermediate_size=40,
        num_hidden_layers=LAYERS,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def documents():
    drawn = torch.randint(50, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    return [Document(path=str(n), tokens=tuple(map(int, row))) for n, row in enumerate(drawn)]


@pytest.mark.parametrize("how", ["float32", "transformers-eager", "transformers-sdpa"])
def test_losses_are_those_that_transformers_computes(model, documents, how):
    found = perplexity.measured(model, documents, how, "cpu")["document_nll"]
    for loss, document in zip(found, documents, strict=True):
        ids = torch.tensor([document.tokens])
        model.set_attn_implementation("eager")
        with torch.no_grad():
            assert loss == pytest.approx(float(model(ids, labels=ids).loss), abs=1e-5)


def test_gradients_of_float32_are_those_of_autograd(model, documents):
    found, figures = gradients.step(model, documents, "float32", "cpu")
    own, other = gradients.step(model, documents, "transformers-eager", "cpu")
    assert figures["loss"] == pytest.approx(other["loss"], abs=1e-5)
    assert {name: len(layers) for name, layers in found.items()} == {
        **dict.fromkeys(("dq", "dk", "dv", "dout", "q_proj", "k_proj", "v_proj"), LAYERS),
        **dict.fromkeys(("o_proj", "mlp", "norms"), LAYERS),
        "embedding": 1,
        "all parameters": 1,
    }
    assert found["dk"][0].numel() == 3 * LENGTH * 16
    for group in comparison.compared(own, found).values():
        assert max(group["relative"]) < 1e-5
        assert min(group["cosine"]) > 1 - 1e-9


def test_progress_goes_layer_by_layer_through_all_documents(model, documents, monkeypatch):
    monkeypatch.setitem(perplexity.BATCH, "cpu", 2)
    told = []

    def report(*said):
        told.append(said)

    perplexity.measured(model, documents, "float32", "cpu", report)
    # Two documents, then one, through two layers each: of 6 layers of documents.
    assert [said[:2] for said in told] == [(0, 6), (2, 6), (4, 6), (4, 6), (5, 6), (6, 6)]
    assert told[1][2] == "0 of 3 documents"
    assert told[-1][2] == "2 of 3 documents"
    told.clear()
    gradients.step(model, documents, "float32", "cpu", report)
    # Forward and backward.
    assert [done for done, _, _ in told] == [0, 2, 4, 6, 8, 8, 9, 10, 11, 12]
    assert {total for _, total, _ in told} == {12}
    told.clear()
    perplexity.measured(model, documents, "transformers-sdpa", "cpu", report)
    assert [done for done, _, _ in told] == [0, 4]


def test_relative_error_and_cosine_of_vectors_by_hand():
    x, y = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 5.0])
    assert comparison.relative(x, y) == pytest.approx((9 + 1) ** 0.5 / 5)
    assert comparison.cosine(x, y) == pytest.approx(0.8)
