"""The digest of the code that emits bits: what is kept of a run is of no use to other code."""

import hashlib
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from flamia_ref import __version__

# What a case's bytes come from, data files included.
_PACKAGES = ("arithmetic", "attention", "formats", "golden", "packing")
_SUFFIXES = (".py", ".csv", ".json", ".safetensors")


@cache
def code_digest() -> str:
    """Return the SHA-256, in hexadecimal, of the code in which cases are computed, as it lies here."""
    digest = hashlib.sha256(f"flamia-ref {__version__}\n".encode())
    for name, path in sorted(_files()):
        data = path.read_bytes()
        digest.update(f"{name} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def _files() -> Iterator[tuple[str, Path]]:
    for root in _folders("flamia_ref"):
        for path in root.glob("_*.py"):
            yield path.name, path
    for package in _PACKAGES:
        for root in _folders(f"flamia_ref.{package}"):
            for path in root.rglob("*"):
                if path.suffix in _SUFFIXES and path.is_file():
                    yield f"{package}/{path.relative_to(root).as_posix()}", path


def _folders(package: str) -> list[Path]:
    found = importlib.util.find_spec(package)
    return [Path(root) for root in (found and found.submodule_search_locations) or ()]
