"""No emitted bit changes unnoticed: digests of a small case of every recipe, and of the exhaustive suite.

Where one of these fails and the new bits are the right ones, raise NUMERICS_VERSION in
flamia_ref/golden/recipes.py and write the digests anew; docs/golden.md says what that means.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from flamia_ref import golden
from flamia_ref.attention import RECIPES
from flamia_ref.golden import NUMERICS_VERSION, SUITES
from flamia_ref.golden.digests import digest_of, known, verify
from flamia_ref.golden.manifest import TensorEntry
from flamia_ref.golden.simulation import simulate
from tests.golden.exhaustive import computed
from tests.golden.packs import FIRST, read_safetensors, spec

# A case with every option: other keys than queries, a window, a cap, a sink, two heads over one.
SMALL = spec(
    name="small",
    lengths=(2, 0, 35),
    key_lengths=(5, 1, 33),
    window=(20, 0),
    softcap=4.0,
    sinks=(0.5, -1.0),
)

# Those of tests/independent that compute these recipes have none of the options. The digests of these, and that of
# attn-qat-nvfp4, were taken of tensors that were compared with theirs.
PLAIN = dict.fromkeys(("cutlass-fp8", "fp8-fa3", "fp8-fa4"), spec(name="plain"))

DIGESTS = {
    "attn-qat-nvfp4": "51133aae3ded578bad767da9e854a871",
    "bf16-fa4": "12c64c31508f0529320f8fdfc2522c5e",
    "cudnn-mxfp8": "7889767f03029720dbe4d58c12e93b93",
    "cudnn-mxfp8-pv-bf16": "f3e221559ee6d2152539e5710e5d3d39",
    "cudnn-mxfp8-reference": "38f58662b62dfff565a78cbdf6a69670",
    "cutlass-fp8": "9588e9d5ce27770a6cbb4ba4a78bc21e",
    "flamia-mxfp8": "0dc900b759e09c23d85a72df543fe937",
    "flamia-mxfp8-folded": "ead2f4a864dfe3ec0b5c86bf43ea2a96",
    "flamia-mxfp8-unguarded": "76f5460a7b36ec8619a47d43abf051a0",
    "flamia-nvfp4-fp8": "fe3c00ec3242e7024896f848390f2986",
    "flamia-nvfp4-fp8-ue4m3": "7e899ea197cfcaa81331d16ea7fd5626",
    "fp8-fa3": "fa898e49756e4c2aed8e850434c97b2a",
    "fp8-fa4": "36d8465ffcb02f4181174d110ed370f6",
    "sage3-nvfp4": "886c7bf3fdf97510892e0564a88150f8",
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bits_of_every_recipe_are_these(recipe: str) -> None:
    assert NUMERICS_VERSION == 1
    tensors = simulate(PLAIN.get(recipe, SMALL), RECIPES[recipe])
    lines = "".join(
        f"{name} {hashlib.sha256(x.tobytes()).hexdigest()}\n" for name, x in tensors.items()
    )
    assert hashlib.sha256(lines.encode()).hexdigest()[:32] == DIGESTS[recipe]


def test_the_digest_of_a_case_is_as_documented(made: Path) -> None:
    entry = golden.load(made)[FIRST].entry
    tensors = read_safetensors(made / entry.file)
    lines = [
        f"{name} {hashlib.sha256(tensors[name].tobytes()).hexdigest()}\n" for name in entry.tensors
    ]
    wanted = hashlib.sha256("".join(lines).encode()).hexdigest()[:32]
    assert digest_of({name: one.sha256 for name, one in entry.tensors.items()}) == wanted


def test_the_table_is_of_this_suite() -> None:
    names = {case.name for case in SUITES["exhaustive"]}
    listed = [recipe for recipe in RECIPES if known(recipe)]
    assert "flamia-mxfp8-folded" in listed
    for recipe in listed:
        assert set(known(recipe)) == names
        assert len(set(known(recipe).values())) == len(names)
    assert not known("no-recipe")


DAILY = ("grid-33-bell-causal", "grid-5x128-top-left-window", "grid-window-1-0-33")


@pytest.mark.parametrize("case", DAILY)
def test_some_cases_have_their_digests(case: str) -> None:
    assert computed(case, "flamia-mxfp8-folded") == known("flamia-mxfp8-folded")[case]


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_seventh_case_has_its_digest(recipe: str) -> None:
    for case in list(known(recipe))[::7]:
        assert computed(case, recipe) == known(recipe)[case], case


def test_other_bits_are_refused(made: Path) -> None:
    entry = golden.load(made)[FIRST].entry
    verify(entry)  # the table has no such case
    name, digest = next(iter(known(entry.recipe).items()))
    case = replace(entry, name=f"{name}.{entry.recipe}", spec=spec(name=name))
    with pytest.raises(ValueError, match=rf"every machine gives '{digest}'") as caught:
        verify(case)
    assert "\n" not in str(caught.value)


def test_the_right_bits_pass() -> None:
    name = DAILY[2]
    case = next(case for case in SUITES["exhaustive"] if case.name == name)
    from flamia_ref.golden.dataflow import dataflow
    from flamia_ref.golden.files import little_endian
    from flamia_ref.golden.manifest import CaseEntry

    recipe = "flamia-mxfp8-folded"
    places = dataflow(RECIPES[recipe]).places(case)
    tensors = simulate(case, RECIPES[recipe])
    entries = {key: TensorEntry.of(places[key], little_endian(x)) for key, x in tensors.items()}
    verify(
        CaseEntry(
            name=f"{name}.{recipe}",
            recipe=recipe,
            spec=case,
            file="",
            size=0,
            sha256="",
            tensors=entries,
        )
    )
