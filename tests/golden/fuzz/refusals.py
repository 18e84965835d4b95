"""The only ways in which reading what nobody vouches for may end."""

import time
from collections.abc import Callable
from typing import Any

# Of this process, not of the clock: other work on the machine does not count.
SECONDS = 1.0
LONGEST = 2000  # characters of a message, a path of the system's greatest length among them


def ends_well(call: Callable[[], Any]) -> str | None:
    """Return the message of the ValueError that a call raised, None where it raised none.

    Any other error goes on. The message must be one printable line of bounded length, and the call
    must not take long.
    """
    started = time.process_time()
    message = None
    try:
        call()
    except ValueError as error:
        message = str(error)
    spent = time.process_time() - started
    assert spent < SECONDS, f"{spent:.2f} s, then {message}"
    if message is not None:
        assert message.isprintable(), message
        assert 0 < len(message) < LONGEST, message
    return message


def refused(call: Callable[[], Any]) -> str:
    """Return the message of the ValueError that a call must raise."""
    message = ends_well(call)
    assert message is not None, "it was accepted"
    return message
