"""Documents: the beginnings of files of a source archive, prose and code in turn, each cut at one length.

Which files: those of Django's `docs/` that are prose in reStructuredText (.txt) and of its package that are Python,
each kind in the order of the SHA-256 of the path, so that neighbours have nothing to do with each other; files of fewer
tokens than the length are passed over. All documents have one length: programs are compiled once.
"""

import hashlib
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

KINDS = {"prose": ("docs/", ".txt"), "code": ("django/", ".py")}
Tokenize = Callable[[str], Sequence[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """The first tokens of a file. `path` is that inside the archive's own folder."""

    path: str
    tokens: tuple[int, ...]


def documents(archive: Path, tokenize: Tokenize, *, count: int, length: int) -> list[Document]:
    """The first `count` documents of `length` tokens.

    Raises: ValueError where the archive has fewer.
    """
    found: list[Document] = []
    for path, text in _in_turn(_files(archive)):
        tokens = tokenize(text.decode("utf-8"))
        if len(tokens) >= length:
            found.append(Document(path=path, tokens=tuple(tokens[:length])))
        if len(found) == count:
            return found
    raise ValueError(
        f"{archive.name} has {len(found)} documents of {length} tokens or more, not {count};"
        " ask for fewer --tokens or a shorter --length"
    )


def description(found: Sequence[Document]) -> dict[str, Any]:
    """What a result says of its text: enough to tell whether another run had the same tokens."""
    digest = hashlib.sha256()
    for document in found:
        digest.update(f"{document.path}\n{' '.join(map(str, document.tokens))}\n".encode())
    return {
        "documents": len(found),
        "length": len(found[0].tokens),
        "tokens": sum(len(document.tokens) for document in found),
        "sha256_of_tokens": digest.hexdigest(),
        "paths": [document.path for document in found],
    }


def _files(archive: Path) -> dict[str, bytes]:
    """The files of all kinds by their paths, read in the archive's own order: it cannot be read in another quickly."""
    found = {}
    with tarfile.open(archive) as files:
        for member in files:
            path = member.name.partition("/")[2]
            if member.isfile() and any(_is(kind, path) for kind in KINDS):
                found[path] = files.extractfile(member).read()
    return found


def _in_turn(files: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    kinds = [sorted((path for path in files if _is(kind, path)), key=_place) for kind in KINDS]
    for row in zip_longest(*kinds):
        yield from ((path, files[path]) for path in row if path is not None)


def _is(kind: str, path: str) -> bool:
    folder, end = KINDS[kind]
    return path.startswith(folder) and path.endswith(end)


def _place(path: str) -> str:
    return hashlib.sha256(path.encode()).hexdigest()
