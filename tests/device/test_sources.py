"""What the CUDA sources and the Python side must agree on."""

import re
from importlib import resources

import pytest

from flamia_ref.arithmetic import INSTRUCTIONS
from flamia_ref.device import probes as probing
from flamia_ref.device.architectures import ARCHITECTURES, of_capability
from flamia_ref.device.probes import ConversionProbe, ProductProbe, probes, programs
from flamia_ref.device.tiles import MAGIC, VERSION

SOURCES = {
    source.name: source.read_text(encoding="utf-8")
    for source in (resources.files("flamia_ref.device") / "cuda").iterdir()
}


def members(source: str, name: str) -> list[str]:
    """The members of an enumeration in a CUDA source."""
    found = re.search(rf"enum {name} : uint32_t {{(.*?)}};", SOURCES[source], re.DOTALL)
    assert found is not None
    return [member.strip() for member in found[1].split(",") if member.strip()]


def test_numbers_of_files() -> None:
    assert f"FILE_MAGIC = {MAGIC:#x};" in SOURCES["files.cuh"]
    assert f"FILE_VERSION = {VERSION};" in SOURCES["files.cuh"]


def test_enumerations() -> None:
    kinds = [f"KIND_{kind.upper()}" for kind in probing.KINDS]
    assert members("tiles.cuh", "Kind") == kinds
    assert members("tiles.cuh", "Format") == [name.upper() for name in probing.FORMATS]
    assert members("tiles.cuh", "ScaleFormat") == ["NO_SCALES", "E8M0", "UE4M3"]
    assert probing.SCALE_FORMATS == ("none", "e8m0", "ue4m3")
    assert members("tiles.cuh", "Accumulator") == ["FLOAT32", "FLOAT16"]
    assert members("special.cu", "Special") == ["EX2", "LG2", "RCP", "TANH"]
    assert probing.FUNCTIONS == ("exp2", "log2", "reciprocal", "tanh")
    written = [
        name.upper().replace(".SATFINITE", "_SAT").replace(".", "_") for name in probing.CONVERSIONS
    ]
    assert members("convert.cu", "Conversion") == written


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_instruction_of_a_probe_is_in_its_source(name: str) -> None:
    for probe in probes(ARCHITECTURES[name]):
        source = SOURCES[f"{probe.program}.cu"]
        if not isinstance(probe, ProductProbe):
            assert f'"{probe.name}"' in source, probe.name
        elif probe.program == "wgmma" and not probe.half:
            assert f'"k{probe.k}"' in source


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_model_is_there_and_takes_the_probe(name: str) -> None:
    for probe in probes(ARCHITECTURES[name]):
        if not isinstance(probe, ProductProbe):
            continue
        rules = INSTRUCTIONS[probe.instruction]
        assert {probe.a_format, probe.b_format} <= set(rules.operand_formats)
        assert (probe.scaling in rules.scalings) if probe.scaling else not rules.scalings
        assert rules.terms is not None
        assert probe.k % rules.terms == 0
        assert probe.half == probe.instruction.endswith(".f16out")


def test_programs_are_sources() -> None:
    for architecture in ARCHITECTURES.values():
        for program in programs(architecture):
            assert f"{program}.cu" in SOURCES


def test_what_is_probed_where() -> None:
    by_name = {name: probes(one) for name, one in ARCHITECTURES.items()}
    on = {name: {probe.program for probe in found} for name, found in by_name.items()}
    assert all({"convert", "special", "mma"} <= found for found in on.values())
    assert [name for name, found in on.items() if "wgmma" in found] == ["sm_90a"]
    assert [name for name, found in on.items() if "tcgen05" in found] == ["sm_100a", "sm_103a"]
    stochastic = {
        name
        for name, found in by_name.items()
        if any(isinstance(one, ConversionProbe) and one.stochastic for one in found)
    }
    assert stochastic == {"sm_100a", "sm_103a"}
    assert [one.name for one in ARCHITECTURES.values() if one.was_run] == ["sm_90a"]


def test_the_architecture_of_a_device() -> None:
    hopper = of_capability("9.0")
    assert hopper is not None
    assert (hopper.name, hopper.number) == ("sm_90a", 900)
    assert of_capability("7.5") is None
