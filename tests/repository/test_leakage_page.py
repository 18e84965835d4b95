"""docs/leakage.md is what docs/leakage.py makes, and the three methods agree on every recipe."""

import importlib.util
import json
import re
from functools import cache

import numpy as np
import pytest

pytest.importorskip("jax")

from examples.leakage.kernels import KERNELS
from flamia_ref.attention import RECIPES
from flamia_ref.leakage import structure
from flamia_ref.leakage.flow.context import Assumption
from flamia_ref.leakage.legal import LEGAL, Severity
from tests.repository.layout import ROOT

PAGE = (ROOT / "docs" / "leakage.md").read_text(encoding="utf-8")
DAILY = ("cudnn-mxfp8", "flamia-mxfp8-folded")  # one that leaks and one that does not
OTHERS = [name for name in RECIPES if name not in DAILY]


@cache
def made():
    """The module that makes the page; what it finds in a recipe it keeps."""
    spec = importlib.util.spec_from_file_location("leakage_page", ROOT / "docs" / "leakage.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_proof(certificate, output: str, source: str) -> np.ndarray:
    """The pairs that a certificate finds illegal."""
    tokens = sum(certificate.setting["lengths"])
    found = np.zeros((tokens, tokens), dtype=bool)
    for one in certificate.runs:
        if (one.output, one.input) == (output, source):
            found[one.out_token, one.first : one.last + 1] = True
    return found


def disagreements(hunted, certificate, found) -> list[str]:
    """Pairs of the hunt that the proof has not, and of the proof that the structure has not."""
    wrong = []
    for output in certificate_outputs(certificate):
        for source in LEGAL[output]:
            proved = of_proof(certificate, output, source)
            if (proved & ~found.illegal_pairs(output, source)).any():
                wrong.append(f"{output} <- {source}: proof beyond structure")
    for moves in hunted.moves:
        proved = of_proof(certificate, moves.output, moves.operand)
        seen = moves.moved & moves.forbidden & moves.tried
        if (seen & ~proved).any():
            wrong.append(f"{moves.output} <- {moves.operand}: hunt beyond proof")
        if (moves.moved & moves.tried & ~found.pairs(moves.output, moves.operand)).any():
            wrong.append(f"{moves.output} <- {moves.operand}: hunt beyond structure")
    for witness in hunted.witnesses:
        proved = of_proof(certificate, witness.output, witness.operand)
        if not proved[witness.place[0], list(witness.edit.changed_tokens)].any():
            wrong.append(f"{witness.sentence}: beyond proof")
    return wrong


def certificate_outputs(certificate) -> list[str]:
    return list(dict.fromkeys(count.output for count in certificate.counts))


def check(name: str) -> None:
    """The three methods agree on a recipe, and the page has its row."""
    looked = made().looked_at(name)
    assert disagreements(looked.hunt, looked.certificate, looked.structure) == []
    assert certificate_outputs(looked.certificate) == list(LEGAL)
    # The same verdict, too: what leaks here is found, and what is legal is proved and exact.
    assert looked.hunt.leaks == (not looked.certificate.legal) == (not looked.structure.legal)
    assert looked.certificate.exact == looked.certificate.legal
    tried = sum(int(moves.tried.sum()) for moves in looked.hunt.moves)
    assert tried > 0
    assert made().recipe_row(name) in made().section(PAGE, "recipes")


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHERS)
def test_the_three_methods_agree(name: str) -> None:
    check(name)


@pytest.mark.nightly  # tests/leakage holds the methods to each other every day
def test_the_three_methods_agree_and_a_disagreement_is_found() -> None:
    """In one test, since what is found in a recipe is kept in one process."""
    for name in DAILY:
        check(name)
    leaky, legal = (made().looked_at(name) for name in DAILY)
    found = disagreements(leaky.hunt, legal.certificate, legal.structure)
    assert any("out <- v: hunt beyond proof" in one for one in found)
    assert any("out <- v: hunt beyond structure" in one for one in found)
    assert any(one.endswith("beyond proof") and "v[" in one for one in found)
    found = disagreements(legal.hunt, leaky.certificate, legal.structure)
    assert "dq <- k: proof beyond structure" in found


def test_the_table_of_recipes_has_each_and_their_structure() -> None:
    rows = made().section(PAGE, "recipes").splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(RECIPES)
    for row in rows:
        name, one, *_, last = (cell.strip() for cell in row.strip("|").split(" | "))
        found = structure(RECIPES[name.strip("`")], lengths=made().LENGTHS)
        assert one == made().structure_cell(found)
        assert last == made().uses_cell(found)


def test_the_table_of_uses() -> None:
    assert made().section(PAGE, "uses") == made().uses_table()


def test_the_reports_of_kernels() -> None:
    assert made().section(PAGE, "kernels") == made().kernels_section()
    files = sorted((ROOT / "docs" / "evidence").glob("leakage-*.json"))
    assert files
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        assert {one["kernel"] for one in found["kernels"]} <= set(KERNELS)
        for one in found["kernels"]:
            leaky = "leaky" in one["kernel"] or one["kernel"] == "cudnn_mxfp8_reference"
            # A GPU's default backend, cuDNN, makes a finite mask of the boolean one.
            leaky |= one["kernel"] == "torch_sdpa_masked" and "h200" in file.name
            if "hunt" in one:
                assert one["hunt"]["leaks"] == leaky, (file.name, one["kernel"])


@pytest.mark.parametrize("number", range(3))
def test_code_prints_what_the_page_says(number: int) -> None:
    code, output = made().CODE.findall(PAGE)[number]
    assert output.strip()
    assert made().printed(code) == output


def test_there_is_no_other_code() -> None:
    assert PAGE.count("```python") == len(made().CODE.findall(PAGE)) == 3


def test_words() -> None:
    for name in (*Severity, *Assumption):
        assert re.search(rf"^\| `{name}` \|", PAGE, re.MULTILINE), name
    known = set(re.findall(r"^- `(\w+)`", PAGE, re.MULTILINE))
    assert known & set(KERNELS)


def test_a_section_that_is_missing_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no '<!-- uses, by"):
        made().with_section(PAGE.replace("<!-- uses,", "<!-- use,"), "uses", "")
