"""Where the packages are in the tree, and what each may import."""

import ast
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Folders at the root that are packages inside flamia_ref.
MAPPED = ("formats", "leakage", "properties")

# A module or folder may import itself and what is on a lower floor, never a neighbour. The ground
# floor is one room: its modules may import each other.
FLOORS = {
    "flamia_ref.__version__": 0,
    "flamia_ref._backend": 0,
    "flamia_ref._console": 0,
    "flamia_ref._errors": 0,
    "flamia_ref._float32": 0,
    "flamia_ref._float64": 0,
    "flamia_ref._primitive": 0,
    "flamia_ref._lazy": 0,
    "flamia_ref._mufu": 0,
    "flamia_ref.evidence": 0,
    "flamia_ref.formats": 1,
    "flamia_ref.arithmetic": 2,
    "flamia_ref.packing": 2,
    "flamia_ref.attention": 3,
    "flamia_ref.kernels": 3,
    "flamia_ref.report": 3,
    "flamia_ref.sweep": 3,
    "flamia_ref.adapters": 4,
    "flamia_ref.device": 4,
    "flamia_ref.golden": 4,
    "flamia_ref.leakage": 4,
    "flamia_ref.schedule": 4,
    "flamia_ref.cli_formats": 5,
    "flamia_ref.cli_golden": 5,
    "flamia_ref.properties": 5,
    "flamia_ref.cli": 6,
    "flamia_ref.pytest_plugin": 6,
}

# Folders at the root that no package may import by their bare names.
OUTSIDE = {*MAPPED, "benchmarks", "docs", "examples", "notebooks", "tests"}


@dataclass(frozen=True, kw_only=True)
class Module:
    """A Python file of the packages and its dotted name."""

    name: str
    path: Path

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


def project(root: Path = ROOT) -> dict:
    """Return pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def package_folders(root: Path = ROOT) -> dict[str, Path]:
    """Return the folder of each package that is a root of its own in the tree."""
    return {"flamia_ref": root / "flamia_ref"} | {
        f"flamia_ref.{name}": root / name for name in MAPPED
    }


def modules(root: Path = ROOT) -> list[Module]:
    """Return every Python file of the packages. Symbolic links are not followed."""
    found = []
    for package, top in package_folders(root).items():
        for folder, _, files in os.walk(top):
            for file in files:
                path = Path(folder, file)
                if path.suffix == ".py":
                    parts = path.relative_to(top).with_suffix("").parts
                    parts = parts[:-1] if parts[-1] == "__init__" else parts
                    found.append(Module(name=".".join((package, *parts)), path=path))
    return sorted(found, key=lambda module: module.name)


def unit(name: str) -> str | None:
    """Return the row of FLOORS that a dotted name belongs to."""
    while name not in FLOORS:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return name


def is_type_checking(node: ast.AST) -> bool:
    """Whether a node is ``if TYPE_CHECKING:``."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of all that a file imports, at any depth, or reaches for.

    ``from a import b`` counts as ``a.b``. A relative import keeps its dots.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom():
                base = "." * node.level + (node.module or "")
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
            case ast.Attribute(value=ast.Name(id="flamia_ref"), attr=name):
                yield node.lineno, f"flamia_ref.{name}"
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def violations(root: Path = ROOT) -> list[str]:
    """Return a line for each import that goes up, sideways, or out of the package."""
    return [
        f"{module.path.relative_to(root)}:{line}: {complaint}"
        for module in modules(root)
        for line, complaint in _complaints(module)
    ]


def _complaints(module: Module) -> Iterator[tuple[int, str]]:
    tree = ast.parse(module.path.read_text(encoding="utf-8"))
    at_top = module.name == "flamia_ref"
    if at_top:
        # It names everything, but only for static tools: at run time these are strings.
        tree.body = [node for node in tree.body if not is_type_checking(node)]
    here = unit(module.name)
    if here is None and not at_top:
        yield 1, f"{module.name} has no floor"
        return
    floor = 1 if here is None else FLOORS[here]
    for line, name in imports(tree):
        top = name.partition(".")[0]
        if top == "":
            yield line, f"relative import of {name}"
        elif top in OUTSIDE:
            yield line, f"{name} is not a package of its own; import flamia_ref.{name}"
        elif top == "flamia_ref" and name != "flamia_ref":
            there = unit(name)
            if there is None:
                yield line, f"{name} has no floor"
            elif there != here and not FLOORS[there] < floor and not FLOORS[there] == floor == 0:
                yield (
                    line,
                    (
                        f"{here or 'flamia_ref'} (floor {floor}) imports {there} "
                        f"(floor {FLOORS[there]})"
                    ),
                )
