"""What a run of the probes is to do, and which probes that names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from flamia_ref._errors import shown
from flamia_ref.device.architectures import ARCHITECTURES, Architecture
from flamia_ref.device.probes import Probe, probes

MOST_ROWS = 10**8
ROWS, SEED = 100_000, 0  # where a plan does not say


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to run.

    Attributes:
        architecture: what to probe ("sm_90a"), or None for what the device is.
        only: shell patterns, or parts, of the names of probes to run; empty for all.
        rows: results of each matrix instruction, and inputs of each special function besides its table, about;
            at most 10^8.
        seed: of the operands.
        exhaustive: whether special functions are asked for all 2^32 inputs.
        compile_only: compile the programs of those probes, of the architecture or of every one, and run nothing.
        nvcc: the compiler, or None to look for it.
        keep: a folder to leave sources and programs in; it must not exist.
    """

    architecture: str | None = None
    only: tuple[str, ...] = ()
    rows: int = ROWS
    seed: int = SEED
    exhaustive: bool = False
    compile_only: bool = False
    nvcc: str | os.PathLike[str] | None = None
    keep: str | os.PathLike[str] | None = None


def check(plan: Plan) -> None:
    """Require that a plan can be run, as far as that can be said without a compiler and a GPU.

    Raises TypeError for a field of another type, ValueError for unknown names, numbers out of range, options
    that contradict each other, and a folder that exists or cannot be made.
    """
    _whole("rows", plan.rows, 1, MOST_ROWS)
    _whole("seed", plan.seed, 0)
    for name in ("exhaustive", "compile_only"):
        if not isinstance(getattr(plan, name), bool):
            raise TypeError(f"{name} is {shown(getattr(plan, name))}; it must be True or False")
    if plan.nvcc is not None and not isinstance(plan.nvcc, str | os.PathLike):
        raise TypeError(f"nvcc is {shown(plan.nvcc)}; give the path of a program, or None")
    if plan.compile_only:
        for name, usual in (("rows", ROWS), ("seed", SEED), ("exhaustive", False)):
            if getattr(plan, name) != usual:
                raise ValueError(
                    f"compile_only runs nothing, so {name} means nothing; leave it out"
                )
    matching(plan.architecture, plan.only)
    if plan.keep is not None:
        _check_new(plan.keep)


def _whole(name: str, given: object, least: int, most: int | None = None) -> None:
    allowed = f"{least} or more" if most is None else f"{least} to {most}"
    if not isinstance(given, int) or isinstance(given, bool):
        raise TypeError(f"{name} is {shown(given)}; it must be an int, {allowed}")
    if given < least or (most is not None and given > most):
        raise ValueError(f"{name} is {shown(given)}; it must be {allowed}")


def _check_new(keep: object) -> None:
    if not isinstance(keep, str | os.PathLike):
        raise TypeError(f"keep is {shown(keep)}; give the name of a folder, or None")
    if not os.fspath(keep):
        raise ValueError("keep is an empty name; name a folder that does not exist")
    path = Path(keep)
    try:
        # A link that leads nowhere is in the way too.
        if os.path.lexists(path):
            raise ValueError(f"{path} exists; name a folder that does not")
        if not path.parent.is_dir():
            raise ValueError(f"cannot make {path}: there is no folder {path.parent}")
        if not os.access(path.parent, os.W_OK):
            raise ValueError(f"cannot make {path}: {path.parent} may not be written")
    except OSError as error:
        raise ValueError(f"cannot make {path}: {error.strerror or error}") from error


def matching(
    architecture: str | None, only: tuple[str, ...] = ()
) -> dict[Architecture, tuple[Probe, ...]]:
    """The probes of an architecture, or of every one, that `only` names; architectures without any are left out.

    Raises TypeError where `only` is no tuple of texts; ValueError for an unknown architecture, and for a name
    that no probe of any architecture has, or none of the one that is given.
    """
    if isinstance(only, str) or not isinstance(only, Sequence):
        raise TypeError(f"only is {shown(only)}; give a tuple of names, such as ('wgmma',)")
    wanted = list(ARCHITECTURES.values()) if architecture is None else [ARCHITECTURES[architecture]]
    for pattern in only:
        if not isinstance(pattern, str):
            raise TypeError(f"only holds {shown(pattern)}; give names as text")
        if not pattern:
            raise ValueError("only holds an empty name, which is part of every one; leave it out")
        if not any(chosen(known, (pattern,)) for known in ARCHITECTURES.values()):
            raise ValueError(
                f"no probe is named like {shown(pattern)}; flamia-ref device probe --list names them all"
            )
    found = {one: chosen(one, only) for one in wanted}
    if architecture is not None and not found[wanted[0]]:
        raise ValueError(none_chosen(wanted[0], only))
    return {one: named for one, named in found.items() if named}


def chosen(architecture: Architecture, only: Sequence[str]) -> tuple[Probe, ...]:
    """The probes of an architecture whose names have one of some texts or match it; all, where there is none."""
    return tuple(
        one
        for one in probes(architecture)
        if not only or any(text in one.name or fnmatchcase(one.name, text) for text in only)
    )


def none_chosen(architecture: Architecture, only: Sequence[str]) -> str:
    """The error for names that only other architectures have."""
    names = " or ".join(map(shown, only))
    return (
        f"no probe of {architecture.name} is named like {names}; "
        f"flamia-ref device probe --list --arch {architecture.name} names them"
    )
