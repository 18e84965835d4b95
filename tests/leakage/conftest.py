"""The demonstration, run once for all tests here."""

import pytest

from flamia_ref.leakage.demo import Demo, demo


@pytest.fixture(scope="session")
def shown() -> Demo:
    """The demonstration as the command runs it."""
    return demo()
