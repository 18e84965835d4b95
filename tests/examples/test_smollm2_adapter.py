"""The adapter of examples/smollm2 on random tensors, against float64 attention written out. No transformers."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

import torch

from examples.smollm2 import adapter
from tests.adapters import attention64

HEADS, KV_HEADS, LENGTH, CHANNELS, SCALE = 6, 2, 40, 64, 0.2
LAYER = SimpleNamespace(layer_idx=3, is_causal=True)


def made(seed=0):
    """q, k, v and dout as transformers has them, [2, heads, LENGTH, CHANNELS], values of bfloat16."""
    rng = np.random.default_rng(seed)
    shapes = [(2, heads, LENGTH, CHANNELS) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    rounded = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in shapes)
    return [torch.from_numpy(x.astype(np.float32)) for x in rounded]


def run(packed, watch=None):
    """out and the gradients through the attention function."""
    q, k, v, dout = made()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    call = adapter.attention_function(packed, watch)
    out, weights = call(LAYER, *inputs, None, scaling=SCALE, dropout=0.0)
    assert weights is None
    out.backward(dout.transpose(1, 2))  # out is [2, LENGTH, heads, CHANNELS]
    gradients = (x.grad.transpose(1, 2) for x in inputs)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


def assert_near(found, limit):
    """Everything near float64 attention of two documents, causal."""
    arrays = [x.transpose(1, 2).reshape(2 * LENGTH, -1, CHANNELS).numpy() for x in made()]
    offsets = [0, LENGTH, 2 * LENGTH]
    expected = attention64.packed(*arrays, offsets, offsets, SCALE, causal=True)
    for name, x in found.items():
        values = x.reshape(2 * LENGTH, -1, CHANNELS).numpy()
        assert values.shape == expected[name].shape, name
        assert np.abs(values - expected[name]).max() <= limit * np.abs(expected[name]).max(), name


def test_float32_attention_is_that_of_float64():
    assert_near(run(adapter.float32), 2e-6)  # float32 has 24 bits, sums of 40 terms


def test_a_recipe_in_bfloat16_is_near_float64():
    # P, dS and the results have 8 bits; a wrong mask, head, scale or document is off by as much as there is.
    found = run(adapter.by_recipe("bf16-fa4"))
    assert_near(found, 0.02)
    assert found["out"].dtype == torch.float32


def test_inputs_are_rounded_to_bfloat16_without_a_warning():
    q, k, v, _ = made()
    call = adapter.attention_function(adapter.by_recipe("bf16-fa4"))
    given = call(LAYER, q, k, v, None, scaling=SCALE)[0]
    moved = (x * (1 + 2.0**-12) for x in (q, k, v))  # less than half a step of bfloat16
    assert torch.equal(call(LAYER, *moved, None, scaling=SCALE)[0], given)


def test_the_watch_gets_the_tensors_of_the_layer():
    seen = {}

    def watch(layer, tensors):
        for name, x in tensors.items():
            x.register_hook(lambda gradient, name=name: seen.update({(layer, name): gradient}))

    found = run(adapter.float32, watch)
    assert set(seen) == {(3, name) for name in ("q", "k", "v", "out")}
    assert torch.equal(seen[3, "q"].transpose(1, 2), found["dq"])
    assert torch.equal(seen[3, "out"], made()[3].transpose(1, 2))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dropout": 0.1}, "dropout is 0.1"),
        ({"is_causal": False}, "not causal"),
        ({"sliding_window": 8}, "sliding_window was given"),
        ({"softcap": 30.0}, "softcap was given"),
        ({"s_aux": torch.zeros(HEADS)}, "s_aux was given"),
        ({"attention_mask": torch.zeros(2, 1, LENGTH, LENGTH)}, "attention mask was given"),
    ],
)
def test_what_it_cannot_do_is_refused(change, said):
    q, k, v, _ = made()
    arguments = {"attention_mask": None, "scaling": SCALE} | change
    with pytest.raises(ValueError, match=said):
        adapter.attention_function(adapter.float32)(LAYER, q, k, v, **arguments)


def test_a_cache_of_keys_is_refused():
    q, k, v, _ = made()
    with pytest.raises(ValueError, match="1 queries and 40 keys"):
        adapter.attention_function(adapter.float32)(LAYER, q[:, :, :1], k, v, None)
