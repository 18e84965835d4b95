"""A shard: the cases of a part of a pack in a folder of their own, until the shards are merged."""

from dataclasses import dataclass
from pathlib import Path

from flamia_ref._errors import shown
from flamia_ref.golden.canonical import Reader, parse, render, sha256
from flamia_ref.golden.files import read_plain
from flamia_ref.golden.manifest import MAX_BYTES, CaseEntry, Manifest
from flamia_ref.sweep import Shard

SHARD_SCHEMA = "flamia-ref golden shard"
SHARD_SCHEMA_VERSION = 1
SHARD_FILE_NAME = "shard.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    """What a shard is, as its ``shard.json`` says.

    Attributes:
        shard: which one of how many.
        work: every case of the whole pack, by name and in order.
        code: the digest of the code that made it; shards of different code are not merged.
        manifest: the manifest of the cases that are here.
    """

    shard: Shard
    work: tuple[str, ...]
    code: str
    manifest: Manifest

    def to_json(self) -> str:
        """Return the canonical text: what the file holds."""
        document = {
            "schema": SHARD_SCHEMA,
            "schema_version": SHARD_SCHEMA_VERSION,
            "index": self.shard.index,
            "count": self.shard.count,
            "work": list(self.work),
            "code": self.code,
            "manifest": self.manifest.to_json() if self.manifest.cases else "",
            "suite": self.manifest.suite,
        }
        return render(document | {"digest": sha256(render(document).encode("ascii"))})

    @classmethod
    def from_json(cls, text: str) -> "ShardFile":
        """Read the canonical text.

        Raises ValueError where it is no shard of this version, or was changed since it was written.
        """
        document = parse(text, source=SHARD_FILE_NAME)
        if document.get("schema") != SHARD_SCHEMA:
            raise ValueError(f"{SHARD_FILE_NAME} is not that of a {SHARD_SCHEMA}")
        if document.get("schema_version") != SHARD_SCHEMA_VERSION:
            raise ValueError(
                f"{SHARD_FILE_NAME} has schema version {shown(document.get('schema_version'))}, "
                f"this version reads {SHARD_SCHEMA_VERSION}; make the shard again"
            )
        digest = document.pop("digest", None)
        if digest != sha256(render(document).encode("ascii")):
            raise ValueError(f"{SHARD_FILE_NAME} was changed since it was written; make it again")
        reader = Reader(data=document, path=SHARD_FILE_NAME)
        reader.fields(
            "schema", "schema_version", "index", "count", "work", "code", "manifest", "suite"
        )
        inner = reader["manifest"].text()
        suite = reader["suite"].text()
        manifest = (
            Manifest.from_json(inner) if inner else Manifest(suite=suite, recipes={}, cases=())
        )
        found = cls(
            shard=Shard(index=reader["index"].integer(), count=reader["count"].integer()),
            work=tuple(name.text() for name in reader["work"].entries()),
            code=reader["code"].digest(),
            manifest=manifest,
        )
        if len(set(found.work)) != len(found.work):
            raise ValueError(f"{SHARD_FILE_NAME} lists a case twice")
        if found.shard.of(found.work) != tuple(case.name for case in manifest.cases):
            raise ValueError(f"{SHARD_FILE_NAME} lists cases that are not those of {found.shard}")
        return found


def read_shard(folder: Path) -> ShardFile:
    """Read what a folder says of the shard in it.

    Raises ValueError where it holds none, or a damaged one.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; make it with `golden make --shard i/n`")
    path = folder / SHARD_FILE_NAME
    if not path.is_file():
        raise ValueError(f"{folder} is no shard: it has no {SHARD_FILE_NAME}")
    data = read_plain(path, limit=2 * MAX_BYTES)
    try:
        return ShardFile.from_json(data.decode("ascii"))
    except ValueError as error:  # UnicodeDecodeError is one too
        raise ValueError(f"{folder}: {error}") from error


def case_data(folder: Path, entry: CaseEntry) -> bytes:
    """Return the file of a case of a shard.

    Raises ValueError where it is missing or not what the shard says.
    """
    path = folder / entry.file
    data = read_plain(path, limit=entry.size)
    if sha256(data) != entry.sha256:
        raise ValueError(f"{path} was changed since it was written; make the shard again")
    return data
