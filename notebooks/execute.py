"""Run the notebooks, keep what they printed and drew in them, and write the pictures that documents take from them.

Run from the root of the checkout: python notebooks/execute.py [FILE ...]

A code cell whose metadata has `"picture": "NAME.png"` draws docs/pictures/NAME.png. Times and versions, which differ
from one run to the next, are not kept.
"""

import base64
import os
import sys
import tempfile
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(Path(__file__).parent.glob("*.ipynb"))
PICTURES = ROOT / "docs" / "pictures"


def executed(path: Path, *, seconds: int = 600) -> NotebookNode:
    """The notebook in `path` as a fresh kernel runs it. A cell that fails raises its error."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        # This checkout, and nobody's own IPython settings.
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": folder}
        # Sockets in a folder of our own, where nobody else can listen or send.
        manager = AsyncKernelManager(
            kernel_name="python3",
            transport="ipc",
            ip=f"{folder}/kernel",
            connection_file=f"{folder}/kernel.json",
        )
        client = NotebookClient(
            notebook,
            km=manager,
            timeout=seconds,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(path.parent)}},
        )
        client.execute(env=environment, cleanup_kc=True)
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    return notebook


def drawn(notebook: NotebookNode) -> list[tuple[str | None, bytes]]:
    """Every picture of a notebook: the name that documents know it by, or None, and its PNG file."""
    return [
        (cell.metadata.get("picture"), base64.b64decode(output.data["image/png"]))
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", ())
    ]


def printed(notebook: NotebookNode) -> list[str]:
    """What each code cell printed."""
    return [
        "".join(output.text for output in cell.outputs if output.output_type == "stream")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def main(paths: list[Path]) -> None:
    """Run each notebook and write it back, with its pictures."""
    for path in paths:
        print(f"running {path.name}")
        notebook = executed(path)
        nbformat.write(notebook, path)
        for name, png in drawn(notebook):
            if name is not None:
                (PICTURES / name).write_bytes(png)


if __name__ == "__main__":
    main([Path(name).resolve() for name in sys.argv[1:]] or NOTEBOOKS)
