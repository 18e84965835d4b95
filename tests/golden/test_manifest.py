"""The fields of a case in a manifest come back as they were, and are untrusted."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flamia_ref import golden
from flamia_ref._errors import Registry
from flamia_ref.golden import SUITES
from flamia_ref.golden.manifest import Manifest
from tests.golden.packs import FIRST, forge

Change = Callable[[dict[str, Any]], None]


def test_the_data_of_cases_comes_back(made: Path) -> None:
    """A manifest of one case, with the data of each case in turn, and the tensors that it then has."""
    pack = golden.load(made)
    entry, recipe = pack[FIRST].entry, pack[FIRST].recipe
    from flamia_ref.golden.manifest import TensorEntry

    for spec in (*SUITES["standard"][6::6], *SUITES["exhaustive"][-3:]):
        places = recipe.dataflow.places(spec)
        name = f"{spec.name}.{entry.recipe}"
        case = replace(
            entry,
            name=name,
            spec=spec,
            file=f"{name}.safetensors",
            size=sum(place.nbytes for place in places.values()) + 9,
            tensors=Registry(
                "tensor", ((key, TensorEntry.of(place, b"")) for key, place in places.items())
            ),
        )
        manifest = Manifest(suite="standard", recipes=pack.manifest.recipes, cases=(case,))
        assert Manifest.from_json(manifest.to_json()).cases[0].spec == spec


def field(**values: object) -> Change:
    return lambda document: document["cases"][0]["spec"].update(values)


def number(value: float) -> dict[str, str]:
    """A float as manifests hold it."""
    import struct

    return {"bits": f"0x{struct.pack('>d', value).hex()}", "repr": repr(value)}


FILL = {
    "tensor": "q",
    "tokens": [0, 1],
    "heads": [0, 1],
    "channels": [0, 1],
    "bits": 0,
    "steps": [0, 0, 0],
}
ROWS = {"tensor": "v", "first": 0, "end": 1}
TWIN = {"case": "other", "changed": ROWS, "equal": []}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: document["cases"][0]["spec"].pop("window"), "has no field 'window'"),
        (field(key_lengths=[1]), "1 key_lengths, 3 lengths"),
        (field(key_lengths=3), "key_lengths is 3; it must be a list"),
        (field(key_lengths=[2, 0, -35]), "must be an integer"),
        (field(key_lengths=[2, 0, 35]), "lists no cu_seqlens_k; the case has key_lengths"),
        (field(alignment="left"), "unknown alignment"),
        (field(alignment=None), "alignment is None; it must be a string"),
        (field(window=[1]), "window has 1 entries; it must have 2"),
        (field(window=[1, 1 << 70]), "must be an integer"),
        (field(window=[1 << 40, None]), "give two sides, each None or 0 to"),
        (field(window=[True, None]), "must be an integer"),
        (field(softcap=5), "softcap is 5; it must be a float"),
        (field(softcap=number(-1.0)), "softcap is -1.0"),
        (field(sinks=[number(0.5)]), "1 sinks for 2 heads"),
        (field(sinks=[number(0.5)] * 2), "lists no sink; the case has sinks"),
        (field(scale_padding=-1), "must be an integer"),
        (field(scale_padding=999), "it must be a byte"),
        (field(fills=[FILL | {"tokens": [0, 1 << 50]}]), "lies outside the case"),
        (field(fills=[FILL | {"steps": [0, 0]}]), "steps has 2 entries; it must have 3"),
        (field(fills=[FILL | {"steps": [0, 0, 1 << 40]}]), "at most 32 bits"),
        (field(fills=[FILL | {"more": 1}]), "field 'more', which is unknown"),
        (field(twin=[]), "twin is \\[\\]; it must be an object"),
        (field(twin=TWIN | {"case": "tiny"}), "is no name of another case"),
        (field(twin=TWIN | {"changed": ROWS | {"end": 1 << 60}}), "no rows of an input"),
        (field(twin=TWIN | {"changed": ROWS | {"end": 0}}), "are no rows"),
        (field(twin=TWIN | {"equal": [ROWS]}), "are no rows of a result"),
    ],
)
def test_forged_fields_are_refused(pack: Path, change: Change, message: str) -> None:
    forge(pack, change)
    with pytest.raises(ValueError, match=message) as caught:
        golden.load(pack)
    assert "\n" not in str(caught.value)
