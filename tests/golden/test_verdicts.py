"""Every status, where it comes from, and what stands beside it in a report."""

import dataclasses
import itertools
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flamia_ref import cli, golden
from flamia_ref._errors import Registry
from flamia_ref.attention import Recipe
from flamia_ref.golden import making, verdicts
from flamia_ref.golden.bitwise import Aligned, align
from flamia_ref.golden.case_fields import Rows
from flamia_ref.golden.cases import CaseSpec, Plant
from flamia_ref.golden.envelope.record import Permitted
from flamia_ref.golden.files import Stored
from flamia_ref.golden.simulator import numpy_kernel
from flamia_ref.golden.twins import twin
from flamia_ref.report.model import CaseResult, Status, TensorResult
from tests.golden.packs import FIRST, RECIPE, SECOND, results, spec

BF16 = "bf16-fa4"
NUMPY = "flamia_ref.golden.simulator:numpy_kernel"


@pytest.fixture
def case(made: Path) -> golden.Case:
    return golden.load(made)[FIRST]


def check(case: golden.Case, given: Mapping[str, Any]) -> CaseResult:
    (result,) = golden.check(case, {case.name: given}, diagnose=False).cases
    return result


def pack_of(folder: Path, cases: tuple[CaseSpec, ...], recipe: str) -> golden.Pack:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(making, "SUITES", Registry("suite", [("verdicts", cases)]))
        golden.make(folder, [recipe], suite="verdicts")
    return golden.load(folder)


def flipped(x: Any, bit: int) -> Any:
    """One element with another bit."""
    changed = x.copy()
    changed.reshape(-1).view(f"u{x.itemsize}")[-1] ^= 1 << bit
    return changed


def with_nan(x: Any) -> Any:
    changed = x.copy()
    changed[0, 5] = np.nan
    return changed


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: {key: x for key, x in given.items() if key != name}


def other(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: given | {name: change(given[name])}


CHANGES: list[tuple[Status, str, Callable[[dict[str, Any]], dict[str, Any]]]] = [
    (Status.PASS, "", lambda given: given),
    (Status.BIT_MISMATCH, "q.codes", other("q.codes", lambda x: flipped(x, 0))),
    (Status.BIT_MISMATCH, "p.o.scales", other("p.o.scales.2", lambda x: flipped(x, 0))),
    (Status.OUTSIDE_ENVELOPE, "out", other("out", lambda x: flipped(x, 0))),
    (Status.OUTSIDE_ENVELOPE, "s", other("s.2", lambda x: flipped(x, 20))),
    (Status.OUTSIDE_ENVELOPE, "dq", other("dq", lambda x: flipped(x, 9))),
    (Status.SHAPE, "lse", other("lse", lambda x: x[:, :-1])),
    (Status.DTYPE, "lse", other("lse", lambda x: x.astype(np.float64))),
    (Status.LAYOUT, "k.codes", other("k.codes", lambda x: x[:, :, ::-1])),
    (Status.LAYOUT, "k.codes", other("k.codes", lambda x: x.reshape(-1))),
    (Status.NAN_PATTERN, "lse", other("lse", with_nan)),
    (Status.MISSING, "", without("lse")),
    (Status.UNKNOWN, "", lambda given: given | {"tmp": np.zeros(3)}),
]


@pytest.mark.parametrize(
    ("status", "departs", "change"),
    CHANGES,
    ids=[f"{status}-{departs}" for status, departs, _ in CHANGES],
)
def test_each_status_of_arrays(
    case: golden.Case,
    status: Status,
    departs: str,
    change: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    report = golden.check(case, {case.name: change(results(case))}, diagnose=False)
    (result,) = report.cases
    assert result.status is report.status is status
    assert result.departs == (departs or None)
    assert report.exit_code == (0 if status is Status.PASS else 1)
    assert report.passed == result.passed == (status is Status.PASS)
    assert str(status) in report.to_text()


def test_a_case_has_the_status_of_its_first_tensor_that_fails(case: golden.Case) -> None:
    good = results(case)
    given = good | {"q.codes": flipped(good["q.codes"], 0), "out": flipped(good["out"], 3)}
    result = check(case, given | {"lse": with_nan(good["lse"])})
    failing = [(one.name, one.status) for one in result.tensors if one.status is not Status.PASS]
    assert failing == [
        ("q.codes", Status.BIT_MISMATCH),
        ("out", Status.OUTSIDE_ENVELOPE),
        ("lse", Status.NAN_PATTERN),
    ]
    assert (result.status, result.departs) == (Status.BIT_MISMATCH, "q.codes")


def test_a_nan_that_must_be_is_missed(made: Path) -> None:
    poison = golden.load(made)[SECOND]
    given = results(poison)
    nan = np.isnan(given["lse"])
    assert nan.any()
    given["lse"] = np.where(nan, np.float32(1), given["lse"])
    result = check(poison, given)
    assert (result.status, result.departs) == (Status.NAN_PATTERN, "lse")


def unsteady(*names: str) -> Any:
    """The simulator, whose second call and every second one after it changes the last bit of some tensors."""
    calls = itertools.count()

    def kernel(q: Any, k: Any, v: Any, **settings: Any) -> dict[str, Any]:
        given = numpy_kernel(q, k, v, **settings)
        if next(calls) % 2:
            for name in names:
                given[name] = flipped(np.asarray(given[name]), 0)
        return given

    return kernel


def test_calls_that_differ_are_no_result(case: golden.Case) -> None:
    assert golden.check(case, unsteady("row_max"), diagnose=False).passed
    report = golden.check(case, unsteady("row_max", "out"), repeats=2, diagnose=False)
    (result,) = report.cases
    assert (report.status, report.exit_code) == (Status.NONDETERMINISTIC, 1)
    found = {one.name: one for one in result.tensors if one.status is not Status.PASS}
    assert set(found) == {"row_max", "out"}
    assert found["out"].note == "two calls on the same inputs: 1 bytes differ"
    assert result.departs is None  # the first call was right
    assert golden.check(case, numpy_kernel, repeats=2, diagnose=False).passed


@pytest.mark.parametrize("repeats", [0, -1, 1.0, True])
def test_repeats_is_a_count(case: golden.Case, repeats: Any) -> None:
    with pytest.raises(ValueError, match=r"repeats is .*; it must be a whole number from 1 up"):
        golden.check(case, numpy_kernel, repeats=repeats)


def test_cases_are_names_or_patterns(made: Path) -> None:
    def names(*patterns: str) -> list[str]:
        report = golden.check(made, numpy_kernel, cases=patterns, diagnose=False)
        assert report.passed
        return [one.name for one in report.cases]

    assert names("tiny-p*") == [SECOND]
    assert names(FIRST) == [FIRST]
    assert names(f"*.{RECIPE}") == [FIRST, SECOND]
    for wrong in ("tinny.*", "nothing"):
        with pytest.raises(ValueError, match=wrong.replace("*", r"\*")):
            golden.check(made, numpy_kernel, cases=[wrong])


def test_an_instruction_is_one_that_is_known(case: golden.Case) -> None:
    with pytest.raises(ValueError, match=r"unknown instruction 'sm90.wgmma\.bf17'"):
        golden.check(case, numpy_kernel, instruction="sm90.wgmma.bf17")
    report = golden.check(case, numpy_kernel, instruction="float32", diagnose=False)
    assert report.passed
    assert any("judged as float32 adds them" in note for note in report.notes)


# Skipped.

SINK = spec(name="sink", lengths=(5,), sinks=(1.0, -0.5))


def takes_no_sink(
    q: Any, k: Any, v: Any, *, cu_seqlens: Any, causal: bool, softmax_scale: float, recipe_json: str
) -> dict[str, Any]:
    return numpy_kernel(
        q,
        k,
        v,
        cu_seqlens=cu_seqlens,
        causal=causal,
        softmax_scale=softmax_scale,
        recipe_json=recipe_json,
        trace=(),
    )


def test_what_a_kernel_does_not_take_counts_neither_way(tmp_path: Path) -> None:
    pack = pack_of(tmp_path / "pack", (SINK, spec(name="plain", lengths=(5,))), RECIPE)
    report = golden.check(pack, takes_no_sink, diagnose=False)
    assert [(one.status, one.note) for one in report.cases] == [
        (Status.SKIPPED, "takes no sink"),
        (Status.PASS, "forward only: nothing of the backward was given"),
    ]
    assert (report.status, report.exit_code) == (Status.PASS, 0)
    assert not report.cases[0].passed
    assert not report.cases[0].failed
    alone = golden.check(pack, takes_no_sink, cases=["sink.*"])
    assert (alone.status, alone.passed, alone.exit_code) == (Status.SKIPPED, False, 2)


# Leaks.

PLAIN = spec(name="plain", lengths=(70,), heads=1, exponent=-6)
CHANGED = Rows(tensor="v", first=69, end=70)
LEAKING = dataclasses.replace(
    spec(
        name="changed",
        lengths=(70,),
        heads=1,
        exponent=-6,
        plants=(Plant(tensor="v", token=69, head=0, channel=3, bits=0x4000),),
    ),
    twin=twin(PLAIN, "plain", CHANGED),
)


@pytest.fixture(scope="module")
def leaking(tmp_path_factory: pytest.TempPathFactory) -> golden.Pack:
    return pack_of(tmp_path_factory.mktemp("leaks") / "pack", (PLAIN, LEAKING), BF16)


def outputs(
    q: Any, k: Any, v: Any, *, by: Recipe | None = None, recipe_json: str, **settings: Any
) -> dict[str, Any]:
    """The outputs of the forward, by another recipe if one is given."""
    text = recipe_json if by is None else by.to_json()
    settings |= {"trace": (), "dout": None}
    return numpy_kernel(q, k, v, recipe_json=text, **settings)


def leaky(q: Any, k: Any, v: Any, *, recipe_json: str, **settings: Any) -> dict[str, Any]:
    """Adds the row sum in another order, which is permitted, where the last token has the planted value."""
    right = Recipe.from_json(recipe_json)
    softmax = dataclasses.replace(right.softmax, row_sum="ascending")
    turned = dataclasses.replace(right, name="turned", schedules=(), softmax=softmax)
    return outputs(
        q, k, v, by=turned if v[69, 0, 3] == 2 else None, recipe_json=recipe_json, **settings
    )


def test_results_that_are_permitted_may_leak_all_the_same(leaking: golden.Pack) -> None:
    report = golden.check(leaking, leaky, diagnose=False)
    plain, changed = report.cases
    assert plain.passed
    assert (changed.status, report.exit_code) == (Status.LEAK, 1)
    leaks = [one for one in changed.tensors if one.status is Status.LEAK]
    assert "lse" in {one.name for one in leaks}
    assert all("change with v of tokens 69 to 69, which they may" in one.note for one in leaks)
    assert golden.check(leaking, outputs, diagnose=False).passed
    # One of the twins shows nothing.
    assert golden.check(leaking, leaky, cases=["changed.*"], diagnose=False).passed


def test_a_leak_is_said_beside_what_else_is_wrong(leaking: golden.Pack) -> None:
    def kernel(q: Any, k: Any, v: Any, **settings: Any) -> dict[str, Any]:
        given = outputs(q, k, v, **settings)
        out = np.asarray(given["out"]).astype(np.float32)
        return given | {"out": (out + np.float32(v[69, 0, 3])).astype(given["out"].dtype)}

    (changed,) = [
        one
        for one in golden.check(leaking, kernel, diagnose=False).cases
        if one.name.startswith("changed")
    ]
    assert changed.status is Status.OUTSIDE_ENVELOPE
    (leak,) = [one for one in changed.tensors if one.status is Status.LEAK]
    assert leak.note.startswith("69 rows of out, the first of them 0")


# What stands beside a status.


def only(result: CaseResult, name: str) -> TensorResult:
    return next(one for one in result.tensors if one.name == name)


def test_heat_map_and_steps_are_counted(case: golden.Case) -> None:
    given = results(case)
    out = given["out"]
    # Tokens 0 to 31 are the first row of cells, 32 to 36 the second; one column, of 32 channels.
    steps = {(0, 0, 3): 1, (31, 1, 31): 2, (32, 1, 0): 3, (35, 0, 4): 4, (36, 1, 30): 7}
    for index, step in steps.items():
        assert 0x80 <= int(out[index]) & 0x7FFF < 0x7F00
        out[index] += step
    out[2, 0, 0] = 0x7FC0
    found = only(check(case, given), "out")
    assert (found.differing, found.inside, found.largest_steps) == (6, 0, 7)
    assert dict(found.steps) == {"1": 1, "2": 1, "3-4": 2, "5-8": 1, "NaN": 1}
    drawn = found.heat_map
    assert drawn is not None
    assert (drawn.rows, drawn.columns, drawn.row_size, drawn.column_size) == (
        "tokens",
        "head dim",
        32,
        32,
    )
    assert drawn.counts == ((3,), (3,))
    assert drawn.sizes == ((32 * 2 * 32,), (5 * 2 * 32,))


def test_zeros_of_both_signs_are_no_step_and_no_equals_in_operands(case: golden.Case) -> None:
    given = results(case)
    name, index = next(
        (name, tuple(np.argwhere((given[name] & 0x7F) == 0)[0]))
        for name in ("q.codes", "k.codes", "v.codes")
        if ((given[name] & 0x7F) == 0).any()
    )
    given[name][index] ^= 0x80
    found = only(check(case, given), name)
    assert (found.status, dict(found.steps)) == (Status.BIT_MISMATCH, {"0": 1})


def test_what_passes_inside_is_counted_and_drawn_nowhere(case: golden.Case) -> None:
    given = results(case)
    at = next(iter(np.argwhere(given["row_max"] != 0)))
    given["row_max"].view(np.uint32)[tuple(at)] ^= 1
    result = check(case, given)
    found = only(result, "row_max")
    assert (result.status, found.differing, found.inside) == (Status.PASS, 1, 1)
    assert (dict(found.steps), found.heat_map, found.first) == ({"1": 1}, None, None)
    assert found.envelope is not None


def test_consistent_is_of_the_outputs_alone(case: golden.Case) -> None:
    good = results(case)
    assert check(case, good).consistent is None
    stage = check(case, good | {"s.2": flipped(good["s.2"], 20)})
    assert (stage.passed, stage.consistent) == (False, True)
    output = check(case, good | {"out": flipped(good["out"], 8)})
    assert (output.passed, output.consistent) == (False, False)
    alone = {name: good[name] for name in ("out", "lse")}
    assert check(case, alone | {"out": flipped(good["out"], 8)}).consistent is False


def command_of(pack: golden.Pack, actual: Any, **settings: Any) -> list[str]:
    return [one.command for one in golden.check(pack, actual, diagnose=False, **settings).cases]


def test_the_command_repeats_the_case(
    made: Path, pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = golden.load(made)
    kernel = command_of(loaded, numpy_kernel)
    assert shlex.split(kernel[1]) == [
        *("flamia-ref", "golden", "check", str(made)),
        *("--kernel", NUMPY, "--case", SECOND),
    ]
    files = command_of(loaded, pack)
    assert shlex.split(files[0])[4:] == ["--actual", str(pack), "--case", FIRST]
    assert command_of(loaded, {FIRST: results(loaded[FIRST])}, cases=[FIRST]) == [""]
    judged = command_of(loaded, numpy_kernel, cases=[FIRST], instruction="float32")
    assert shlex.split(judged[0])[-2:] == ["--instruction", "float32"]
    for line in (kernel[1], files[0], judged[0]):
        assert cli.main(shlex.split(line)[1:]) == 0
        assert "1 case" in capsys.readouterr().out


# Schedules.


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> golden.Case:
    folder = tmp_path_factory.mktemp("schedules") / "pack"
    return pack_of(folder, (spec(name="short", lengths=(5,)),), BF16)[f"short.{BF16}"]


def test_a_row_is_of_one_schedule(short: golden.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """By envelopes made by hand: a schedule gives dQ one number up, the other one two numbers up."""
    right = short.tensors["dq"]
    known, none = np.ones(right.shape, bool), np.zeros(right.shape, bool)
    up = {BF16: 0, f"{BF16}, dq ascending": 1, f"{BF16}, dq descending": 2}
    asked = []

    def permitted(case: Any, recipe: Any, given: Any, wanted: Any, instruction: Any) -> Any:
        asked.append(recipe.name)
        bits = right + np.uint16(up[recipe.name])
        return {"dq": Permitted(low=bits, high=bits, nan=none, known=known)}

    monkeypatch.setattr(verdicts, "_permitted", permitted)

    def judged(steps: Any) -> CaseResult:
        steps = np.broadcast_to(np.asarray(steps), right.shape).astype(np.uint16)
        return check(short, results(short) | {"dq": right + steps})

    for whole in (1, 2):
        result = judged(whole)
        assert (result.passed, only(result, "dq").inside) == (True, right.size)
    assert set(asked) == set(up)
    # A row of each: nobody asks that all rows are of one schedule.
    assert judged((np.arange(5) % 2 + 1)[:, None, None]).passed
    channels = np.arange(32) % 2 + 1
    result = judged(channels)
    assert (result.status, result.departs) == (Status.OUTSIDE_ENVELOPE, "dq")
    one = np.where((np.arange(5) == 3)[:, None, None], channels, 1)
    row = only(judged(one), "dq")
    # Two heads of token 3. Which schedule a row is held to is open, so that all of it fails, or half.
    assert row.first is not None
    assert row.first.where["token"] == 3
    assert row.differing - row.inside in (32, 64)
    assert not judged(3).passed


def test_schedules_are_tried_for_what_they_change(
    case: golden.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    right = verdicts._permitted

    def permitted(case: Any, recipe: Any, *rest: Any) -> Any:
        asked.append(recipe.name)
        return right(case, recipe, *rest)

    monkeypatch.setattr(verdicts, "_permitted", permitted)
    good = results(case)
    verdicts.judge(case, {"s.2": aligned(case, "s.2", flipped(good["s.2"], 20))})
    assert asked == [RECIPE]
    asked.clear()
    verdicts.judge(case, {"dk": aligned(case, "dk", flipped(good["dk"], 9))})
    assert asked == [
        RECIPE,
        *(f"{RECIPE}, {name}" for name in ("descending", "shifted", "heads descending")),
    ]


def aligned(case: golden.Case, name: str, x: Any) -> Aligned:
    found = align(
        case.places[name], case.tensors[name], Stored(dtype=STORED[x.dtype.name], array=x)
    )
    assert isinstance(found, Aligned)
    return found


STORED = {"uint16": "U16", "float32": "F32"}


def test_a_kernel_that_fails_on_one_case_is_judged_on_the_others(made: Path) -> None:
    pack = golden.load(made)
    first = next(iter(pack))

    def kernel(q, k, v, *, cu_seqlens, causal, softmax_scale, dout=None, trace=(), **_):  # type: ignore[no-untyped-def]
        if len(q) == first.spec.tokens:
            raise RuntimeError("launch failed")
        return numpy_kernel(
            q,
            k,
            v,
            cu_seqlens=cu_seqlens,
            causal=causal,
            softmax_scale=softmax_scale,
            dout=dout,
            trace=trace,
        )

    report = golden.check(pack, kernel)
    found = {case.name: case for case in report.cases}
    assert found[first.name].status is Status.FAILED
    assert "RuntimeError: launch failed" in found[first.name].note
    assert [case.status for case in report.cases if case.name != first.name] == [Status.PASS]
    assert report.exit_code == 1
    # Alone there is nothing else to say: it is an error.
    with pytest.raises(ValueError, match="launch failed"):
        golden.check(first, kernel)


@pytest.mark.parametrize(
    ("value", "passes"), [(-1e30, True), (-1e4, True), (-9999.0, False), (1.25, False)]
)
def test_what_stands_for_a_masked_score(made: Path, value: float, passes: bool) -> None:
    case = next(iter(golden.load(made)))
    given = results(case)
    given["s.2"] = np.where(
        np.tril(np.ones(given["s.2"].shape[1:], bool)), given["s.2"], np.float32(value)
    )
    assert golden.check(case, {case.name: given}, diagnose=False).passed is passes


def test_axes_in_another_order_are_a_layout(made: Path) -> None:
    case = next(iter(golden.load(made)))
    given = results(case)
    given["out"] = np.ascontiguousarray(given["out"].swapaxes(0, 1))
    (found,) = golden.check(case, {case.name: given}, diagnose=False).cases
    (out,) = (one for one in found.tensors if one.name == "out")
    assert out.status is Status.LAYOUT
    assert "[heads, tokens, head_dim]" in out.note
