"""A line at the end of a run: how much was compared."""

import pytest

from tests.formats.live.inputs import SEED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    total = {"blocks": 0, "outside": 0, "numbers": 0}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for key, value in report.user_properties:
                if "/formats/live/" in report.nodeid and report.when == "call" and key in total:
                    total[key] += int(str(value))
    if any(total.values()):
        terminalreporter.write_line(
            f"Libraries themselves, seed {SEED}: {total['blocks']:,} blocks and"
            f" {total['numbers']:,} casts compared, {total['outside']:,} blocks out of contract"
        )
