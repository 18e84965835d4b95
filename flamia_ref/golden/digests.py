"""The table of digests: what the exhaustive suite must give, recipe by recipe, without the packs.

A digest is the first 32 hexadecimal digits of the SHA-256 of the lines "NAME SHA-256" of all tensors
of a case, in dataflow order: it depends on their bytes, and on nothing of the file around them.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources

from flamia_ref._errors import shown
from flamia_ref.golden.canonical import sha256
from flamia_ref.golden.manifest import CaseEntry
from flamia_ref.golden.recipes import NUMERICS_VERSION

FILE_NAME = "exhaustive.json"
_DIGITS = 32


def digest_of(tensors: Mapping[str, str]) -> str:
    """Return the digest of a case from the SHA-256 of its tensors by name, in dataflow order."""
    lines = "".join(f"{name} {digest}\n" for name, digest in tensors.items())
    return sha256(lines.encode("ascii"))[:_DIGITS]


def known(recipe: str) -> Mapping[str, str]:
    """Return the digests of a recipe's cases by the name of their data; none for an unknown recipe."""
    return _table().get(recipe, {})


def verify(case: CaseEntry) -> None:
    """Hold a case to the table, where the table has it.

    Raises ValueError where the bits are others than those that every machine must give.
    """
    wanted = known(case.recipe).get(case.spec.name)
    found = digest_of({name: entry.sha256 for name, entry in case.tensors.items()})
    if wanted not in (None, found):
        raise ValueError(
            f"case {case.name} has digest {found}; with numerics version {NUMERICS_VERSION} every "
            f"machine gives {shown(wanted)}: this one computes other bits, report it"
        )


@cache
def _table() -> Mapping[str, Mapping[str, str]]:
    text = (resources.files("flamia_ref.golden") / "data" / FILE_NAME).read_text("ascii")
    document = json.loads(text)
    if document["numerics_version"] != NUMERICS_VERSION:
        return {}
    table: Mapping[str, Mapping[str, str]] = document["digests"]
    return table
