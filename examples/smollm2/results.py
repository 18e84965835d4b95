"""The file of results: what was measured, of what, where and when. Attentions of the same set-up are added to it."""

import importlib.metadata
import json
import math
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from examples.smollm2.sources import TEXT, WEIGHTS, Source
from flamia_ref import __version__

SCHEMA = 1
PACKAGES = ("torch", "transformers", "jax", "numpy")


def setup(device: str) -> dict[str, Any]:
    """What results depend on besides the documents: the device, the versions, the weights, the source of the text.

    The version of this package is kept with each entry: recipes keep their bits from version to version.
    """
    return {
        "schema": SCHEMA,
        "device": _device(device),
        "versions": {"python": platform.python_version(), **_versions()},
        "weights": _source(WEIGHTS),
        "text": _source(TEXT),
    }


class Results:
    """Sections by name ("perplexity", "gradients"), each with its documents and one entry an attention.

    `file`: where they are kept, None for nowhere; each entry is written when it is added.
    """

    def __init__(self, file: str | None, setup: dict[str, Any]) -> None:
        self._path = None if file is None else Path(file)
        self.data = dict(setup)
        if self._path is not None and self._path.exists():
            self.data = _read(self._path)
            for name, value in setup.items():
                self._same(name, self.data.get(name), value)
        elif self._path is not None and not self._path.absolute().parent.is_dir():
            raise ValueError(f"cannot write {file}: there is no folder {self._path.parent}")

    def section(self, name: str, about: dict[str, Any]) -> dict[str, Any]:
        """The entries of a section, by attention. Raises: ValueError where the file's are of other documents."""
        section = self.data.setdefault(name, {**about, "attentions": {}})
        for key, value in about.items():
            self._same(f"{name}.{key}", section.get(key), value)
        entries: dict[str, Any] = section["attentions"]
        return entries

    def add(self, section: str, name: str, entry: dict[str, Any], command: str) -> None:
        """Put an entry in the place of an older one, and write the file."""
        today = time.strftime("%Y-%m-%d", time.gmtime())
        dated = {"date": today, "flamia-ref": __version__, "command": command}
        self.data[section]["attentions"][name] = dated | _rounded(entry)
        if self._path is not None:
            text = json.dumps(self.data, indent=1, allow_nan=False) + "\n"
            with tempfile.NamedTemporaryFile(
                "w", dir=self._path.absolute().parent, delete=False, encoding="utf-8"
            ) as part:
                part.write(text)
            os.chmod(part.name, 0o644)
            shutil.move(part.name, self._path)

    def _same(self, name: str, had: Any, value: Any) -> None:
        if had != value:
            raise ValueError(
                f"{self._path} has results with another {name}; give another file, or remove that one"
            )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no file of results: {error}; give another file") from error
    if not isinstance(found, dict) or "schema" not in found:
        raise ValueError(f"{path} is no file of results; give another file")
    return found


def _rounded(value: Any) -> Any:
    """Floats to 7 significant digits, None for what is no number, through dicts and lists."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def _source(source: Source) -> dict[str, str]:
    return {
        "from": f"{source.requirement} of PyPI",
        "file": source.file,
        "sha256": source.sha256,
        "license": source.license,
    }


def _device(device: str) -> str:
    if device == "cpu":
        return f"CPU, {platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    import torch

    return str(torch.cuda.get_device_name(0))
