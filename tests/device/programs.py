"""What the CUDA programs do, in Python: files of operands in, files of results out."""

import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flamia_ref.arithmetic import special
from flamia_ref.device.architectures import ARCHITECTURES
from flamia_ref.device.probes import CONVERSIONS, FUNCTIONS, ProductProbe, probes
from flamia_ref.device.tiles import Tiles
from tests.device import machines
from tests.independent import codes, oracles

KINDS = ["f16", "tf32", "fp8", "f8f6f4", "mxf8f6f4", "mxf4", "mxf4nvf4"]
FORMATS = ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "fp16", "bf16", "tf32"]
SCALES = [None, "e8m0", "ue4m3"]
RANGE, LIST, RUNS = range(3)
# An input whose result a faulty special function has one off.
WRONG_INPUT = 0x3F812345


def products(program: str, arch: str, data: bytes, fault: str | None) -> bytes:
    """The results of a file of tiles."""
    header = struct.unpack("<16I", data[:64])
    assert header[:2] == (0x504D4C46, 1)
    assert header[13:] == (0, 0, 0)
    kind, a_format, b_format, half, scale, scales, count, steps, m, n, k = header[2:13]
    probe = _probe(program, arch, kind, a_format, b_format, half, scale, scales, k)
    assert (m, n) == (probe.m, probe.n)
    at = 64
    arrays = []
    for rows, wide, dtype in (
        (m, k, _dtype(a_format)),
        (n, k, _dtype(b_format)),
        (m, scales, "<u1"),
        (n, scales, "<u1"),
    ):
        shape = (count, steps, rows, wide)
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays.append(np.frombuffer(data[at : at + size], dtype=dtype).reshape(shape))
        at += size
    c = np.frombuffer(data[at:], dtype="<u4").reshape(count, m, n)
    a, b, a_scales, b_scales = arrays
    tiles = Tiles(a=a, b=b, a_scales=a_scales, b_scales=b_scales, c=c)
    # Tiles of counterexamples hold one row and zeros: those need no second computation.
    wanted = np.argwhere(np.ones(c.shape, dtype=bool))
    alone = not a[:, :, 1:].any() and not b[:, :, 1:].any() and not c[:, 1:].any()
    if alone:
        wanted = wanted[(wanted[:, 1] == 0) & (wanted[:, 2] == 0)]
    found = np.zeros(c.shape, dtype="<u4")
    found[tuple(wanted.T)] = machines.results(probe, tiles, fault, wanted)
    return found.tobytes()


def _dtype(format_: int) -> str:
    return {"fp16": "<u2", "bf16": "<u2", "tf32": "<u4"}.get(FORMATS[format_], "<u1")


def _probe(
    program: str,
    arch: str,
    kind: int,
    a_format: int,
    b_format: int,
    half: int,
    scale: int,
    scales: int,
    k: int,
) -> ProductProbe:
    for probe in probes(ARCHITECTURES[arch]):
        if (
            isinstance(probe, ProductProbe)
            and probe.program == program
            and (probe.kind, probe.a_format, probe.b_format)
            == (KINDS[kind], FORMATS[a_format], FORMATS[b_format])
            and (int(probe.half), probe.scales, probe.k) == (half, scales, k)
            and (probe.scaling.format if probe.scaling else None) == SCALES[scale]
        ):
            return probe
    raise SystemExit(3)


def values(program: str, data: bytes, fault: str | None) -> bytes:
    """The results of a file of single inputs."""
    magic, version, function, mode, start, count, *_ = struct.unpack("<8I", data[:32])
    assert (magic, version) == (0x504D4C46, 1)
    if mode == RUNS:
        return _runs(CONVERSIONS[function], fault)
    if mode == RANGE:
        x = np.arange(start, start + count, dtype=np.uint64).astype(np.uint32)
        random = np.zeros_like(x)
    else:
        x, random = np.frombuffer(data[32:], dtype="<u4").reshape(-1, 2).T
        assert len(x) == count
    if program == "special":
        # Only the way there and back is tested here: the functions have tests of their own.
        found = getattr(special, FUNCTIONS[function])(x.copy().view(np.float32), "mufu.sm90")
        found = np.asarray(found).view(np.uint32) ^ ((x == WRONG_INPUT) & (fault is not None))
        return found.astype("<u4").tobytes()
    element = next(e for e in codes.NARROW if e.name == CONVERSIONS[function].split(".")[0])
    pairs = zip(x.tolist(), random.tolist(), strict=True)
    rounded = [_stochastic(bits, drawn, element, fault is not None) for bits, drawn in pairs]
    return np.array(rounded, dtype="<u4").tobytes()


def _runs(conversion: str, fault: str | None) -> bytes:
    """All results of a conversion that was recorded on a device."""
    target, rounding, *satfinite = conversion.split(".")
    stored = oracles.load("conversions", "conversions")
    name = f"f32_{target}"
    if target == "e8m0":
        name += f"_{rounding}"
    if target in ("e4m3", "e5m2", "e8m0"):
        name += "_sat" if satfinite else "_nosat"
    starts, found = stored[f"{name}_bits"].astype(np.uint32), stored[f"{name}_code"]
    if fault is not None:
        starts = starts.copy()
        starts[len(starts) // 4] += 1  # a tie that goes the other way
    pairs = np.stack([starts, found.astype(np.uint32)], axis=1)
    return np.concatenate([[len(pairs)], pairs.ravel()]).astype("<u4").tobytes()


def _stochastic(bits: int, drawn: int, element: codes.Element, faulty: bool) -> int:
    """The magnitude is raised by 16 random bits below the last one that is kept, then cut."""
    sign = element.sign_bit if bits >> 31 else 0
    magnitude = bits & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return element.nan if element.nan > element.largest else element.largest
    if magnitude == 0x7F800000:
        return element.largest | sign
    field, fraction = magnitude >> 23, magnitude & 0x7FFFFF
    significand, exponent = (fraction | 0x800000, field) if field else (fraction, 1)
    last = max(exponent - 127, 1 - element.bias) - element.fraction_bits
    dropped = last - (exponent - 150)  # bits of the significand below the last one that is kept
    kept, rest = significand >> dropped, significand & ((1 << dropped) - 1)
    top = rest >> (dropped - 16) if dropped >= 16 else rest << (16 - dropped)
    kept += (top + drawn + faulty) >> 16
    code = kept + (max(exponent - 127 + element.bias, 1) - 1 << element.fraction_bits)
    return min(code, element.largest) | sign


def answer(program: str, arch: str, data: bytes, fault: str | None) -> bytes:
    """The results of any file."""
    if program in ("special", "convert"):
        return values(program, data, fault)
    return products(program, arch, data, fault)


def runner(program: str, arch: str, fault: str | None = None) -> Any:
    """A program to be run in this process."""

    def run(files: Sequence[bytes]) -> list[bytes]:
        return [answer(program, arch, data, fault) for data in files]

    return run


def main(program: str, arch: str, fault: str | None, names: list[str]) -> None:
    """What a compiled program does with its arguments."""
    for source, target in zip(names[::2], names[1::2], strict=True):
        data = Path(source).read_bytes()
        Path(target).write_bytes(answer(program, arch, data, fault))


NVCC = """#!{python}
# Stands for nvcc: what it makes of a source is a Python program that answers as the device does.
import sys
from pathlib import Path
if "--version" in sys.argv:
    print("Cuda compilation tools, release {release}, V{release}.88")
    raise SystemExit
source, target = Path(sys.argv[-1]), Path(sys.argv[sys.argv.index("-o") + 1])
assert source.is_file()
if source.stem == {refused!r}:
    sys.exit("x.cu(1): warning: odd\\nptxas fatal   : no such instruction")
arch = target.name.partition("-")[2]
if source.stem == "describe":
    text = {describe!r}
else:
    text = f'''import sys
sys.path[:0] = [{root!r}]
from tests.device import programs
{crash}
programs.main({{source.stem!r}}, {{arch!r}}, {fault!r}, sys.argv[1:])
'''
target.write_text("#!{python}\\n" + text)
target.chmod(0o755)
"""

DEVICE = """print('{"name": "Fake GPU", "capability": "%s", "driver_cuda": "13.0", "runtime_cuda": "13.0"}')"""
NO_DEVICE = "import sys; print('no CUDA device: none found', file=sys.stderr); sys.exit(3)"


def write_nvcc(
    folder: Path,
    *,
    release: str = "13.0",
    capability: str | None = "9.0",
    fault: str | None = None,
    refused: str = "",
    crash: str = "",
) -> Path:
    """An nvcc that compiles for a device that is none."""
    path = folder / "nvcc"
    text = NVCC.format(
        python=sys.executable,
        release=release,
        refused=refused,
        describe=NO_DEVICE if capability is None else DEVICE % capability,
        root=str(Path(__file__).resolve().parents[2]),
        fault=fault,
        crash=crash,
    )
    path.write_text(text)
    path.chmod(0o755)
    return path
