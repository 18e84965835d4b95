"""The whole run, with an nvcc that stands for one: what is reported, and the exit status."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flamia_ref.device import Plan, ProbeReport, Status, operands, probe, toolchain, value_probing
from flamia_ref.device.architectures import ARCHITECTURES
from flamia_ref.device.probes import ProductProbe, probes
from flamia_ref.device.probes import programs as programs_of
from flamia_ref.device.tiles import to_file
from tests.device import programs

ONE = ("mma.k4.tf32.tf32.f32",)


def run(tmp_path: Path, plan: dict[str, Any] | None = None, **nvcc: Any) -> ProbeReport:
    compiler = programs.write_nvcc(tmp_path, **nvcc)
    chosen: dict[str, Any] = {"only": ONE, "nvcc": str(compiler)} | (plan or {})
    if not chosen.get("compile_only"):
        chosen = {"rows": 1} | chosen
    return probe(Plan(**chosen))


def test_a_confirmed_run(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    compiler = programs.write_nvcc(tmp_path)
    plan = Plan(only=(*ONE, "cvt.rn.satfinite.e4m3*"), rows=1, nvcc=str(compiler))
    report = probe(plan, lambda *progress: told.append(progress))
    assert report.exit_code == 0
    assert (report.architecture, report.device, report.nvcc) == ("sm_90a", "Fake GPU", "13.0")
    assert [(one.probe, one.status) for one in report.outcomes] == [
        ("cvt.rn.satfinite.e4m3x2.f32", Status.CONFIRMED),
        (ONE[0], Status.CONFIRMED),
    ]
    assert told == [(0, 2, "cvt.rn.satfinite.e4m3x2.f32"), (1, 2, ONE[0])]
    document = json.loads(report.to_json())
    assert document["totals"]["confirmed"] == 2
    assert document["settings"] == {"rows": 1, "seed": 0, "exhaustive": False}
    assert document["outcomes"][1]["families"]["exponent floor"] == [256, 0]
    for name in ("sm_100a", "sm_103a", "sm_120a"):
        assert "never ran them" in document["others"][name]
    assert "2 confirmed; 4294970880 results compared, 0 mismatches" in report.to_text()


@pytest.mark.nightly
def test_a_refuted_run(tmp_path: Path) -> None:
    report = run(tmp_path, fault="one fraction bit fewer")
    assert report.exit_code == 1
    (outcome,) = report.outcomes
    assert outcome.status is Status.REFUTED
    assert outcome.counterexample is not None
    text = report.to_text()
    assert "refuted" in text
    assert f"expected: {outcome.counterexample['expected']}" in text


def test_a_refuted_conversion(tmp_path: Path) -> None:
    report = run(tmp_path, {"only": ("cvt.rn.satfinite.e4m3",)}, fault="a fault")
    assert report.exit_code == 1
    assert any(line.startswith("    input: 0x") for line in report.to_text().splitlines())


def test_without_a_gpu_there_is_nothing_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no GPU to probe .*none found.*--compile-only"):
        run(tmp_path, capability=None)


def test_a_gpu_without_probes(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"Fake GPU has compute capability 7\.0; there are probes for 8\.0"
    ):
        run(tmp_path, capability="7.0")


def test_another_architecture_is_not_run(tmp_path: Path) -> None:
    only = ("tcgen05.mxf4.*",)
    report = run(tmp_path, {"architecture": "sm_100a", "only": only})
    assert report.exit_code == 2
    (outcome,) = report.outcomes
    assert outcome.status is Status.NOT_RUN
    assert outcome.reason == "not sm_100a: this device is Fake GPU, compute capability 9.0"


def test_an_nvcc_that_is_too_old(tmp_path: Path) -> None:
    plan = {"only": ("tcgen05.tf32",)}
    report = run(tmp_path, plan, release="12.6", capability="10.0")
    assert report.exit_code == 2
    assert report.outcomes[0].reason == "nvcc 12.6 does not know sm_100a; that needs 12.8"


def test_a_source_that_does_not_compile_fails_its_probes_alone(tmp_path: Path) -> None:
    plan = {"only": (*ONE, "cvt.rn.satfinite.e4m3")}
    report = run(tmp_path, plan, refused="mma")
    assert report.exit_code == 2
    first, second = report.outcomes
    assert first.status is Status.CONFIRMED
    assert second.status is Status.FAILED
    assert second.reason == "nvcc 13.0 refuses mma.cu: ptxas fatal : no such instruction"


def test_a_program_that_stops(tmp_path: Path) -> None:
    crash = 'import os; sys.exit("kernel: an illegal instruction was encountered")'
    report = run(tmp_path, crash=crash)
    assert report.exit_code == 2
    assert report.outcomes[0].status is Status.FAILED
    assert "mma-sm_90a failed: kernel: an illegal instruction" in report.outcomes[0].reason


def test_a_program_that_writes_too_little(tmp_path: Path) -> None:
    crash = "for name in sys.argv[2::2]: open(name, 'wb').close()\nsys.exit(0)"
    report = run(tmp_path, crash=crash)
    assert report.outcomes[0].status is Status.FAILED
    assert "wrote 0 bytes of results, not 512" in report.outcomes[0].reason


def test_sources_and_programs_are_kept_and_nothing_is_overwritten(tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    plan = {"keep": str(keep), "compile_only": True, "architecture": "sm_80", "only": ()}
    run(tmp_path, plan)
    kept = sorted(path.name for path in (keep / "sources").iterdir())
    assert "mma.cu" in kept
    assert "mma-sm_80" in kept
    assert list(keep.iterdir()) == [keep / "sources"]
    with pytest.raises(ValueError, match="kept exists; name a folder that does not"):
        run(tmp_path, plan)


def test_nothing_is_kept_where_nothing_can_be_run(tmp_path: Path) -> None:
    plan = {"keep": str(tmp_path / "kept")}
    with pytest.raises(ValueError, match="no GPU to probe"):
        run(tmp_path, plan, capability=None)
    assert not (tmp_path / "kept").exists()
    assert run(tmp_path, plan, release="11.9").exit_code == 2
    assert not (tmp_path / "kept").exists()
    assert run(tmp_path, plan).exit_code == 0
    assert (tmp_path / "kept" / "sources" / "mma-sm_90a").is_file()


def test_nothing_is_kept_of_a_run_that_is_interrupted(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    keep = tmp_path / "kept"
    plan = Plan(only=ONE, rows=1, nvcc=programs.write_nvcc(tmp_path), keep=keep)
    with pytest.raises(KeyboardInterrupt):
        probe(plan, interrupt)
    assert not keep.exists()


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("", "keep is an empty name; name a folder"),
        ("a/b/c", "cannot make .*a/b/c: there is no folder .*a/b"),
        ("dangling", "dangling exists; name a folder that does not"),
        ("nvcc/x", "cannot make .*nvcc/x: there is no folder .*nvcc"),
        ("x" * 300, "cannot make x*: File name too long"),
    ],
)
def test_a_folder_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(ValueError, match=message):
        run(tmp_path, {"keep": keep})


def test_a_report_names_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sp ace").mkdir()
    monkeypatch.chdir(tmp_path)
    crash = (
        "sys.exit('cannot read ' + sys.argv[1] + ', ' + __file__"
        " + '(3): see /opt/me/include/x.h, /tmp/tmpxft_1/mma.ptx; 1/2, /dev')"
    )
    report = run(tmp_path, {"keep": "sp ace/kept"}, crash=crash)
    said = report.outcomes[0].reason
    assert said == (
        "mma-sm_90a failed: cannot read 0.in, mma-sm_90a(3): see x.h, mma.ptx; 1/2, /dev"
    )
    for part in ("sp ace", "kept", str(tmp_path), "tmpxft"):
        assert part not in report.to_json()


def test_a_program_that_writes_no_result_fails_its_probes_alone(tmp_path: Path) -> None:
    crash = "if 'mma' in sys.argv[0]: sys.exit(0)"
    report = run(tmp_path, {"only": (*ONE, "cvt.rn.satfinite.e4m3")}, crash=crash)
    assert [one.status for one in report.outcomes] == [Status.CONFIRMED, Status.FAILED]
    assert report.outcomes[1].reason == "mma-sm_90a ended well and wrote no 0.out"


def test_a_program_that_leaves_things_behind(tmp_path: Path) -> None:
    crash = "import os\nfor name in sys.argv[2::2]: os.makedirs(name + '/x')\nsys.exit(0)"
    report = run(tmp_path, crash=crash)
    assert "wrote no 0.out" in report.outcomes[0].reason


def test_names_that_no_probe_of_the_device_has(tmp_path: Path) -> None:
    message = r"no probe of sm_90a is named like 'tcgen05'; .* --list --arch sm_90a"
    for plan in ({}, {"architecture": "sm_90a"}, {"architecture": "sm_90a", "compile_only": True}):
        with pytest.raises(ValueError, match=message):
            run(tmp_path, {"only": ("tcgen05",)} | plan)


def test_compiling_what_some_probes_need(tmp_path: Path) -> None:
    report = run(tmp_path, {"only": ("tcgen05", "wgmma"), "compile_only": True})
    assert [one.probe for one in report.outcomes] == [
        "wgmma.cu for sm_90a",
        "tcgen05.cu for sm_100a",
        "tcgen05.cu for sm_103a",
    ]


@pytest.mark.parametrize("given", [{"rows": 1}, {"seed": 1}, {"exhaustive": True}])
def test_compiling_only_refuses_what_is_for_runs(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"runs nothing, so {next(iter(given))} means nothing"):
        run(tmp_path, {"compile_only": True} | given)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"rows": "x"}, "rows is 'x'; it must be an int, 1 to 100000000"),
        ({"rows": None}, "rows is None"),
        ({"rows": 1.5}, "rows is 1.5"),
        ({"rows": True}, "rows is True"),
        ({"seed": None}, "seed is None; it must be an int, 0 or more"),
        ({"only": "wgmma"}, r"only is 'wgmma'; give a tuple of names, such as \('wgmma',\)"),
        ({"only": None}, "only is None"),
        ({"only": (5,)}, "only holds 5; give names as text"),
        ({"keep": 5}, "keep is 5; give the name of a folder"),
        ({"nvcc": 5}, "nvcc is 5; give the path of a program"),
        ({"exhaustive": "no"}, "exhaustive is 'no'; it must be True or False"),
    ],
)
def test_a_plan_of_other_types(tmp_path: Path, plan: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        run(tmp_path, plan)


def test_compiling_needs_no_gpu(tmp_path: Path) -> None:
    plan = {"only": (), "compile_only": True}
    report = run(tmp_path, plan, capability=None, release="12.8")
    assert report.exit_code == 0
    found = {one.probe: one for one in report.outcomes}
    assert found["tcgen05.cu for sm_100a"].status is Status.COMPILED
    assert found["tcgen05.cu for sm_100a"].reason == "never run by its authors"
    assert found["wgmma.cu for sm_90a"].reason == ""
    assert found["tcgen05.cu for sm_103a"].status is Status.NOT_RUN
    plan |= {"architecture": "sm_120a"}
    report = run(tmp_path, plan, capability=None, refused="special")
    assert report.exit_code == 2
    assert [one.probe for one in report.outcomes if one.status is Status.FAILED] == [
        "special.cu for sm_120a"
    ]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"architecture": "sm_90"}, "unknown architecture 'sm_90'; did you mean 'sm_90a'"),
        ({"only": ("wgma",)}, "no probe is named like 'wgma'; .* --list names them all"),
        ({"only": ("",)}, "only holds an empty name"),
        ({"rows": 0}, "rows is 0; it must be 1 to 100000000"),
        ({"rows": 10**8 + 1}, "rows is 100000001; it must be 1 to 100000000"),
        ({"seed": -1}, "seed is -1; it must be 0 or more"),
        ({"nvcc": "no-such-nvcc"}, "'no-such-nvcc' is no program"),
    ],
)
def test_a_plan_that_cannot_be_run(tmp_path: Path, plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(tmp_path, plan)


def test_no_nvcc_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"nvcc was not found on PATH.*--nvcc"):
        probe(Plan())


def test_nvcc_in_cuda_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    programs.write_nvcc(tmp_path / "bin", release="12.9")
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert toolchain.find_compiler().release == (12, 9)


@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH"])
def test_a_cuda_home_without_nvcc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv(name, "/no/such/folder")
    # Not any other installation: the one that was meant.
    with pytest.raises(
        ValueError, match=f"{name} is '/no/such/folder', in which there is no bin/nvcc"
    ):
        toolchain.find_compiler()
    assert toolchain.find_compiler(programs.write_nvcc(tmp_path)).release == (13, 0)


def test_what_is_no_nvcc(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names no CUDA release; is it nvcc"):
        toolchain.find_compiler("true")
    with pytest.raises(ValueError, match="false does not run"):
        toolchain.find_compiler("false")


def test_every_probe_has_its_name_and_its_model() -> None:
    for architecture in ARCHITECTURES.values():
        names = [one.name for one in probes(architecture)]
        assert len(set(names)) == len(names)


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="NOT CHECKED: no nvcc here")
def test_the_sources_compile() -> None:
    report = probe(Plan(compile_only=True))
    assert {one.status for one in report.outcomes} <= {Status.COMPILED, Status.NOT_RUN}


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="NOT CHECKED: no nvcc here")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_probe_has_a_kernel_in_its_program(name: str, tmp_path: Path) -> None:
    """Status 3 is "no kernel for this file"; without a GPU of the kind a program stops later, with another one."""
    architecture = ARCHITECTURES[name]
    toolchain.write_sources(tmp_path / "sources")
    compiler = toolchain.find_compiler()
    compiled = {
        program: toolchain.compile_program(compiler, tmp_path / "sources", program, architecture)
        for program in programs_of(architecture)
    }
    for number, one in enumerate(probes(architecture)):
        if isinstance(one, ProductProbe):
            data = to_file(one, next(operands.tiles(one, 1, 4, 0))[1])
        else:
            data = value_probing.request(one.number, 0, 0, 1)
        file = tmp_path / f"{number}.in"
        file.write_bytes(data)
        command = [compiled[one.program], file, tmp_path / "out"]
        assert subprocess.run(command, capture_output=True).returncode != 3, one.name
    # A file for which there is none.
    data = value_probing.request(99, 0, 0, 1)
    file.write_bytes(data)
    command = [compiled["special"], file, tmp_path / "out"]
    assert subprocess.run(command, capture_output=True).returncode == 3
