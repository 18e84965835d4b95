"""Merging shards: the pack that one run would have made."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from flamia_ref.golden.canonical import sha256
from flamia_ref.golden.manifest import FILE_NAME, CaseEntry, Manifest
from flamia_ref.golden.replacing import replacing, reported
from flamia_ref.golden.shards import ShardFile, case_data, read_shard

Progress = Callable[[int, int, str], None]  # cases done, cases in all, the name of the next one


def merge(
    folder: str | os.PathLike[str],
    shards: Sequence[str | os.PathLike[str]],
    *,
    force: bool = False,
    raw: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Write the pack that is made of shards: the same bytes as those of a run in one piece.

    `shards` are the folders of all shards of one pack, in any order; they stay as they are. Every
    file is verified. The folder appears when it is complete, as that of `make` does, with the same
    `force` and `raw`.

    Raises ValueError where shards are missing, come twice, are not of one pack and one code, or were
    changed, and as `make` does for the folder.
    """
    if isinstance(shards, str | os.PathLike):
        raise TypeError(f"shards is the path {os.fspath(shards)!r}; give a sequence of folders")
    target = Path(os.path.abspath(folder))
    found = [(Path(os.path.abspath(one)), read_shard(Path(os.path.abspath(one)))) for one in shards]
    _require_one_pack(found)
    (_, first) = found[0]
    held = {case.name: (where, case) for where, one in found for case in one.manifest.cases}
    manifest = Manifest(
        suite=first.manifest.suite,
        # A shard without cases lists no recipes.
        recipes=next(one.manifest.recipes for _, one in found if one.manifest.cases),
        cases=tuple(held[name][1] for name in first.work),
        numerics_version=first.manifest.numerics_version,
    )
    what = f"a merge of {len(found)} shards, suite {manifest.suite}"
    work = {"what": what, "digest": manifest.digest}
    with reported(target), replacing(target, work, force=force) as unfinished:
        for done, name in enumerate(first.work):
            where, entry = held[name]
            if progress is not None:
                progress(done, len(first.work), name)
            if unfinished.kept(name, _job(entry)) is None:
                unfinished.keep(name, _job(entry), case_data(where, entry))
        unfinished.strip(held)
        unfinished.finish({FILE_NAME: manifest.to_json().encode("ascii")})
        if raw:
            from flamia_ref.golden.raw import write_raw

            write_raw(unfinished.pack, manifest)
    return manifest


def _job(entry: CaseEntry) -> str:
    return sha256(f"merged {entry.sha256}".encode("ascii"))


def _require_one_pack(found: Sequence[tuple[Path, ShardFile]]) -> None:
    if not found:
        raise ValueError("no shard is given; name the folders of all shards of a pack")
    where, first = found[0]
    count = first.shard.count
    seen: dict[int, Path] = {}
    for path, one in found:
        if (one.shard.count, one.work, one.manifest.suite) != (
            count,
            first.work,
            first.manifest.suite,
        ):
            raise ValueError(f"{path} and {where} are shards of two packs; make them alike")
        if one.code != first.code:
            raise ValueError(
                f"{path} and {where} were made by different code, whose bits may differ; make one "
                "of them again"
            )
        if one.shard.index in seen:
            raise ValueError(f"{path} and {seen[one.shard.index]} are both shard {one.shard}")
        seen[one.shard.index] = path
    missing = [f"{index}/{count}" for index in range(1, count + 1) if index not in seen]
    if missing:
        listed = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        raise ValueError(f"shards are missing: {listed}; give the folders of all {count}")
    full = [(path, one) for path, one in found if one.manifest.cases]
    for path, one in found:
        if one.manifest.numerics_version != first.manifest.numerics_version:
            raise ValueError(f"{path} and {where} have different numerics versions")
    for path, one in full:
        if one.manifest.recipes != full[0][1].manifest.recipes:
            raise ValueError(f"{path} and {full[0][0]} have other recipes of one name")
    if not full:
        raise ValueError("the shards hold no case")
