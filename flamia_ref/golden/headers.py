"""Where the C++ headers are: ``python -m flamia_ref.golden.headers`` prints the folder for ``-I``."""

from importlib import resources
from pathlib import Path


def include_dir() -> Path:
    """Return the folder to include from: it holds ``flamia_ref/pack.hpp`` and ``flamia_ref/inputs.hpp``.

    Raises ValueError where the package does not lie in a folder, such as in a zip archive.
    """
    folder = resources.files("flamia_ref.golden") / "include"
    if not isinstance(folder, Path) or not folder.is_dir():
        raise ValueError(f"the headers are not in a folder but in {folder}; install the package")
    return folder.absolute()


if __name__ == "__main__":
    print(include_dir())  # noqa: T201  its purpose
