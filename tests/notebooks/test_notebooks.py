"""Every notebook runs from the top, prints what its file holds, and keeps nothing of the machine it ran on."""

import functools
import importlib.util
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PNG = b"\x89PNG\r\n\x1a\n"

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

# Those that take a minute run by night; what they use has tests of its own.
LONG = ("01_formats", "03_accumulation", "04_attention_error", "05_leakage", "06_scheduling")


@functools.cache
def module(name: str) -> ModuleType:
    """A program of the folders notebooks and docs, which are no packages."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / name)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def kept(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS] == [
        "01_formats.ipynb",
        "02_quantization_error.ipynb",
        "03_accumulation.ipynb",
        "04_attention_error.ipynb",
        "05_leakage.ipynb",
        "06_scheduling.ipynb",
    ]


# The client of the kernel leaves the closing of its sockets to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.nightly] * (path.stem in LONG))
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_runs_and_prints_what_it_keeps(path: Path) -> None:
    execute = module("notebooks/execute.py")
    again = execute.executed(path, seconds=300)
    assert execute.printed(again) == execute.printed(kept(path))
    names = [name for name, _ in execute.drawn(kept(path))]
    assert [name for name, _ in execute.drawn(again)] == names


@every_notebook
def test_a_notebook_keeps_its_outputs_and_nothing_of_a_machine(path: Path) -> None:
    notebook = kept(path)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.language_info == {"name": "python"}
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert set(cell.metadata) <= {"picture"}, "a time, or a state of an editor"
        assert not any(output.get("name") == "stderr" for output in cell.outputs)
    assert all(png.startswith(PNG) for _, png in module("notebooks/execute.py").drawn(notebook))


def test_pictures_in_documents_are_those_of_the_notebooks() -> None:
    execute = module("notebooks/execute.py")
    drawn = dict(
        picture for path in NOTEBOOKS for picture in execute.drawn(kept(path)) if picture[0]
    )
    assert set(drawn) == {
        "accumulation-error.png",
        "accumulation-bias.png",
        "error-attribution.png",
        "error-length.png",
        "leakage-proof.png",
        "leakage-safeguards.png",
    }
    for name, png in drawn.items():
        assert (execute.PICTURES / name).read_bytes() == png


def test_a_cell_that_fails_is_an_error(tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell("assert 1 + 1 == 3")]
    path = tmp_path / "wrong.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    with pytest.raises(Exception, match="AssertionError"):
        module("notebooks/execute.py").executed(path)


def test_the_page_of_accumulation_has_the_tables_of_today() -> None:
    # Each instruction, what it rests on and what the H200 confirmed; and what the notebook printed.
    accumulation = module("docs/accumulation.py")
    text = accumulation.PAGE.read_text(encoding="utf-8")
    assert accumulation.page(text) == text
