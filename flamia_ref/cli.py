"""The command ``flamia-ref``: parse, call, render, exit status.

Exit status: 0 all is well, 1 a mismatch was found, 2 bad usage or input, or the work could not be
done. Results go to standard output; errors, one line each, and progress to standard error.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flamia_ref import __version__

# Everything else is imported by the command that needs it, so that --help is quick.
if TYPE_CHECKING:
    from flamia_ref.attention import Recipe
    from flamia_ref.golden import Manifest

_PROGRESS_AFTER = 2.0  # seconds


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status. `arguments` are those of the command line."""
    if arguments is None:
        # So that what is half-written is cleared away when a job is stopped.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    code = 2
    try:
        parsed = _parser().parse_args(arguments)
        code, text, document = parsed.run(parsed)
        _emit(text, document, parsed.json)
    except KeyboardInterrupt:
        _complain("interrupted")
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Whoever read the output has seen enough. Python must not try to flush it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, TypeError, ImportError, OSError, MemoryError) as error:
        _complain(str(error) or type(error).__name__)
        return 2
    except Exception:  # noqa: BLE001  a fault of ours must not look like a mismatch, which is 1
        traceback.print_exc()
        return 2
    return code


def _complain(message: str) -> None:
    print(f"flamia-ref: {' '.join(message.split())}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="flamia-ref",
        description="Bit-exact reference vectors for low-precision attention on Blackwell.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"flamia-ref {__version__}")
    groups = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)

    golden = _group(groups, "golden", "make golden packs, and check kernels against them")
    make = _command(golden, "make", "run the simulator on a suite of cases and write a pack", _make)
    make.add_argument("folder", metavar="DIR", help="the folder to write; it must not exist")
    make.add_argument(
        "--recipe",
        metavar="NAME|FILE",
        action="append",
        help="a recipe by name, or a JSON file of one; may be repeated (default: flamia-mxfp8-folded)",
    )
    make.add_argument("--suite", default="smoke", help="the cases to run (default: smoke)")
    make.add_argument("--force", action="store_true", help="replace an existing pack")

    check = _command(golden, "check", "compare a kernel, or its results, with a pack", _check)
    check.add_argument("folder", metavar="DIR", help="the pack")
    actual = check.add_mutually_exclusive_group(required=True)
    actual.add_argument(
        "--actual", metavar="PATH", help="a folder of CASE.safetensors, or one such file"
    )
    actual.add_argument("--kernel", metavar="MODULE:FUNCTION", help="a Python callable")

    show = _command(golden, "show", "say what a pack or one of its cases holds", _show)
    show.add_argument("folder", metavar="DIR", help="the pack")
    show.add_argument("case", metavar="CASE", nargs="?", help="a case; its digests are verified")

    formats = _group(groups, "formats", "number formats and block formats")
    _command(formats, "list", "list scalar formats and presets", _formats_list)
    one = _command(formats, "show", "show a scalar format or a preset", _formats_show)
    one.add_argument("name", metavar="NAME")

    recipes = _group(groups, "recipes", "attention paths as data")
    _command(recipes, "list", "list the recipes", _recipes_list)
    one = _command(recipes, "show", "print a recipe as JSON, which --recipe reads", _recipes_show)
    one.add_argument("name", metavar="NAME")
    return parser


def _group(groups: Any, name: str, summary: str) -> Any:
    group = groups.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    return group.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)


def _command(group: Any, name: str, summary: str, run: Callable[..., Any]) -> Any:
    command = group.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    command.set_defaults(run=run)
    command.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="give JSON, in a file or as the output"
    )
    return command


# Each command returns its exit status, its result as text, and its result as JSON text.
Result = tuple[int, str, str]


def _make(options: argparse.Namespace) -> Result:
    from flamia_ref.golden import DEFAULT_RECIPES, make

    manifest = make(
        options.folder,
        [_recipe(name) for name in options.recipe or DEFAULT_RECIPES],
        options.suite,
        force=options.force,
        progress=_progress(),
    )
    text = f"wrote {options.folder}: {_summary(manifest)}"
    document = {
        "folder": options.folder,
        "cases": [case.name for case in manifest.cases],
        "bytes": manifest.size,
        "digest": manifest.digest,
    }
    return 0, text, _json(document)


def _check(options: argparse.Namespace) -> Result:
    from flamia_ref import kernels
    from flamia_ref.golden import check, load

    pack = load(options.folder)
    # What a kernel prints must not end up in the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        actual = options.actual if options.kernel is None else kernels.load(options.kernel)
        report = check(pack, actual, progress=_progress())
    return report.exit_code, report.to_text(), report.to_json()


def _show(options: argparse.Namespace) -> Result:
    from flamia_ref.golden import load

    pack = load(options.folder)
    if options.case is None:
        lines = [f"{options.folder}: {_summary(pack.manifest)}"]
        lines += [f"{case.name}\n    {case.spec.why}" for case in pack]
        return 0, "\n".join(lines), pack.manifest.to_json()
    case = pack[options.case]
    data = {
        field.name: getattr(case.spec, field.name)
        for field in dataclasses.fields(case.spec)
        if field.name != "plants"
    }
    lines = [f"{key}: {_words(value)}" for key, value in data.items()]
    lines += [f"recipe: {case.entry.recipe}, evidence {case.recipe.evidence}", "tensors:"]
    tensors = []
    for name, tensor in case.tensors.items():
        entry = case.entry.tensors[name]
        tensors.append(dataclasses.asdict(entry))
        lines.append(f"    {name:<20} {entry.view:<8} {list(tensor.shape)}  {entry.sha256[:16]}")
    document = {"name": case.name, "recipe": case.entry.recipe, "spec": data, "tensors": tensors}
    return 0, "\n".join(lines), _json(document)


def _formats_list(_: argparse.Namespace) -> Result:
    from flamia_ref.formats import FORMATS, PRESETS

    lines = ["scalar formats:", *(f"    {name}" for name in FORMATS), "presets:"]
    lines += [f"    {name:<24} {preset.source}" for name, preset in PRESETS.items()]
    return 0, "\n".join(lines), _json({"formats": list(FORMATS), "presets": list(PRESETS)})


def _formats_show(options: argparse.Namespace) -> Result:
    from flamia_ref._errors import unknown_name
    from flamia_ref.formats import FORMATS, PRESETS, ScalarFormat

    known: dict[str, Any] = {**FORMATS, **PRESETS}
    if options.name not in known:
        raise unknown_name("format", options.name, known)
    found = known[options.name]
    shown = [field.name for field in dataclasses.fields(found)]
    if options.name in FORMATS:
        shown += ["bits", "max", "smallest_normal", "smallest"]
    data = {key: getattr(found, key) for key in shown}
    plain = {
        key: value.name if isinstance(value, ScalarFormat) else value for key, value in data.items()
    }
    return 0, "\n".join(f"{key}: {_words(value)}" for key, value in plain.items()), _json(plain)


def _recipes_list(_: argparse.Namespace) -> Result:
    from flamia_ref.attention import RECIPES

    lines = [f"{name:<24} evidence {recipe.label}" for name, recipe in RECIPES.items()]
    labels = {name: str(recipe.label) for name, recipe in RECIPES.items()}
    return 0, "\n".join(lines), _json({"recipes": labels})


def _recipes_show(options: argparse.Namespace) -> Result:
    from flamia_ref.attention import RECIPES

    text = RECIPES[options.name].to_json()
    return 0, text, text + "\n"


def _recipe(given: str) -> "Recipe":
    from flamia_ref.attention import RECIPES, Recipe

    path = Path(given)
    if given in RECIPES or not (path.suffix == ".json" or path.name != given or path.is_file()):
        return RECIPES[given]
    from flamia_ref.golden.files import read_plain

    data = read_plain(path, limit=1 << 20, follow=True)
    try:
        return Recipe.from_json(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"recipe file {given}: {error}") from error


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


def _progress() -> Callable[[int, int, str], None] | None:
    """Return a reporter that speaks on a terminal, and only when the work takes a while."""
    if not sys.stderr.isatty():
        return None
    start = time.monotonic()

    def report(done: int, total: int, name: str) -> None:
        if time.monotonic() - start > _PROGRESS_AFTER:
            print(f"{done} of {total} done, now {name}", file=sys.stderr)

    return report


def _emit(text: str, document: str, file: str | None) -> None:
    if file == "-":
        sys.stdout.write(document)
    else:
        print(text)
    sys.stdout.flush()
    if file not in (None, "-"):
        try:
            _write(Path(str(file)), document)
        except OSError as error:
            raise ValueError(f"cannot write {file}: {error.strerror or error}") from error


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all, unless it is a device or a pipe."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
