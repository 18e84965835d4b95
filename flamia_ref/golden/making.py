"""Making packs: the simulator's results on a suite, written whole or not at all."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from flamia_ref import sweep
from flamia_ref._errors import Registry, shown
from flamia_ref.golden import digests
from flamia_ref.golden.canonical import render, sha256
from flamia_ref.golden.cases import PLAIN_NAME, CaseSpec
from flamia_ref.golden.dataflow import dataflow
from flamia_ref.golden.files import little_endian, tensors_from_bytes, tensors_to_bytes
from flamia_ref.golden.manifest import (
    FILE_NAME,
    SCHEMA_VERSION,
    CaseEntry,
    Manifest,
    TensorEntry,
    case_name,
)
from flamia_ref.golden.recipes import NUMERICS_VERSION, RecipeEntry
from flamia_ref.golden.replacing import Unfinished, replacing, reported
from flamia_ref.golden.shards import SHARD_FILE_NAME, ShardFile
from flamia_ref.golden.simulation import simulate
from flamia_ref.golden.source_code import code_digest
from flamia_ref.golden.suites import SUITES

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe

DEFAULT_RECIPES = ("flamia-mxfp8-folded",)

# Multiply-accumulates of S from which "auto" starts processes: half a minute of one core, about.
_MUCH = 1 << 26

Progress = Callable[[int, int, str], None]  # cases done, cases in all, the name of the next one


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A case to be made: its data and its recipe, as JSON. Plain data, for any worker."""

    spec: CaseSpec
    recipe: str

    @property
    def name(self) -> str:
        """The name of the case."""
        return case_name(self.spec.name, _recipe(self.recipe).name)

    @property
    def digest(self) -> str:
        """The digest of all that the case's bytes come from, the code included."""
        made_from = {
            "spec": asdict(self.spec),
            "recipe": json.loads(self.recipe),
            "numerics_version": NUMERICS_VERSION,
            "schema_version": SCHEMA_VERSION,
            "code": code_digest(),
        }
        return sha256(render(made_from).encode("ascii"))

    def entry(self, data: bytes) -> CaseEntry:
        """Return the entry of the manifest for the case's file, given its bytes."""
        recipe = _recipe(self.recipe)
        name = case_name(self.spec.name, recipe.name)
        stored = tensors_from_bytes(data, source=name)
        entries = [
            (key, TensorEntry.of(place, little_endian(stored[key].array)))
            for key, place in dataflow(recipe).places(self.spec).items()
        ]
        entry = CaseEntry(
            name=name,
            recipe=recipe.name,
            spec=self.spec,
            file=f"{name}.safetensors",
            size=len(data),
            sha256=sha256(data),
            tensors=Registry("tensor", entries),
        )
        digests.verify(entry)
        return entry


@cache
def _recipe(text: str) -> "Recipe":
    from flamia_ref.attention import Recipe

    return Recipe.from_json(text)


def _jobs(cases: Iterable[CaseSpec], recipes: "Iterable[Recipe]") -> dict[str, Job]:
    """Return every case of a pack, by name and in order: the static list that shards cut."""
    cases = tuple(cases)
    jobs: dict[str, Job] = {}
    for recipe in recipes:
        text = recipe.to_json()
        for spec in cases:
            job = Job(spec=spec, recipe=text)
            if job.name in jobs:
                raise ValueError(f"two cases are named {job.name}; rename a recipe")
            jobs[job.name] = job
    return jobs


def _simulated(job: Job) -> tuple[str, bytes]:
    """Run a case, in whatever process: the digest of the code, and the case's file."""
    return code_digest(), tensors_to_bytes(simulate(job.spec, _recipe(job.recipe)))


def make(
    folder: str | os.PathLike[str],
    recipes: "Sequence[str | Recipe]" = DEFAULT_RECIPES,
    suite: str = "smoke",
    *,
    force: bool = False,
    raw: bool = False,
    shard: str | sweep.Shard | None = None,
    executor: sweep.Executor = None,
    progress: Progress | None = None,
) -> Manifest:
    """Run the simulator, in numpy, on every case of a suite with every recipe, and write a pack.

    The folder appears when it is complete. A run that is stopped, by whatever, leaves the cases that
    are done in the hidden folder ``.NAME.part`` beside it, and the same call resumes there: what is
    done and whole, by its digest, is not done again. With `force` an existing pack, or an empty
    folder, is replaced, and kept until then.

    `raw` adds every tensor as a plain file. `shard`, ``"i/n"``, makes the i-th of n parts, a folder
    that is no pack until `merge` joins them. `executor` says who runs the cases: None, this process; a
    number of processes, or "processes", one a core; "auto", these where it takes long;
    ``"dask:ADDRESS"``; or an object with the interface of `concurrent.futures.Executor`. The bytes are
    the same whichever way.

    Raises ValueError for an unknown recipe or suite, a folder that exists (without `force`, or that
    is not a pack), where another process writes it, where the disk refuses, and for a case whose
    worker dies time after time.
    """
    cases = SUITES[suite]
    chosen = _chosen(recipes)
    part = None if shard is None else sweep.Shard.parse(shard)
    if raw and part is not None:
        raise ValueError("a shard has no raw files; ask for them where the shards are merged")
    work = _jobs(cases, chosen.values())
    jobs = work if part is None else {name: work[name] for name in part.of(tuple(work))}
    listed = [(name, RecipeEntry.of(given)) for name, given in chosen.items()]
    target = Path(os.path.abspath(folder))

    def last(manifest: Manifest) -> dict[str, bytes]:
        if part is None:
            return {FILE_NAME: manifest.to_json().encode("ascii")}
        file = ShardFile(shard=part, work=tuple(work), code=code_digest(), manifest=manifest)
        return {SHARD_FILE_NAME: file.to_json().encode("ascii")}

    what = f"suite {suite}, {', '.join(chosen)}" + ("" if part is None else f", shard {part}")
    with reported(target), replacing(target, {"what": what}, force=force) as unfinished:
        entries = _entries(unfinished, jobs, executor, progress)
        manifest = Manifest(
            suite=suite,
            recipes=Registry("recipe", listed),
            cases=tuple(entries[name] for name in jobs),
        )
        unfinished.strip(jobs)
        unfinished.finish(last(manifest))
        if raw:
            from flamia_ref.golden.raw import write_raw

            write_raw(unfinished.pack, manifest)
    return manifest


def _entries(
    unfinished: Unfinished,
    jobs: Mapping[str, Job],
    executor: sweep.Executor,
    progress: Progress | None,
) -> dict[str, CaseEntry]:
    """Make every case that is not there yet, and return the entries of all."""
    digests = {name: job.digest for name, job in jobs.items()}
    entries: dict[str, CaseEntry] = {}
    for name, job in jobs.items():
        data = unfinished.kept(name, digests[name])
        if data is not None:
            entries[name] = job.entry(data)
    kept = len(entries)
    left = [name for name in jobs if name not in entries]
    cost = {name: jobs[name].spec.pairs * jobs[name].spec.head_dim for name in left}
    if executor == "auto":
        executor = "processes" if sum(cost.values()) > _MUCH else None
    if executor is not None:
        # Long ones first, so that none begins when all others are done.
        left.sort(key=lambda name: -cost[name])

    def report(done: int, _: int, name: str) -> None:
        if progress is not None:
            progress(kept + done, len(jobs), name)

    made = sweep.run(
        _simulated, {name: jobs[name] for name in left}, executor=executor, progress=report
    )
    with closing(made):
        for name, (code, data) in made:
            if code != code_digest():
                raise ValueError(
                    f"a worker made {name} with other code than is here; install one version of "
                    "flamia-ref everywhere, and start the workers again"
                )
            unfinished.keep(name, digests[name], data)
            entries[name] = jobs[name].entry(data)
    return entries


def _chosen(recipes: "Sequence[str | Recipe]") -> "dict[str, Recipe]":
    from flamia_ref.attention import RECIPES, Recipe

    if isinstance(recipes, str):
        raise TypeError(f"recipes is the string {shown(recipes)}; give a sequence of recipes")
    chosen: dict[str, Recipe] = {}
    for given in recipes:
        recipe = RECIPES[given] if isinstance(given, str) else given
        if not isinstance(recipe, Recipe):
            raise TypeError(f"recipe {shown(recipe)} is neither a name nor a Recipe")
        if not PLAIN_NAME.match(recipe.name):
            raise ValueError(
                f"recipe name {shown(recipe.name)} is not plain; use at most 80 of a-z 0-9 . _ -"
            )
        if recipe.name in chosen:
            raise ValueError(f"recipe {recipe.name} is given twice; name each one differently")
        if recipe.name in RECIPES and recipe != RECIPES[recipe.name]:
            raise ValueError(
                f"recipe {recipe.name} differs from the registered one of that name; rename it"
            )
        dataflow(recipe)  # raises for one that packs cannot hold
        chosen[recipe.name] = recipe
    if not chosen:
        raise ValueError("no recipe is given; name at least one")
    return chosen
