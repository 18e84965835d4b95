"""Attention as users write it: exactly the legal set where it is right, exactly the illegal pairs where it is not."""

from typing import Any

import jax
import numpy as np
import pytest

from tests.leakage.flow import leaky, masks
from tests.leakage.flow.masks import dependencies, differences, mask_of, visible

N, D = 64, 8
CAUSAL = mask_of([N])
PACKED = mask_of([20, 30, 14])
SEEN, SEEN_PACKED = visible(CAUSAL), visible(PACKED)
QKV = [(N, D)] * 3
SEGMENTS = np.repeat([0, 1, 2], [20, 30, 14])
GRADIENTS = ("out", "dq", "dk", "dv")

FORWARDS = {
    "select": (masks.plain(SEEN), CAUSAL),
    "select-packed": (masks.plain(SEEN_PACKED), PACKED),
    "additive": (masks.additive(SEEN), CAUSAL),
    "additive-packed": (masks.additive(SEEN_PACKED), PACKED),
    "segments": (masks.from_segments(SEGMENTS), PACKED),
    "scan": (masks.flash(SEEN, 16, "scan"), CAUSAL),
    "scan-packed": (masks.flash(SEEN_PACKED, 16, "scan"), PACKED),
    "fori": (masks.flash(SEEN, 16, "fori"), CAUSAL),
    "checkpoint": (jax.checkpoint(masks.plain(SEEN)), CAUSAL),
    "jit": (jax.jit(masks.plain(SEEN)), CAUSAL),
    "quantized-tokens": (leaky.quantized(SEEN, q=(1, D), k=(1, D), v=(1, D), p=(1, 32)), CAUSAL),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_forward_depends_on_exactly_what_it_may(name: str) -> None:
    forward, mask = FORWARDS[name]
    found, context = dependencies(forward, QKV)
    assert differences(found, mask) == {}
    assert not context.unknown


@pytest.mark.parametrize("name", [name for name in FORWARDS if "quantized" not in name])
def test_gradients_depend_on_exactly_what_they_may(name: str) -> None:
    forward, mask = FORWARDS[name]
    found, context = dependencies(masks.with_gradients(forward), [*QKV, (N, D)])
    assert differences(found, mask, GRADIENTS) == {}
    assert not context.unknown


def test_gradient_of_a_sum_is_that_of_all_rows() -> None:
    """`jax.grad` has no dO of its own."""

    def loss(q: Any, k: Any, v: Any) -> Any:
        return masks.plain(SEEN)(q, k, v).sum()

    found, _ = dependencies(jax.grad(loss, argnums=(0, 1, 2)), QKV)
    assert differences(found, CAUSAL, ("dq", "dk", "dv")) == {}


def test_custom_vjp() -> None:
    forward = jax.custom_vjp(masks.plain(SEEN))
    forward.defvjp(
        lambda q, k, v: (masks.plain(SEEN)(q, k, v), (q, k, v)),
        lambda saved, dout: jax.vjp(masks.flash(SEEN, 16, "scan"), *saved)[1](dout),
    )
    found, _ = dependencies(masks.with_gradients(forward), [*QKV, (N, D)])
    assert differences(found, CAUSAL, GRADIENTS) == {}


HEADS = [(1, N, 4, D), (1, N, 2, D), (1, N, 2, D)]  # grouped queries


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    ("given", "mask"),
    [
        ({"is_causal": True}, CAUSAL),
        ({"mask": SEEN_PACKED[None, None]}, PACKED),
        ({"bias": np.where(SEEN, 0, -np.inf).astype(np.float32)[None, None]}, CAUSAL),
        ({"is_causal": True, "local_window_size": (5, 0)}, mask_of([N], window=(5, 0))),
        (
            {
                "query_seq_lengths": np.array([N], np.int32),
                "key_value_seq_lengths": np.array([N], np.int32),
                "is_causal": True,
            },
            CAUSAL,
        ),
    ],
    ids=["causal", "mask", "bias", "window", "lengths"],
)
def test_dot_product_attention_of_jax(given: dict[str, Any], mask: Any, gradients: bool) -> None:
    def forward(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, implementation="xla", **given)

    outputs, shapes = ("out",), HEADS
    if gradients:
        forward, outputs, shapes = masks.with_gradients(forward), GRADIENTS, [*HEADS, HEADS[0]]
    with jax.numpy_dtype_promotion("standard"):
        found, _ = dependencies(
            forward, shapes, axes=[1] * len(shapes), out_axes=[1] * len(outputs)
        )
    assert differences(found, mask, outputs) == {}


def test_heads_by_vmap() -> None:
    heads = jax.vmap(masks.flash(SEEN, 16, "scan"))
    found, _ = dependencies(
        masks.with_gradients(heads), [(2, N, D)] * 4, axes=[1] * 4, out_axes=[1] * 4
    )
    assert differences(found, CAUSAL, GRADIENTS) == {}


def test_heads_by_shard_map_over_one_device() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("heads",))
    spec = jax.sharding.PartitionSpec("heads")
    inside = jax.vmap(masks.plain(SEEN))
    heads = jax.shard_map(inside, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    found, context = dependencies(
        masks.with_gradients(heads), [(2, N, D)] * 4, axes=[1] * 4, out_axes=[1] * 4
    )
    assert differences(found, CAUSAL, GRADIENTS) == {}
    assert not context.unknown


@pytest.mark.parametrize("loop", ["select", "scan", "fori"])
def test_heads_are_apart(loop: str) -> None:
    """Of two heads under vmap neither depends on the other."""
    one = masks.plain(SEEN) if loop == "select" else masks.flash(SEEN, 16, loop)
    found, _ = dependencies(jax.vmap(one), [(2, N, D)] * 3)
    for pairs in found[0]:
        assert (pairs == np.eye(2, dtype=np.bool_)).all()


# Faults. The counts are those of 3b of the theory: 64 tokens, blocks of 32.

PAIRS = N * (N - 1) // 2  # of a query and a later key
IN_BLOCKS = 2 * (32 * 31 // 2)  # of those, in one block
LEAKY = {
    "finite-mask": (masks.plain(SEEN, -1e9), CAUSAL, {"out<-k": (0, 0), "out<-v": (PAIRS, 0)}),
    "v-column": (leaky.quantized(SEEN, v=(32, 1)), CAUSAL, {"out<-v": (IN_BLOCKS, 0)}),
    "v-tile": (leaky.quantized(SEEN, v=(32, D)), CAUSAL, {"out<-v": (IN_BLOCKS, 0)}),
    "k-tile": (leaky.quantized(SEEN, k=(32, D)), CAUSAL, {"out<-k": (IN_BLOCKS, 0)}),
    "q-tile": (leaky.quantized(SEEN, q=(32, D)), CAUSAL, {"out<-q": (2 * IN_BLOCKS, 0)}),
    "p-tile": (
        leaky.quantized(SEEN, p=(32, 32)),
        CAUSAL,
        {"out<-q": (2 * IN_BLOCKS, 0), "out<-k": (IN_BLOCKS, 0)},
    ),
    "unmasked-maximum": (leaky.unmasked_maximum(SEEN), CAUSAL, {"out<-k": (PAIRS, 0)}),
    "smoothed-keys": (leaky.smoothed_keys(SEEN), CAUSAL, {"out<-k": (PAIRS, 0)}),
    "tensor-scale": (leaky.tensor_scale(SEEN), CAUSAL, {"out<-v": (PAIRS, 0)}),
    "tile-decides": (
        leaky.tile_decides(SEEN, 32),
        CAUSAL,
        {"out<-q": (2 * IN_BLOCKS, 0), "out<-k": (IN_BLOCKS, 0)},
    ),
    "v-column-packed": (leaky.quantized(SEEN_PACKED, v=(32, 1)), PACKED, {"out<-v": (1844, 0)}),
}


@pytest.mark.parametrize("name", LEAKY)
def test_faults_are_found_pair_by_pair(name: str) -> None:
    forward, mask, expected = LEAKY[name]
    found, _ = dependencies(forward, QKV)
    assert differences(found, mask) == {
        key: value for key, value in expected.items() if value != (0, 0)
    }


def test_strict_shows_the_poison_of_masked_rows() -> None:
    """0 times infinity is NaN: a masked row of v reaches all."""
    found, context = dependencies(masks.plain(SEEN), QKV, strict=True)
    assert differences(found, CAUSAL) == {"out<-v": (PAIRS, 0), **differences(found, CAUSAL)}
    assert not context.assumed


def test_what_is_assumed_is_counted() -> None:
    _, context = dependencies(masks.plain(SEEN), QKV)
    assert context.assumed == {
        "infinity_plus_finite": PAIRS,  # -inf less the row maximum
        "zero_over_nonzero": PAIRS,  # P over the row sum
        "zero_times_finite": PAIRS * D,  # P times v
    }


def test_finite_mask_of_jax_is_an_assumption() -> None:
    """-0.7 times the largest float32, which jax.nn uses, is as good as infinity for scores below 2^102 only."""
    fill = float(-0.7 * np.finfo(np.float32).max)
    found, context = dependencies(masks.plain(SEEN, fill), QKV)
    assert differences(found, CAUSAL) == {}
    assert context.assumed["huge_plus_moderate"] == PAIRS  # type: ignore[index]
    found, _ = dependencies(masks.plain(SEEN, fill), QKV, strict=True)
    assert differences(found, CAUSAL)["out<-v"] == (PAIRS, 0)
