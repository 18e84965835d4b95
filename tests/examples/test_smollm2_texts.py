"""Which documents are taken from a source archive, and what a file of results lets in."""

import io
import json
import tarfile

import pytest

from examples.smollm2 import results, texts

# SHA-256 of the paths, by sha256sum: docs/b/c.txt 31bc, docs/d.txt 6363, docs/a.txt 6b7b; django/m.py 9fca,
# django/n.py c862. docs/d.txt is too short.
FILES = (
    "docs/a.txt",
    "docs/b/c.txt",
    "docs/d.txt",
    "docs/o.rst",
    "django/m.py",
    "django/n.py",
    "t.py",
)
ORDER = ["docs/b/c.txt", "django/m.py", "django/n.py", "docs/a.txt"]


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "made-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as files:
        for name in sorted(FILES):
            text = "short" if name == "docs/d.txt" else f"{name} one three seventy"
            member = tarfile.TarInfo(f"made-1.0/{name}")
            member.size = len(text)
            files.addfile(member, io.BytesIO(text.encode()))
    return path


def words(text):
    """A token a word: the number of its letters."""
    return [len(word) for word in text.split()]


def test_kinds_come_in_turn_in_the_order_of_their_digests(archive):
    found = texts.documents(archive, words, count=4, length=3)
    assert [one.path for one in found] == ORDER
    assert [one.tokens for one in found] == [(len(path), 3, 5) for path in ORDER]


def test_too_few_documents_are_refused(archive):
    with pytest.raises(ValueError, match=r"has 4 documents of 3 tokens or more, not 5; ask for"):
        texts.documents(archive, words, count=5, length=3)


def test_a_description_tells_other_tokens_apart(archive):
    found = texts.documents(archive, words, count=2, length=3)
    said = texts.description(found)
    assert (said["documents"], said["length"], said["tokens"]) == (2, 3, 6)
    # printf 'docs/b/c.txt\n12 3 5\ndjango/m.py\n11 3 5\n' | sha256sum
    assert said["sha256_of_tokens"].startswith("cf90bb5c8d2a22fe")
    longer = texts.documents(archive, words, count=2, length=4)
    assert texts.description(longer)["sha256_of_tokens"] != said["sha256_of_tokens"]


SETUP = {"schema": 1, "device": "CPU", "versions": {"torch": "2"}}
ABOUT = {"documents": {"length": 512}}


def kept(file, **others):
    """A file of results with one entry."""
    made = results.Results(str(file), SETUP | others)
    made.section("perplexity", ABOUT)
    made.add("perplexity", "float32", {"nll": 1 / 3, "bad": float("nan")}, "command")
    return made


def test_a_file_of_results_grows(tmp_path):
    file = tmp_path / "results.json"
    kept(file)
    again = results.Results(str(file), SETUP)
    entries = again.section("perplexity", ABOUT)
    assert entries["float32"]["nll"] == 0.3333333
    assert entries["float32"]["bad"] is None
    again.add("perplexity", "bf16-fa4", {"nll": 2.0}, "command")
    data = json.loads(file.read_text(encoding="utf-8"))
    assert list(data["perplexity"]["attentions"]) == ["float32", "bf16-fa4"]
    assert data["perplexity"]["attentions"]["bf16-fa4"]["command"] == "command"
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_of_another_setup_is_refused(tmp_path):
    file = tmp_path / "results.json"
    kept(file)
    with pytest.raises(ValueError, match="has results with another device; give another file"):
        results.Results(str(file), SETUP | {"device": "NVIDIA H200"})
    same = results.Results(str(file), SETUP)
    with pytest.raises(ValueError, match=r"another perplexity\.documents"):
        same.section("perplexity", {"documents": {"length": 1024}})


@pytest.mark.parametrize("text", ["no json", "[]", "{}"])
def test_other_files_are_left_alone(tmp_path, text):
    file = tmp_path / "results.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="is no file of results"):
        results.Results(str(file), SETUP)
    assert file.read_text(encoding="utf-8") == text


def test_a_folder_that_is_not_there_is_said_before_work(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        results.Results(str(tmp_path / "none" / "results.json"), SETUP)
