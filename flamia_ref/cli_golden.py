"""The commands ``flamia-ref golden``: make, merge, check, show, explain, migrate, export, include."""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flamia_ref import _console
from flamia_ref._errors import shown
from flamia_ref.report.sentences import MEANINGS

# Everything else is imported by the command that needs it, so that --help is quick.
if TYPE_CHECKING:
    from flamia_ref.attention import Recipe
    from flamia_ref.golden import Case, Manifest
    from flamia_ref.report import Report

Result = tuple[int, str, str]  # exit status, text, JSON

_BEGINNING = 4096  # bytes of a file that tell whether it is a report of ours
_MOST_SHOWN = 16  # elements of a tensor


def add_commands(command: Callable[..., Any], recipe: "Callable[[str], Recipe]") -> None:
    """Add the commands.

    `command(name, summary, run, more)` makes a parser with ``--json``; `recipe` reads a recipe by name
    or from a file.
    """

    def add(name: str, summary: str, run: Callable[..., Result], more: str | None = None) -> Any:
        def checked(options: argparse.Namespace) -> Result:
            _require_reports(options)
            return run(options)

        made = command(name, summary, checked, more)
        # `_require_reports` lets a report of ours be replaced by another.
        made.set_defaults(read_recipe=recipe, replaces_reports=True)
        made.add_argument("--force", action="store_true", help="replace what exists")
        return made

    make = add(
        "make",
        "run the simulator on a suite of cases and write a pack",
        _make,
        "A run that is stopped leaves a hidden folder .NAME.part beside DIR, and the same command resumes there.",
    )
    make.add_argument("folder", metavar="DIR", help="the folder to write; it must not exist")
    make.add_argument(
        "--recipe",
        metavar="NAME|FILE",
        action="append",
        help="a recipe by name, or a JSON file of one; may be repeated (default: flamia-mxfp8-folded)",
    )
    make.add_argument("--suite", default="smoke", help="the cases to run (default: smoke)")
    _add_raw(make)
    make.add_argument(
        "--shard", metavar="I/N", help="make a part, from 1/N to N/N; `golden merge` joins them"
    )
    make.add_argument(
        "--executor",
        metavar="ENGINE",
        default="auto",
        help="who runs the cases: serial, processes, a number of processes, or dask:ADDRESS, a scheduler's"
        " (default: processes, one a core, where it takes long)",
    )

    merge = add("merge", "join the shards of a pack", _merge)
    merge.add_argument("folder", metavar="DIR", help="the folder to write; it must not exist")
    merge.add_argument("shards", metavar="SHARD", nargs="+", help="the folders of all shards")
    _add_raw(merge)

    check = add("check", "compare a kernel, or its results, with a pack", _check)
    check.add_argument("folder", metavar="DIR", help="the pack")
    actual = check.add_mutually_exclusive_group(required=True)
    actual.add_argument(
        "--actual", metavar="PATH", help="a folder of CASE.safetensors, or one such file"
    )
    actual.add_argument("--kernel", metavar="MODULE:FUNCTION", help="a Python callable")
    check.add_argument(
        "--case",
        metavar="NAME",
        action="append",
        help="only cases of this name or pattern (* and ?); may be repeated",
    )
    check.add_argument(
        "--repeats",
        metavar="N",
        type=int,
        default=1,
        help="call the kernel N times a case, and require the same bits (1)",
    )
    check.add_argument(
        "--instruction",
        metavar="NAME",
        help="judge the products as this instruction adds them, for a device that has not the recipe's",
    )
    check.add_argument(
        "--no-diagnosis", action="store_true", help="do not look for the mistake that was made"
    )
    check.add_argument("--html", metavar="FILE", help="also write the report as one HTML file")
    check.add_argument("--junit", metavar="FILE", help="also write the report as JUnit XML")
    check.formatter_class = argparse.RawDescriptionHelpFormatter  # the verdicts keep their lines
    width = max(map(len, MEANINGS))
    check.epilog = "\n".join(
        [
            "verdicts:",
            *(f"  {status:<{width}}  {meaning}" for status, meaning in MEANINGS.items()),
            "",
            "Exit status: 0 every case that was compared passes, 1 one does not, 2 nothing was compared,",
            "or the check could not be done.",
        ]
    )

    show = add("show", "say what a pack, one of its cases, or a tensor of it holds", _show)
    show.add_argument("folder", metavar="DIR", help="the pack")
    show.add_argument("case", metavar="CASE", nargs="?", help="a case; its digests are verified")
    show.add_argument("tensor", metavar="TENSOR", nargs="?", help="a tensor of the case")

    add_explain(add)

    migrate = add(
        "migrate", "bring a pack of an older version up to this one, or say why not", _migrate
    )
    migrate.add_argument("folder", metavar="DIR", help="the pack")
    migrate.add_argument("target", metavar="TARGET", help="the folder to write; it must not exist")

    export = add("export", "write a pack in the form of another project", _export)
    export.add_argument("folder", metavar="DIR", help="the pack")
    export.add_argument(
        "--flashinfer", metavar="OUT", required=True, help="a folder for flashinfer-bench"
    )

    add("include", "print the folder of the C++ headers, for -I", _include)


def add_explain(command: Callable[..., Any]) -> None:
    """Add the command ``explain``, by itself."""
    explain = command(
        "explain", "follow one element of a tensor back to the inputs it comes from", _explain
    )
    explain.add_argument("folder", metavar="DIR", help="the pack")
    explain.add_argument("case", metavar="CASE")
    explain.add_argument("tensor", metavar="TENSOR")
    explain.add_argument(
        "index", metavar="INDEX", nargs="+", help="a number an axis: `18,0,3` or `18 0 3`"
    )


def _add_raw(parser: Any) -> None:
    parser.add_argument(
        "--raw", action="store_true", help="also write every tensor as a file of its bytes alone"
    )


def _make(options: argparse.Namespace) -> Result:
    from flamia_ref.golden import DEFAULT_RECIPES, make

    with _console.bar() as progress:
        manifest = make(
            options.folder,
            [options.read_recipe(name) for name in options.recipe or DEFAULT_RECIPES],
            options.suite,
            force=options.force,
            raw=options.raw,
            shard=options.shard,
            executor=_executor(options.executor),
            progress=progress,
        )
    return _written(options, manifest, "" if options.shard is None else f"shard {options.shard}, ")


def _merge(options: argparse.Namespace) -> Result:
    from flamia_ref.golden import merge

    with _console.bar() as progress:
        manifest = merge(
            options.folder,
            options.shards,
            force=options.force,
            raw=options.raw,
            progress=progress,
        )
    return _written(options, manifest)


def _executor(given: str) -> int | str:
    return int(given) if re.fullmatch(r"[0-9]{1,9}", given) else given


def _written(options: argparse.Namespace, manifest: "Manifest", more: str = "") -> Result:
    folder = getattr(options, "target", options.folder)
    document = {
        "schema": "flamia-ref golden make",
        "folder": folder,
        "cases": [case.name for case in manifest.cases],
        "bytes": manifest.size,
        "digest": manifest.digest,
    }
    return 0, f"wrote {folder}: {more}{_summary(manifest)}", _json(document)


def _check(options: argparse.Namespace) -> Result:
    from flamia_ref import kernels
    from flamia_ref.golden import check, load

    pack = load(options.folder)
    settings: dict[str, Any] = {}
    if options.case is not None:
        settings["cases"] = tuple(options.case)
    if options.repeats != 1:
        settings["repeats"] = options.repeats
    if options.instruction is not None:
        settings["instruction"] = options.instruction
    if options.no_diagnosis:
        settings["diagnose"] = False
    # What a kernel prints must not end up in the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        actual = options.actual if options.kernel is None else kernels.load(options.kernel)
        report = check(pack, actual, progress=_console.progress(), **settings)
    report = _as_typed(report, options)
    code, text = report.exit_code, report.to_text()
    for form in ("html", "junit"):
        file = getattr(options, form)
        if file is None:
            continue
        try:
            _console.write(file, getattr(report, f"to_{form}")())
            text += f"\nwrote {file}"
        except ValueError as error:
            # The kernel may have run for hours: what it came to is said all the same.
            _console.complain(str(error))
            code = 2
    return code, text, report.to_json()


def _as_typed(report: "Report", options: argparse.Namespace) -> "Report":
    """The report by the names that were typed, with the line that repeats a case alone."""
    option = (
        ["--kernel", options.kernel] if options.actual is None else ["--actual", options.actual]
    )
    instruction = [] if options.instruction is None else ["--instruction", options.instruction]
    cases = tuple(
        dataclasses.replace(
            case,
            command=shlex.join(
                [
                    *("flamia-ref", "golden", "check", options.folder, *option),
                    *(*instruction, "--case", case.name),
                ]
            ),
        )
        if case.failed
        else case
        for case in report.cases
    )
    return dataclasses.replace(report, pack=options.folder, subject=option[1], cases=cases)


def _show(options: argparse.Namespace) -> Result:
    from flamia_ref.golden import load

    pack = load(options.folder)
    if options.case is None:
        lines = [f"{options.folder}: {_summary(pack.manifest)}"]
        lines += [f"{case.name}\n    {case.spec.why}" for case in pack]
        return 0, "\n".join(lines), pack.manifest.to_json()
    case = pack[options.case]
    if options.tensor is not None:
        return _show_tensor(case, options.tensor)
    data = {
        field.name: getattr(case.spec, field.name)
        for field in dataclasses.fields(case.spec)
        if field.name not in ("plants", "garbage")
    }
    lines = [f"{key}: {_words(value)}" for key, value in data.items() if value not in (None, ())]
    lines += [f"recipe: {case.entry.recipe}, evidence {case.recipe.evidence}", "tensors:"]
    tensors = []
    width = max(map(len, case.tensors))
    for name, tensor in case.tensors.items():
        entry = case.entry.tensors[name]
        tensors.append(dataclasses.asdict(entry))
        shape = list(tensor.shape)
        lines.append(f"    {name:<{width}}  {entry.view:<8} {shape}  {entry.sha256[:16]}")
    document = {
        "schema": "flamia-ref golden case",
        "name": case.name,
        "recipe": case.entry.recipe,
        "spec": data,
        "tensors": tensors,
    }
    return 0, "\n".join(lines), _json(document)


def _show_tensor(case: "Case", name: str) -> Result:
    import numpy as np

    tensor, entry, place = case.tensors[name], case.entry.tensors[name], case.places[name]
    axes = dict(zip(place.stage.axes, tensor.shape, strict=True))
    bits = np.ascontiguousarray(tensor).reshape(-1)
    bits = bits.view(f"u{bits.dtype.itemsize}")
    first = [f"0x{int(one):0{2 * bits.dtype.itemsize}x}" for one in bits[:_MOST_SHOWN]]
    values, counts = np.unique(bits, return_counts=True)
    document: dict[str, Any] = {
        "schema": "flamia-ref golden tensor",
        "case": case.name,
        **dataclasses.asdict(entry),
        "axes": axes,
        "computed_from": list(place.stage.parents),
        "elements": int(bits.size),
        "different_bits": int(values.size),
        "first": first,
    }
    lines = [
        f"{name} of {case.name}",
        f"view: {entry.view}, stored as {entry.dtype}, {entry.layout}",
        f"axes: {', '.join(f'{axis} {size}' for axis, size in axes.items())}",
        f"computed from: {', '.join(place.stage.parents) or 'an input'}",
        f"elements: {bits.size}, of {values.size} different bit patterns",
    ]
    if values.size:
        most = int(np.argmax(counts))
        document["commonest"] = {"bits": f"0x{int(values[most]):x}", "count": int(counts[most])}
        lines.append(f"commonest: 0x{int(values[most]):x}, {int(counts[most])} times")
    lines += [
        f"SHA-256: {entry.sha256}",
        f"first: {' '.join(first)}{' ...' if bits.size > len(first) else ''}",
    ]
    return 0, "\n".join(lines), _json(document)


def _explain(options: argparse.Namespace) -> Result:
    from flamia_ref.golden import load
    from flamia_ref.golden.explanation import explain

    text = " ".join(options.index)
    if not re.fullmatch(r"[\s\[(]*[0-9]{1,9}([\s,]+[0-9]{1,9})*[\s\]),]*", text):
        raise ValueError(f"index {shown(text)} is none; give a number an axis, like 18,0,3")
    index = tuple(int(number) for number in re.findall(r"[0-9]+", text))
    found = explain(load(options.folder)[options.case], options.tensor, index)
    return 0, found.to_text(), found.to_json()


def _migrate(options: argparse.Namespace) -> Result:
    from flamia_ref.golden.migration import changes, migrate

    manifest = migrate(options.folder, options.target)
    brought = changes(options.folder)
    more = [f"schema version {version} brought: {words}" for version, words in brought.items()]
    code, text, document = _written(options, manifest)
    both = json.loads(document) | {"schema": "flamia-ref golden migrate", "changes": brought}
    return code, "\n".join([text, *more]), _json(both)


def _export(options: argparse.Namespace) -> Result:
    from flamia_ref.golden import load
    from flamia_ref.golden.flashinfer import export_flashinfer
    from flamia_ref.golden.replacing import require_outside_packs

    pack = load(options.folder)
    target = Path(options.flashinfer)
    if os.path.realpath(target) == os.path.realpath(options.folder):
        raise ValueError(f"{target} is the pack itself; choose another folder")
    require_outside_packs(target)
    if os.path.lexists(target) and not options.force:
        raise ValueError(
            f"{target} exists; choose another folder, or write over what is in it with --force"
        )
    export_flashinfer(pack, options.flashinfer)
    document = {
        "schema": "flamia-ref golden export",
        "form": "flashinfer-bench",
        "folder": options.flashinfer,
        "cases": [case.name for case in pack],
    }
    return 0, f"wrote {options.flashinfer}: {len(pack)} cases for flashinfer-bench", _json(document)


def _include(_: argparse.Namespace) -> Result:
    from importlib import resources

    folder = resources.files("flamia_ref.golden") / "include"
    if not folder.is_dir():
        raise ValueError("this installation has no C++ headers; install flamia-ref anew")
    document = {"schema": "flamia-ref golden include", "folder": str(folder)}
    return 0, str(folder), _json(document)


def _require_reports(options: argparse.Namespace) -> None:
    """Require that every report can be written, and replaces no file but an earlier report of ours.

    Devices and pipes are no files.
    """
    files = {
        form: file
        for form in ("json", "html", "junit")
        if (file := getattr(options, form, None)) not in (None, "-")
    }
    for form, file in files.items():
        _console.require_writable(file)
        for other, its in files.items():
            if other < form and _console.same_file(file, its):
                raise ValueError(f"--{other} and --{form} are both to be {file}; give two names")
        _require_outside(file, options)
        path = Path(file)
        if path.is_fifo():
            raise ValueError(f"{file} is a pipe, which nobody may be reading; give a file")
        if path.is_file() and not options.force and not _is_ours(path, form):
            raise ValueError(
                f"{file} exists and is no earlier {form} report of flamia-ref; choose another name, or "
                "replace it with --force"
            )


def _require_outside(file: str, options: argparse.Namespace) -> None:
    """Require that a report does not become part of a pack."""
    where = Path(os.path.realpath(file)).parents
    for folder in (getattr(options, "folder", None), *getattr(options, "shards", ())):
        if folder is not None and Path(os.path.realpath(folder)) in where:
            raise ValueError(f"{file} lies in {folder}; write reports elsewhere")


def _is_ours(path: Path, form: str) -> bool:
    """Whether a file is empty, or begins as a report of ours does."""
    try:
        with open(path, "rb") as file:
            beginning = file.read(_BEGINNING)
            if form == "json" and beginning.startswith(b"{"):
                # The schema of a pack's manifest is at its end.
                file.seek(max(0, path.stat().st_size - _BEGINNING))
                beginning += file.read(_BEGINNING)
    except OSError:
        return False
    marks = {
        "json": rb'\{\s.*"schema": "flamia-ref ',
        # Our pages forbid themselves to load anything, in these words.
        "html": rb"<!DOCTYPE html>.*<meta [^>]*default-src &#x27;none&#x27;; style-src &#x27;sha256-",
        "junit": rb'<\?xml [^>]*>\s*<testsuites name="flamia-ref ',
    }
    if path.name in ("manifest.json", "shard.json"):
        return False
    return not beginning or re.match(marks[form], beginning, re.DOTALL) is not None


def _summary(manifest: "Manifest") -> str:
    recipes = ", ".join(f"{name} ({one.evidence})" for name, one in manifest.recipes.items())
    return (
        f"suite {manifest.suite}, {len(manifest.cases)} cases, {manifest.size / 1e6:.2f} MB, "
        f"numerics version {manifest.numerics_version}, {recipes}, digest {manifest.digest}"
    )


def _words(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _json(document: object) -> str:
    return json.dumps(document, indent=1, default=str) + "\n"
