"""Lazy exports for a package's ``__init__`` (PEP 562).

Every ``__init__`` of this project names its public surface twice: once for people and static tools,
once for the interpreter, which imports a module only when one of its names is first used::

    from typing import TYPE_CHECKING

    from flamia_ref._lazy import attach

    if TYPE_CHECKING:
        from flamia_ref.formats import layout as layout
        from flamia_ref.formats.scalar import E4M3 as E4M3
        from flamia_ref.formats.scalar import ScalarFormat as ScalarFormat
    else:
        __getattr__, __dir__, __all__ = attach(
            __name__, {"layout": [], "scalar": ["E4M3", "ScalarFormat"]}
        )

A test holds the two lists equal. The ``else`` matters: a module-level ``__getattr__`` that a type
checker can see makes it accept every misspelt name.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping


def attach(
    package: str, exports: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for a package.

    ``exports`` maps a module of the package (its name relative to the package) to the names that
    it gives to the package. An empty list exports the module itself.

    Raises ValueError if two modules give the same name, or if a name is also that of a module:
    the import system binds a submodule to its package, so the module would hide the name as soon
    as anyone imported it.
    """
    owner: dict[str, str] = {}
    modules: set[str] = set()
    for module, names in exports.items():
        listed = list(names)
        if not listed:
            modules.add(module)
        for name in listed or [module]:
            if name in owner:
                raise ValueError(f"{package} exports {name!r} twice; give one of them another name")
            owner[name] = module
    for name in owner.keys() & exports.keys() - modules:
        raise ValueError(f"{package} exports {name!r}, which is also a module; rename the module")
    public = sorted(owner)

    def getattr_(name: str) -> object:
        if name not in owner:
            # name= and obj= let the interpreter suggest the nearest export.
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}",
                name=name,
                obj=sys.modules[package],
            )
        module = importlib.import_module(f"{package}.{owner[name]}")
        value: object = module if name in modules else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def dir_() -> list[str]:
        return sorted({*vars(sys.modules[package]), *public})

    return getattr_, dir_, public
