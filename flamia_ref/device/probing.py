"""The run of all probes of an architecture: compile, run, compare, report."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from flamia_ref import __version__
from flamia_ref.device.architectures import ARCHITECTURES, Architecture, of_capability
from flamia_ref.device.outcomes import Outcome, ProbeReport, Status
from flamia_ref.device.plans import Plan, check, chosen, matching, none_chosen
from flamia_ref.device.probes import ConversionProbe, Probe, ProductProbe, probes, programs_of
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


def probe(plan: Plan, progress: Progress | None = None) -> ProbeReport:
    """Run the probes of a plan.

    Raises ValueError for a plan that cannot be run: unknown names, no nvcc, no GPU, a folder that exists; TypeError
    for a field of another type.
    """
    check(plan)
    compiler = find_compiler(plan.nvcc)
    if plan.compile_only:
        with _workspace(plan.keep) as folder:
            return _compile_only(plan, compiler, folder / "sources", progress)
    # In a folder of its own: without a GPU none is kept.
    with _workspace(None) as folder:
        device = describe_device(compiler, folder / "sources")
    return _run(plan, compiler, device, progress)


@contextlib.contextmanager
def _workspace(keep: str | os.PathLike[str] | None) -> Iterator[Path]:
    """A new folder with the sources in it. One to keep is removed if the work in it does not come to an end."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="flamia-probe-") as name:
            folder = Path(name).resolve()
            write_sources(folder / "sources")
            yield folder
        return
    folder = Path(keep).resolve()
    try:
        folder.mkdir()
    except OSError as error:
        raise ValueError(f"cannot make {os.fspath(keep)}: {error.strerror or error}") from error
    try:
        write_sources(folder / "sources")
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _run(
    plan: Plan,
    compiler: Compiler,
    device: Device,
    progress: Progress | None,
) -> ProbeReport:
    here = of_capability(device.capability)
    architecture = here if plan.architecture is None else ARCHITECTURES[plan.architecture]
    if architecture is None:
        known = ", ".join(one.capability for one in ARCHITECTURES.values())
        raise ValueError(
            f"{device.name} has compute capability {device.capability}; there are probes for {known}"
        )
    named = chosen(architecture, plan.only)
    if not named:
        raise ValueError(none_chosen(architecture, plan.only))
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
        return replace(report, outcomes=_not_run(named, f"not {architecture.name}: {reason}"))
    if compiler.release < architecture.nvcc:
        return replace(report, outcomes=_not_run(named, _too_old(compiler, architecture)))
    with _workspace(plan.keep) as folder:
        outcomes = _run_all(plan, compiler, folder, architecture, named, progress)
    return replace(report, outcomes=tuple(outcomes))


def _run_all(
    plan: Plan,
    compiler: Compiler,
    folder: Path,
    architecture: Architecture,
    named: Sequence[Probe],
    progress: Progress | None,
) -> list[Outcome]:
    compiled = _compile(compiler, folder / "sources", programs_of(named), architecture)
    runner = _Runner(folder)
    outcomes = []
    for done, one in enumerate(named):
        if progress is not None:
            progress(done, len(named), one.name)
        program = compiled[one.program]
        if isinstance(program, ProgramFailed):
            outcomes.append(_failed(one, program))
            continue
        try:
            outcomes.append(_outcome(plan, architecture, one, runner.of(program)))
        except ProgramFailed as error:
            outcomes.append(_failed(one, error))
    return outcomes


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
                shutil.rmtree(folder, ignore_errors=True)

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
    progress: Progress | None,
) -> ProbeReport:
    wanted = matching(plan.architecture, plan.only)
    outcomes: list[Outcome] = []
    for done, (architecture, named) in enumerate(wanted.items()):
        if progress is not None:
            progress(done, len(wanted), architecture.name)
        needed = programs_of(named)
        if compiler.release < architecture.nvcc:
            reason = _too_old(compiler, architecture)
            outcomes += _programs(architecture, Status.NOT_RUN, needed, reason)
            continue
        for name, found in _compile(compiler, sources, needed, architecture).items():
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
