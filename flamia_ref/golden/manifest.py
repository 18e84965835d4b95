"""The manifest of a pack: what is in it, in full, with the digest of every byte.

It is canonical JSON, so that equal packs are equal files, and it holds no time, host, path or
version of a library. The digest of the manifest covers all the rest of it, and so, through the
digests that it lists, the pack.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from flamia_ref._errors import Registry, shown, unknown_name
from flamia_ref.golden.canonical import Reader, parse, render, sha256
from flamia_ref.golden.case_reading import read_case
from flamia_ref.golden.cases import PLAIN_NAME, CaseSpec
from flamia_ref.golden.dataflow import GRADIENTS, INPUTS, OUTPUTS
from flamia_ref.golden.recipes import NUMERICS_VERSION, RecipeEntry
from flamia_ref.golden.stage import Place

SCHEMA = "flamia-ref golden pack"
SCHEMA_VERSION = 3  # golden.migration says what each one was
FILE_NAME = "manifest.json"
MAX_BYTES = 64 << 20

NAN_POLICY = "NaN equals NaN, whatever its bits; written as 0x7fffffff (F32) and 0x7fff (BF16)"

# Beside its tensors a case file has a header: a line for each of them, and 8 bytes.
_HEADER_BYTES_A_TENSOR = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """A tensor of a case file: how it is stored, what it means, and the SHA-256 of its bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    view: str
    layout: str
    sha256: str

    @classmethod
    def of(cls, place: Place, data: bytes) -> "TensorEntry":
        """Return the entry of a tensor at a place, from its bytes."""
        return cls(
            name=place.name,
            shape=place.shape,
            dtype=place.stage.view.storage,
            view=str(place.stage.view),
            layout=place.stage.layout,
            sha256=sha256(data),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseEntry:
    """A case of a pack: its data, its recipe, its file, and its tensors in dataflow order."""

    name: str
    recipe: str
    spec: CaseSpec
    file: str
    size: int
    sha256: str
    tensors: Mapping[str, TensorEntry] = field(hash=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a pack holds. `digest` identifies it: equal digests, equal packs."""

    suite: str
    recipes: Mapping[str, RecipeEntry] = field(hash=False)
    cases: tuple[CaseEntry, ...]
    numerics_version: int = NUMERICS_VERSION

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical manifest without its digest, in hexadecimal."""
        return _digest(_document(self))

    @property
    def size(self) -> int:
        """Bytes of the whole pack."""
        return sum(case.size for case in self.cases) + len(self.to_json())

    def to_json(self) -> str:
        """Return the canonical text: what the file holds."""
        document = _document(self)
        return render(document | {"digest": _digest(document)})

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read the canonical text.

        Raises ValueError where it is no manifest, has another schema version, was changed since it
        was written, or describes what no pack can hold.
        """
        document = parse(text, source=FILE_NAME)
        if document.get("schema") != SCHEMA:
            raise ValueError(f"{FILE_NAME} is not the manifest of a {SCHEMA}")
        if document.get("schema_version") != SCHEMA_VERSION:
            version = shown(document.get("schema_version"))
            raise ValueError(
                f"{FILE_NAME} has schema version {version}, this version reads {SCHEMA_VERSION}; "
                "try `flamia-ref golden migrate`, make the pack again, or use the version that wrote it"
            )
        digest = document.pop("digest", None)
        if digest != _digest(document):
            raise ValueError(f"{FILE_NAME} was changed since it was written: its digest differs")
        return cls.from_document(document)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "Manifest":
        """Read the data of a manifest of this schema version, without its digest.

        Raises ValueError where it describes what no pack can hold.
        """
        return _manifest(Reader(data=document, path=FILE_NAME))


def case_name(spec: str, recipe: str) -> str:
    """Return the name of a case in a pack: that of its data, a dot, that of its recipe."""
    return f"{spec}.{recipe}"


def _digest(document: Mapping[str, Any]) -> str:
    return sha256(render(document).encode("ascii"))


def _document(manifest: Manifest) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "numerics_version": manifest.numerics_version,
        "nan": NAN_POLICY,
        "suite": manifest.suite,
        "recipes": {
            name: {"recipe": entry.recipe, "evidence": entry.evidence}
            for name, entry in manifest.recipes.items()
        },
        "cases": [
            {
                "name": case.name,
                "recipe": case.recipe,
                "spec": asdict(case.spec),
                "file": case.file,
                "size": case.size,
                "sha256": case.sha256,
                "tensors": {
                    name: {key: value for key, value in asdict(entry).items() if key != "name"}
                    for name, entry in case.tensors.items()
                },
            }
            for case in manifest.cases
        ],
    }


def _manifest(reader: Reader) -> Manifest:
    reader.fields(
        "schema", "schema_version", "numerics_version", "nan", "suite", "recipes", "cases"
    )
    if reader["nan"].text() != NAN_POLICY:
        raise ValueError(f"{FILE_NAME} states a NaN policy that this version does not know")
    recipes: dict[str, RecipeEntry] = {}
    for name, entry in reader["recipes"].items():
        entry.fields("recipe", "evidence")
        if not PLAIN_NAME.match(name):
            raise ValueError(f"{FILE_NAME}: recipe name {shown(name)} is not plain")
        found = RecipeEntry.read(entry["recipe"])
        label = entry["evidence"].text()
        if (found.recipe["name"], str(found.evidence)) != (name, label):
            raise ValueError(
                f"{FILE_NAME} lists {name}, evidence {shown(label)}; its data are those of "
                f"{found.recipe['name']}, evidence {found.evidence}"
            )
        recipes[name] = found
    cases = tuple(_case(entry, recipes) for entry in reader["cases"].entries())
    names = [case.name for case in cases]
    if len(set(names)) != len(names):
        raise ValueError(f"{FILE_NAME} lists a case twice")
    if not cases:
        raise ValueError(f"{FILE_NAME} lists no case")
    suite = reader["suite"].text()
    if not PLAIN_NAME.match(suite):
        raise ValueError(f"{FILE_NAME}: suite name {shown(suite)} is not plain")
    return Manifest(
        suite=suite,
        recipes=Registry("recipe", recipes.items()),
        cases=cases,
        numerics_version=reader["numerics_version"].integer(),
    )


def _case(reader: Reader, recipes: Mapping[str, RecipeEntry]) -> CaseEntry:
    reader.fields("name", "recipe", "spec", "file", "size", "sha256", "tensors")
    spec = read_case(reader["spec"])
    recipe = reader["recipe"].text()
    if recipe not in recipes:
        raise ValueError(f"{reader.path} has recipe {shown(recipe)}, which is not in the manifest")
    name = case_name(spec.name, recipe)
    if reader["name"].text() != name or reader["file"].text() != f"{name}.safetensors":
        # The only file name a case can have, so no path can lead out of the pack.
        raise ValueError(f"{reader.path}: a case of this data is {name} in {name}.safetensors")
    known = recipes[recipe].dataflow.places(spec)
    tensors = _tensors(reader["tensors"], known)
    payload = sum(place.nbytes for key, place in known.items() if key in tensors)
    size = reader["size"].integer()
    if not payload < size <= payload + 8 + _HEADER_BYTES_A_TENSOR * len(tensors):
        raise ValueError(f"{reader.path}: {size} bytes do not fit tensors of {payload} bytes")
    return CaseEntry(
        name=name,
        recipe=recipe,
        spec=spec,
        file=f"{name}.safetensors",
        size=size,
        sha256=reader["sha256"].digest(),
        tensors=tensors,
    )


def _tensors(reader: Reader, known: Mapping[str, Place]) -> Mapping[str, TensorEntry]:
    listed = dict(reader.items())
    for name in listed:
        if name not in known:
            raise unknown_name(f"tensor in {reader.path}", name, known)
    for name in (*INPUTS, *OUTPUTS, *GRADIENTS):
        if name not in listed and (name in known or name not in GRADIENTS):
            raise ValueError(f"{reader.path} lists no {name}; every case has inputs and outputs")
    for name, place in known.items():
        if place.stage.needs and name not in listed:
            raise ValueError(f"{reader.path} lists no {name}; the case has {place.stage.needs}")
    entries = {}
    for name, place in known.items():
        if name not in listed:
            continue
        entry = listed[name]
        entry.fields("shape", "dtype", "view", "layout", "sha256")
        found = TensorEntry(
            name=name,
            shape=tuple(size.integer() for size in entry["shape"].entries()),
            dtype=entry["dtype"].text(),
            view=entry["view"].text(),
            layout=entry["layout"].text(),
            sha256=entry["sha256"].digest(),
        )
        wanted = TensorEntry.of(place, b"")
        for what in ("shape", "dtype", "view", "layout"):
            if getattr(found, what) != getattr(wanted, what):
                raise ValueError(
                    f"{entry.path}: {what} is {shown(getattr(found, what))}; "
                    f"in this case it is {shown(getattr(wanted, what))}"
                )
        entries[name] = found
    return Registry("tensor", entries.items())
