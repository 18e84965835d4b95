"""Little memory, in a process of its own: what a file claims costs nothing, and what it holds little."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.golden.packs import FIRST, canonical, forge

FILE = f"{FIRST}.safetensors"
MEGABYTES = 200
SECONDS = 60  # of the clock, so that a hang ends; other work on the machine may be heavy

# Address space above what the process has with everything imported; then what must be one line.
SCRIPT = """
import resource, sys, time
from pathlib import Path
from flamia_ref import golden
from flamia_ref.golden import comparison
golden.load(sys.argv[2])
now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
limit = now + int(sys.argv[1]) * 1024**2
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
started = time.process_time()
try:
    pack = golden.load(sys.argv[3])
    for case in pack:
        case.verify()
    if len(sys.argv) > 4:
        golden.check(pack, sys.argv[4])
except ValueError as error:
    print(f"ValueError: {error}")
else:
    print("accepted")
print(time.process_time() - started)
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="reads the size of a process from /proc"
)


def limited(good: Path, *arguments: Path) -> tuple[str, float]:
    """The message, or "accepted", of reading a pack with little memory, and the seconds it took."""
    command = [sys.executable, "-c", SCRIPT, str(MEGABYTES), str(good), *map(str, arguments)]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=SECONDS, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    message, seconds = done.stdout.splitlines()
    return message, float(seconds)


def claim_a_huge_header(pack: Path) -> None:
    data = bytearray((pack / FILE).read_bytes())
    data[:8] = (1 << 60).to_bytes(8, "little")
    (pack / FILE).write_bytes(data)


def claim_a_huge_file(pack: Path) -> None:
    forge(pack, lambda document: document["cases"][0].update(size=1 << 60))


def be_sparse(pack: Path) -> None:
    os.truncate(pack / FILE, 1 << 40)


def claim_huge_tensors(pack: Path) -> None:
    forge(pack, lambda document: document["cases"][0]["spec"].update(heads=1 << 24, kv_heads=1))


def have_a_sparse_manifest(pack: Path) -> None:
    os.truncate(pack / "manifest.json", (64 << 20) - 1)


def have_a_manifest_of_brackets(pack: Path) -> None:
    (pack / "manifest.json").write_text("[" * (8 << 20))


def have_a_manifest_of_digits(pack: Path) -> None:
    (pack / "manifest.json").write_text('{"a": ' + "9" * (8 << 20) + "}")


def have_a_manifest_of_zeros(pack: Path) -> None:
    """As long as a manifest may be, and no canonical form."""
    (pack / "manifest.json").write_text("[" + "0," * ((32 << 20) - 8) + "0]")


def have_a_manifest_of_objects(pack: Path) -> None:
    (pack / "manifest.json").write_text("[" + "{}," * ((20 << 20) - 8) + "0]")


def have_a_manifest_of_many_lines(pack: Path) -> None:
    """The canonical form of very many small values."""
    lines = " 0,\n" * ((16 << 20) - 100)
    (pack / "manifest.json").write_text('{\n "a": [\n' + lines + " 0\n ]\n}\n")


CLAIMS = [
    claim_a_huge_header,
    claim_a_huge_file,
    be_sparse,
    claim_huge_tensors,
    have_a_sparse_manifest,
    have_a_manifest_of_brackets,
    have_a_manifest_of_digits,
    have_a_manifest_of_zeros,
    have_a_manifest_of_objects,
    have_a_manifest_of_many_lines,
]
DAILY = (claim_a_huge_header, have_a_manifest_of_zeros)


@pytest.mark.parametrize(
    "claim",
    [
        claim if claim in DAILY else pytest.param(claim, marks=pytest.mark.nightly)
        for claim in CLAIMS
    ],
    ids=lambda claim: claim.__name__,
)
def test_what_a_pack_claims_costs_nothing(made: Path, pack: Path, claim: object) -> None:
    assert callable(claim)
    claim(pack)
    message, seconds = limited(made, pack)
    assert message.startswith("ValueError: ")
    assert len(message) < 1000
    assert seconds < 1
