"""What a hunt says of kernels that misbehave, of shapes that show nothing, and of arguments that are wrong."""

import time
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import ml_dtypes
import numpy as np
import pytest

from flamia_ref.kernels import KernelError
from flamia_ref.leakage import HuntReport, Severity, hunt
from flamia_ref.leakage.search import steps
from flamia_ref.leakage.search.witnesses import Kind
from tests.leakage.planted import planted

SETTINGS: dict[str, Any] = {"lengths": (40,), "head_dim": 8, "calls": 120, "backward": False}

SAFE = planted()


def hunted(kernel: Any, **changes: Any) -> HuntReport:
    return hunt(kernel, **(SETTINGS | changes))


def wrapped(change: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """The safe kernel with something done to its results."""

    def kernel(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        return change(SAFE(q, k, v, **keywords))

    return kernel


def test_a_safe_kernel_is_found_safe_in_this_budget() -> None:
    report = hunted(SAFE)
    assert report.verdict == "none_found", report
    assert report.calls <= 120
    assert "the budget ended" in str(report)


# Kernels that fail.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: None, "it must return a dict"),
        (lambda r: {"lse": r["lse"]}, 'it gave no "out"'),
        (lambda r: r | {"out": r["out"][:-1]}, "out has shape (39, 1, 8); it must be (40, 1, 8)"),
        (lambda r: r | {"lse": r["lse"].T}, "lse has shape (40, 1); it must be (heads, tokens)"),
        (lambda r: r | {"out": r["out"].astype(np.int32)}, "out is int32; it must be float32"),
        (lambda r: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda r: r | {"out": object()}, "out is object"),
    ],
)
def test_a_kernel_that_fails_at_once_is_an_error_of_one_line(
    change: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(KernelError) as caught:
        hunted(wrapped(change))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def fails_at(large: float) -> Callable[..., Any]:
    def kernel(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        if np.abs(v.astype(np.float64)).max() > large:
            raise RuntimeError("v is too large")
        return SAFE(q, k, v, **keywords)

    return kernel


def test_failures_at_single_perturbations_are_recorded() -> None:
    report = hunted(fails_at(2.0**16))
    assert report.verdict == "none_found", report
    assert report.failures
    assert "v is too large" in report.failures[0].reason
    assert "the kernel failed at" in str(report)


def test_failures_at_most_perturbations_show_nothing() -> None:
    report = hunted(fails_at(2.0**2))
    assert report.verdict == "inconclusive"


def test_results_of_another_type_are_a_failure() -> None:
    count = 0

    def kernel(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        nonlocal count
        count += 1
        results = SAFE(q, k, v, **keywords)
        if count > 30:
            results["out"] = results["out"].astype(np.float32)
        return results

    report = hunted(kernel)
    assert any("out was bfloat16 and is float32" in one.reason for one in report.failures)
    assert not report.witnesses


def test_a_kernel_may_change_its_inputs() -> None:
    def kernel(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        results = SAFE(q, k, v, **keywords)
        v[:] = 0
        return results

    report = hunted(kernel)
    assert report.verdict == "none_found", report
    assert "the kernel changes its inputs: v" in report.notes


def test_a_kernel_that_writes_to_one_buffer_again() -> None:
    buffer = np.zeros((40, 1, 8), dtype=ml_dtypes.bfloat16)

    def kernel(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        results = SAFE(q, k, v, **keywords)
        buffer[:] = results["out"]
        return results | {"out": buffer}

    assert hunted(kernel).verdict == "none_found"


def test_failures_at_most_changes_of_one_operand_show_nothing_of_it() -> None:
    report = hunted(fails_at(2.0**4), calls=None)
    assert report.verdict == "inconclusive"
    assert any("changes of v, so little is seen of v" in one for one in report.reasons), report
    assert "failed in the hunt" in report.failures[0].reason
    suite = ElementTree.fromstring(report.to_junit())
    outcomes = {case.get("name"): [one.tag for one in case] for case in suite}
    assert outcomes["q, forward"] == outcomes["v, forward"] == ["skipped"]


def test_the_report_says_how_many_tokens_were_changed_alone() -> None:
    report = hunted(SAFE, calls=None)
    assert report.verdict == "none_found", report
    line = next(one for one in report.notes if one.startswith("tokens changed alone"))
    for operand in "qkv":
        assert f"{operand} 40 of 40, 40 of them in 3 ways or more" in line


def in_chunks(leak: bool) -> Callable[..., Any]:
    """Attention in float32 that adds up chunks of keys in an order of chance."""
    mixer = np.random.default_rng(0)

    def kernel(
        q: Any, k: Any, v: Any, *, cu_seqlens: Any, causal: bool, softmax_scale: float
    ) -> dict[str, Any]:
        q, k, v = (x[:, 0].astype(np.float64) for x in (q, k, v))
        if leak:
            unit = np.exp2(np.ceil(np.log2(np.abs(v[:32]).max(axis=0) + 1e-30)) - 7)
            v[:32] = np.round(v[:32] / unit) * unit
        s = np.where(np.tri(len(q), dtype=np.bool_), q @ k.T * softmax_scale, -np.inf)
        top = s.max(axis=1, keepdims=True)
        p = np.exp(s - top)
        total = p.sum(axis=1, keepdims=True)
        p = (p / total).astype(np.float32)
        out = np.zeros(q.shape, np.float32)
        for i in mixer.permutation(range(0, len(q), 8)):
            out = out + p[:, i : i + 8] @ v[i : i + 8].astype(np.float32)
        lse = (np.log(total) + top).astype(np.float32)
        return {"out": out[:, None], "lse": lse.T}

    return kernel


def test_a_safe_kernel_with_a_noisy_output_is_found_safe() -> None:
    report = hunted(in_chunks(False), calls=None, head_dim=16)
    assert report.verdict == "none_found", report
    assert report.tests["out"] == "exact arithmetic, then permutation"
    assert all(one.found for one in report.controls)
    assert hunted(in_chunks(True), calls=None, head_dim=16, enough=1).leaks


def test_a_leak_found_is_a_leak_whatever_fails() -> None:
    leaky = planted({"o.v": "col"})

    def kernel(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        if np.abs(q.astype(np.float64)).max() > 2.0**10:
            raise RuntimeError("no")
        return leaky(q, k, v, **keywords)

    report = hunted(kernel, enough=1)
    assert report.leaks


# Kernels that say nothing.


def test_a_constant_kernel_is_inconclusive() -> None:
    def kernel(q: Any, k: Any, v: Any, **_: Any) -> Any:
        return {"out": np.zeros(q.shape, np.float32), "lse": np.zeros((1, len(q)), np.float32)}

    report = hunted(kernel, calls=None)
    assert report.verdict == "inconclusive"
    assert any("no change of q moved" in reason for reason in report.reasons)
    assert any("the planted leak was not found" in reason for reason in report.reasons)


def test_nan_for_finite_inputs_is_said_and_shows_nothing() -> None:
    report = hunted(wrapped(lambda r: r | {"out": np.full_like(r["out"], np.nan)}), calls=None)
    assert report.verdict == "inconclusive"
    assert "out has NaN or infinities for finite inputs" in report.notes
    assert any("no change moved out" in reason for reason in report.reasons)


def test_without_a_planted_leak_found_there_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "found_by", lambda *_, **__: None)
    report = hunted(SAFE)
    assert report.verdict == "inconclusive"
    assert sum("planted leak" in reason for reason in report.reasons) == 6


def test_a_planted_leak_must_be_found_by_cases_that_the_kernel_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps, "found_by", lambda *_, **__: 10**6)
    report = hunted(SAFE)
    assert report.verdict == "inconclusive"
    assert "before case 1000001, which finds the planted leak" in report.reasons[0]


def test_a_kernel_without_a_backward_says_so() -> None:
    def kernel(
        q: Any, k: Any, v: Any, *, cu_seqlens: Any, causal: bool, softmax_scale: float
    ) -> Any:
        return SAFE(q, k, v, cu_seqlens=cu_seqlens, causal=causal, softmax_scale=softmax_scale)

    report = hunted(kernel, backward=True)
    assert report.verdict == "none_found", report
    assert "not given by the kernel, and not hunted: dq, dk, dv" in report.notes
    assert report.operands == ("q", "k", "v")
    with pytest.raises(ValueError, match="takes no window"):
        hunted(kernel, window=(4, 0))


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [
        ((1,), "no two different tokens are forbidden to each other"),
        ((1, 1, 1), "no document has two tokens that share a block"),
        ((0, 0), "there are no tokens"),
    ],
)
def test_shapes_that_show_nothing_are_said(lengths: tuple[int, ...], reason: str) -> None:
    report = hunted(SAFE, lengths=lengths)
    assert report.verdict == "inconclusive"
    assert report.exit_code == 2
    assert report.calls == 0
    assert reason in report.reasons[0]


def test_full_attention_of_one_document_has_forbidden_rows_only() -> None:
    report = hunted(SAFE, causal=False)
    assert set(report.hunted["q"]) == {Severity.PAST}
    assert report.hunted["k"] == {}
    assert report.verdict == "none_found"


# Kernels that keep something, and kernels that differ by chance.


def test_state_between_calls_is_found() -> None:
    report = hunted(planted(delayed=True), calls=300)
    witness = report.witnesses[0]
    assert witness.kind is Kind.STATE
    assert "of a later call with the inputs unchanged" in witness.sentence
    assert {one.kind for one in report.witnesses} == {Kind.STATE}
    assert witness.reproduce(planted(delayed=True))
    assert not witness.reproduce(planted())


def test_a_leak_inside_a_kernel_with_state() -> None:
    report = hunted(planted({"s.k": "col"}, delayed=True), calls=300)
    assert {one.kind for one in report.witnesses} == {Kind.STATE, Kind.PAYLOAD}


NOISY: dict[str, Any] = {"backward": True, "calls": None, "head_dim": 16}


@pytest.mark.nightly
@pytest.mark.parametrize("noise", [("dq",), ("dq", "dk", "dv", "out")])
def test_orders_by_chance_are_no_leaks(noise: tuple[str, ...]) -> None:
    report = hunted(planted(noise=noise), **NOISY)
    assert report.verdict == "none_found", report
    assert report.tests["dq"] == "exact arithmetic, then permutation"


@pytest.mark.nightly
@pytest.mark.parametrize(("use", "operand"), [("dq.k", "k"), ("dp.do", "dout"), ("dq.ds", "dout")])
def test_leaks_under_noise_are_found(use: str, operand: str) -> None:
    report = hunted(planted({use: "col"}, noise=("dq",)), **NOISY)
    assert operand in {one.operand for one in report.witnesses}


def test_noise_and_a_leak() -> None:
    shape: dict[str, Any] = {"lengths": (64,), "head_dim": 32}
    safe = hunted(planted(noise=("out",)), calls=150, **shape)
    assert not safe.witnesses
    assert "equal calls give other bits of out" in safe.notes
    assert "the budget ended before out was tested" in safe.reasons
    leaky = hunted(planted({"o.v": "col"}, noise=("out",)), calls=None, enough=1, **shape)
    assert leaky.witnesses[0].operand == "v"


def test_noise_that_shows_late_is_no_leak() -> None:
    count = 0

    def kernel(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        nonlocal count
        results = SAFE(q, k, v, **keywords)
        if np.abs(v.astype(np.float64)).max() > 2.0**10:
            count += 1
            results["out"].view(np.uint16)[3] ^= count % 3 == 1
        return results

    report = hunted(kernel, calls=200)
    assert not report.witnesses
    assert "equal calls give other bits of out" in report.notes
    assert report.verdict == "inconclusive"  # nothing is left for the tests of it


# Budgets.


def test_calls_are_counted() -> None:
    calls = 0

    def kernel(*arrays: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        return SAFE(*arrays, **keywords)

    report = hunted(kernel, calls=60)
    assert calls == report.calls <= 60


@pytest.mark.parametrize("calls", [1, 5, 12, 25])
def test_a_small_budget_is_inconclusive(calls: int) -> None:
    report = hunted(SAFE, calls=calls)
    assert report.verdict == "inconclusive"
    assert report.calls <= calls


def test_a_slow_kernel_is_stopped_between_calls() -> None:
    def kernel(*arrays: Any, **keywords: Any) -> Any:
        time.sleep(0.1)
        return SAFE(*arrays, **keywords)

    start = time.monotonic()
    report = hunted(kernel, seconds=1, calls=None)
    assert time.monotonic() - start < 2
    assert report.verdict == "inconclusive"
    assert 0 < report.calls < 15


def test_progress_is_told() -> None:
    lines: list[tuple[int, int, str]] = []
    report = hunted(SAFE, progress=lambda *one: lines.append(one))
    assert lines[-1][0] == report.cases
    assert [done for done, _, _ in lines] == sorted(done for done, _, _ in lines)


# Arguments.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (-1,)}, "lengths"),
        ({"lengths": ()}, "lengths must be whole numbers"),
        ({"head_dim": 0}, "head_dim is 0; it must be 1 or more"),
        ({"head_dim": 2.5}, "head_dim is 2.5; it must be a whole number"),
        ({"heads": 3, "kv_heads": 2}, "heads must be a multiple of kv_heads"),
        ({"calls": 0}, "calls is 0; it must be 1 or more"),
        ({"seconds": 0}, "seconds is 0; it must be above 0"),
        ({"seconds": float("nan")}, "seconds is nan; it must be above 0"),
        ({"seconds": "1"}, "seconds is '1'; it must be a number"),
        ({"seed": -1}, "seed is -1"),
        ({"enough": 0}, "enough is 0"),
        ({"causal": 1}, "causal is 1; it must be True or False"),
        ({"window": 3}, "window is 3"),
        ({"softmax_scale": 0}, "softmax_scale is 0; it must be above 0"),
        ({"severities": ("forwards",)}, "did you mean 'forward'"),
        ({"severities": ()}, "severities is empty"),
        ({"executor": 3}, "executor is 3; it must be a concurrent.futures.Executor"),
        ({"alignment": "top_left"}, "the kernel protocol has no alignment"),
        ({"backward": None}, "backward is None"),
    ],
)
def test_wrong_arguments_are_refused_in_a_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        hunted(SAFE, **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("subject", "message"),
    [("cudnn", "unknown recipe 'cudnn'"), (3, "a hunt is given 3; give a recipe")],
)
def test_what_cannot_be_hunted_is_refused(subject: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        hunted(subject)
