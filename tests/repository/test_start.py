"""What an import loads: nothing that a kernel's CI may not have."""

import json
import subprocess
import sys

import pytest

from tests.repository.layout import ROOT

OPTIONAL = {"dask", "hypothesis", "jax", "jaxlib", "matplotlib", "pytest", "torch"}
CORE = ("formats", "arithmetic", "packing", "attention", "report", "leakage", "golden", "device")

# The program to watch runs first; what it left in sys.modules is the last line it prints.
REPORT = """
import json, sys
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def loaded(program: str) -> set[str]:
    """Run a program in a new interpreter and return the top-level modules that it loaded."""
    command = [sys.executable, "-W", "error", "-c", program + REPORT]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_the_report_sees_what_is_loaded() -> None:
    assert loaded("import hypothesis") & OPTIONAL >= {"hypothesis"}


def test_the_package_itself_loads_no_numpy() -> None:
    assert not loaded("import flamia_ref") & {*OPTIONAL, "numpy"}


@pytest.mark.parametrize("name", [*CORE, "properties"])
def test_importing_a_package_loads_nothing_optional(name: str) -> None:
    assert not loaded(f"import flamia_ref.{name}") & OPTIONAL


@pytest.mark.parametrize("name", CORE)
def test_the_exports_of_the_core_load_nothing_optional(name: str) -> None:
    program = f"""
import flamia_ref.{name} as package
for export in getattr(package, "__all__", []):
    getattr(package, export)
"""
    assert not loaded(program) & OPTIONAL


def test_the_help_of_the_command_loads_nothing_optional() -> None:
    program = """
import runpy, sys
sys.argv = ["flamia-ref", "--help"]
try:
    runpy.run_module("flamia_ref.cli", run_name="__main__")
except SystemExit as stop:
    assert not stop.code, stop.code
else:
    raise AssertionError("the help did not exit")
"""
    assert not loaded(program) & {*OPTIONAL, "numpy"}
