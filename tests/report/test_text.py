"""The text form: what it says, and that a case that fails fits on a screen."""

from dataclasses import replace

from flamia_ref.report import Status
from tests.report import examples

EXPECTED = """\
mine:kernel against packs/smoke, numerics version 3
recipe flamia-mxfp8-folded: evidence derived
recipe bf16-fa4: evidence source
environment: python 3.11.7, numpy 2.2.0, device NVIDIA H200
pass           alpha.flamia-mxfp8-folded  (2 tensors, 29445 elements)
    differ from the pack, inside the envelope of their inputs (its mean width over the rms): lse (3.4e-07)
    consistent: some way that the recipe permits leads from the inputs to these outputs
bit mismatch   real.flamia-mxfp8-folded  (4 tensors, 58588 elements)
    this case is there for: real activations of a small model
    not given: row_max, ds.dq.codes.1
    first departs at v.scales; every stage that leads to it is equal
      document 1, kv head 0, token 75, tile 0, block 2, channels 0 to 63
      scale: expected 0x75 (2^-10), actual 0x76 (2^-9)
      first code under it: expected 0x63 (44.0), actual 0x63 (44.0)
    diagnosis: one scale byte of V is too large by one (explains 9 of the 10 elements that fail in v.scales)
    v.scales: bit mismatch, 10 of 151 elements, largest difference 0.000976562, 2 steps of the format
    out: outside envelope, 9321 of 28992 elements, 321 of them outside, largest difference 0.386719, \
4 steps of the format, envelope 0.00051 of the rms wide, 77 ambiguous
    differ from the pack, inside the envelope of their inputs (its mean width over the rms): lse (3.4e-07)
    not consistent: no way that the recipe permits leads from the inputs to these outputs
    repeat: flamia-ref golden check pack --kernel mine:kernel --case real.flamia-mxfp8-folded
skipped        sink.bf16-fa4  (0 tensors, 0 elements)
    takes no sink
note: cases not compared: other.flamia-mxfp8-folded
FAIL: 3 cases: 1 pass, 1 bit mismatch, 1 skipped"""


def test_what_it_says() -> None:
    report = examples.report(
        examples.good("alpha"), examples.case(), examples.skipped("sink", examples.OTHER)
    )
    assert str(report) == EXPECTED


def test_a_stage_after_one_inside_its_envelope_is_not_called_equal() -> None:
    case = examples.case(tensors=(examples.LSE, examples.OUT), departs="out", diagnoses=())
    text = str(examples.report(case))
    assert "every stage that leads to it is equal or inside its envelope" in text


def test_one_case_that_fails_everywhere_fits_on_a_screen() -> None:
    tensors = tuple(
        replace(examples.SCALES, name=f"s.{number}", first=None) for number in range(90)
    )
    text = str(examples.report(examples.case(tensors=(examples.SCALES, *tensors))))
    assert len(text.splitlines()) <= 40
    assert "and 77 more: s.13 (bit mismatch), s.14" in text


def test_every_status_has_its_word() -> None:
    for status in Status:
        assert f"{status:<14} real" in str(examples.report(examples.case(status=status)))


def test_hostile_names_keep_to_their_lines() -> None:
    text = str(examples.hostile(10))
    assert all(c.isprintable() or c == "\n" for c in text)
    assert len(text.splitlines()) < 30


def test_skipped_alone_is_no_pass() -> None:
    assert str(examples.report(examples.skipped("a"))).endswith(
        "NOTHING COMPARED: 1 case: 1 skipped"
    )
