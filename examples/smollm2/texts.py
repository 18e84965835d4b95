"""Documents: the beginnings of files of a source archive, prose and code in turn, each cut at one length.

Which files: those of Django's `docs/` that are prose in reStructuredText (.txt) and of its package that are Python, each
kind in the order of the SHA-256 of the path, so that neighbours have nothing to do with each other; files of fewer
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
    found = []
    with tarfile.open(archive) as files:
        for member in _in_turn(files):
            text = files.extractfile(member).read().decode("utf-8")
            tokens = tokenize(text)
            if len(tokens) >= length:
                path = member.name.partition("/")[2]
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


def _in_turn(files: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    members = [member for member in files.getmembers() if member.isfile()]
    kinds = [sorted(_of_kind(members, *kind), key=_place) for kind in KINDS.values()]
    for row in zip_longest(*kinds):
        yield from (member for member in row if member is not None)


def _of_kind(members: list[tarfile.TarInfo], folder: str, end: str) -> Iterator[tarfile.TarInfo]:
    for member in members:
        path = member.name.partition("/")[2]
        if path.startswith(folder) and path.endswith(end):
            yield member


def _place(member: tarfile.TarInfo) -> str:
    return hashlib.sha256(member.name.encode()).hexdigest()
