"""Writes the table of digests of the exhaustive suite: `python -m tests.golden.exhaustive RECIPE ...`.

Only where NUMERICS_VERSION was raised, or the suite was changed, may the table change.
"""

import json
import sys
from pathlib import Path

from flamia_ref.attention import RECIPES
from flamia_ref.golden import NUMERICS_VERSION, SUITES
from flamia_ref.golden.canonical import sha256
from flamia_ref.golden.digests import FILE_NAME, digest_of
from flamia_ref.golden.files import little_endian
from flamia_ref.golden.simulation import simulate

TABLE = Path(__file__).parents[2] / "flamia_ref" / "golden" / "data" / FILE_NAME


def computed(case: str, recipe: str) -> str:
    """The digest of a case of the exhaustive suite."""
    spec = next(one for one in SUITES["exhaustive"] if one.name == case)
    tensors = simulate(spec, RECIPES[recipe])
    return digest_of({name: sha256(little_endian(tensor)) for name, tensor in tensors.items()})


def main(recipes: list[str]) -> None:
    """Compute the digests of recipes and put them in the table."""
    for recipe in recipes:
        found = {case.name: computed(case.name, recipe) for case in SUITES["exhaustive"]}
        document = json.loads(TABLE.read_text()) if TABLE.exists() else {"digests": {}}
        if document.get("numerics_version") != NUMERICS_VERSION:
            document["digests"] = {}
        document["numerics_version"] = NUMERICS_VERSION
        document["digests"][recipe] = found
        TABLE.write_text(json.dumps(document, sort_keys=True, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
