"""The forms of a hunt's report, replaying its witnesses, and that engines do not change it."""

import concurrent.futures
import json
import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from flamia_ref.leakage import FoundWitness, HuntReport, hunt
from tests.leakage.planted import planted

SIGNATURE = b"\x89PNG\r\n\x1a\n"
SHAPE: dict[str, Any] = {"lengths": (24, 16), "head_dim": 8, "calls": 120}


def leaky(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
    """A kernel that another process can find."""
    return planted({"o.v": "col"}, grid="packed")(q, k, v, **keywords)


@pytest.fixture(scope="module")
def report() -> HuntReport:
    return hunt(leaky, **SHAPE)


def steady(report: HuntReport) -> dict[str, Any]:
    """The JSON without what differs from run to run."""
    document = json.loads(report.to_json())
    assert document.pop("seconds") >= 0
    document["first_found"].pop("seconds")
    return document


def test_the_same_hunt_gives_the_same_report(report: HuntReport) -> None:
    assert steady(hunt(leaky, **SHAPE)) == steady(report)
    assert steady(hunt(leaky, seed=1, **SHAPE)) != steady(report)


def test_threads_change_nothing(report: HuntReport) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        assert steady(hunt(leaky, executor=executor, **SHAPE)) == steady(report)


@pytest.mark.nightly
def test_processes_change_nothing(report: HuntReport) -> None:
    with concurrent.futures.ProcessPoolExecutor(2) as executor:
        assert steady(hunt(leaky, executor=executor, **SHAPE)) == steady(report)
        with pytest.raises(ValueError, match="give a function of a module"):
            hunt(planted(), executor=executor, **SHAPE)


def test_json_says_all(report: HuntReport) -> None:
    document = json.loads(report.to_json())
    assert (document["schema"], document["schema_version"]) == ("flamia-ref leak hunt", 1)
    assert (document["verdict"], document["leaks"]) == ("leak", True)
    assert document["setting"]["lengths"] == [24, 16]
    assert [one["sentence"] for one in document["witnesses"]] == [
        one.sentence for one in report.witnesses
    ]
    assert "NaN" not in report.to_json()


def test_a_witness_of_the_json_can_be_replayed(report: HuntReport) -> None:
    document = json.loads(report.to_json())
    for written, found in zip(document["witnesses"], report.witnesses, strict=True):
        read = FoundWitness.from_document(written)
        assert read.sentence == found.sentence
        assert read.to_document() == written
        for changed in (False, True):
            pairs = zip(
                read.inputs(changed=changed).values(),
                found.inputs(changed=changed).values(),
                strict=True,
            )
            assert all(np.array_equal(x.view(np.uint16), y.view(np.uint16)) for x, y in pairs)
        assert read.reproduce(leaky)
        assert not read.reproduce(planted())


def test_a_witness_is_one_change_and_its_hex_is_that_of_the_arrays(report: HuntReport) -> None:
    witness = report.witnesses[0]
    before, after = (witness.inputs(changed=changed) for changed in (False, True))
    for name, x in before.items():
        different = np.argwhere(x.view(np.uint16) != after[name].view(np.uint16))
        assert len(different) == (name == witness.operand)
    pattern = r"v\[(\d+), head 0, channel (\d+)\] from 0x(\w+) \(.*?\) to 0x(\w+) "
    token, channel, first, last = re.match(pattern, witness.sentence).groups()  # type: ignore[union-attr]
    place = (int(token), 0, int(channel))
    assert before["v"].view(np.uint16)[place] == int(first, 16)
    assert after["v"].view(np.uint16)[place] == int(last, 16)
    settings = {
        "cu_seqlens": np.array([0, 24, 40], np.int32),
        "causal": True,
        "softmax_scale": 8**-0.5,
    }
    for inputs, text in ((before, witness.before), (after, witness.after)):
        results = leaky(inputs["q"], inputs["k"], inputs["v"], dout=inputs["dout"], **settings)
        bits = results[witness.output].view(np.uint16)[witness.place]
        assert text.startswith(f"0x{bits:04x} ")


@pytest.mark.parametrize("data", [None, {}, {"base": {}}, []])
def test_what_is_no_witness_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="a witness cannot be read"):
        FoundWitness.from_document(data)


def test_a_witness_of_an_unknown_family_is_refused(report: HuntReport) -> None:
    data = report.witnesses[0].to_document()
    data["base"]["family"] = "other"
    with pytest.raises(ValueError, match="family 'other' is unknown"):
        FoundWitness.from_document(data)


def test_junit(report: HuntReport) -> None:
    suite = ElementTree.fromstring(report.to_junit())
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    counted = {f"{one.operand}, {one.severity}" for one in report.witnesses}
    assert set(failed) == counted
    assert int(suite.get("failures", -1)) == len(failed)
    assert int(suite.get("tests", -1)) == len(suite)
    quiet = hunt(planted(), lengths=(1,), head_dim=8)
    (case,) = ElementTree.fromstring(quiet.to_junit())
    assert case.find("error") is not None


def test_the_page_needs_nothing_else(report: HuntReport) -> None:
    page = report.to_html()
    assert "data:image/png;base64," in page
    assert re.findall(r"(?:src|href)=\"(?!data:)", page) == []
    assert report.witnesses[0].sentence in page
    named = HuntReport(**{**vars(report), "subject": "<b>&"})
    assert "<b>&" not in named.to_html()
    assert "&lt;b&gt;&amp;" in named.to_html()


def test_the_picture(report: HuntReport) -> None:
    assert report.to_png().startswith(SIGNATURE)
    with pytest.raises(ValueError, match="no map of moves"):
        hunt(planted(), lengths=(1,), head_dim=8).to_png()


def test_the_map_of_moves(report: HuntReport) -> None:
    (moves,) = (x for x in report.moves if (x.output, x.operand) == ("out", "v"))
    wrong = moves.moved & moves.forbidden
    assert wrong.any()
    # Blocks of 32 are counted from the pack: a token reaches rows that see one of its block.
    for row, token in np.argwhere(wrong).tolist():
        block = slice(token // 32 * 32, token // 32 * 32 + 32)
        assert (~moves.forbidden)[row, block].any()
    assert not (moves.moved & ~moves.tried).any()


def test_the_text(report: HuntReport) -> None:
    text = str(report)
    assert text == report.to_text()
    assert text.splitlines()[-1].startswith("LEAK: forward")
    for witness in report.witnesses:
        assert f"leak: {witness.sentence}" in text
    assert not re.search(r"[^\x20-\x7e\n]", text)
