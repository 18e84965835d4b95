"""The graph of stages follows from the recipe, in the order of the dataflow, and is complete."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flamia_ref.attention import RECIPES, Recipe, Use
from flamia_ref.attention.product import Scope
from flamia_ref.attention.stages import backward_stages, forward_stages
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.dataflow import GRADIENTS, INPUTS, OUTPUTS, Dataflow, dataflow, visible_pairs
from flamia_ref.golden.stage import Role
from tests.golden.packs import spec

FOLDED = "flamia-mxfp8-folded"
FP4, UE4M3 = "flamia-nvfp4-fp8", "flamia-nvfp4-fp8-ue4m3"

# Names by the documentation of the trace, in dataflow order, without inputs, outputs, tiled scales.
TRACED = {
    "attn-qat-nvfp4": (
        "q.scales q.codes k.scales k.codes v.scales v.codes "
        "s row_max p p.o.scales p.o.codes row_sum o high_precision_out",
        "delta dp p.dv p.dv.scales p.dv.codes ds ds.dq.codes ds.dk.codes",
    ),
    "bf16-fa4": (
        "s row_max p p.o.codes row_sum o",
        "delta dp p.dv p.dv.codes ds ds.dq.codes ds.dk.codes",
    ),
    "cudnn-mxfp8": (
        "q.s.scales q.s.codes k.s.scales k.s.codes v.o.scales v.o.codes "
        "s row_max p p.o.codes row_sum o",
        "q.dk.scales q.dk.codes k.dq.scales k.dq.codes v.dp.scales v.dp.codes "
        "do.dp.scales do.dp.codes do.dv.scales do.dv.codes delta dp p.dv p.dv.codes ds "
        "ds.dq.scales ds.dq.codes ds.dk.scales ds.dk.codes",
    ),
    "cudnn-mxfp8-reference": (  # two payloads of each input; the scales of P are constants
        "q.s.scales q.s.codes k.s.scales k.s.codes v.o.scales v.o.codes "
        "s row_max p p.o.codes row_sum o",
        "q.dk.scales q.dk.codes k.dq.scales k.dq.codes v.dp.scales v.dp.codes "
        "do.dp.scales do.dp.codes do.dv.scales do.dv.codes delta dp p.dv p.dv.codes ds "
        "ds.dq.scales ds.dq.codes ds.dk.scales ds.dk.codes",
    ),
    "cudnn-mxfp8-pv-bf16": (
        "q.s.scales q.s.codes k.s.scales k.s.codes s row_max p p.o.codes row_sum o",
        "v.dp.scales v.dp.codes do.dp.scales do.dp.codes delta dp p.dv p.dv.codes ds "
        "ds.dq.codes ds.dk.codes",
    ),
    "flamia-mxfp8": (
        "q.scales q.codes k.scales k.codes v.scales v.codes s row_max p p.o.codes row_sum o",
        "do.scales do.codes delta dp p.dv p.dv.scales p.dv.codes ds "
        "ds.dq.scales ds.dq.codes ds.dk.scales ds.dk.codes",
    ),
    FOLDED: (
        "q.scales q.codes k.scales k.codes v.scales v.codes "
        "s row_max p p.o.scales p.o.codes row_sum o",
        "do.scales do.codes delta dp p.dv p.dv.scales p.dv.codes ds "
        "ds.dq.scales ds.dq.codes ds.dk.scales ds.dk.codes",
    ),
    "flamia-mxfp8-unguarded": (
        "q.scales q.codes k.scales k.codes v.scales v.codes s row_max p p.o.codes row_sum o",
        "do.scales do.codes delta dp p.dv p.dv.scales p.dv.codes ds ds.scales ds.codes",
    ),
    "sage3-nvfp4": (
        "q.scales q.codes k.scales k.codes v.scales v.codes "
        "s row_max p p.o.scales p.o.codes row_sum o",
        "",
    ),
    **dict.fromkeys(
        ("fp8-fa4", "fp8-fa3"),
        ("q.scales q.codes k.scales k.codes v.scales v.codes s row_max p p.o.codes row_sum o", ""),
    ),
    "cutlass-fp8": ("q.codes k.codes v.codes s row_max p p.o.codes row_sum o", ""),
    FP4: (
        "q.s.scales q.s.codes k.s.scales k.s.codes v.scales v.codes "
        "s row_max p p.o.scales p.o.codes row_sum o",
        "q.dk.scales q.dk.codes k.dq.scales k.dq.codes do.scales do.codes "
        "delta dp p.dv p.dv.scales p.dv.codes ds ds.dq.scales ds.dq.codes ds.dk.scales ds.dk.codes",
    ),
    UE4M3: (
        "q.s.token_scales q.s.scales q.s.codes k.s.token_scales k.s.scales k.s.codes "
        "v.scales v.codes s row_max p p.o.scales p.o.codes row_sum o",
        "q.dk.scales q.dk.codes k.dq.scales k.dq.codes do.scales do.codes "
        "delta dp p.dv p.dv.scales p.dv.codes ds ds.dq.scales ds.dq.codes ds.dk.scales ds.dk.codes",
    ),
}

# Scales and their tiled forms in a case of 2, 0 and 35 tokens, 2 heads over 1, 160 channels: 3 blocks
# of tokens, 5 of channels, which take 2 tiles of channels and 2 tiles of 4 blocks. The tiled shapes
# are those of the last document.
TOKEN = (37, 2, 1)
TILED = {2: (2, 1, 2, 512), 1: (1, 1, 2, 512)}  # by heads
TRANSPOSED = {2: (2, 2, 1, 512), 1: (1, 2, 1, 512)}
# In FP4 there are 10 blocks of 16 channels, which take 3 tiles of 4.
OF_FP4 = {
    "q.s.scales": (37, 2, 10),
    "q.s.scales.tiled.2": (2, 1, 3, 512),
    "k.s.scales": (37, 1, 10),
    "k.s.scales.tiled.2": (1, 1, 3, 512),
    "v.scales": (37, 1, 1),
    "v.scales.tiled.2": TILED[1],
    "p.o.scales.2": (2, 35, 2),
    "q.dk.scales": TOKEN,
    "k.dq.scales": (37, 1, 1),
    "do.scales": TOKEN,
    "do.scales.tiled.2": TILED[2],
    "p.dv.scales.2": (2, 2, 35),
    "ds.dq.scales.2": (2, 35, 2),
    "ds.dk.scales.2": (2, 2, 35),
}
SCALES = {
    "bf16-fa4": {},
    "cudnn-mxfp8": {
        "q.s.scales": (37, 2, 5),
        "q.s.scales.tiled.2": TILED[2],
        "k.s.scales": (37, 1, 5),
        "k.s.scales.tiled.2": TILED[1],
        "v.o.scales": (3, 1, 160),
        "v.o.scales.tiled_transposed.2": TRANSPOSED[1],
        "q.dk.scales": (3, 2, 160),
        "q.dk.scales.tiled_transposed.2": TRANSPOSED[2],
        "k.dq.scales": (3, 1, 160),
        "k.dq.scales.tiled_transposed.2": TRANSPOSED[1],
        "v.dp.scales": (37, 1, 5),
        "v.dp.scales.tiled.2": TILED[1],
        "do.dp.scales": (37, 2, 5),
        "do.dp.scales.tiled.2": TILED[2],
        "do.dv.scales": (3, 2, 160),
        "do.dv.scales.tiled_transposed.2": TRANSPOSED[2],
        "ds.dq.scales.2": (2, 35, 2),
        "ds.dk.scales.2": (2, 2, 35),
    },
    "cudnn-mxfp8-reference": {  # by 32 channels of a token, or by 32 tokens of a channel
        "q.s.scales": (37, 2, 5),
        "q.s.scales.tiled.2": TILED[2],
        "k.s.scales": (37, 1, 5),
        "k.s.scales.tiled.2": TILED[1],
        "v.o.scales": (3, 1, 160),
        "v.o.scales.tiled_transposed.2": TRANSPOSED[1],
        "q.dk.scales": (3, 2, 160),
        "q.dk.scales.tiled_transposed.2": TRANSPOSED[2],
        "k.dq.scales": (3, 1, 160),
        "k.dq.scales.tiled_transposed.2": TRANSPOSED[1],
        "v.dp.scales": (37, 1, 5),
        "v.dp.scales.tiled.2": TILED[1],
        "do.dp.scales": (37, 2, 5),
        "do.dp.scales.tiled.2": TILED[2],
        "do.dv.scales": (3, 2, 160),
        "do.dv.scales.tiled_transposed.2": TRANSPOSED[2],
        "ds.dq.scales.2": (2, 35, 2),
        "ds.dk.scales.2": (2, 2, 35),
    },
    "cudnn-mxfp8-pv-bf16": {
        "q.s.scales": (37, 2, 5),
        "q.s.scales.tiled.2": TILED[2],
        "k.s.scales": (37, 1, 5),
        "k.s.scales.tiled.2": TILED[1],
        "v.dp.scales": (37, 1, 5),
        "v.dp.scales.tiled.2": TILED[1],
        "do.dp.scales": (37, 2, 5),
        "do.dp.scales.tiled.2": TILED[2],
    },
    "flamia-mxfp8": {
        "q.scales": TOKEN,
        "q.scales.tiled.2": TILED[2],
        "k.scales": (3, 1, 5),
        "k.scales.tiled.2": TILED[1],
        "k.scales.tiled_transposed.2": TRANSPOSED[1],
        "v.scales": (3, 1, 5),
        "v.scales.tiled.2": TILED[1],
        "v.scales.tiled_transposed.2": TRANSPOSED[1],
        "do.scales": TOKEN,
        "do.scales.tiled.2": TILED[2],
        "p.dv.scales.2": (2, 2, 35),
        "ds.dq.scales.2": (2, 35, 2),
        "ds.dk.scales.2": (2, 2, 35),
    },
    FOLDED: {
        "q.scales": TOKEN,
        "q.scales.tiled.2": TILED[2],
        "k.scales": (37, 1, 1),
        "k.scales.tiled.2": TILED[1],
        "v.scales": (37, 1, 1),
        "v.scales.tiled.2": TILED[1],
        "p.o.scales.2": (2, 35, 2),
        "do.scales": TOKEN,
        "do.scales.tiled.2": TILED[2],
        "p.dv.scales.2": (2, 2, 35),
        "ds.dq.scales.2": (2, 35, 2),
        "ds.dk.scales.2": (2, 2, 35),
    },
    "flamia-mxfp8-unguarded": {
        "q.scales": (3, 2, 5),
        "q.scales.tiled.2": TILED[2],
        "q.scales.tiled_transposed.2": TRANSPOSED[2],
        "k.scales": (3, 1, 5),
        "k.scales.tiled.2": TILED[1],
        "k.scales.tiled_transposed.2": TRANSPOSED[1],
        "v.scales": (3, 1, 5),
        "v.scales.tiled.2": TILED[1],
        "v.scales.tiled_transposed.2": TRANSPOSED[1],
        "do.scales": (3, 2, 5),
        "do.scales.tiled.2": TILED[2],
        "do.scales.tiled_transposed.2": TRANSPOSED[2],
        "p.dv.scales.2": (2, 2, 2),
        "ds.scales.2": (2, 2, 2),
    },
    "attn-qat-nvfp4": {  # 3 blocks of 16 keys in 35; products take values, so that nothing is tiled
        "q.scales": (37, 2, 10),
        "k.scales": (37, 1, 10),
        "v.scales": (37, 1, 10),
        "p.o.scales.2": (2, 35, 3),
        "p.dv.scales.2": (2, 35, 3),
    },
    "sage3-nvfp4": {  # 1, 0 and 3 blocks of 16 tokens, which are not tiled; 3 tiles of 4 blocks of 16 channels
        "q.scales": (37, 2, 10),
        "q.scales.tiled.2": (2, 1, 3, 512),
        "k.scales": (37, 1, 10),
        "k.scales.tiled.2": (1, 1, 3, 512),
        "v.scales": (4, 1, 160),
        "p.o.scales.2": (2, 35, 3),
    },
    # A descale for each of three documents and one key/value head.
    **dict.fromkeys(
        ("fp8-fa4", "fp8-fa3"), dict.fromkeys(("q.scales", "k.scales", "v.scales"), (3, 1))
    ),
    "cutlass-fp8": {},
    FP4: OF_FP4,
    UE4M3: {"q.s.token_scales": TOKEN, "k.s.token_scales": (37, 1, 1), **OF_FP4},
}


# What only some cases have, by the field of the case that says so.
NEEDS = {"cu_seqlens_k": "key_lengths", "sink": "sinks", "dsink": "sinks"}


def flow(name: str = FOLDED) -> Dataflow:
    return dataflow(RECIPES[name])


def shapes(name: str, case: CaseSpec) -> dict[str, tuple[int, ...]]:
    return {key: place.shape for key, place in flow(name).places(case).items()}


def test_every_recipe_is_here() -> None:
    assert set(TRACED) == set(SCALES) == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_the_stages_are_those_of_the_recipe_in_order(name: str) -> None:
    for backward, names in enumerate(TRACED[name]):
        assert " ".join(flow(name).trace(backward=bool(backward))) == names


@pytest.mark.parametrize("name", RECIPES)
def test_the_simulator_traces_the_same_stages(name: str) -> None:
    assert set(flow(name).trace(backward=False)) == set(forward_stages(RECIPES[name]))
    assert set(flow(name).trace(backward=True)) == set(backward_stages(RECIPES[name]))


@pytest.mark.parametrize("name", RECIPES)
def test_inputs_come_first_and_outputs_after_what_they_are_made_of(name: str) -> None:
    stages = flow(name).stages
    order = list(stages)
    assert tuple(order[:5]) == INPUTS == ("cu_seqlens", "q", "k", "v", "dout")
    assert GRADIENTS == ("dq", "dk", "dv")
    if RECIPES[name].has_backward:
        assert tuple(order[-3:]) == GRADIENTS
    else:
        assert order[-1] == "lse"
    assert OUTPUTS == ("out", "lse")
    for stage in stages.values():
        assert (stage.role is Role.INPUT) == (stage.name in (*INPUTS, "cu_seqlens_k", "sink"))
        assert (stage.role is Role.OUTPUT) == (stage.name in (*OUTPUTS, "dsink", *GRADIENTS))
        assert stage.needs == NEEDS.get(stage.name, "")
        assert bool(stage.parents) == (stage.role is not Role.INPUT)
        assert stage.backward == (order.index(stage.name) > order.index("lse"))
        for parent in stage.parents:
            assert order.index(parent) < order.index(stage.name)
            assert stages[parent].backward <= stage.backward


@pytest.mark.parametrize("name", RECIPES)
def test_everything_is_on_the_way_to_an_output(name: str) -> None:
    stages = flow(name).stages
    reached = {*OUTPUTS, *GRADIENTS, "dsink", "cu_seqlens", "cu_seqlens_k"}
    for stage in reversed(list(stages.values())):
        if stage.name in reached:
            reached |= set(stage.parents)
    aside = {name for name, stage in stages.items() if stage.tiled}
    aside |= set() if RECIPES[name].has_backward else {"dout"}
    assert set(stages) - reached == aside


@pytest.mark.parametrize("name", RECIPES)
def test_scales_come_before_their_codes(name: str) -> None:
    stages = flow(name).stages
    order = list(stages)
    for stage in stages.values():
        if stage.scales is not None:
            assert stage.name == stage.scales.replace(".scales", ".codes")
            assert order.index(stage.scales) < order.index(stage.name)
            assert stage.scales in stage.parents


@pytest.mark.parametrize("name", RECIPES)
def test_shapes_are_those_of_the_documentation(name: str) -> None:
    found = shapes(name, spec(head_dim=160))
    assert found["cu_seqlens"] == (4,)
    back = RECIPES[name].has_backward
    for of_queries in ("q", "dout", "o", "out", *["dq"] * back):
        assert found[of_queries] == (37, 2, 160)
    for of_keys in ("k", "v", *["dk", "dv"] * back):
        assert found[of_keys] == (37, 1, 160)
    for of_rows in ("row_max", "row_sum", "lse", *["delta"] * back):
        assert found[of_rows] == (2, 37)
    of_backward = ("dp", "p.dv", "ds", "p.dv.codes") if back else ()
    for of_pairs in ("s", "p", "p.o.codes", *of_backward):
        assert [found[f"{of_pairs}.{d}"] for d in range(3)] == [(2, 2, 2), (2, 0, 0), (2, 35, 35)]
    scales = {
        key: shape
        for key, shape in found.items()
        if "scales" in key and not key.endswith((".0", ".1"))
    }
    assert scales == SCALES[name]
    codes = {key: shape for key, shape in found.items() if ".codes" in key}
    for key, shape in codes.items():
        heads = 1 if key[0] in "kv" else 2
        assert shape == (37, heads, 160) or key[-2:] in (".0", ".1", ".2")


def test_shapes_of_tiles_where_no_two_sizes_agree() -> None:
    # 300 tokens are 3 tiles, or 10 blocks, which are 3 tiles of 4. 544 channels are 5 tiles, or 17 blocks.
    found = shapes("flamia-mxfp8", spec(lengths=(300, 0), head_dim=544, heads=6, kv_heads=2))
    assert found["q.scales.tiled.0"] == (6, 3, 5, 512)
    assert found["k.scales.tiled.0"] == (2, 3, 5, 512)
    assert found["k.scales.tiled_transposed.0"] == (2, 5, 3, 512)
    assert found["q.scales.tiled.1"] == (6, 0, 5, 512)
    assert found["k.scales.tiled_transposed.1"] == (2, 5, 0, 512)
    assert found["p.dv.scales.0"] == (6, 10, 300)
    assert found["ds.dq.scales.0"] == (6, 300, 10)


def test_layouts_in_words() -> None:
    stages = flow("flamia-mxfp8").stages
    assert stages["v.scales"].layout == "row-major [key_token_blocks, kv_heads, channel_blocks]"
    assert stages["v.scales.tiled"].layout == (
        "row-major [kv_heads, token_tiles, channel_block_tiles, bytes], "
        "scales of 128x4 tiles, tokens by blocks of 32 channels, padding scale_padding"
    )
    assert stages["v.scales.tiled_transposed"].layout == (
        "row-major [kv_heads, channel_tiles, token_block_tiles, bytes], "
        "scales of 128x4 tiles, channels by blocks of 32 tokens, padding scale_padding"
    )
    stages = flow(FP4).stages
    assert stages["q.s.scales"].layout == (
        "row-major [tokens, heads, channel_blocks], blocks of 16 channels"
    )
    assert stages["q.s.codes"].layout == "row-major [tokens, heads, head_dim]"
    assert stages["q.s.scales.tiled"].layout == (
        "row-major [heads, token_tiles, channel_block_tiles, bytes], "
        "scales of 128x4 tiles, tokens by blocks of 16 channels, padding scale_padding"
    )


@pytest.mark.parametrize(("name", "of_block"), [(FP4, "F8_E8M0"), (UE4M3, "F8_UE4M3")])
def test_what_the_bits_of_fp4_mean(name: str, of_block: str) -> None:
    stages = flow(name).stages
    for tensor, later in (("q", "dk"), ("k", "dq")):
        found = {key: stages[f"{tensor}.{key}"].view for key in ("s.codes", "s.scales")}
        assert found == {"s.codes": "F4_E2M1", "s.scales": of_block}
        assert stages[f"{tensor}.s.scales.tiled"].view == of_block
        assert stages[f"{tensor}.{later}.codes"].view == "F8_E4M3"
        assert stages[f"{tensor}.{later}.scales"].view == "F8_E8M0"
        assert (f"{tensor}.s.token_scales" in stages) == (name == UE4M3)
    assert {stage.view.dtype for stage in stages.values() if stage.name[1:4] == ".s."} == {
        np.dtype(np.uint8)
    }


@pytest.mark.parametrize("name", RECIPES)
def test_pairs_in_bfloat16_take_two_bytes(name: str) -> None:
    stages = flow(name).stages
    for use in ("p.o", "p.dv", "ds.dq", "ds.dk"):
        product = getattr(RECIPES[name], use.split(".")[1])
        if product is None:
            continue
        codes = stages.get(f"{use}.codes", stages.get("ds.codes"))
        assert codes is not None
        wide = product.instruction == "sm100.tcgen05.f16" and not product.left.dequantized
        fp4 = product.left.dequantized or product.instruction.endswith("mxf4nvf4")
        narrow = "F4_E2M1" if fp4 else "F8_E4M3"
        assert codes.view == ("BF16" if wide else narrow)
        assert codes.view.dtype == (np.uint16 if wide else np.uint8)


# S is of codes; what multiplies it has their descales, before a soft cap too.
OF_DESCALES = {
    "q.scales": "q",
    "q.codes": "q q.scales",
    "v.codes": "v v.scales",
    "s": "q.codes k.codes",
    "row_max": "s q.scales k.scales sink",
    "p": "s q.scales k.scales row_max",
    "p.o.codes": "p",
    "o": "p.o.codes v.scales v.codes row_max row_sum sink",
    "lse": "row_max row_sum q.scales k.scales sink",
}

# What products, and what is quantized for them, are computed from: the steps of the recipes.
PARENTS = {
    "attn-qat-nvfp4": {
        "s": "q.scales q.codes k.scales k.codes",
        "p.o.codes": "p p.o.scales",
        "o": "p.o.scales p.o.codes v.scales v.codes row_max row_sum sink",
        "high_precision_out": "v.scales v.codes p row_max row_sum sink",
        "delta": "dout high_precision_out",
        "dp": "dout v.scales v.codes",
        "p.dv.scales": "p.dv",
        "dv": "p.dv.scales p.dv.codes dout",
        "dq": "ds.dq.codes k.scales k.codes",
        "dk": "ds.dk.codes q.scales q.codes",
    },
    "sage3-nvfp4": {
        "q.scales": "q",
        "q.codes": "q q.scales",
        "s": "q.scales q.codes q k.scales k.codes k",
        "p.o.scales": "p s row_max",
        "p.o.codes": "p s row_max p.o.scales",
        "row_sum": "p row_max sink",
        "o": "p.o.scales p.o.codes v.scales v.codes row_max row_sum sink",
    },
    "fp8-fa4": OF_DESCALES,
    "fp8-fa3": OF_DESCALES,
    "cutlass-fp8": {
        "q.codes": "q",
        "s": "q.codes k.codes",
        "p": "s row_max",
        "o": "p.o.codes v.codes row_max row_sum sink",
        "lse": "row_max row_sum sink",
    },
    "bf16-fa4": {
        "s": "q k",
        "o": "p.o.codes v row_max row_sum sink",
        "delta": "dout out",
        "dp": "dout v",
        "ds": "p.dv dp delta",
        "ds.dk.codes": "ds",
        "dq": "ds.dq.codes k",
        "dk": "ds.dk.codes q",
        "dv": "p.dv.codes dout",
    },
    "cudnn-mxfp8": {
        "s": "q.s.scales q.s.codes k.s.scales k.s.codes",
        "o": "p.o.codes v.o.scales v.o.codes row_max row_sum sink",
        "do.dv.scales": "dout",
        "delta": "dout out",
        "dp": "do.dp.scales do.dp.codes v.dp.scales v.dp.codes",
        "dq": "ds.dq.scales ds.dq.codes k.dq.scales k.dq.codes",
        "dk": "ds.dk.scales ds.dk.codes q.dk.scales q.dk.codes",
        "dv": "p.dv.codes do.dv.scales do.dv.codes",
    },
    "cudnn-mxfp8-reference": {  # the backward makes P from a softmax of its own, in which a sink counts
        "s": "q.s.scales q.s.codes k.s.scales k.s.codes",
        "p": "s row_max",
        "o": "p.o.codes v.o.scales v.o.codes row_max row_sum sink",
        "lse": "row_max row_sum sink",
        "delta": "dout out",
        "dp": "do.dp.scales do.dp.codes v.dp.scales v.dp.codes",
        "p.dv": "s sink",
        "p.dv.codes": "p.dv",
        "ds": "p.dv dp delta",
        "ds.dk.codes": "ds ds.dk.scales",
        "dsink": "sink s delta",
        "dq": "ds.dq.scales ds.dq.codes k.dq.scales k.dq.codes",
        "dk": "ds.dk.scales ds.dk.codes q.dk.scales q.dk.codes",
        "dv": "p.dv.codes do.dv.scales do.dv.codes",
    },
    "cudnn-mxfp8-pv-bf16": {
        "o": "p.o.codes v row_max row_sum sink",
        "dp": "do.dp.scales do.dp.codes v.dp.scales v.dp.codes",
        "dq": "ds.dq.codes k",
        "dv": "p.dv.codes dout",
    },
    "flamia-mxfp8": {
        "s": "q.scales q.codes q k.scales k.codes k",
        "o": "p.o.codes p v.scales v.codes v row_max row_sum sink",
        "do.scales": "dout lse",
        "do.codes": "dout lse do.scales",
        "delta": "dout lse out",
        "dp": "do.scales do.codes dout lse v.scales v.codes v",
        "p.dv.scales": "p.dv do.scales",
        "ds.dq.scales": "ds",
        "ds.dk.scales": "ds q.scales",
        "dq": "ds.dq.scales ds.dq.codes ds k.scales k.codes k",
        "dk": "ds.dk.scales ds.dk.codes q.codes",
        "dv": "p.dv.scales p.dv.codes do.codes",
    },
    FOLDED: {
        "s": "q.scales q.codes k.scales k.codes",
        "p.o.scales": "p v.scales",
        "p.o.codes": "p v.scales p.o.scales",
        "o": "p.o.scales p.o.codes v.codes row_max row_sum sink",
        "lse": "row_max row_sum sink",
        "dp": "do.scales do.codes v.scales v.codes",
        "p.dv": "s lse",
        "p.dv.codes": "p.dv do.scales p.dv.scales",
        "ds.dq.codes": "ds k.scales ds.dq.scales",
        "ds.dk.codes": "ds q.scales ds.dk.scales",
        "dq": "ds.dq.scales ds.dq.codes k.codes",
        "dk": "ds.dk.scales ds.dk.codes q.codes",
        "dv": "p.dv.scales p.dv.codes do.codes",
    },
    "flamia-mxfp8-unguarded": {
        "dq": "ds.scales ds.codes k.scales k.codes",
        "dk": "ds.scales ds.codes q.scales q.codes",
        "dv": "p.dv.scales p.dv.codes do.scales do.codes",
        "ds.scales": "ds",
    },
    FP4: {
        "q.s.scales": "q",
        "q.s.codes": "q q.s.scales",
        "s": "q.s.scales q.s.codes k.s.scales k.s.codes",
        "q.dk.scales": "q.s.scales q.s.codes",
        "q.dk.codes": "q.s.scales q.s.codes q.dk.scales",
        "k.dq.codes": "k.s.scales k.s.codes k.dq.scales",
        "ds.dq.codes": "ds k.dq.scales ds.dq.scales",
        "ds.dk.codes": "ds q.dk.scales ds.dk.scales",
        "dq": "ds.dq.scales ds.dq.codes k.dq.codes",
        "dk": "ds.dk.scales ds.dk.codes q.dk.codes",
    },
    UE4M3: {
        "q.s.token_scales": "q",
        "q.s.scales": "q q.s.token_scales",
        "q.s.codes": "q q.s.token_scales q.s.scales",
        "s": "q.s.token_scales q.s.scales q.s.codes k.s.token_scales k.s.scales k.s.codes",
        "q.dk.scales": "q.s.token_scales q.s.scales q.s.codes",
        "k.dq.codes": "k.s.token_scales k.s.scales k.s.codes k.dq.scales",
        "dk": "ds.dk.scales ds.dk.codes q.dk.codes",
    },
}


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_stage_is_computed_from(name: str) -> None:
    stages = flow(name).stages
    for stage, parents in PARENTS[name].items():
        assert set(stages[stage].parents) == set(parents.split()), stage


def knobs(name: str, **changes: dict[str, Any]) -> Recipe:
    """A recipe with other fields of its softmax, its gradient, its tiles."""
    given = RECIPES[name]
    parts = {part: replace(getattr(given, part), **fields) for part, fields in changes.items()}
    return replace(given, name="mine", **parts)


@pytest.mark.parametrize(
    ("recipe", "stage", "parents"),
    [
        (
            knobs(FOLDED, softmax={"row_sum_of": "codes"}),
            "row_sum",
            "p.o.scales p.o.codes v.scales row_max sink",
        ),
        (
            knobs("flamia-mxfp8", softmax={"row_sum_of": "codes"}),
            "row_sum",
            "p p.o.codes row_max sink",
        ),
        (knobs(FOLDED, gradient={"delta_source": "unrounded_out"}), "delta", "dout lse o"),
        (
            knobs(FOLDED, gradient={"delta_source": "quantized_dout"}),
            "delta",
            "do.scales do.codes out",
        ),
        (knobs("bf16-fa4", gradient={"delta_source": "quantized_dout"}), "delta", "dout out"),
        (knobs(FOLDED, gradient={"delta_source": "p_dp"}), "delta", "p.dv dp lse"),
        (knobs("cudnn-mxfp8", gradient={"delta_source": "p_dp"}), "delta", "p.dv dp"),
        (
            knobs(FOLDED, gradient={"p_for_dv": "forward"}),
            "p.dv.codes",
            "p.o.scales p.o.codes v.scales row_max lse do.scales p.dv.scales",
        ),
        (
            knobs("flamia-mxfp8", gradient={"p_for_dv": "forward"}),
            "p.dv.scales",
            "p p.o.codes row_max lse do.scales",
        ),
        (
            replace(RECIPES["flamia-mxfp8"], name="mine", guard_operands="codes"),
            "s",
            "q.scales q.codes k.scales k.codes",
        ),
        (
            replace(RECIPES["flamia-mxfp8"], name="mine", guard_operands="codes"),
            "dq",
            "ds.dq.scales ds.dq.codes ds k.scales k.codes",
        ),
    ],
)
def test_what_a_stage_is_computed_from_with_other_knobs(
    recipe: Recipe, stage: str, parents: str
) -> None:
    stages = dataflow(recipe).stages
    assert set(stages[stage].parents) == set(parents.split())
    order = list(stages)
    assert all(order.index(parent) < order.index(stage) for parent in stages[stage].parents)


def test_a_static_scale_is_no_stage() -> None:
    fields = {"format": "e4m3", "block": None, "scope": Scope.STATIC, "static_scale": 120}
    stages = dataflow(changed("s", "left", "cudnn-mxfp8", **fields)).stages
    assert stages["q.s.codes"].parents == ("q",)
    assert stages["q.s.codes"].view == "F8_E4M3"
    assert "q.s.scales" not in stages
    assert set(stages["s"].parents) == {"q.s.codes", "k.s.scales", "k.s.codes"}


def test_a_stage_with_nothing_given_before_it_has_all_suspects() -> None:
    forward = TRACED[FOLDED][0].split()
    assert flow().suspects("out", frozenset({"out", "lse"})) == tuple(forward)
    # Without dq, dk and dv nothing hides what leads to them.
    assert flow().suspects("dq", frozenset({"out", "lse"})) == (
        *(name for name in forward if name in ("q.scales", "q.codes", "k.scales", "k.codes")),
        *("v.scales", "v.codes", "s", "do.scales", "do.codes", "delta", "dp", "p.dv", "ds"),
        *("ds.dq.scales", "ds.dq.codes"),
    )


def test_a_given_stage_hides_what_is_behind_it() -> None:
    given = frozenset({"s", "v.scales", "v.codes", "out"})
    assert flow().suspects("out", given) == (
        *("row_max", "p", "p.o.scales", "p.o.codes", "row_sum", "o"),
    )
    assert flow().suspects("lse", frozenset({"row_max", "row_sum"})) == ()
    given = frozenset({"out", "lse", "ds", "q.codes", "q.scales"})
    assert flow().suspects("dk", given) == ("ds.dk.scales", "ds.dk.codes")


def test_an_output_that_was_not_given_is_a_suspect() -> None:
    found = flow().suspects("delta", frozenset())
    assert {"out", "lse", "o"} <= set(found)
    assert flow().suspects("delta", frozenset({"out", "lse"})) == ()


def test_a_fault_in_lse_alone_does_not_suspect_v() -> None:
    found = flow().suspects("lse", frozenset({"out"}))
    assert "row_sum" in found
    assert not {"v.codes", "p.o.codes", "o"} & set(found)


@pytest.mark.parametrize("causal", [True, False])
def test_visible_pairs(causal: bool) -> None:
    case = spec(causal=causal)
    places = flow().places(case)
    seen = visible_pairs(case, places["s.2"])
    for query in range(35):
        for key in range(35):
            assert seen[query, key] == (not causal or key <= query)
    assert visible_pairs(case, places["s.1"]).shape == (0, 0)
    assert seen.dtype == np.bool_


# A triangle: 3 queries over 5 keys, and 4 over 2, by hand; rows are queries.
BOTTOM_RIGHT = [["11100", "11110", "11111"], ["00", "00", "10", "11"]]
TOP_LEFT = [["10000", "11000", "11100"], ["10", "11", "11", "11"]]


@pytest.mark.parametrize(
    ("alignment", "rows"), [("bottom_right", BOTTOM_RIGHT), ("top_left", TOP_LEFT)]
)
def test_visible_pairs_of_different_lengths(alignment: str, rows: list[list[str]]) -> None:
    case = spec(lengths=(3, 4), key_lengths=(5, 2), alignment=alignment)
    places = flow().places(case)
    for document, wanted in enumerate(rows):
        seen = visible_pairs(case, places[f"s.{document}"])
        assert ["".join("01"[int(x)] for x in row) for row in seen] == wanted


def test_shapes_of_different_lengths() -> None:
    found = shapes("flamia-mxfp8", spec(lengths=(3, 40), key_lengths=(70, 2)))
    assert found["cu_seqlens"] == found["cu_seqlens_k"] == (3,)
    assert found["q"] == found["dq"] == found["q.codes"] == (43, 2, 32)
    assert found["k"] == found["dv"] == found["k.codes"] == (72, 1, 32)
    assert found["q.scales"] == (43, 2, 1)
    assert found["k.scales"] == (4, 1, 1)
    assert (found["s.0"], found["ds.1"]) == ((2, 3, 70), (2, 40, 2))
    assert (found["p.dv.scales.1"], found["ds.dq.scales.0"]) == ((2, 2, 2), (2, 3, 3))
    assert found["q.scales.tiled.1"] == (2, 1, 1, 512)
    assert found["lse"] == found["delta"] == (2, 43)
    tall = shapes("cudnn-mxfp8", spec(lengths=(3,), key_lengths=(300,)))
    assert tall["k.s.scales.tiled.0"] == (1, 3, 1, 512)
    assert tall["v.o.scales.tiled_transposed.0"] == (1, 1, 3, 512)
    assert tall["q.s.scales.tiled.0"] == (2, 1, 1, 512)
    assert tall["v.o.scales"] == (10, 1, 32)


def test_what_a_case_without_a_sink_has_not() -> None:
    without, with_sink = flow().places(spec()), flow().places(spec(sinks=(0.5, -1.0)))
    assert set(with_sink) - set(without) == {"sink", "dsink"}
    assert with_sink["dsink"].shape == with_sink["sink"].shape == (2,)
    for name in ("row_max", "row_sum", "o", "lse"):
        parents = without[name].stage.parents
        assert with_sink[name].stage.parents == (*parents, "sink")
    assert "cu_seqlens_k" not in with_sink


def changed(product: str, side: str, recipe: str = FOLDED, **fields: Any) -> Recipe:
    """A recipe with another operand."""
    given = RECIPES[recipe]
    of_product = getattr(given, product)
    operand = replace(getattr(of_product, side), **fields)
    return replace(given, name="mine", **{product: replace(of_product, **{side: operand})})


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            changed("s", "left", "cudnn-mxfp8", block=("all", 1)),
            r"^q.s has scale blocks \('all', 1\); packs hold",
        ),
        (changed("o", "left", block=(1, "all")), r"p.o has scale blocks \(1, 'all'\); packs hold"),
        (
            changed("s", "left", "cudnn-mxfp8", block=(32, 1)),
            r"^q.s has scale blocks \(32, 1\), and s takes one scale for 32 channels",
        ),
        (
            changed("s", "left", block=(1, 32)),
            "dk.q has the codes of s.q, but another format or block",
        ),
        (
            changed("dk", "right", scale_folded_into=None),
            r"q has scale blocks \(1, 'all'\), and dk takes one scale for 32 tokens",
        ),
        (changed("dk", "right", same_codes_as=Use.S_K), "dk.q has the codes of s.k"),
        (changed("dv", "left", same_codes_as=Use.O_P), "dv.p has the codes of o.p"),
        (
            changed("s", "left", "bf16-fa4", format="fp16"),
            "^q.s has format 'fp16'; packs hold e4m3, bf16",
        ),
        (
            changed("o", "left", "bf16-fa4", format="fp16"),
            "p.o has format 'fp16'; packs hold e4m3, bf16",
        ),
        (replace(RECIPES[FOLDED], output="fp16"), "input bf16 and output fp16; packs hold bf16"),
        (
            knobs(FOLDED, tiles={"splits": 2}),
            "splits the keys 2 times; packs hold the stages of one",
        ),
        (
            changed("dk", "right", FP4, promoted_from=Use.S_K),
            "dk.q is promoted from s.k, which is no copy of q",
        ),
    ],
)
def test_recipes_that_packs_cannot_hold(recipe: Recipe, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        dataflow(recipe)
    assert "\n" not in str(caught.value)
