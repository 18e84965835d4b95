"""Golden cases as tests of pytest: what the fixture `golden_case` gives, and one report of a whole run.

The plugin imports this where a test takes the fixture, or an option asks for a report.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flamia_ref.golden import arrays, expectations
from flamia_ref.golden.gathering import Finding, gathered
from flamia_ref.golden.pack import Case, load
from flamia_ref.report.model import CaseResult, Report, Status

if TYPE_CHECKING:
    from flamia_ref.golden.cases import CaseSpec

    class _Failed(Exception):
        def __init__(self, message: str, pytrace: bool) -> None: ...
else:
    _Failed = pytest.fail.Exception

ATTRIBUTE = "flamia_golden"  # of a test's report: what crosses from a worker, as plain data
_FOUND: pytest.StashKey[list[str]] = pytest.StashKey()


class CaseFailed(_Failed):
    """A kernel does not pass a case: what an expected failure may be, unlike one that cannot be run."""

    __module__ = "builtins"  # pytest's summaries then leave it out, as for its own


class GoldenCase:
    """One case of the pack of --flamia-pack, for a test to run its kernel on. `str` is its name.

    `case` is the case with all its tensors, `spec` its data: lengths, causal, softmax_scale, why.
    """

    def __init__(
        self, case: Case, record: Callable[[str, object], None], found: list[Report]
    ) -> None:
        self.case = case
        self._record = record
        self._reports = found

    def __str__(self) -> str:
        return self.case.name

    @property
    def spec(self) -> CaseSpec:
        """The data of the case."""
        return self.case.spec

    def inputs(
        self, library: str = "numpy", device: Any = None, *, typed: bool = True
    ) -> dict[str, Any]:
        """Return copies of the inputs as arrays of a library: `flamia_ref.golden.arrays.inputs_for`.

        q, k, v and dout in bfloat16, cu_seqlens in int32, and cu_seqlens_k and sink where the case has
        them.
        """
        return arrays.inputs_for(self.case, library, device, typed=typed)

    def operands(
        self, library: str = "numpy", device: Any = None, *, typed: bool = False
    ) -> dict[str, Any]:
        """Return copies of the codes and scales that the contractions take: `arrays.operands_for`."""
        return arrays.operands_for(self.case, library, device, typed=typed)

    def check(self, results: Mapping[str, Any] | Callable[..., Any] | object, **how: Any) -> Report:
        """Compare a kernel's results, a dict of arrays by name, or run a kernel, whole or in stages.

        The test fails with the report, and is skipped where the kernel takes no such case. `how` are
        keywords of `flamia_ref.golden.check`, such as `repeats`.
        """
        __tracebackhide__ = True
        from flamia_ref import golden, kernels

        actual: Any = kernels.staged(results)
        if actual is None:
            named = isinstance(results, Mapping)
            actual = {self.case.name: results} if named or not callable(results) else results
        try:
            report = golden.check(self.case, actual, **how)
        except kernels.Unsupported as error:
            report = self._without_results(actual, Status.SKIPPED, error.note)
        except kernels.KernelFailed as error:
            report = self._without_results(actual, Status.FAILED, str(error))
        except (ValueError, TypeError) as error:
            raise _Failed(str(error), pytrace=False) from None
        self._reports.append(report)
        (result,) = report.cases
        self._note(result)
        if report.status is Status.SKIPPED:
            raise pytest.skip.Exception(result.note or "the kernel takes no such case")
        if report.status is Status.FAILED:  # no failure that a file can expect: nothing was judged
            raise _Failed(result.note, pytrace=False)
        if not report.passed:
            raise CaseFailed(f"{headline(result)}\n{report}", pytrace=False)
        return report

    def _without_results(self, kernel: Any, status: Status, note: str) -> Report:
        from flamia_ref import kernels

        result = CaseResult(
            name=self.case.name,
            status=status,
            why=self.case.spec.why,
            flags=self.case.spec.flags,
            note=note,
        )
        return Report(
            pack=str(self.case.folder),
            subject=kernels.name_of(kernel),
            numerics_version=self.case.numerics_version,
            cases=(result,),
        )

    def _note(self, result: CaseResult) -> None:
        """Record what JUnit files then hold as properties of the test."""
        self._record("recipe", self.case.entry.recipe)
        self._record("numerics version", self.case.numerics_version)
        self._record("evidence", str(self.case.recipe.evidence))
        self._record("status", str(result.status))
        if result.departs is not None:
            self._record("departs", result.departs)
        for diagnosis in result.diagnoses[:1]:
            self._record("diagnosis", diagnosis.sentence)


def headline(result: CaseResult) -> str:
    """Return on one line what is wrong first: the tensor, the place, code and scale, the diagnosis."""
    first = result.first
    if first is None:
        return f"{result.name}: {result.status}" + (f"; {result.note}" if result.note else "")
    parts = [f"{first.name}: {first.status}"]
    if first.differing:
        parts[0] += f", {first.differing} of {first.elements} elements"
    if first.first is not None:
        parts.append(", ".join(f"{name} {at}" for name, at in first.first.where.items()))
        what = "scale " if first.first.code is not None else ""
        parts.append(f"{what}{first.first.element}")
        if first.first.scale is not None:
            parts.append(f"scale {first.first.scale}")
    elif first.note:
        parts.append(first.note)
    parts += [one.sentence for one in result.diagnoses[:1]]
    return "; ".join(parts)


def parameters(
    folder: str, patterns: Sequence[str], expected: Mapping[str, expectations.Expectation]
) -> list[Any]:
    """Return a parameter of pytest for each case that is chosen, with its id and its marks.

    Raises ValueError for a damaged pack, and for a name that means no case of it.
    """
    pack = load(folder)
    known = expectations.by_case(expected, pack)
    cases = expectations.chosen(pack, patterns) if patterns else list(pack)
    places = {name: place for place, name in enumerate(pack.cases)}
    return [
        pytest.param((case, places[case.name]), id=case.name, marks=_marks(known.get(case.name)))
        for case in cases
    ]


def _marks(expectation: expectations.Expectation | None) -> list[Any]:
    if expectation is None:
        return []
    if expectation.outcome is expectations.Outcome.SKIP:
        return [pytest.mark.skip(reason=expectation.reason)]
    return [pytest.mark.xfail(reason=expectation.reason, strict=True, raises=CaseFailed)]


def golden_case(request: pytest.FixtureRequest) -> Iterator[GoldenCase]:
    """Return the case of a test, whose checks go to the report of the run. A generator: it ends with the test."""
    case, place = request.param
    found: list[Report] = []
    # The fixture record_property does the same, and warns where the family of JUnit files is xunit2.
    properties = request.node.user_properties
    yield GoldenCase(case, lambda name, value: properties.append((name, value)), found)
    tested = [[request.node.nodeid, place, report.to_json()] for report in found]
    request.node.stash[_FOUND] = [json.dumps(one) for one in tested]


class Gatherer:
    """Collects the reports of all tests, of xdist's workers too, and writes them as files once."""

    def __init__(self, pack: str, *, html: str | None, as_json: str | None) -> None:
        self.pack, self.html, self.json = pack, html, as_json
        self.tested: list[Finding] = []
        self.notes: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take what a test found, from this process or from a worker."""
        for text in getattr(report, ATTRIBUTE, ()):
            test, place, found = json.loads(text)
            self.tested.append(Finding(test=test, place=place, report=found))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the files."""
        report = gathered(self.tested, pack=self.pack)
        for path, render in ((self.html, report.to_html), (self.json, report.to_json)):
            if path is None:
                continue
            try:
                Path(path).write_text(render(), encoding="utf-8")
                self.notes.append(f"{os.fspath(path)}: {len(report.cases)} cases checked")
            except OSError as error:
                session.exitstatus = pytest.ExitCode.USAGE_ERROR
                self.notes.append(f"cannot write {path}: {error.strerror or error}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what was written."""
        terminalreporter.section("flamia")
        for note in self.notes:
            terminalreporter.line(note)


def finish(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Add what a test found to its report, and leave the first line of a failure to summaries.

    pytest's summary, where the environment has CI, and JUnit files would have the whole text twice.
    """
    if call.when == "teardown" and _FOUND in item.stash:
        setattr(report, ATTRIBUTE, item.stash[_FOUND])
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None and call.excinfo is not None and call.excinfo.errisinstance(CaseFailed):
        crash.message = crash.message.partition("\n")[0]
