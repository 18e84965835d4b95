"""Every departure is found, and named where it starts; nothing else is called a mismatch."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flamia_ref import golden
from flamia_ref.golden.simulator import jax_kernel, numpy_kernel
from flamia_ref.golden.stage import Place, View
from flamia_ref.report import CaseResult, Report, Status
from tests.golden.packs import (
    FIRST,
    SECOND,
    flip,
    offset,
    read_safetensors,
    results,
    typed,
    write_safetensors,
)

FILE = f"{FIRST}.safetensors"


@pytest.fixture
def case(made: Path) -> golden.Case:
    return golden.load(made)[FIRST]


def check(case: golden.Case, given: Mapping[str, Any]) -> CaseResult:
    (result,) = golden.check(case, {case.name: given}, diagnose=False).cases
    return result


def test_a_perfect_kernel_passes_every_tensor(made: Path) -> None:
    pack = golden.load(made)
    report = golden.check(pack, {case.name: results(case) for case in pack})
    assert report.passed
    assert report.exit_code == 0
    assert report.status is Status.PASS
    for one, case in zip(report.cases, pack, strict=True):
        assert {tensor.name for tensor in one.tensors} == set(results(case))
        assert all(tensor.status is Status.PASS for tensor in one.tensors)
        assert (one.not_given, one.departs, one.suspects) == ((), None, ())


@pytest.mark.parametrize(
    "kernel", [numpy_kernel, pytest.param(jax_kernel, marks=pytest.mark.nightly)]
)
def test_the_simulator_passes_as_a_kernel(made: Path, kernel: Any) -> None:
    report = golden.check(made, kernel)
    assert report.passed, str(report)
    assert all(one.not_given == () for one in report.cases)
    assert report.subject == f"flamia_ref.golden.simulator:{kernel.__name__}"
    assert set(report.evidence.values()) == {"assumed"}


def is_float(place: Place) -> bool:
    return place.stage.view in (View.F32, View.BF16)


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_bits_high_and_low_of_every_tensor_count(case: golden.Case, which: int) -> None:
    """Each tensor with its lowest, a middle and its highest bit: one of them daily, the next one nightly."""
    for number, (name, tensor) in enumerate(results(case).items()):
        if not tensor.size:
            continue
        place, given = case.places[name], results(case)
        bit = (0, 4 * tensor.itemsize, 8 * tensor.itemsize - 1)[(number + which) % 3]
        unsigned = given[name].reshape(-1).view(f"u{tensor.itemsize}")
        at = (tensor.size * (bit + 1)) // (8 * tensor.itemsize + 1)
        if is_float(place):  # the sign of a zero is open
            sign = 8 * tensor.itemsize - 1
            at = (
                int(np.flatnonzero(unsigned[at:] & np.array((1 << sign) - 1, unsigned.dtype))[0])
                + at
            )
        unsigned[at] ^= np.array(1 << bit, unsigned.dtype)
        result = check(case, given)
        found = {one.name: one for one in result.tensors}
        assert found[name].differing == 1, (name, bit)
        assert all(one.status is Status.PASS for one in result.tensors if one.name != name)
        if bit == 0 and is_float(place) and result.passed:  # an order of additions gives this too
            assert found[name].inside == 1
            assert name not in ("s.0", "out")
            continue
        wrong = Status.OUTSIDE_ENVELOPE if is_float(place) else Status.BIT_MISMATCH
        assert result.status is wrong, (name, bit)
        assert result.departs == place.stage.name
        first = result.first
        assert first is not None
        assert first.first is not None
        assert first.name == name
        assert first.first.index == np.unravel_index(at, tensor.shape)
        assert first.first.element.expected != first.first.element.actual


def test_a_flipped_bit_in_a_copy_of_the_pack_is_a_mismatch(made: Path, tmp_path: Path) -> None:
    actual = Path(shutil.copytree(made, tmp_path / "actual"))
    (actual / "manifest.json").write_text("not read")
    data = (actual / FILE).read_bytes()
    assert golden.check(made, actual).exit_code == 0
    held = read_safetensors(actual / FILE)
    for name in [name for name, tensor in held.items() if tensor.size][::4]:
        # The second byte of a float in little-endian order: far more than the last bit.
        of_float = held[name].itemsize > 1
        flip(actual / FILE, offset(actual / FILE, name) + held[name].itemsize - 1 * of_float, 5)
        report = golden.check(made, actual, cases=[FIRST], diagnose=False)
        assert report.exit_code == 1
        first = report.cases[0].first
        assert first is not None
        assert first.name == name
        (actual / FILE).write_bytes(data)


def where(case: golden.Case, name: str, index: tuple[int, ...]) -> Mapping[str, int | str]:
    """Change one element and return where the report finds it."""
    given = results(case)
    # A bit that no order of additions changes.
    bit = 8 * given[name].itemsize - 2 if is_float(case.places[name]) else 0
    given[name].view(f"u{given[name].itemsize}")[index] ^= 1 << bit
    first = check(case, given).first
    assert first is not None
    assert first.first is not None
    return first.first.where


def test_places_are_named_in_words(case: golden.Case) -> None:
    # The documents have 2, 0 and 35 tokens, so token 36 is number 34 of document 2.
    assert where(case, "q.codes", (36, 1, 31)) == {
        "document": 2,
        "head": 1,
        "token": 36,
        "position": 34,
        "tile": 0,
        "block": 0,
        "channel": 31,
    }
    assert where(case, "v.scales", (2, 0, 0)) == {
        "document": 2,
        "kv head": 0,
        "token": 2,
        "position": 0,
        "tile": 0,
        "block": 0,
        "channels": "0 to 31",
    }
    assert where(case, "row_max", (1, 1)) == {
        "document": 0,
        "head": 1,
        "token": 1,
        "position": 1,
        "tile": 0,
    }
    assert where(case, "p.o.codes.2", (1, 34, 33)) == {
        "document": 2,
        "head": 1,
        "token": 36,
        "query": 34,
        "query tile": 0,
        "key tile": 0,
        "block": 1,
        "key": 33,
        "key token": 35,
    }
    assert where(case, "p.o.scales.2", (0, 34, 1)) == {
        "document": 2,
        "head": 0,
        "token": 36,
        "query": 34,
        "query tile": 0,
        "key tile": 0,
        "block": 1,
        "keys": "32 to 34",
    }
    # Row 33 of the document is in byte 33 % 32 * 16 + 33 // 32 * 4 of its tile.
    assert where(case, "q.scales.tiled.2", (1, 0, 0, 20)) == {
        "document": 2,
        "head": 1,
        "token": 35,
        "position": 33,
        "tile": 0,
        "block": 0,
        "byte": 20,
    }
    assert where(case, "k.scales.tiled.0", (0, 0, 0, 3)) == {
        "document": 0,
        "kv head": 0,
        "row": 0,
        "column": 3,
        "in": "the padding",
    }


def test_a_code_is_shown_with_its_scale_and_a_scale_with_a_code(case: golden.Case) -> None:
    given = results(case)
    expected = int(given["q.codes"][5, 1, 7])
    scale = int(given["q.scales"][5, 1, 0])
    given["q.codes"][5, 1, 7] ^= 0x80
    given["q.scales"][5, 1, 0] = scale  # equal
    first = check(case, given).first
    assert first is not None
    assert first.first is not None
    value = float(np.array([expected], np.uint8).view(ml_dtypes.float8_e4m3fn)[0])
    assert str(first.first.element) == (
        f"expected 0x{expected:02x} ({value}), actual 0x{expected ^ 0x80:02x} ({-value})"
    )
    shown = f"0x{scale:02x} (2^{scale - 127})"
    assert str(first.first.scale) == f"expected {shown}, actual {shown}"

    given["q.scales"][5, 1, 0] += 1
    first = check(case, given).first
    assert first is not None
    assert first.first is not None
    assert first.name == "q.scales"
    assert str(first.first.element) == (
        f"expected {shown}, actual 0x{scale + 1:02x} (2^{scale - 126})"
    )
    code = int(given["q.codes"][5, 1, 0])
    assert first.first.code is not None
    assert first.first.code.expected.bits == f"0x{code:02x}"


def test_what_was_not_given_is_said(case: golden.Case) -> None:
    given = results(case)
    codes = given["q.codes"]
    codes[0, 0, 0] ^= 1
    result = check(case, {"q.codes": codes, "out": given["out"], "lse": given["lse"]})
    assert result.first is not None
    assert result.first.first is not None
    assert str(result.first.first.scale).endswith("actual not given")
    assert result.suspects == ("q.scales",)
    assert "s" in result.not_given
    assert "q.scales.tiled" not in result.not_given


def test_with_outputs_alone_the_stage_is_an_inference(case: golden.Case) -> None:
    given = {name: results(case)[name] for name in ("out", "lse")}
    assert check(case, given).passed
    given["out"].view(np.uint16)[4, 1, 3] ^= 1
    result = check(case, given)
    assert result.departs == "out"
    assert result.suspects[0] == "q.scales"
    assert "an inference" in golden.check(case, {case.name: given}).to_text()


def test_with_all_stages_it_is_none(case: golden.Case) -> None:
    given = results(case)
    given["o"].view(np.uint32)[3, 0, 0] ^= 1 << 16
    given["out"][3, 0, 0] ^= 1
    result = check(case, given)
    assert (result.departs, result.suspects) == ("o", ())
    text = golden.check(case, {case.name: given}).to_text()
    assert "first departs at o; every stage that leads to it" in text
    assert "o: outside envelope, 1 of 2368 elements" in text


def test_tiled_scales_stand_for_the_scales(case: golden.Case) -> None:
    given = results(case)
    for operand in ("q", "k", "v", "do"):
        del given[f"{operand}.scales"]
    given["q.codes"][0, 0, 0] ^= 1
    assert check(case, given).suspects == ()
    del given["q.scales.tiled.2"]
    assert check(case, given).suspects == ("q.scales",)


FORWARD_ONLY = "forward only: nothing of the backward was given"


def forward_results(case: golden.Case) -> dict[str, Any]:
    """What a perfect kernel without a backward gives."""
    return {
        name: tensor
        for name, tensor in results(case).items()
        if not case.places[name].stage.backward
    }


def test_a_forward_alone_passes_and_the_report_says_so(case: golden.Case) -> None:
    given = forward_results(case)
    assert {"out", "lse", "s.2", "o"} <= set(given)
    assert not {"dq", "delta", "do.codes", "p.dv.2"} & set(given)
    result = check(case, given)
    assert (result.passed, result.not_given, result.note) == (True, (), FORWARD_ONLY)
    assert f"    {FORWARD_ONLY}" in golden.check(case, {case.name: given}).to_text()
    given["s.2"][0, 3, 2] += 1
    result = check(case, given)
    assert (result.departs, result.suspects, result.note) == ("s", (), FORWARD_ONLY)
    # dout is an input: to give it back is no backward.
    result = check(case, forward_results(case) | {"dout": case.tensors["dout"].copy()})
    assert (result.passed, result.note) == (True, FORWARD_ONLY)


def test_a_part_of_the_backward_is_compared_and_the_rest_is_named(case: golden.Case) -> None:
    given = forward_results(case) | {"dq": results(case)["dq"]}
    result = check(case, given)
    assert (result.passed, result.note) == (True, "")
    assert result.not_given == (
        *("do.scales", "do.codes", "delta", "dp", "p.dv", "p.dv.scales", "p.dv.codes", "ds"),
        *("ds.dq.scales", "ds.dq.codes", "ds.dk.scales", "ds.dk.codes", "dk", "dv"),
    )
    given["dq"].view(np.uint16)[4, 1, 3] ^= 1
    result = check(case, given)
    assert result.departs == "dq"
    # P of dV is a suspect as what dS is made of; what leads to dK or dV alone is none.
    assert result.suspects == (
        *("do.scales", "do.codes", "delta", "dp", "p.dv", "ds", "ds.dq.scales", "ds.dq.codes"),
    )


def test_the_first_stage_of_the_backward_that_departs_is_named(case: golden.Case) -> None:
    given = results(case)
    for name in ("delta", "ds.2", "dq", "dk"):
        given[name].reshape(-1).view(f"u{given[name].itemsize}")[-1] ^= 1 << 14
    result = check(case, given)
    assert (result.departs, result.suspects) == ("delta", ())
    given["delta"] = results(case)["delta"]
    assert check(case, given).departs == "ds"
    del given["delta"]
    result = check(case, given)
    assert (result.departs, result.suspects) == ("ds", ("delta",))


@pytest.mark.parametrize("output", ["out", "lse"])
def test_gradients_alone_do_not_pass(case: golden.Case, output: str) -> None:
    given = {name: results(case)[name] for name in ("dq", "dk", "dv", output)}
    assert check(case, given).status is Status.MISSING


@pytest.mark.parametrize("output", ["out", "lse"])
def test_a_case_without_an_output_does_not_pass(case: golden.Case, output: str) -> None:
    given = results(case)
    del given[output]
    result = check(case, given)
    assert result.status is Status.MISSING
    assert result.departs is None


def test_a_tensor_of_an_unknown_name_does_not_pass(case: golden.Case) -> None:
    result = check(case, results(case) | {"row_summ": np.zeros(3)})
    assert result.status is Status.UNKNOWN
    assert "did you mean 'row_sum'" in result.tensors[-1].note


@pytest.mark.parametrize("given", [{}, {"q": np.zeros(3)}, {"other": np.zeros(3)}])
def test_results_without_any_stage_are_no_results(case: golden.Case, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="hold no stage and no output"):
        check(case, given)


def test_inputs_beside_the_results_are_compared_too(case: golden.Case) -> None:
    given = results(case) | {"k": case.tensors["k"].copy()}
    assert check(case, given).passed
    given["k"][0, 0, 0] ^= 1
    assert check(case, given).departs == "k"


def test_shapes_and_types(case: golden.Case) -> None:
    good = results(case)
    bad: dict[str, tuple[Any, Status]] = {
        "lse": (good["lse"].T, Status.LAYOUT),  # the right elements, its axes in another order
        "dq": (good["dq"][:, :1], Status.SHAPE),
        "row_sum": (good["row_sum"].astype(np.float64), Status.DTYPE),
        "q.codes": (good["q.codes"].astype(np.int8), Status.DTYPE),
        "q.scales": (good["q.scales"][1:], Status.SHAPE),
        "k.scales": (good["k.scales"][:, :, 0], Status.LAYOUT),  # the right bytes
        "out": (good["out"].astype(np.float16), Status.DTYPE),
        "row_max": (np.float32(3), Status.SHAPE),
    }
    for name, (value, status) in bad.items():
        result = check(case, good | {name: value})
        assert result.status is status, name
        assert result.departs == name
        assert result.first is not None
        assert "given as" in result.first.note


def test_other_types_that_hold_the_same_bits(case: golden.Case) -> None:
    given = results(case)
    given["out"] = given["out"].view(ml_dtypes.bfloat16)
    given["lse"] = given["lse"].astype(">f4")
    given["row_sum"] = given["row_sum"].view(np.uint32)
    given["q.codes"] = given["q.codes"].view(ml_dtypes.float8_e4m3fn)
    given["q.scales"] = given["q.scales"].view(ml_dtypes.float8_e8m0fnu)
    given["k.codes"] = np.asfortranarray(given["k.codes"])
    for stage in ("s", "p", "p.o.codes", "p.o.scales"):
        given[stage] = [given.pop(f"{stage}.{document}") for document in range(3)]
    given["cu_seqlens"] = case.tensors["cu_seqlens"].astype(np.int64)
    assert check(case, given).passed
    given["out"] = given["out"].astype(np.float32)
    assert check(case, given).passed
    given["out"].view(np.uint32)[0, 0, 0] |= 1
    result = check(case, given)
    assert (result.status, result.departs) == (Status.OUTSIDE_ENVELOPE, "out")
    given["cu_seqlens"][1] += 1
    assert check(case, given).departs == "cu_seqlens"


def test_a_stage_that_is_a_list_needs_an_array_a_document(case: golden.Case) -> None:
    given = results(case)
    arrays = [given.pop(f"s.{document}") for document in range(3)]
    for bad in (arrays[:2], arrays[2], None):
        with pytest.raises(ValueError, match=r"s of tiny.* must be a list of 3 arrays"):
            check(case, given | {"s": bad})
    with pytest.raises(TypeError, match=r"lse of tiny.* is 'NoneType', which is no array"):
        check(case, given | {"lse": None})
    with pytest.raises(TypeError, match=r"is no array"):
        check(case, given | {"lse": [[1.0], [1.0, 2.0]]})


class Altered(dict[str, Any]):
    """The tensors of a case with some changed."""

    def verify(self) -> None: ...


@pytest.mark.parametrize(
    ("expected", "actual", "status"),
    [
        (1.0, np.nan, Status.NAN_PATTERN),
        (np.nan, 1.0, Status.NAN_PATTERN),
        (np.nan, np.nan, Status.PASS),
        (0.0, -0.0, Status.PASS),  # zeros of both signs are one number
        (np.inf, -np.inf, Status.OUTSIDE_ENVELOPE),
        (np.inf, np.inf, Status.PASS),
        (-np.inf, np.nan, Status.NAN_PATTERN),
        (1e-40, 0.0, Status.OUTSIDE_ENVELOPE),
    ],
)
def test_special_values(expected: float, actual: float, status: Status, case: golden.Case) -> None:
    """Of out, which is O rounded: nothing is open where O was given."""
    changed = {"o": expected, "out": expected}
    tensors = Altered(case.tensors)
    given = results(case)
    for name, value in changed.items():
        tensor = tensors[name].copy()
        wide = np.array([value], np.float32)
        bits = (wide.view(np.uint32) >> (16 if tensor.itemsize == 2 else 0)).astype(
            f"u{tensor.itemsize}"
        )
        tensor.view(bits.dtype)[0, 0, 0] = bits[0]
        tensors[name] = tensor
        given[name] = tensor.copy()
    given["out"][0, 0, 0] = np.array([actual], np.float32).view(np.uint32)[0] >> 16
    altered = golden.Case(
        folder=case.folder,
        entry=case.entry,
        recipe=case.recipe,
        numerics_version=case.numerics_version,
    )
    altered.__dict__["tensors"] = tensors
    assert check(altered, given).status is status


def test_nan_bits_do_not_matter_but_nan_does(made: Path) -> None:
    case = golden.load(made)[SECOND]
    given = results(case)
    nan = np.isnan(given["lse"])
    assert nan.any()
    given["lse"].view(np.uint32)[nan] = 0xFFC00001
    given["out"][(given["out"] & 0x7FFF) > 0x7F80] = 0xFFC0
    assert check(case, given).passed
    given["lse"][nan] = 0
    result = check(case, given)
    assert result.first is not None
    assert result.first.differing == np.count_nonzero(nan)
    assert result.first.largest_steps is None
    assert result.first.largest is None


@pytest.mark.parametrize("value", [0.0, -0.0, -np.inf, np.nan])
@pytest.mark.parametrize("stage", ["s", "dp"])
def test_masked_scores_may_be_left_out(case: golden.Case, stage: str, value: float) -> None:
    given = results(case)
    given[f"{stage}.2"][:, ~np.tril(np.ones((35, 35), bool))] = value
    assert check(case, given).passed
    given[f"{stage}.2"][0, 3, 3] = value
    assert check(case, given).departs == stage


@pytest.mark.parametrize("stage", ["s", "dp"])
def test_masked_scores_may_not_be_anything(case: golden.Case, stage: str) -> None:
    given = results(case)
    given[f"{stage}.2"][1, 3, 4] = 12345.0
    result = check(case, given)
    assert result.departs == stage
    assert result.first is not None
    assert "masked pair" in result.first.note


def test_sizes_of_differences(case: golden.Case) -> None:
    given = results(case)
    lse = given["lse"]
    lse[0, 5] = np.nextafter(np.nextafter(lse[0, 5], np.float32(9)), np.float32(9))
    lse[1, 6] = np.nextafter(lse[1, 6], np.float32(-9))
    given["k.scales"][3, 0, 0] -= 2
    result = check(case, given)
    found = {one.name: one for one in result.tensors if one.status is not Status.PASS}
    assert found["lse"].differing == 2
    assert found["lse"].largest_steps == 2
    difference = np.abs(lse.astype(np.float64) - case.tensors["lse"]).max()
    assert found["lse"].largest == difference
    assert found["k.scales"].largest_steps == 2
    scale = int(given["k.scales"][3, 0, 0]) + 2
    assert found["k.scales"].largest == 2.0 ** (scale - 127) - 2.0 ** (scale - 129)


def test_steps_are_counted_across_zero(case: golden.Case) -> None:
    given = results(case)
    code = int(given["q.codes"][0, 0, 0]) & 0x7F
    assert code not in (0, 0x7F)
    given["q.codes"][0, 0, 0] ^= 0x80
    first = check(case, given).first
    assert first is not None
    assert first.largest_steps == 2 * code


def test_the_pack_itself_is_no_result(made: Path, pack: Path, tmp_path: Path) -> None:
    for actual in (made, made / FILE, golden.load(made), golden.load(made)[FIRST], str(made)):
        with pytest.raises(ValueError, match="is the pack's own file"):
            golden.check(made, actual)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / FILE).symlink_to(made / FILE)
    with pytest.raises(ValueError, match="is the pack's own file"):
        golden.check(made, tmp_path / "links")
    (tmp_path / "hard").mkdir()
    (tmp_path / "hard" / FILE).hardlink_to(pack / FILE)
    with pytest.raises(ValueError, match="is the pack's own file"):
        golden.check(pack, tmp_path / "hard")
    case = golden.load(made)[FIRST]
    with pytest.raises(ValueError, match="is the pack's own array"):
        golden.check(case, {FIRST: dict(case.tensors)})
    # A copy of a pack is what a perfect kernel would write.
    assert golden.check(made, pack).passed
    assert golden.check(made, golden.load(pack)).passed


def test_files(made: Path, tmp_path: Path) -> None:
    outputs = {
        name: tensor
        for name, tensor in read_safetensors(made / FILE).items()
        if name in ("out", "lse", "q.codes")
    }
    as_written = typed(outputs)
    as_written["out"] = ("BF16", outputs["out"])
    as_written["q.codes"] = ("F8_E4M3", outputs["q.codes"])
    folder = tmp_path / "results"
    folder.mkdir()
    write_safetensors(folder / FILE, as_written)
    report = golden.check(made, folder / FILE)
    assert report.passed
    assert report.notes == (f"cases not compared: {SECOND}",)
    report = golden.check(made, folder)
    assert [one.status for one in report.cases] == [Status.PASS, Status.MISSING]
    assert report.exit_code == 1

    wide = (outputs["out"].astype(np.uint32) << 16).view(np.float32)
    write_safetensors(folder / FILE, as_written | {"out": ("F32", wide)})
    assert golden.check(made, folder / FILE).passed
    write_safetensors(folder / FILE, as_written | {"out": ("F8_E5M2", outputs["q.codes"])})
    assert golden.check(made, folder / FILE).status is Status.DTYPE
    write_safetensors(folder / FILE, as_written | {"lse": ("F64", outputs["lse"].astype("f8"))})
    assert golden.check(made, folder / FILE).status is Status.DTYPE

    (folder / FILE).rename(folder / "other.safetensors")
    with pytest.raises(ValueError, match="is named after no case"):
        golden.check(made, folder / "other.safetensors")
    one_case = golden.load(made)[FIRST]
    write_safetensors(folder / "other.safetensors", as_written)
    assert golden.check(one_case, folder / "other.safetensors").passed
    with pytest.raises(ValueError, match="holds no results of this pack"):
        golden.check(made, folder)
    with pytest.raises(ValueError, match="there is no file or folder"):
        golden.check(made, folder / "nothing")


def test_damaged_result_files_are_bad_input(made: Path, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes((made / FILE).read_bytes()[:-1])
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        golden.check(made, tmp_path)
    with (tmp_path / FILE).open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="bytes; at most"):
        golden.check(made, tmp_path)


def test_a_damaged_pack_is_bad_input(pack: Path) -> None:
    flip(pack / FILE, (pack / FILE).stat().st_size - 1)
    with pytest.raises(ValueError, match="was changed since it was written"):
        golden.check(pack, numpy_kernel)


def test_a_mapping_of_other_cases_is_refused(made: Path) -> None:
    with pytest.raises(ValueError, match="unknown case 'tiny'; did you mean "):
        golden.check(made, {"tiny": {}})
    with pytest.raises(ValueError, match="unknown case None"):
        golden.check(made, {})
    number: Any = 3
    with pytest.raises(TypeError, match="give a kernel, a path, or a mapping"):
        golden.check(made, number)


def faulty(fault: str) -> Any:
    """The simulator with a fault in one place, and what follows from it."""

    def kernel(q: Any, k: Any, v: Any, **keywords: Any) -> dict[str, Any]:
        if fault == "q.scales":
            q = q.copy()
            q[1, 0] *= 2  # a power of two moves the scale alone
        if fault == "k.scales":
            k = k.copy()
            k[1, 0] *= 2
        if fault == "v.scales":
            v = v.copy()
            v[1, 0] *= 2
        if fault == "q.codes":
            q = q.copy()
            smallest = np.argmin(np.abs(q[1, 0].astype(np.float32)))
            q[1, 0, smallest] = -q[1, 0, smallest]  # the amax, and so the scale, stays
        if fault == "row_max":
            keywords["causal"] = False
        if fault == "p":
            keywords["softmax_scale"] *= 1.0001
        if fault == "head":
            q = q[:, ::-1]
        return numpy_kernel(q, k, v, **keywords)

    return kernel


@pytest.mark.parametrize(
    "fault", ["q.scales", "k.scales", "v.scales", "q.codes", "row_max", "p", "head"]
)
def test_a_fault_with_all_that_follows_from_it_is_named_where_it_starts(
    case: golden.Case, fault: str
) -> None:
    report = golden.check(case, faulty(fault), diagnose=False)
    (result,) = report.cases
    exact = fault not in ("row_max", "p")
    assert result.status is (Status.BIT_MISMATCH if exact else Status.OUTSIDE_ENVELOPE)
    assert result.departs == ("q.scales" if fault == "head" else fault)
    assert result.suspects == ()
    # What follows from it differs, and is what this kernel's own stages give.
    follows = [one for one in result.tensors if one.name in ("s.2", "p.2", "o", "out", "lse", "dq")]
    assert sum(one.differing > 0 for one in follows) > 1
    if exact:
        assert all(one.status is Status.PASS for one in follows)
    if fault.endswith("scales"):
        first = result.first
        assert first is not None
        assert first.first is not None
        assert first.differing == 1
        assert first.first.where["token"] == 1
        before, after = first.first.element.expected, first.first.element.actual
        assert after is not None
        assert int(after.bits, 16) == int(before.bits, 16) + 1


def test_reports_in_json(case: golden.Case) -> None:
    given = results(case)
    given["lse"][0, 0] = np.inf
    report: Report = golden.check(case, {case.name: given})
    document = json.loads(report.to_json())
    assert document["schema"] == "flamia-ref report"
    assert (document["status"], document["passed"]) == ("outside envelope", False)
    (one,) = document["cases"]
    assert one["departs"] == "lse"
    tensor = next(entry for entry in one["tensors"] if entry["name"] == "lse")
    assert tensor["largest"] == "inf"
    assert tensor["first"]["where"]["token"] == 0
    assert tensor["first"]["element"]["actual"] == {"bits": "0x7f800000", "value": "inf"}
    assert str(report) == report.to_text()
    assert "\n" in str(report)


def test_progress_is_told(made: Path) -> None:
    told: list[tuple[int, int, str]] = []
    golden.check(made, numpy_kernel, progress=lambda *news: told.append(news))
    assert told == [(0, 2, FIRST), (1, 2, SECOND)]
