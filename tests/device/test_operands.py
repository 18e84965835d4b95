"""Operands of probes: what they are made of, and that each fault of a model shows on them."""

import dataclasses

import numpy as np
import pytest

from flamia_ref.device import operands
from flamia_ref.device.architectures import ARCHITECTURES
from flamia_ref.device.probes import ProductProbe, probes
from flamia_ref.device.tiles import expected
from tests.device import machines

PRODUCTS = {
    probe.name: probe
    for architecture in ARCHITECTURES.values()
    for probe in probes(architecture)
    if isinstance(probe, ProductProbe)
}
# One probe a model and a form of its operands; sister architectures share theirs.
EVERY = {
    (probe.instruction, probe.a_format, probe.b_format, probe.k, probe.scaling): probe
    for architecture in ARCHITECTURES.values()
    for probe in probes(architecture)
    if isinstance(probe, ProductProbe)
}
HOPPER = [name for name in PRODUCTS if name.startswith("wgmma")]
LOOKED_AT = (
    "wgmma.k16.f16.f16.f32",
    "wgmma.k16.bf16.bf16.f32",
    "wgmma.k8.tf32.tf32.f32",
    "wgmma.k32.e4m3.e4m3.f32",
    "wgmma.k16.f16.f16.f16",
    "wgmma.k32.e5m2.e5m2.f16",
    "tcgen05.f8f6f4.e2m1.e2m1.f32",
    "tcgen05.mxf8f6f4.e4m3.e4m3.f32.block32.e8m0",
    "tcgen05.mxf8f6f4.e2m1.e2m1.f32.block32.e8m0",
    "tcgen05.mxf4.e2m1.e2m1.f32.block32.e8m0",
    "tcgen05.mxf4nvf4.e2m1.e2m1.f32.block16.ue4m3",
)
TILES = 14 * 3  # 3 of each family, or 5 of the fewer ones for FP4
# No product of these is small enough to be cut at the exponent floor.
NO_FLOOR = ("wgmma.k16.f16.f16.f32", "wgmma.k32.e4m3.e4m3.f32", "wgmma.k32.e5m2.e5m2.f16")
NO_FLOOR += ("tcgen05.f8f6f4.e2m1.e2m1.f32", "tcgen05.mxf4nvf4.e2m1.e2m1.f32.block16.ue4m3")


def sample(
    probe: ProductProbe, rows: int, *, steps: int = 1, seed: int = 1
) -> list[tuple[str, object, np.ndarray]]:
    """Of each family some results: its tiles, and where in them."""
    found = []
    rng = np.random.default_rng(seed)
    for name, tiles in operands.tiles(probe, TILES, steps, seed):
        chosen = np.stack([rng.integers(0, size, rows) for size in tiles.c.shape], axis=1)
        found.append((name, tiles, chosen))
    return found


def caught(probe: ProductProbe, fault: str, rows: int) -> dict[str, int]:
    """How many of the results of each family a fault changes."""
    found = {}
    for name, tiles, chosen in sample(probe, rows):
        right = machines.model(probe, tiles, chosen)
        count = int((machines.results(probe, tiles, fault, chosen) != right).sum())
        if count:
            found[name] = count
    return found


@pytest.mark.parametrize("name", LOOKED_AT)
def test_the_model_and_the_independent_machine_agree(name: str) -> None:
    probe = PRODUCTS[name]
    for steps in (1, 3):
        for family, tiles, chosen in sample(probe, 8, steps=steps):
            right = machines.model(probe, tiles, chosen)
            assert machines.results(probe, tiles, None, chosen).tolist() == right.tolist(), family


@pytest.mark.nightly
@pytest.mark.parametrize("probe", EVERY.values(), ids=[probe.name for probe in EVERY.values()])
def test_the_model_and_the_independent_machine_agree_everywhere(probe: ProductProbe) -> None:
    for steps in (1, 4):
        for family, tiles, chosen in sample(probe, 40, steps=steps, seed=2):
            right = machines.model(probe, tiles, chosen)
            assert machines.results(probe, tiles, None, chosen).tolist() == right.tolist(), family


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (name, fault)
        for name in LOOKED_AT
        for fault in machines.FAULTS
        if machines.applies(fault, PRODUCTS[name])
    ],
)
def test_every_fault_shows(name: str, fault: str) -> None:
    probe = PRODUCTS[name]
    found = caught(probe, fault, 60)
    if fault.startswith("floor") and name in NO_FLOOR:
        assert not found
    else:
        assert found


@pytest.mark.parametrize("name", ["wgmma.k16.f16.f16.f16", "wgmma.k16.bf16.bf16.f32"])
@pytest.mark.parametrize("fault", ["floor one lower", "floor one higher"])
def test_the_floor_shows_often_in_its_family(name: str, fault: str) -> None:
    assert caught(PRODUCTS[name], fault, 100)["exponent floor"] >= 5


def test_the_seed_decides_everything() -> None:
    probe = PRODUCTS["wgmma.k32.e4m3.e5m2.f16"]
    once, again, other = (list(operands.tiles(probe, 1, 2, seed)) for seed in (5, 5, 6))
    assert [name for name, _ in once] == list(operands.families(probe))
    for (_, x), (_, y), (_, z) in zip(once, again, other, strict=True):
        for field in dataclasses.fields(x):
            assert np.array_equal(getattr(x, field.name), getattr(y, field.name))
        assert not np.array_equal(x.c, z.c)


@pytest.mark.parametrize("name", LOOKED_AT)
def test_shapes_and_types(name: str) -> None:
    probe = PRODUCTS[name]
    for _, tiles in operands.tiles(probe, 1, 3, 0):
        assert tiles.a.shape == (1, 3, probe.m, probe.k)
        assert tiles.b.shape == (1, 3, probe.n, probe.k)
        assert tiles.a_scales.shape == (1, 3, probe.m, probe.scales)
        assert tiles.b_scales.shape == (1, 3, probe.n, probe.scales)
        assert tiles.c.shape == (1, probe.m, probe.n)
        assert tiles.c.dtype == np.uint32
        if probe.half:
            assert int(tiles.c.max()) < 1 << 16


@pytest.mark.parametrize("name", HOPPER)
def test_special_values_are_rare_enough(name: str) -> None:
    """Where most results are NaN little is tested."""
    probe = PRODUCTS[name]
    nan = 0x7FFF if probe.half else 0x7FFFFFFF
    results = np.concatenate(
        [expected(probe, tiles).ravel() for _, tiles in operands.tiles(probe, 28, 1, 0)]
    )
    assert 0.005 < np.mean(results == nan) < 0.15
