"""What a rule of the simulator rests on."""

from collections.abc import Iterable
from enum import StrEnum

from flamia_ref._errors import unknown_name


class Evidence(StrEnum):
    """The label of a rule, from the strongest to the weakest. `meaning` says it in one line.

    Labels are strings and compare by the alphabet: compare `rank`, or ask `weakest`.
    """

    meaning: str

    SPECIFIED = "specified", "a section of a published standard says so"
    MEASURED = "measured", "observed on a device; the rule names it and the number of cases"
    SOURCE = "source", "read in a kernel's public code"
    SIMULATED = "simulated", "taken from another simulator's model"
    DERIVED = "derived", "follows from labelled rules by proof or exhaustive check"
    ASSUMED = "assumed", "our reading of an abstract, or a rule carried to an unmeasured device"

    def __new__(cls, value: str, meaning: str = "") -> "Evidence":
        """Keep the meaning beside the value; looking a label up takes the value alone."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    @property
    def rank(self) -> int:
        """Place in the order of strength, 0 for the strongest."""
        return list(Evidence).index(self)


def weakest(labels: Iterable[Evidence | str]) -> Evidence:
    """Return the weakest of some labels: all that a whole made of such steps may claim.

    Raises ValueError for an unknown label, and where there is no label, since a step without one
    is not a strong one.
    """
    members = [_member(label) for label in labels]
    if not members:
        raise ValueError("no evidence label given; every rule carries one")
    return max(members, key=lambda label: label.rank)


def _member(label: Evidence | str) -> Evidence:
    try:
        return Evidence(label)
    except ValueError:
        raise unknown_name("evidence label", label, Evidence) from None
