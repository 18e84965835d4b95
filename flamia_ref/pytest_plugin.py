"""The pytest plugin: property suites on a kernel, and golden cases as tests.

At import it needs the standard library and pytest only. It does nothing until an option or a fixture of it is used:

- ``pytest --pyargs flamia_ref.properties --flamia-kernel module:function`` runs the property suites on a kernel.
- ``--flamia-pack DIR`` gives the fixture `golden_case`: a test that takes it runs once for each case of the pack.
  What it is, is in `flamia_ref.golden.testing`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from flamia_ref.golden.expectations import Expectation
    from flamia_ref.golden.testing import GoldenCase
    from flamia_ref.properties.suite import Suite

    class _Failed(Exception):
        def __init__(self, message: str, pytrace: bool) -> None: ...
else:
    _Failed = pytest.fail.Exception

_PROFILES = ("dev", "ci", "nightly")
_NO_KERNEL = (
    "no kernel was given: add --flamia-kernel module:function, a function of q, k, v and the keywords of"
    " flamia_ref.kernels"
)
_NO_PACK = "no pack was given: add --flamia-pack DIR, a folder that `flamia-ref golden make` wrote"
_NOTE = "flamia"
_EXPECTED: pytest.StashKey[Mapping[str, Expectation]] = pytest.StashKey()
_GOLDEN: pytest.StashKey[list[Any]] = pytest.StashKey()  # the parameters of golden_case, read once


class PropertyFailed(_Failed):
    """A kernel lacks a property: what an expected failure may be, unlike a kernel that cannot be run."""

    __module__ = "builtins"  # pytest's summaries then leave it out, as for its own


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, all of which begin with --flamia-."""
    group = parser.getgroup("flamia", "flamia_ref: property suites and golden packs")
    group.addoption(
        "--flamia-kernel",
        metavar="MODULE:FUNCTION",
        help="the kernel that the property suites run on",
    )
    group.addoption(
        "--flamia-recipe",
        metavar="NAME|FILE",
        help="the recipe that a kernel which takes one is called with",
    )
    group.addoption(
        "--flamia-profile",
        choices=_PROFILES,
        help="how much is tried: dev 25 examples a property, ci 50 and always the same, nightly 2000; ci where the"
        " environment has CI, else dev",
    )
    group.addoption(
        "--flamia-max-examples",
        type=_count(1),
        metavar="N",
        help="examples a property, whatever the profile",
    )
    group.addoption("--flamia-heads", type=_count(1), default=2, metavar="N", help="query heads: 2")
    group.addoption(
        "--flamia-kv-heads", type=_count(1), default=1, metavar="N", help="key/value heads: 1"
    )
    group.addoption(
        "--flamia-head-dim", type=_count(1), default=64, metavar="N", help="channels: 64"
    )
    group.addoption(
        "--flamia-lengths",
        type=_lengths,
        metavar="N,N,...",
        help="the lengths that documents may have: 0,1,31,32,33,127,128,129",
    )
    group.addoption(
        "--flamia-documents",
        type=_count(1),
        default=3,
        metavar="N",
        help="documents of an example at most: 3",
    )
    group.addoption(
        "--flamia-window",
        type=_count(0),
        metavar="N",
        help="earlier keys that a query sees besides its own, for kernels that take a window: all",
    )
    group.addoption(
        "--flamia-expect",
        metavar="FILE",
        help="TOML or JSON that says which properties are skipped or expected to fail, and why",
    )
    group.addoption(
        "--flamia-save-examples",
        metavar="FILE",
        help="add each failing example to a file, as an @example line",
    )
    group.addoption(
        "--flamia-examples", metavar="FILE", help="@example lines that are tried before all others"
    )
    group.addoption(
        "--flamia-pack", metavar="DIR", help="the golden pack that golden_case runs through"
    )
    group.addoption(
        "--flamia-cases",
        metavar="NAME|GLOB",
        action="append",
        default=[],
        help="the cases of the pack that golden_case runs through: all; may be given again",
    )
    group.addoption(
        "--flamia-golden-expect",
        metavar="FILE",
        help="TOML or JSON that says which cases are skipped or expected to fail, and why",
    )
    group.addoption(
        "--flamia-html", metavar="FILE", help="write one report of all cases that were checked"
    )
    group.addoption("--flamia-report-json", metavar="FILE", help="the same as data")
    parser.addini("flamia_pack", "the same as --flamia-pack", default="")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and read what is expected of the kernel."""
    config.addinivalue_line(
        "markers",
        "flamia_property(name): a test of one property of a kernel (flamia_ref.properties)",
    )
    path = config.getoption("--flamia-expect")
    if path is not None:
        from flamia_ref.properties.files import read_expectations

        with _refused():
            config.stash[_EXPECTED] = read_expectations(path)
    html, as_json = (config.getoption(name) for name in ("--flamia-html", "--flamia-report-json"))
    at_home = not hasattr(config, "workerinput")  # xdist's workers send what they found here
    if at_home and (html is not None or as_json is not None):
        from flamia_ref.golden.testing import Gatherer

        with _refused():
            for file in (html, as_json):
                _check_folder(file)
        config.pluginmanager.register(Gatherer(_pack_of(config), html=html, as_json=as_json))


def _check_folder(file: str | None) -> None:
    """Refuse a file in a folder that is not there, or in a pack, before hours of tests, not after them."""
    if file is not None and not os.path.isdir(os.path.dirname(file) or "."):
        raise ValueError(f"cannot write {file}: there is no folder {os.path.dirname(file)}")
    if file is not None:
        from pathlib import Path

        from flamia_ref.golden.replacing import require_outside_packs

        require_outside_packs(Path(file))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the properties that cannot be tested, and those that a file says to skip or to expect to fail."""
    expected = config.stash.get(_EXPECTED, {})
    for item in items:
        marker = item.get_closest_marker("flamia_property")
        if marker is None:
            continue
        expectation = expected.get(str(marker.args[0]))
        if config.getoption("--flamia-kernel") is None:
            item.add_marker(pytest.mark.skip(reason=_NO_KERNEL))
        elif expectation is not None and expectation.outcome == "skip":
            item.add_marker(pytest.mark.skip(reason=expectation.reason))
        elif expectation is not None:
            item.add_marker(
                pytest.mark.xfail(reason=expectation.reason, strict=True, raises=PropertyFailed)
            )


@pytest.fixture(scope="session")
def flamia_suite(pytestconfig: pytest.Config) -> Suite:
    """The kernel of --flamia-kernel with the shapes, the profile and the examples of the other options."""
    option = pytestconfig.getoption
    if option("--flamia-kernel") is None:
        pytest.skip(_NO_KERNEL)
    if importlib.util.find_spec("hypothesis") is None:
        pytest.fail(
            "the property suites need Hypothesis: pip install 'flamia-ref[properties]'",
            pytrace=False,
        )
    from flamia_ref.properties.drawn import LENGTHS, Space
    from flamia_ref.properties.files import read_examples
    from flamia_ref.properties.suite import Suite, profile_named, subject_named

    try:
        name = option("--flamia-profile") or ("ci" if os.environ.get("CI") else "dev")
        examples = option("--flamia-examples")
        return Suite(
            subject=subject_named(option("--flamia-kernel"), option("--flamia-recipe")),
            space=Space(
                heads=option("--flamia-heads"),
                kv_heads=option("--flamia-kv-heads"),
                head_dim=option("--flamia-head-dim"),
                lengths=option("--flamia-lengths") or LENGTHS,
                documents=option("--flamia-documents"),
                window=option("--flamia-window"),
            ),
            profile=profile_named(name, option("--flamia-max-examples")),
            first=() if examples is None else read_examples(examples),
            save_to=option("--flamia-save-examples"),
        )
    except (ValueError, OSError) as error:
        raise _Failed(str(error), pytrace=False) from None


@pytest.fixture
def flamia_hold(
    flamia_suite: Suite, record_property: Callable[[str, object], None]
) -> Callable[[str], None]:
    """Hold the kernel to a property by its name: the test fails with the simplest example, or is skipped with why."""
    return functools.partial(_hold, flamia_suite, record_property)


def _hold(suite: Suite, record: Callable[[str, object], None], name: str) -> None:
    __tracebackhide__ = True
    from flamia_ref.kernels import KernelError
    from flamia_ref.properties.searching import Inconclusive, NothingToFind
    from flamia_ref.properties.subject import PropertyFailure

    try:
        record(_NOTE, suite.search(name))
    except PropertyFailure as failure:
        raise PropertyFailed(str(failure), pytrace=False) from None
    except NothingToFind as nothing:
        record(_NOTE, str(nothing))
        raise pytest.skip.Exception(str(nothing)) from None
    except (KernelError, Inconclusive, ValueError) as error:
        raise _Failed(str(error), pytrace=False) from None


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what each property was tested with, and, where no kernel was given, what to give."""
    reports = [
        report
        for outcome in ("passed", "skipped", "xfailed", "xpassed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if hasattr(report, "user_properties")
    ]
    notes = [text for report in reports for name, text in report.user_properties if name == _NOTE]
    missing = any(_NO_KERNEL in str(report.longrepr) for report in reports if report.skipped)
    if missing:
        notes.append(f"nothing was tested: {_NO_KERNEL}")
        notes.append(
            "for example: pytest --pyargs flamia_ref.properties"
            " --flamia-kernel flamia_ref.golden.simulator:numpy_kernel"
        )
    if notes:
        terminalreporter.section("flamia")
        for note in notes:
            terminalreporter.line(note)


@pytest.fixture
def golden_case(request: pytest.FixtureRequest) -> Iterator[GoldenCase]:
    """One case of the pack of --flamia-pack: a test that takes it runs once for each of them.

    `golden_case.check(kernel)` runs a kernel, `golden_case.check(results)` compares a dict of arrays
    that were made from `golden_case.inputs()` or `golden_case.operands()`.
    """
    from flamia_ref.golden import testing

    yield from testing.golden_case(request)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what golden_case found to the report of a test."""
    report = yield
    if "golden_case" in getattr(item, "fixturenames", ()) and _pack_of(item.config):
        from flamia_ref.golden import testing

        testing.finish(item, call, report)
    return report


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `golden_case` once for each case, in the order of the pack."""
    if "golden_case" not in metafunc.fixturenames:
        return
    config = metafunc.config
    folder = _pack_of(config)
    if not folder:
        cases = [pytest.param(None, marks=pytest.mark.skip(reason=_NO_PACK), id="no-pack")]
    elif _GOLDEN in config.stash:
        cases = config.stash[_GOLDEN]
    else:
        from flamia_ref.golden import testing
        from flamia_ref.golden.expectations import read_expectations

        with _refused():
            file = config.getoption("--flamia-golden-expect")
            expected = {} if file is None else read_expectations(file, what="case")
            cases = testing.parameters(folder, config.getoption("--flamia-cases"), expected)
        config.stash[_GOLDEN] = cases
    metafunc.parametrize("golden_case", cases, indirect=True)


def _pack_of(config: pytest.Config) -> str:
    """The folder of the option, or that of the ini file, which is relative to it; "" for none."""
    given = config.getoption("--flamia-pack")
    if given:
        return str(given)
    written = str(config.getini("flamia_pack"))
    beside = os.path.dirname(config.inipath) if config.inipath else ""
    return os.path.join(beside, written) if written else ""


@contextmanager
def _refused() -> Iterator[None]:
    """Turn the error of a file into a usage error of pytest, of one line."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise pytest.UsageError(str(error)) from None


def _count(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise ValueError
        return value

    number.__name__ = f"whole number of at least {least}"
    return number


def _lengths(text: str) -> tuple[int, ...]:
    whole = _count(0)
    return tuple(whole(part) for part in text.split(","))


_lengths.__name__ = "list of lengths"
