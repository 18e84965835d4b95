"""The run of all probes of an architecture: compile, run, compare, report."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from flamia_ref import __version__
from flamia_ref.device.architectures import ARCHITECTURES, Architecture, of_capability
from flamia_ref.device.outcomes import Outcome, ProbeReport, Status
from flamia_ref.device.probes import ConversionProbe, Probe, ProductProbe, probes, programs
from flamia_ref.device.product_probing import probe_product
from flamia_ref.device.toolchain import (
    Compiler,
    Device,
    ProgramFailed,
    compile_program,
    describe_device,
    find_compiler,
    run_program,
    write_sources,
)
from flamia_ref.device.value_probing import probe_conversion, probe_special

Progress = Callable[[int, int, str], None]

NEVER_RUN = (
    "these programs were compiled, but their authors never ran them: they had no such device"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to run.

    Attributes:
        architecture: what to probe ("sm_90a"), or None for what the device is.
        only: shell patterns, or parts, of the names of probes to run; empty for all.
        rows: results of each matrix instruction, and inputs of each special function besides its table, about.
        seed: of the operands.
        exhaustive: whether special functions are asked for all 2^32 inputs.
        compile_only: compile what the architecture, or every one, has, and run nothing.
        nvcc: the compiler, or None to look for it.
        keep: a folder to leave sources and programs in; it must not exist.
    """

    architecture: str | None = None
    only: tuple[str, ...] = ()
    rows: int = 100_000
    seed: int = 0
    exhaustive: bool = False
    compile_only: bool = False
    nvcc: str | None = None
    keep: str | None = None


def probe(plan: Plan, progress: Progress | None = None) -> ProbeReport:
    """Run the probes of a plan.

    Raises ValueError for a plan that cannot be run: unknown names, no nvcc, no GPU, a folder that exists.
    """
    if plan.rows < 1:
        raise ValueError(f"rows is {plan.rows}; it must be 1 or more")
    if plan.seed < 0:
        raise ValueError(f"seed is {plan.seed}; it must be 0 or more")
    asked = None if plan.architecture is None else ARCHITECTURES[plan.architecture]
    if plan.keep is not None and Path(plan.keep).exists():
        raise ValueError(f"{plan.keep} exists; name a folder that does not")
    for pattern in plan.only:
        if not any(
            _chosen((pattern,), one) for known in ARCHITECTURES.values() for one in probes(known)
        ):
            raise ValueError(
                f"no probe is named like {pattern!r}; names are such as wgmma.k32.e4m3.e4m3.f32, "
                "tcgen05.mxf4nvf4.e2m1.e2m1.f32.block16.ue4m3, cvt.rn.satfinite.e4m3x2.f32, ex2.approx.ftz.f32"
            )
    if plan.compile_only and (plan.only or plan.exhaustive):
        raise ValueError("compile_only compiles all programs; leave out only and exhaustive")
    compiler = find_compiler(plan.nvcc)
    with _workspace(plan.keep) as folder:
        write_sources(folder / "sources")
        if plan.compile_only:
            return _compile_only(plan, compiler, folder / "sources", asked, progress)
        device = describe_device(compiler, folder / "sources")
        return _run(plan, compiler, folder, device, asked, progress)


@contextlib.contextmanager
def _workspace(keep: str | None) -> Iterator[Path]:
    if keep is not None:
        folder = Path(keep)
        folder.mkdir()
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="flamia-probe-") as name:
        yield Path(name)


def _chosen(only: Sequence[str], one: Probe) -> bool:
    return not only or any(p in one.name or fnmatchcase(one.name, p) for p in only)


def _run(
    plan: Plan,
    compiler: Compiler,
    folder: Path,
    device: Device,
    asked: Architecture | None,
    progress: Progress | None,
) -> ProbeReport:
    here = of_capability(device.capability)
    architecture = asked or here
    if architecture is None:
        known = ", ".join(one.capability for one in ARCHITECTURES.values())
        raise ValueError(
            f"{device.name} has compute capability {device.capability}; there are probes for {known}"
        )
    chosen = [one for one in probes(architecture) if _chosen(plan.only, one)]
    reason = f"this device is {device.name}, compute capability {device.capability}"
    report = ProbeReport(
        device=device.name,
        capability=device.capability,
        driver_cuda=device.driver_cuda,
        architecture=architecture.name,
        nvcc=compiler.version,
        date=_today(),
        settings={"rows": plan.rows, "seed": plan.seed, "exhaustive": plan.exhaustive},
        outcomes=(),
        others={
            name: f"{reason}; {len(probes(one))} probes" + ("" if one.was_run else f"; {NEVER_RUN}")
            for name, one in ARCHITECTURES.items()
            if one is not architecture
        },
        version=__version__,
    )
    if architecture is not here:
        return replace(report, outcomes=_not_run(chosen, f"not {architecture.name}: {reason}"))
    if compiler.release < architecture.nvcc:
        return replace(report, outcomes=_not_run(chosen, _too_old(compiler, architecture)))
    needed = [name for name in programs(architecture) if any(one.program == name for one in chosen)]
    compiled = _compile(compiler, folder / "sources", needed, architecture)
    runner = _Runner(folder)
    outcomes = []
    for done, one in enumerate(chosen):
        if progress is not None:
            progress(done, len(chosen), one.name)
        program = compiled[one.program]
        if isinstance(program, ProgramFailed):
            outcomes.append(_failed(one, program))
            continue
        try:
            outcomes.append(_outcome(plan, architecture, one, runner.of(program)))
        except ProgramFailed as error:
            outcomes.append(_failed(one, error))
    return replace(report, outcomes=tuple(outcomes))


class _Runner:
    """Runs programs, each call in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._lock = threading.Lock()

    def of(self, program: Path) -> Callable[[Sequence[bytes]], list[bytes]]:
        def run(inputs: Sequence[bytes]) -> list[bytes]:
            with self._lock:
                self._count += 1
                folder = self._folder / f"run-{self._count}"
            folder.mkdir()
            try:
                return run_program(program, inputs, folder)
            finally:
                folder.rmdir()

        return run


def _outcome(
    plan: Plan,
    architecture: Architecture,
    one: Probe,
    run: Callable[[Sequence[bytes]], list[bytes]],
) -> Outcome:
    if isinstance(one, ProductProbe):
        note = "" if architecture.own_model else f"the model is that of {architecture.model}"
        return probe_product(one, run, rows=plan.rows, seed=plan.seed, note=note)
    if isinstance(one, ConversionProbe):
        return probe_conversion(one, run, rows=plan.rows, seed=plan.seed)
    return probe_special(
        one,
        run,
        capability=architecture.capability,
        rows=plan.rows,
        seed=plan.seed,
        exhaustive=plan.exhaustive,
    )


def _compile(
    compiler: Compiler, sources: Path, names: Sequence[str], architecture: Architecture
) -> dict[str, Path | ProgramFailed]:
    def one(name: str) -> Path | ProgramFailed:
        try:
            return compile_program(compiler, sources, name, architecture)
        except ProgramFailed as error:
            return error

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return dict(zip(names, threads.map(one, names), strict=True))


def _compile_only(
    plan: Plan,
    compiler: Compiler,
    sources: Path,
    asked: Architecture | None,
    progress: Progress | None,
) -> ProbeReport:
    wanted = list(ARCHITECTURES.values()) if asked is None else [asked]
    outcomes: list[Outcome] = []
    for done, architecture in enumerate(wanted):
        if progress is not None:
            progress(done, len(wanted), architecture.name)
        if compiler.release < architecture.nvcc:
            reason = _too_old(compiler, architecture)
            outcomes += _programs(architecture, Status.NOT_RUN, programs(architecture), reason)
            continue
        for name, found in _compile(
            compiler, sources, programs(architecture), architecture
        ).items():
            if isinstance(found, ProgramFailed):
                outcomes += _programs(architecture, Status.FAILED, [name], str(found))
            else:
                reason = "" if architecture.was_run else "never run by its authors"
                outcomes += _programs(architecture, Status.COMPILED, [name], reason)
    return ProbeReport(
        device="",
        architecture=", ".join(one.name for one in wanted),
        nvcc=compiler.version,
        date=_today(),
        outcomes=tuple(outcomes),
        settings={"compile_only": True},
        version=__version__,
    )


def _programs(
    architecture: Architecture, status: Status, names: Sequence[str], reason: str
) -> list[Outcome]:
    return [
        Outcome(probe=f"{name}.cu for {architecture.name}", status=status, reason=reason)
        for name in names
    ]


def _too_old(compiler: Compiler, architecture: Architecture) -> str:
    needed = ".".join(map(str, architecture.nvcc))
    return f"nvcc {compiler.version} does not know {architecture.name}; that needs {needed}"


def _not_run(chosen: Sequence[Probe], reason: str) -> tuple[Outcome, ...]:
    return tuple(Outcome(probe=one.name, status=Status.NOT_RUN, reason=reason) for one in chosen)


def _failed(one: Probe, error: ProgramFailed) -> Outcome:
    return Outcome(probe=one.name, status=Status.FAILED, reason=str(error))


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
