"""Write the pages of docs/api/ and docs/command-line.md: a page for each public package, and every command.

Run from the root of the checkout, seconds: python docs/reference.py
An API page lists what a package exports; `make docs` fills in the signatures and docstrings. The page of the commands
is read from the argument parser.
"""

import argparse
import ast
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flamia_ref import cli  # noqa: E402

API = ROOT / "docs" / "api"
COMMANDS = ROOT / "docs" / "command-line.md"

PUBLIC = ("formats", "arithmetic", "attention", "leakage", "golden", "properties", "kernels")
"""The public modules of flamia_ref, from the ground up."""

INDEX = """# API

Made by `python docs/reference.py`; the site has the docstrings. All of it is imported from the package named here,
whatever module defines it. Arrays are numpy or JAX arrays, and results come back in the library of the input;
arithmetic, attention and golden packs run on numpy alone.

```{toctree}
:hidden:

PAGES
```

| module | what it is |
|---|---|
"""

COMMAND_HEAD = """# Command line

Made by `python docs/reference.py` from the argument parser: `flamia-ref COMMAND --help` says the same.
`python -m flamia_ref.cli` is the same command. Results go to standard output, errors and progress to standard error.
Exit status: 0 all is well, 1 a mismatch or a leak was found, 2 bad usage or input or nothing was compared; what a
command says below goes before that.

Every command takes `-h`, `--help`.

"""


# The API.


def exports(module: str) -> list[str]:
    """The public names of a module: those it lists, or else what it defines without an underscore."""
    found = importlib.import_module(module)
    if hasattr(found, "__all__"):
        return sorted(found.__all__)
    named = (name for name in vars(found) if not name.startswith("_"))
    return sorted(
        name for name in named if getattr(vars(found)[name], "__module__", None) == module
    )


def owners(module: str) -> dict[str, str]:
    """The module that defines each export of a package, from the list that its __init__ has for static tools."""
    file = inspect.getsourcefile(importlib.import_module(module))
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {alias.asname: node.module for node in imports for alias in node.names if alias.asname}


def note(module: str, name: str) -> str:
    """The first paragraph, in one line, of the string after the assignment of a name; empty where there is none."""
    file = inspect.getsourcefile(importlib.import_module(module))
    body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    for before, after in pairwise(body):
        targets = getattr(before, "targets", [getattr(before, "target", None)])
        assigned = any(isinstance(one, ast.Name) and one.id == name for one in targets)
        if assigned and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            return " ".join(inspect.cleandoc(after.value.value).partition("\n\n")[0].split())
    return ""


def directive(module: str, name: str, owner: str | None = None) -> str:
    """What makes Sphinx describe an export."""
    value, full = getattr(importlib.import_module(module), name), f"{module}.{name}"
    if inspect.ismodule(value):
        return f".. automodule:: {full}\n   :members:\n"
    if isinstance(value, type):
        return f".. autoclass:: {full}\n   :members:\n"
    if inspect.isroutine(value):
        return f".. autofunction:: {full}\n"
    said = note(owner or module, name)
    kind = type(value).__name__
    return f".. py:data:: {name}\n   :module: {module}\n   :type: {kind}\n" + (
        f"\n   {said}\n" if said else ""
    )


def api_page(short: str) -> str:
    """The page of one module."""
    module = f"flamia_ref.{short}"
    listed, defined = exports(module), owners(module)
    whole = [
        name for name in listed if inspect.ismodule(getattr(importlib.import_module(module), name))
    ]
    parts = [directive(module, name, defined.get(name)) for name in listed if name not in whole]
    about = f".. automodule:: {module}\n   :no-index:\n"
    lines = [f"# {module}\n\n", fenced("\n".join([about, *parts]))]
    for name in whole:
        lines += [f"## {module}.{name}\n\n", fenced(directive(module, name))]
    return "".join(lines).rstrip("\n") + "\n"


def fenced(text: str) -> str:
    """A piece of reStructuredText in a page of Markdown."""
    return f"```{{eval-rst}}\n{text}```\n\n"


def index() -> str:
    """The page that lists the pages."""
    rows = []
    for short in PUBLIC:
        first = inspect.getdoc(importlib.import_module(f"flamia_ref.{short}")).splitlines()[0]
        rows.append(f"| [flamia_ref.{short}]({short}.md) | {first} |\n")
    return INDEX.replace("PAGES", "\n".join(PUBLIC)) + "".join(rows)


# The command line.


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of the commands, groups first, in the order of --help."""
    for action in parser._actions:  # argparse has no public way to its parts
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield one
                yield from commands(one)


def is_group(parser: argparse.ArgumentParser) -> bool:
    """Whether a parser only has commands below it."""
    return any(isinstance(one, argparse._SubParsersAction) for one in parser._actions)


def shown(action: argparse.Action) -> str:
    """An option or argument as one writes it."""
    names = [action.metavar] if isinstance(action.metavar, str) else list(action.metavar or ())
    if action.nargs == 0:
        value = ""
    else:
        choices = ["|".join(map(str, action.choices))] if action.choices else []
        value = " ".join(names or choices or [action.dest.upper()])
        value = f"[{value}]" if action.nargs == "?" else value
        value = f"{value} ..." if action.nargs in ("*", "+") else value
    if not action.option_strings:
        return f"`{value}`"
    return f"`{', '.join(action.option_strings)}{' ' if value else ''}{value}`".replace("|", "\\|")


def described(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """What an option is for, as --help says it."""
    text = " ".join(parser._get_formatter()._expand_help(action).split()) if action.help else ""
    text = text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return f"{text} **required**".strip() if action.required and action.option_strings else text


def command_lines(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The section of one command."""
    text = " ".join((parser.description or "").split())
    text = text[:1].upper() + text[1:] + ("" if text.endswith(".") or not text else ".")
    if is_group(parser):
        yield f"## {parser.prog}\n\n{text}\n\n"
        return
    yield f"### {parser.prog}\n\n{text}\n\n"
    mine = [
        one
        for one in parser._actions
        if not isinstance(one, argparse._HelpAction) and one.help != argparse.SUPPRESS
    ]
    if mine:
        yield "| argument | |\n|---|---|\n"
        for action in sorted(mine, key=lambda one: bool(one.option_strings)):
            yield f"| {shown(action)} | {described(parser, action)} |\n"
        yield "\n"
    if parser.epilog:
        yield " ".join(parser.epilog.split()).replace("<", "&lt;").replace("*", "\\*") + "\n\n"


def command_page() -> str:
    """The page of the commands."""
    parts = (line for one in commands(cli._parser()) for line in command_lines(one))
    return (COMMAND_HEAD + "".join(parts)).rstrip("\n") + "\n"


def pages() -> dict[Path, str]:
    """All pages, by their files."""
    made = {API / f"{short}.md": api_page(short) for short in PUBLIC}
    return {API / "README.md": index(), **made, COMMANDS: command_page()}


def write(made: Iterable[tuple[Path, str]]) -> None:
    """Write the pages."""
    API.mkdir(exist_ok=True)
    for file, text in made:
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(pages().items())
