"""The plugin as users run it: pytest in a process of its own, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flamia_ref import golden
from flamia_ref.golden import making
from flamia_ref.properties import PROPERTIES, strategies
from flamia_ref.properties.files import read_expectations
from flamia_ref.properties.searching import PROFILES
from tests.golden.packs import WITH_TINY
from tests.repository.layout import ROOT, project

SMALL = ("--flamia-max-examples=3", "--flamia-lengths=0,1,5,17", "--flamia-head-dim=32")
SUITES = ("--pyargs", "flamia_ref.properties")


def run(folder: Path, *arguments: str, status: int = 0) -> str:
    """Run pytest and return what it printed."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTHONPATH": str(ROOT), "CI": "1", "COLUMNS": "200"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # others take a second to load
    command = [sys.executable, "-W", "error", "-m", "pytest", "-p", "flamia_ref.pytest_plugin"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-q", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def test_the_entry_point_is_the_plugin() -> None:
    points = project()["project"]["entry-points"]["pytest11"]
    # Under its own name, so that `-p flamia_ref.pytest_plugin` does not register it twice.
    assert points == {"flamia_ref.pytest_plugin": "flamia_ref.pytest_plugin"}


def test_the_plugin_loads_the_standard_library_and_pytest_only() -> None:
    program = """
import sys
import pytest
before = set(sys.modules)
import flamia_ref.pytest_plugin
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert new - set(sys.stdlib_module_names) == {"flamia_ref"}, new
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, cwd=ROOT)


def test_without_a_kernel_it_says_what_to_give(tmp_path: Path) -> None:
    printed = run(tmp_path, *SUITES, "--strict-markers")
    assert f"{len(PROPERTIES)} skipped" in printed
    assert "nothing was tested: no kernel was given: add --flamia-kernel module:function" in printed


def test_every_property_is_a_test() -> None:
    from flamia_ref.properties import test_kernel

    names = [name for name in vars(test_kernel) if name.startswith("test_")]
    assert names == [f"test_{name}" for name in PROPERTIES]
    for name in PROPERTIES:
        (mark,) = getattr(test_kernel, f"test_{name}").pytestmark
        assert (mark.name, mark.args) == ("flamia_property", (name,))


@pytest.mark.nightly
def test_properties_are_chosen_as_tests_are(tmp_path: Path) -> None:
    printed = run(tmp_path, *SUITES, "--collect-only", "-k", "nan_poison or causality")
    assert re.findall(r"::test_(\w+)$", printed, re.MULTILINE) == ["causality", "nan_poison"]


def test_a_right_kernel_passes_and_the_summary_says_with_what(tmp_path: Path) -> None:
    printed = run(tmp_path, *SUITES, *SMALL, "--flamia-kernel=tests.properties.kernels:exact")
    assert f"{len(PROPERTIES)} passed" in printed
    assert re.search(
        r"causality: [4-9] examples, \d with a forbidden pair in one block of 32; the planted fault was found",
        printed,
    )


def test_failures_expectations_and_examples(tmp_path: Path) -> None:
    kernel = "--flamia-kernel=tests.properties.kernels:times_zero"
    chosen = ("-k", "nan_poison or determinism or padding_garbage")
    saved = tmp_path / "found.txt"
    printed = run(
        tmp_path, *SUITES, *SMALL, kernel, *chosen, f"--flamia-save-examples={saved}", status=1
    )
    assert "1 failed, 2 passed" in printed
    assert "Traceback" not in printed
    assert ">" not in "".join(line[:1] for line in printed.splitlines())  # no source of ours
    (line,) = saved.read_text().splitlines()
    assert line in printed
    assert re.search(
        r"FAILED .*test_nan_poison - PropertyFailed: tests.properties.kernels:times_zero", printed
    )

    expected = tmp_path / "expected.toml"
    expected.write_text(
        '[nan_poison]\noutcome = "xfail"\nreason = "masks by a product"\n'
        '[padding_garbage]\noutcome = "skip"\nreason = "no padding here"\n'
    )
    # The saved example is tried first: without it, one draw of an empty search might not find it.
    known = (f"--flamia-expect={expected}", f"--flamia-examples={saved}", "-rxs")
    printed = run(tmp_path, *SUITES, *SMALL, kernel, *chosen, *known)
    assert "1 passed, 1 skipped, 9 deselected, 1 xfailed" in printed
    assert "masks by a product" in printed
    assert "no padding here" in printed


@pytest.mark.nightly
def test_a_kernel_that_was_repaired_is_told_so(tmp_path: Path) -> None:
    expected = tmp_path / "expected.toml"
    expected.write_text('[nan_poison]\noutcome = "xfail"\nreason = "masks by a product"\n')
    right = ("--flamia-kernel=tests.properties.kernels:exact", f"--flamia-expect={expected}")
    printed = run(tmp_path, *SUITES, *SMALL, *right, "-k", "nan_poison", status=1)
    assert "[XPASS(strict)] masks by a product" in printed


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        ("broken:kernel", "OSError: no device"),
        pytest.param("nowhere:kernel", "there is no module 'nowhere'", marks=pytest.mark.nightly),
        pytest.param(
            "tests.properties.kernels:zeros",
            "does the kernel read its inputs?",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_failure_is_said_once(kernel: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "def kernel(q, k, v, **settings):\n    raise OSError('no device')\n"
    )
    arguments = (*SUITES, *SMALL, "-k", "determinism or zero_length", "-rN")
    printed = run(tmp_path, *arguments, f"--flamia-kernel={kernel}", status=1)
    assert printed.count(says) == 2, printed  # one for each property
    assert "exception" not in printed


@pytest.mark.nightly
def test_an_expected_failure_is_no_excuse_for_a_kernel_that_cannot_run(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "def kernel(q, k, v, **settings):\n    raise OSError('no device')\n"
    )
    expected = tmp_path / "expected.json"
    expected.write_text('{"causality": {"outcome": "xfail", "reason": "v in blocks"}}')
    printed = run(
        tmp_path,
        *SUITES,
        *SMALL,
        "--flamia-kernel=broken:kernel",
        f"--flamia-expect={expected}",
        "-k",
        "causality",
        status=1,
    )
    assert "1 failed" in printed
    assert "kernel broken:kernel failed in case causality (lengths " in printed
    assert "OSError: no device" in printed


WRONG = [
    (("--flamia-expect=none.toml",), 4, "cannot read none.toml"),
    (("--flamia-kernel=nowhere:kernel",), 1, "there is no module 'nowhere' here or installed"),
    (("--flamia-kernel=kernel",), 1, "must have the form module:function"),
    (("--flamia-heads=3", "--flamia-kv-heads=2"), 1, "3 heads do not divide over 2 kv_heads"),
    (("--flamia-recipe=flamia-mxfp9",), 1, "did you mean 'flamia-mxfp8'"),
    (("--flamia-examples=none.txt",), 1, "cannot read none.txt"),
    (("--flamia-lengths=1,x",), 4, "invalid list of lengths value: '1,x'"),
    (("--flamia-heads=0",), 4, "invalid whole number of at least 1 value: '0'"),
    (("--flamia-profile=fast",), 4, "invalid choice: 'fast'"),
]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        pytest.param(*one, marks=() if at < 1 else pytest.mark.nightly)
        for at, one in enumerate(WRONG)
    ],
)
def test_wrong_options_are_named(
    arguments: tuple[str, ...], status: int, says: str, tmp_path: Path
) -> None:
    kernel = "--flamia-kernel=tests.properties.kernels:exact"
    printed = run(tmp_path, *SUITES, "-k", "causality", kernel, *arguments, status=status)
    assert says in printed
    assert "Traceback" not in printed


@pytest.mark.nightly
def test_a_recipe_and_what_a_length_cannot_show(tmp_path: Path) -> None:
    printed = run(
        tmp_path,
        *SUITES,
        "--flamia-kernel=flamia_ref.golden.simulator:numpy_kernel",
        "--flamia-recipe=cudnn-mxfp8",
        "--flamia-head-dim=32",
        "--flamia-lengths=1,33",
        "-k",
        "causality or zero_length",
        "-rs",
        status=1,
    )
    assert "1 failed, 1 skipped" in printed
    assert "numpy_kernel by cudnn-mxfp8: v of token" in printed
    assert "0 is not among the lengths (1, 33); add it" in printed


GOLDEN = """
from flamia_ref.golden.simulator import numpy_kernel

def test_kernel(golden_case):
    golden_case.check(numpy_kernel)

def test_results(golden_case):
    x = golden_case.inputs()
    results = numpy_kernel(
        x["q"], x["k"], x["v"], cu_seqlens=x["cu_seqlens"], causal=golden_case.case.spec.causal,
        softmax_scale=golden_case.case.spec.softmax_scale, recipe=golden_case.case.entry.recipe,
    )
    results["out"][0] += 1
    golden_case.check(results)

def test_nothing(golden_case):
    golden_case.check({})
"""


@pytest.mark.nightly  # tests/golden/test_golden_plugin.py has these daily
def test_golden_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_golden.py").write_text(GOLDEN)
    pack = tmp_path / "pack"
    monkeypatch.setattr(making, "SUITES", WITH_TINY)
    golden.make(pack, ["flamia-mxfp8-folded"], suite="tiny")
    names = [case.name for case in golden.load(pack)]
    printed = run(tmp_path, f"--flamia-pack={pack}", "-vv", status=1)
    for name in names:
        assert f"test_kernel[{name}] PASSED" in printed
    assert f"{2 * len(names)} failed, {len(names)} passed" in printed
    assert "first departs at out" in printed
    assert f"the results of {names[0]} hold no stage and no output" in printed
    assert "Traceback" not in printed
    printed = run(tmp_path, "-rs")
    assert "3 skipped" in printed
    assert "no pack was given: add --flamia-pack DIR" in printed


@pytest.mark.nightly
def test_a_pack_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "test_golden.py").write_text(GOLDEN)
    assert "there is no folder" in run(tmp_path, "--flamia-pack=none", status=2)


def test_what_the_readme_shows(tmp_path: Path) -> None:
    """The test of one's own runs, the expectations are read, and what is said of options is what there is."""
    text = (ROOT / "properties" / "README.md").read_text(encoding="utf-8")
    blocks = dict.fromkeys(re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    (own,) = [body for kind, body in blocks if kind == "python" and "import" in body]
    (expected,) = [body for kind, body in blocks if kind == "toml"]
    (tmp_path / "my_module.py").write_text(
        "from tests.properties.kernels import exact as my_kernel"
    )
    # Fewer and shorter examples, or it would take long; the line that is pasted stays as it is.
    body = own.replace("Space(head_dim=128)", "Space(head_dim=32, lengths=(5,))")
    (tmp_path / "test_own.py").write_text(body)
    (tmp_path / "conftest.py").write_text(
        "from hypothesis import settings\n\n"
        'settings.register_profile("few", max_examples=5)\nsettings.load_profile("few")\n'
    )
    assert "1 passed" in run(tmp_path)
    (tmp_path / "expected.toml").write_text(expected)
    assert list(read_expectations(tmp_path / "expected.toml")) == ["nan_poison", "grouped_heads"]
    for name in PROPERTIES:
        assert f"| `{name}` |" in text
    for name, profile in PROFILES.items():
        assert f"| `{name}` | {profile.examples} |" in text
    for name in strategies.__all__:
        assert f"`{name}(" in text
    options = set(
        re.findall(r'"(--flamia-[a-z-]+)"', (ROOT / "flamia_ref/pytest_plugin.py").read_text())
    )
    assert set(re.findall(r"--flamia-[a-z-]+", text)) == options
    modules = {path.stem for path in (ROOT / "properties").glob("*.py")} - {"__init__"}
    assert modules <= set(re.findall(r"`(\w+)`", text.partition("## Modules")[2]))


def test_the_plugin_is_quiet_where_it_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("def test_other():\n    pass\n")
    printed = run(tmp_path)
    assert "1 passed" in printed
    assert "flamia" not in printed
