"""The command ``flamia-ref``: parse, call, render, exit status.

Exit status: 0 all is well, 1 a mismatch or a leak was found, 2 bad usage or input, or the work could
not be done, 128 and more a signal ended it. Results go to standard output; errors, one line each, progress,
and whatever a kernel prints to standard error. No result is ever half-written. A run of ``golden make``
that is stopped, by whatever, leaves the cases that are done in a hidden folder ``.NAME.part``, says so
where it can, and is resumed by the same command; SIGKILL may leave a hidden ``*.part`` file too.
"""

import argparse
import contextlib
import json
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flamia_ref import __version__, _console
from flamia_ref._errors import line, printable

# Everything else is imported by the command that needs it, so that --help is quick.
if TYPE_CHECKING:
    from flamia_ref.attention import Recipe


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {line(message)}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status. `arguments` are those of the command line."""
    if arguments is None:
        _console.take_over()
    code = 2
    try:
        parsed = _parser().parse_args(arguments)
        if parsed.json not in (None, "-"):
            _console.require_new(parsed.json, force=parsed.force or parsed.replaces_reports)
        result: Result = parsed.run(parsed)
        code, text, document = result
        if parsed.json not in (None, "-"):
            _console.write(parsed.json, document)
        _console.show(document if parsed.json == "-" else _lines(text))
    except _console.Stopped as stop:
        if kept := _notes(stop):
            _console.complain(kept)
        return 128 + stop.number
    except KeyboardInterrupt as stop:
        _console.complain("; ".join(["interrupted", *filter(None, [_notes(stop)])]))
        return 128 + signal.SIGINT
    except (ValueError, TypeError, ImportError, OSError, MemoryError) as error:
        message = str(error) or type(error).__name__
        _console.complain("; ".join([message, *filter(None, [_notes(error)])]))
        return 2
    except Exception:  # noqa: BLE001  a fault of ours must not look like a mismatch, which is 1
        traceback.print_exc()
        return 2
    return code


def _notes(error: BaseException) -> str:
    """What was noted of an error: what a run that is stopped has left for the next one."""
    return "; ".join(getattr(error, "__notes__", ()))


def _lines(text: str) -> str:
    return "".join(f"{printable(one)}\n" for one in text.split("\n"))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="flamia-ref",
        description="Bit-exact reference vectors for low-precision attention on Blackwell.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"flamia-ref {__version__}")
    groups = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)

    from flamia_ref import cli_formats, cli_golden

    golden = _group(groups, "golden", "make golden packs, and check kernels against them")
    cli_golden.add_commands(lambda *given: _command(golden, *given), _recipe)
    cli_golden.add_explain(lambda *given: _command(groups, *given))

    from flamia_ref.schedule import command as schedule_command

    schedule = _group(
        groups, "schedule", "when which tile of packed documents is computed where, by a model"
    )
    schedule_command.add_commands(lambda *given: _command(schedule, *given), _recipe)

    leak = _group(groups, "leak", "whether an output depends on a token that it must not see")
    demo = _command(
        leak, "demo", "show the public leak witnesses on cuDNN's recipes and on ours", _leak_demo
    )
    demo.add_argument(
        "--picture", metavar="FILE", help="also draw which outputs moved, as a PNG file"
    )
    demo.add_argument(
        "--force", action="store_true", help="replace an existing picture, and file of --json"
    )
    demo.epilog = (
        "Exit status: 0 all came out as known, which is that cudnn-mxfp8 leaks and the others do not; 1 another recipe"
        " leaked, or that one did not; 2 bad usage, or a control failed, so that a run proves nothing."
    )

    proved = _command(
        leak,
        "prove",
        "follow every dependency through the program, and certify that none is illegal",
        _leak_prove,
    )
    _add_subject(proved)
    from flamia_ref.leakage import proof_options

    proof_options.add_arguments(proved)
    proved.epilog = proof_options.EPILOG
    verified = _command(
        leak,
        "verify",
        "make a certificate anew, and compare",
        _leak_verify,
        proof_options.VERIFY_EPILOG,
    )
    verified.add_argument("file", metavar="FILE", help="what `leak prove --json FILE` wrote")

    from flamia_ref.leakage.sharing import command as structure_command

    structured = _command(
        leak,
        "structure",
        "say which tokens each use of a recipe couples, and what of that is illegal",
        _leak_structure,
        structure_command.EPILOG,
    )
    structure_command.add_arguments(structured)

    from flamia_ref.leakage.safeguarding import command as safeguards_command

    studied = _command(
        leak,
        "safeguards",
        "try every safeguard on the uses of a recipe that leak: safe or not, error, work, bytes",
        _leak_safeguards,
        safeguards_command.EPILOG,
    )
    safeguards_command.add_arguments(studied)

    from flamia_ref.leakage.search import options as hunt_options

    hunted = _command(
        leak,
        "hunt",
        "search a recipe or a kernel, as a black box, for an input that moves what it must not",
        _leak_hunt,
        hunt_options.EPILOG,
    )
    _add_subject(hunted)
    hunt_options.add_arguments(hunted)

    from flamia_ref.leakage.information import command as capacity_command

    measured = _command(
        leak,
        "capacity",
        "say how many bits get through a recipe: bounds, entropy over draws, a probe",
        _leak_capacity,
        capacity_command.EPILOG,
    )
    capacity_command.add_arguments(measured)

    device = _group(groups, "device", "what a GPU of yours computes, beside the models")
    probed = _command(
        device,
        "probe",
        "run a GPU's instructions on hard operands and compare with the models",
        _probe,
    )
    probed.add_argument("--arch", metavar="NAME", help="sm_90a, sm_100a, ... (default: the GPU's)")
    probed.add_argument(
        "--only",
        metavar="TEXT",
        action="append",
        help="probes whose names have this text or match this pattern; may be repeated",
    )
    probed.add_argument(
        "--rows",
        metavar="N",
        type=int,
        help="results an instruction, about (100000)",
    )
    probed.add_argument("--seed", metavar="N", type=int, help="seed of the operands (0)")
    probed.add_argument(
        "--exhaustive", action="store_true", help="special functions on all 2^32 inputs, minutes"
    )
    probed.add_argument(
        "--compile-only",
        action="store_true",
        help="compile for one or all architectures; needs no GPU",
    )
    probed.add_argument(
        "--list",
        action="store_true",
        help="print the names of the probes of one or all architectures; needs no GPU",
    )
    probed.add_argument("--nvcc", metavar="PATH", help="the compiler (default: the one on PATH)")
    probed.add_argument("--keep", metavar="DIR", help="leave sources and programs in a new folder")
    probed.epilog = (
        "It needs nvcc and a GPU. Probes were run on sm_90a alone, on an NVIDIA H200; those of the other architectures,"
        " all of Blackwell among them, were compiled but never run. Exit status: 0 every probe that ran was confirmed;"
        " 1 a model was refuted, and the smallest counterexample found is given; 2 nothing ran, a program failed, there"
        " is no nvcc or no GPU."
    )

    formats = _group(groups, "formats", "number formats and block formats")
    cli_formats.add_commands(lambda *given: _command(formats, *given))

    recipes = _group(groups, "recipes", "attention paths as data")
    _command(recipes, "list", "list the recipes", _recipes_list)
    one = _command(recipes, "show", "print a recipe as JSON, which --recipe reads", _recipes_show)
    one.add_argument("name", metavar="NAME|FILE")
    summary = "say where the data and the evidence of two recipes differ"
    two = _command(
        recipes, "diff", summary, _recipes_diff, "Exit status 1 if they do; names do not count."
    )
    for side, which in (("one", "the first"), ("other", "the second")):
        two.add_argument(side, metavar="NAME|FILE", help=f"{which} recipe by name, or a JSON file")
    summary = "run a recipe and say which consistency properties it has"
    one = _command(
        recipes,
        "check",
        summary,
        _recipes_check,
        "It takes some seconds. Exit status 1 if a property is broken.",
    )
    one.add_argument("name", metavar="NAME|FILE", help="a recipe by name, or a JSON file of one")

    from flamia_ref.golden.matching import command as match_command

    matched = _command(
        recipes,
        "match",
        "say which recipe a kernel's outputs fit best, and what would bring it closer",
        _recipes_match,
        match_command.EPILOG,
    )
    match_command.add_arguments(matched)
    return parser


def _group(groups: Any, name: str, summary: str) -> Any:
    group = groups.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    return group.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)


def _command(
    group: Any, name: str, summary: str, run: Callable[..., Any], more: str | None = None
) -> Any:
    command = group.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=more,
        allow_abbrev=False,
        # A command with more files has a --force that says which.
        conflict_handler="resolve",
    )
    command.set_defaults(run=run, replaces_reports=False)
    command.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="give JSON, in a file or as the output"
    )
    command.add_argument("--force", action="store_true", help="replace an existing file of --json")
    return command


# Each command returns its exit status, its result as text, and its result as JSON text.
Result = tuple[int, str, str]


def _require_picture(picture: str | None, options: argparse.Namespace) -> None:
    """Require that a picture can be written, before the work for it is done."""
    if picture is None:
        return
    _console.require_new(picture, force=options.force)
    if options.json not in (None, "-") and _console.same_file(picture, options.json):
        raise ValueError(f"the picture and the JSON are both to be {options.json}; give two names")


def _leak_structure(options: argparse.Namespace) -> Result:
    from flamia_ref.leakage.sharing.command import run

    _require_picture(options.png, options)
    found = run(_recipe(options.recipe), options)
    text = found.to_text()
    if options.png is not None:
        _console.write(options.png, found.to_png())
        text += f"\nwrote {options.png}"
    return found.exit_code, text, found.to_json()


def _leak_safeguards(options: argparse.Namespace) -> Result:
    from flamia_ref.leakage.safeguarding.command import run

    _require_picture(options.picture, options)
    found = run(_recipe(options.recipe), options, _console.progress())
    text = found.to_text()
    if options.picture is not None:
        _console.write(options.picture, found.to_png())
        text += f"\nwrote {options.picture}"
    return found.exit_code, text, found.to_json()


def _leak_demo(options: argparse.Namespace) -> Result:
    _require_picture(options.picture, options)
    from flamia_ref.leakage.demo import demo

    result = demo()
    text = result.to_text()
    if options.picture is not None:
        _console.write(options.picture, result.to_png())
        text += f"\nwrote {options.picture}"
    return result.exit_code, text, result.to_json()


def _add_subject(parser: argparse.ArgumentParser) -> None:
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument(
        "--recipe", metavar="NAME|FILE", help="a recipe by name, or a JSON file of one"
    )
    subject.add_argument("--kernel", metavar="MODULE:FUNCTION", help="a Python callable")


def _subject(options: argparse.Namespace) -> Any:
    """The recipe or the kernel that the options name."""
    if options.recipe is not None:
        return _recipe(options.recipe)
    from flamia_ref import kernels

    return kernels.load(options.kernel)


def _leak_prove(options: argparse.Namespace) -> Result:
    from flamia_ref.leakage.proof import prove
    from flamia_ref.leakage.proof_options import arguments

    # What a function prints as it is imported or traced must not end up in the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        found = prove(_subject(options), **arguments(options), progress=_console.progress())
    return found.exit_code, found.to_text(), found.to_json()


def _leak_verify(options: argparse.Namespace) -> Result:
    from flamia_ref.golden.files import read_plain
    from flamia_ref.leakage.verification import verify

    data = read_plain(Path(options.file), limit=64 << 20, follow=True)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{options.file} is not UTF-8 text: {error}") from error
    with contextlib.redirect_stdout(sys.stderr):
        found = verify(text, progress=_console.progress())
    return found.exit_code, found.to_text(), found.to_json()


def _leak_hunt(options: argparse.Namespace) -> Result:
    from flamia_ref.leakage.search import hunt
    from flamia_ref.leakage.search.options import arguments, files

    named = files(options)
    for file in named.values():
        _console.require_new(file, force=options.force)
    every = [*named.values(), *([] if options.json in (None, "-") else [options.json])]
    for index, file in enumerate(every):
        if any(_console.same_file(file, other) for other in every[:index]):
            raise ValueError(f"two results are both to be {file}; give each a name of its own")
    # What a kernel prints must not end up in the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        found = hunt(_subject(options), **arguments(options), progress=_console.progress())
    text = found.to_text()
    for form, file in named.items():
        if form == "png" and not found.moves:
            text += f"\nnot written, as there is no map of moves: {file}"
            continue
        _console.write(file, getattr(found, f"to_{form}")())
        text += f"\nwrote {file}"
    return found.exit_code, text, found.to_json()


def _leak_capacity(options: argparse.Namespace) -> Result:
    from flamia_ref.leakage.information.capacities import capacity
    from flamia_ref.leakage.information.command import arguments

    _require_picture(options.picture, options)
    with _console.bar() as progress:
        found = capacity(_recipe(options.recipe), **arguments(options), progress=progress)
    text = found.to_text()
    if options.picture is not None:
        _console.write(options.picture, found.to_png())
        text += f"\nwrote {options.picture}"
    return found.exit_code, text, found.to_json()


def _probe(options: argparse.Namespace) -> Result:
    from flamia_ref.device import Plan, probe

    only = tuple(options.only or ())
    settings = {
        name: given
        for name in ("rows", "seed", "exhaustive", "compile_only", "nvcc", "keep")
        if (given := getattr(options, name)) is not None and given is not False
    }
    # One that is given in vain is refused even where it has the value that it has anyway.
    if options.list and settings:
        raise ValueError(f"--list runs nothing; leave out {_options(settings)}")
    vain = [name for name in ("rows", "seed", "exhaustive") if name in settings]
    if options.compile_only and vain:
        raise ValueError(f"--compile-only runs nothing; leave out {_options(vain)}")
    if options.list:
        return _probe_list(options.arch, only)
    plan = Plan(architecture=options.arch, only=only, **settings)
    report = probe(plan, progress=_console.progress())
    return report.exit_code, report.to_text(), report.to_json()


def _options(names: Iterable[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)


def _probe_list(architecture: str | None, only: tuple[str, ...]) -> Result:
    from flamia_ref.device.plans import matching

    names = {
        one.name: [probe.name for probe in found]
        for one, found in matching(architecture, only).items()
    }
    lines = []
    for name, listed in names.items():
        lines += [f"{name}: {len(listed)} probes", *(f"    {probe}" for probe in listed)]
    return 0, "\n".join(lines), _json({"probes": names})


def _recipes_list(_: argparse.Namespace) -> Result:
    from flamia_ref.attention import RECIPES
    from flamia_ref.attention.description import summary

    lines = [f"{name:<24} evidence {r.label:<9} {summary(r)}" for name, r in RECIPES.items()]
    labels = {name: str(recipe.label) for name, recipe in RECIPES.items()}
    summaries = {name: summary(recipe) for name, recipe in RECIPES.items()}
    return 0, "\n".join(lines), _json({"recipes": labels, "summaries": summaries})


def _recipes_show(options: argparse.Namespace) -> Result:
    text = _recipe(options.name).to_json()
    return 0, text, text + "\n"


def _recipes_diff(options: argparse.Namespace) -> Result:
    from flamia_ref.attention.description import data_differences, evidence_differences

    one, other = _recipe(options.one), _recipe(options.other)
    found = {
        "data": data_differences(one, other),
        "evidence": evidence_differences(one, other),
    }
    lines = []
    for kind, differences in found.items():
        lines.append(f"{kind}: {len(differences)} differences")
        for path, first, second in differences:
            lines += [f"    {path}", *(f"        {json.dumps(x)}" for x in (first, second))]
    document = {
        "recipes": [one.name, other.name],
        **{kind: [d._asdict() for d in differences] for kind, differences in found.items()},
    }
    return int(any(found.values())), "\n".join(lines), _json(document)


def _recipes_check(options: argparse.Namespace) -> Result:
    from flamia_ref.attention import consistency

    report = consistency.check(_recipe(options.name), progress=_console.progress())
    return report.exit_code, report.to_text(), report.to_json()


def _recipes_match(options: argparse.Namespace) -> Result:
    from flamia_ref.golden.matching.command import run

    if options.write is not None:
        _console.require_new(options.write, force=options.force)
        if options.json not in (None, "-") and _console.same_file(options.write, options.json):
            raise ValueError(
                f"the recipe and the JSON are both to be {options.json}; give two names"
            )
    with _console.bar() as progress:
        found = run(options, _recipe, progress)
    text = found.to_text()
    if options.write is not None:
        if found.fitting is None:
            text += f"\nnot written, as no recipe gives every bit: {options.write}"
        else:
            _console.write(options.write, found.fitting.to_json() + "\n")
            text += f"\nwrote {options.write}"
    return found.exit_code, text, found.to_json()


def _recipe(given: str) -> "Recipe":
    from flamia_ref.attention import RECIPES, Recipe

    path = Path(given)
    if given in RECIPES or not (path.suffix == ".json" or path.name != given or path.is_file()):
        return RECIPES[given]
    from flamia_ref.golden.files import read_plain

    data = read_plain(path, limit=1 << 20, follow=True)
    try:
        return Recipe.from_json(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"recipe file {given} is not UTF-8 text: {error}") from error
    except ValueError as error:
        raise ValueError(f"recipe file {given}: {error}") from error


def _json(document: object) -> str:
    return json.dumps(document, indent=1, default=str) + "\n"


if __name__ == "__main__":
    sys.exit(main())
