"""Little memory, in a process of its own: what a file claims costs nothing, and what it holds little."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.golden.packs import FIRST, SECOND, forge

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
def test_what_a_pack_claims_costs_nothing(
    made: Path, pack: Path, claim: Callable[[Path], None]
) -> None:
    claim(pack)
    message, seconds = limited(made, pack)
    assert message.startswith("ValueError: ")
    assert len(message) < 1000
    assert seconds < 1


def be_sparse_results(file: Path) -> None:
    file.write_bytes(b"")
    os.truncate(file, 1 << 40)


def claim_a_huge_header_of_results(file: Path) -> None:
    file.write_bytes((1 << 60).to_bytes(8, "little") + b'{"out":')


def have_a_deep_header(file: Path) -> None:
    header = b'{"a":' * 100_000
    file.write_bytes(len(header).to_bytes(8, "little") + header)


def claim_a_huge_shape(file: Path) -> None:
    header = b'{"out":{"dtype":"U8","shape":[1152921504606846976],"data_offsets":[0,0]}}'
    file.write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "claim",
    [be_sparse_results, claim_a_huge_header_of_results, have_a_deep_header, claim_a_huge_shape],
    ids=lambda claim: claim.__name__,
)
def test_what_results_claim_costs_nothing(
    made: Path, tmp_path: Path, claim: Callable[[Path], None]
) -> None:
    for name in (FIRST, SECOND):
        claim(tmp_path / f"{name}.safetensors")
    message, seconds = limited(made, made, tmp_path)
    assert message.startswith("ValueError: ")
    assert len(message) < 1000
    assert seconds < 1


@pytest.mark.nightly
def test_verifying_a_large_file_takes_little_memory(tmp_path: Path) -> None:
    """A file of 512 MB, most of it one tensor, with 200 MB of address space."""
    command = [sys.executable, "-c", LARGE, str(tmp_path / "large.safetensors"), str(MEGABYTES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 32 << 20


# Writes the file by the format's definition, verifies it, and prints how much resident memory grew.
LARGE = """
import hashlib, json, resource, sys
from pathlib import Path
from types import SimpleNamespace
from flamia_ref.golden.case_file import CaseFile
path = Path(sys.argv[1])
block, count = bytes(range(256)) * 4096, 508
sizes = {"a": len(block) * count, "b": len(block), "c": 3 * len(block)}
header, at = {}, 0
for name, size in sizes.items():
    header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
    at += size
text = json.dumps(header, separators=(",", ":")).encode()
text += b" " * (-len(text) % 8)
whole, entries = hashlib.sha256(), {}
with path.open("wb") as file:
    def write(data):
        file.write(data)
        whole.update(data)
    write(len(text).to_bytes(8, "little"))
    write(text)
    for name, size in sizes.items():
        own = hashlib.sha256()
        for _ in range(size // len(block)):
            write(block)
            own.update(block)
        entries[name] = SimpleNamespace(name=name, dtype="U8", shape=(size,), sha256=own.hexdigest())
entry = SimpleNamespace(size=path.stat().st_size, sha256=whole.hexdigest(), tensors=entries)
now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
limit = now + int(sys.argv[2]) * 1024**2
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tensors = CaseFile(path, entry)
tensors.verify()
assert tensors["b"].tobytes() == block
try:
    tensors["a"]
except ValueError as error:
    assert "there is no memory for tensor a" in str(error)
else:
    raise AssertionError("512 MB in 200 MB")
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""
