"""Bytes of quantization, by hand and against what the backward keeps."""

import pytest

from flamia_ref.attention import RECIPES, bytes_kept
from flamia_ref.attention.copies import copy_names
from flamia_ref.attention.memory import CopyBytes
from flamia_ref.attention.stages import input_of
from flamia_ref.schedule.hardware import GPUS
from flamia_ref.schedule.quantization import MEMORY_EFFICIENCY, traffic
from flamia_ref.schedule.work import Pass, Problem

PACKED = Problem.of([0, 256, 320], heads=4, kv_heads=2)
Q, KV = 320 * 4 * 128, 320 * 2 * 128  # elements


def test_mxfp8_by_hand() -> None:
    # q, k and v are read in bfloat16. Each is written twice, along channels and along tokens, a byte an element and a
    # scale for 32: q and k for S and for dK or dQ, v for O and for dP.
    forward = traffic(RECIPES["cudnn-mxfp8"], PACKED, Pass.FORWARD)
    assert forward.read == 2 * (Q + KV + KV)
    assert forward.written == 2 * (Q + KV + KV) * (1 + 1 / 32)
    backward = traffic(RECIPES["cudnn-mxfp8"], PACKED, "backward")
    assert (backward.read, backward.written) == (2 * Q, 2 * Q * (1 + 1 / 32))


def test_one_copy_by_hand() -> None:
    # One copy of each: q and dO with a scale a token and head, k and v with one for 32 by 32.
    forward = traffic(RECIPES["flamia-mxfp8"], PACKED, "forward")
    assert forward.written == Q + Q / 128 + 2 * (KV + KV / 1024)
    assert traffic(RECIPES["flamia-mxfp8"], PACKED, "backward").written == Q + Q / 128


def test_bfloat16_is_not_quantized() -> None:
    for launch in ("forward", "backward"):
        found = traffic(RECIPES["bf16-fa4"], PACKED, launch)
        assert (found.read, found.written, found.seconds(GPUS["B200"])) == (0, 0, 0)


def test_widths_of_queries_and_values_differ() -> None:
    problem = Problem.of([0, 64], heads=2, head_dim=192, value_dim=128)
    found = traffic(RECIPES["cudnn-mxfp8"], problem, "forward")
    assert found.read == 2 * 64 * 2 * (192 + 192 + 128)
    assert traffic(RECIPES["cudnn-mxfp8"], problem, "backward").read == 2 * 64 * 2 * 128


@pytest.mark.parametrize(
    "name",
    [n for n, one in RECIPES.items() if one.has_backward and n not in ("bf16-fa4",)],
)
def test_it_writes_what_the_backward_keeps(name: str) -> None:
    # Besides that, copies of V that the forward alone reads; and bfloat16 copies are not written, but are the inputs.
    recipe = RECIPES[name]
    kept = bytes_kept(name, lengths=[256, 64], head_dim=128, heads=4, kv_heads=2).copies
    for launch, tensors in (("forward", "q k v"), ("backward", "do")):
        copies = [one for one in kept if one.tensor in tensors.split() and not is_input(name, one)]
        wanted = sum(one.payload + one.scales for one in copies)
        found = traffic(recipe, PACKED, launch).written
        if launch == "forward" and name.startswith("cudnn-mxfp8") and "pv" not in name:
            found -= KV * (1 + 1 / 32)
        assert found == wanted


def is_input(name: str, copy: CopyBytes) -> bool:
    """Whether a copy is the bfloat16 input itself."""
    recipe = RECIPES[name]
    names = copy_names(recipe)
    uses = [use for use in names if names[use] == copy.name and input_of(use) == copy.tensor]
    return all(recipe.operand(use).plain for use in uses)


def test_seconds() -> None:
    found = traffic(RECIPES["flamia-mxfp8"], PACKED, "backward")
    assert found.seconds(GPUS["H200"]) == (2 * Q + Q + Q / 128) / (MEMORY_EFFICIENCY * 4.8e12)
