"""What a tile product costs, against figures worked out by hand from the rates of each GPU."""

import numpy as np
import pytest

from flamia_ref.attention import RECIPES
from flamia_ref.schedule.cost import Constants, guarded_cycles, terms_of, tile_cycles
from flamia_ref.schedule.hardware import GPUS
from flamia_ref.schedule.kernel import Kernel, kernel_of
from flamia_ref.schedule.work import Pass, Problem, Size, work_of

TILE = Size(128, 128)
ONE = Problem.of([0, 256], heads=1)


def kernel(recipe: str, launch: str = "forward", *, emulated: float = 0.0) -> Kernel:
    return kernel_of(RECIPES[recipe], launch, size=TILE, emulated=emulated)


@pytest.mark.parametrize(
    ("recipe", "launch", "gpu", "cycles"),
    [
        # Two products of 128 x 128 x 128 are 2 x 2 x 2^21 operations; 8192 a clock in bfloat16, twice in FP8.
        ("bf16-fa4", "forward", "B200", 1024),
        ("cudnn-mxfp8", "forward", "B200", 512),
        ("fp8-fa4", "forward", "B200", 512),
        # S in FP4, O in FP8: 128 and 256.
        ("flamia-nvfp4-fp8", "forward", "B200", 128 + 256),
        # Five products.
        ("bf16-fa4", "backward", "B200", 5 * 512),
        ("cudnn-mxfp8", "backward", "B300", 5 * 256),
        ("bf16-fa4", "backward_dq", "B200", 3 * 512),
        ("bf16-fa4", "backward_dkdv", "B200", 4 * 512),
        # Half the rate.
        ("bf16-fa4", "forward", "H200", 2048),
    ],
)
def test_the_tensor_core(recipe: str, launch: str, gpu: str, cycles: int) -> None:
    assert terms_of(kernel(recipe, launch), ONE, GPUS[gpu]).tensor == cycles


def test_products_are_as_wide_as_their_operands() -> None:
    # S over 192 channels, O of 128.
    problem = Problem.of([0, 256], heads=1, head_dim=192, value_dim=128)
    assert terms_of(kernel("bf16-fa4"), problem, GPUS["B200"]).tensor == 768 + 512
    # S, dQ and dK over 192, dP and dV over 128.
    found = terms_of(kernel("bf16-fa4", "backward"), problem, GPUS["B200"])
    assert found.tensor == 3 * 768 + 2 * 512


@pytest.mark.parametrize(
    ("gpu", "emulated", "exp2"),
    [("B200", 0.0, 1024), ("B200", 0.25, 768), ("B300", 0.0, 512), ("H200", 0.0, 1024)],
)
def test_special_functions(gpu: str, emulated: float, exp2: int) -> None:
    # 16384 exp2 of 16 or 32 a clock, and 16384 conversions of 64 a clock.
    found = terms_of(kernel("bf16-fa4", emulated=emulated), ONE, GPUS[gpu])
    assert found.special == exp2 + 256
    # Three operations a score and ten for an emulated exp2, 128 lanes.
    assert found.float32 == 128 * (3 + 10 * emulated)


def test_conversions_and_scales_of_a_backward() -> None:
    # P once, of a scale that is known, and dS twice with scales of blocks: 2 operations more a score and copy.
    found = terms_of(kernel("cudnn-mxfp8", "backward"), ONE, GPUS["B200"])
    assert found.special == 1024 + 3 * 256
    assert found.float32 == 128 * (3 + 2 * 2)
    # Where P has scales of blocks too, of columns for dV.
    assert terms_of(kernel("flamia-mxfp8", "backward"), ONE, GPUS["B200"]).float32 == 128 * 9
    plain = terms_of(kernel("bf16-fa4", "backward"), ONE, GPUS["B200"])
    assert (plain.special, plain.float32) == (1024 + 2 * 256, 128 * 3)


def test_shared_memory() -> None:
    tile = 128 * 128  # elements of an operand, of P and of dS
    # S reads Q and K, O reads V.
    assert terms_of(kernel("bf16-fa4"), ONE, GPUS["B200"]).shared * 128 == 2 * 3 * tile
    assert terms_of(kernel("cudnn-mxfp8"), ONE, GPUS["B200"]).shared * 128 == 3 * tile
    # S and dP read two operands each, dV reads dO, dQ reads K and dS, dK reads Q and dS: nine. dS is written once in
    # bfloat16 and once in each direction in MXFP8. dQ is written in float32 and read.
    bf16 = terms_of(kernel("bf16-fa4", "backward"), ONE, GPUS["B200"])
    assert bf16.shared * 128 == 2 * (9 + 1) * tile + 2 * 4 * tile
    mxfp8 = terms_of(kernel("cudnn-mxfp8", "backward"), ONE, GPUS["B200"])
    assert mxfp8.shared * 128 == (9 + 2) * tile + 2 * 4 * tile
    # Where dQ has a launch of its own it stays where it is added up: S 2, dP 2, dQ 2, and dS written.
    alone = terms_of(kernel("bf16-fa4", "backward_dq"), ONE, GPUS["B200"])
    assert alone.shared * 128 == 2 * (6 + 1) * tile


def test_what_bounds_a_tile() -> None:
    assert terms_of(kernel("bf16-fa4"), ONE, GPUS["B200"]).bound_by == "special"
    assert terms_of(kernel("bf16-fa4"), ONE, GPUS["B300"]).bound_by == "tensor"
    assert terms_of(kernel("cudnn-mxfp8"), ONE, GPUS["B300"]).bound_by == "special"
    backward = terms_of(kernel("cudnn-mxfp8", "backward"), ONE, GPUS["B200"])
    assert (backward.bound_by, backward.slowest) == ("shared", 19 * 128)


def test_guarded_blocks() -> None:
    # flamia-mxfp8 guards S and O; a block of 32 x 32 x 128 in bfloat16 takes 2^18 / 8192.
    forward, backward = (kernel("flamia-mxfp8", launch) for launch in ("forward", "backward"))
    assert guarded_cycles(forward, ONE, GPUS["B200"]) == 2 * 32
    # S, dP and dQ in the backward; dV and dK are not guarded.
    assert guarded_cycles(backward, ONE, GPUS["B200"]) == 3 * 32
    for other in ("cudnn-mxfp8", "bf16-fa4"):
        assert guarded_cycles(kernel(other), ONE, GPUS["B200"]) == 0


def test_tiles() -> None:
    # 300 causal tokens: 1, 2 and 3 products, 4, 4 and 2 guarded blocks; efficiency one half doubles all but the
    # overhead.
    work = work_of(Problem.of([0, 300], heads=1), "forward", TILE)
    constants = Constants(efficiency=0.5, overhead=100.0)
    one = terms_of(kernel("flamia-mxfp8"), work.problem, GPUS["B200"]).slowest
    assert one == 1024 + 256
    found = tile_cycles(work, kernel("flamia-mxfp8"), GPUS["B200"], constants)
    assert found.tolist() == [
        100 + 2 * (products * one + guarded * 64) for products, guarded in ((1, 4), (2, 4), (3, 2))
    ]
    plain = tile_cycles(work, kernel("cudnn-mxfp8"), GPUS["B200"], constants)
    assert plain.tolist() == [100 + 2 * 1280 * products for products in (1, 2, 3)]
    assert plain.dtype == np.float64


def test_bad_input() -> None:
    for call, message in (
        (lambda: terms_of(kernel("flamia-nvfp4-fp8"), ONE, GPUS["H200"]), "H200 has no fp4"),
        (lambda: kernel("fp8-fa4", "backward"), "'fp8-fa4' has no backward"),
        (lambda: kernel("bf16-fa4", emulated=1.5), "emulated is 1.5"),
        (lambda: kernel("bf16-fa4", "sideways"), "sideways"),
        (lambda: Constants(efficiency=0.0, overhead=1.0), "efficiency is 0"),
        (lambda: Constants(efficiency=float("nan"), overhead=1.0), "efficiency is nan"),
        (lambda: Constants(efficiency=1.0, overhead=-1.0), "overhead is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_every_figure_has_a_source() -> None:
    for gpu in GPUS.values():
        for name in gpu.__slots__:
            figure = getattr(gpu, name)
            if name != "name" and figure is not None:
                assert figure.source, (gpu.name, name)
                assert figure.value > 0
    assert {one.name for one in GPUS.values()} == {"B200", "B300", "GB200", "GB300", "H200"}
    assert [Pass(x).by_keys for x in Pass] == [False, True, False, True]
