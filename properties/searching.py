"""Looking for an example that shows that a kernel lacks a property, with Hypothesis, and whether one could be found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.errors import Flaky

from flamia_ref._errors import Registry
from flamia_ref.golden.dataflow import GRADIENTS
from flamia_ref.kernels import KernelError
from flamia_ref.properties.catalogue import PROPERTIES, Gradients, Property, planted
from flamia_ref.properties.data import inputs_of
from flamia_ref.properties.drawn import Example, Space
from flamia_ref.properties.perturbing import Observed, moved_outputs
from flamia_ref.properties.simplifying import simplified
from flamia_ref.properties.strategies import examples
from flamia_ref.properties.subject import PropertyFailure, Subject
from flamia_ref.properties.witnesses import witnesses

_DATABASE = ".hypothesis/examples"


class NothingToFind(Exception):
    """A property does not apply: with this kernel, or in this space, no example could show its absence."""


class Inconclusive(Exception):
    """A search found nothing, and a control says that it could not have: the kernel may read nothing of its inputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """How much is tried, and what is remembered.

    Attributes:
        name: "dev", "ci" or "nightly".
        examples: how many are drawn for a property.
        random: whether other ones are drawn in each run.
        remembered: whether failing ones are kept in .hypothesis, and tried first the next time.
    """

    name: str
    examples: int
    random: bool
    remembered: bool


PROFILES = Registry(
    "profile",
    (
        (one.name, one)
        for one in (
            Profile(name="dev", examples=25, random=True, remembered=True),
            Profile(name="ci", examples=50, random=False, remembered=False),
            Profile(name="nightly", examples=2000, random=True, remembered=True),
        )
    ),
)
"""All profiles by name. None has a deadline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """A search that found nothing.

    Attributes:
        property: its name.
        examples: how many were tried.
        shared: in how many of them a changed token and an output that may not see it were in one block of 32 tokens;
            None where nothing is changed.
        control: whether the planted fault was found; None where none is planted.
    """

    property: str
    examples: int
    shared: int | None
    control: bool | None

    def __str__(self) -> str:
        text = f"{self.property}: {self.examples} examples"
        if self.shared is not None:
            text += f", {self.shared} with a forbidden pair in one block of 32"
        if self.shared == 0:
            text += ": no block straddled documents, add lengths that are no multiples of 32"
        return text + ("; the planted fault was found" if self.control else "")


def search(
    kernel: Any,
    property: str,
    *,
    space: Space | None = None,
    profile: Profile | str = "dev",
    first: Iterable[Example] = (),
) -> Searched:
    """Try examples of a property on a kernel, those of `first` before others.

    Raises PropertyFailure with the simplest example found, KernelError where the kernel fails or breaks its protocol,
    NothingToFind where no example could have shown anything (no backward, no length that is long enough, no forbidden
    pair in one block), Inconclusive where an output that it compares is NaN in all examples or the same for other
    inputs, or a planted fault was not found, and UnknownName for an unknown property or profile.
    """
    one = PROPERTIES[property]
    profile = PROFILES[profile] if isinstance(profile, str) else profile
    space = Space() if space is None else space
    subject = kernel if isinstance(kernel, Subject) else Subject(kernel=kernel)
    try:
        drawn = examples(property, space)
    except ValueError as error:
        raise NothingToFind(f"{property}: {error}") from None
    if one.gradients is Gradients.NEEDED:
        _require_gradients(subject, one, space)
    seen: list[Observed] = []
    for example in first:
        if example.property == property:
            seen.append(one.check(subject, example))
    failures: list[PropertyFailure] = []

    def attempt(example: Example) -> None:
        try:
            seen.append(one.check(subject, example))
        except PropertyFailure as failure:
            failures.append(failure)
            raise

    # Hypothesis remembers failing examples by the name of the test.
    attempt.__name__ = f"test_{property}"
    attempt.__qualname__ = f"{attempt.__name__} of {subject.name}"
    try:
        for example in witnesses(property, space):
            attempt(example)
        settings(
            max_examples=profile.examples,
            derandomize=not profile.random,
            database=DirectoryBasedExampleDatabase(_DATABASE) if profile.remembered else None,
            deadline=None,
            phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
            report_multiple_bugs=False,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        )(given(example=drawn)(attempt))()
    except Flaky:
        raise _flaky(failures, property) from None
    except PropertyFailure as failure:
        # Raised anew, without the notes and the frames of Hypothesis: the example is in the failure.
        simplest = _simplest(one, subject, failure)
        raise PropertyFailure(str(simplest), simplest.example) from None
    except KernelError as error:
        raise KernelError(str(error)) from error.__cause__
    found = summed(one, seen, _control(one, subject, space))
    _require_reading(one, subject, space, {name for each in seen for name in each.numbers})
    return found


def _require_reading(one: Property, subject: Subject, space: Space, compared: set[str]) -> None:
    """Raises Inconclusive where an output that was compared does not depend on the inputs: it equals anything."""
    lengths = space.at_least(2) or space.at_least(1)
    if not lengths:
        return
    if lengths[0] < 2 or space.window == 0:
        compared = compared - {
            "dq",
            "dk",
        }  # the softmax of one score is 1: they are 0 for any inputs
    inputs = [
        Example(property=one.name, lengths=(lengths[0],), family="bell", seed=seed, **space.shape)
        for seed in (0, 1)
    ]
    first, other = (
        subject.run(inputs_of(each), each, gradients=one.with_gradients) for each in inputs
    )
    still = [name for name in first if name in compared - moved_outputs(first, other)]
    if still:
        raise Inconclusive(
            f"{one.name}: {' and '.join(still)} of kernel {subject.name} did not move when all inputs were others, so"
            " finding nothing means nothing; does the kernel read its inputs?"
        )


def _simplest(one: Property, subject: Subject, failure: PropertyFailure) -> PropertyFailure:
    last = failure

    def fails(example: Example) -> bool:
        nonlocal last
        try:
            one.check(subject, example)
        except PropertyFailure as failure:
            last = failure
            return True
        except KernelError:
            pass
        return False

    simplified(fails, failure.example)
    return last


def _require_gradients(subject: Subject, one: Property, space: Space) -> None:
    example = Example(
        property=one.name,
        lengths=(space.at_least(1)[0],),
        **space.shape,
    )
    results = subject.run(inputs_of(example), example, gradients=True)
    if not any(name in results for name in GRADIENTS):
        raise NothingToFind(
            f"{one.name}: kernel {subject.name} gives none of {', '.join(GRADIENTS)}, so it has no backward to test"
        )


def _flaky(failures: list[PropertyFailure], name: str) -> Exception:
    if not failures:
        return KernelError(f"{name}: the kernel failed on an example, and not when called again")
    last = failures[-1]
    return PropertyFailure(
        f"{last}; called again with the same example it did not, so the kernel is not deterministic",
        last.example,
    )


def _control(one: Property, subject: Subject, space: Space) -> bool | None:
    """Whether the fault that is planted in front of the kernel is found."""
    if one.control is None:
        return None
    example = one.control.example(one.name, space)
    try:
        one.check(planted(one, subject), example)
    except PropertyFailure:
        return True
    return False


def summed(one: Property, seen: list[Observed], control: bool | None) -> Searched:
    """What a search was that found nothing. Raises NothingToFind and Inconclusive where it could not have."""
    if not sum(observed.elements for observed in seen):
        raise NothingToFind(
            f"{one.name}: no example had an output that may not change; add longer lengths"
        )
    blank = _blank(seen)
    if one.control is None and blank:
        raise Inconclusive(_no_number(one, blank, len(seen)))
    if one.control is None:
        return Searched(property=one.name, examples=len(seen), shared=None, control=None)
    shared = sum(bool(observed.shared) for observed in seen)
    if not shared and one.control.tokens is not None:
        raise NothingToFind(
            f"{one.name}: in none of {len(seen)} examples were a changed token and an output that may not see it in one"
            " block of 32 tokens, so no shared scale could be found; add longer lengths"
        )
    if not any(observed.alive for observed in seen):
        raise Inconclusive(
            f"{one.name}: in none of {len(seen)} examples did any output move, not even one that sees a changed"
            " token; does the kernel read its inputs?"
        )
    if blank:
        raise Inconclusive(_no_number(one, blank, len(seen)))
    if not control:
        raise Inconclusive(
            f"{one.name}: a fault that was planted in front of the kernel was not found, so finding nothing means"
            " nothing; does the kernel read its inputs?"
        )
    return Searched(property=one.name, examples=len(seen), shared=shared, control=control)


def _blank(seen: list[Observed]) -> list[str]:
    """The outputs that were compared and had no number, in no example."""
    names = dict.fromkeys(name for observed in seen for name in observed.numbers)
    return [name for name in names if not any(observed.numbers.get(name) for observed in seen)]


def _no_number(one: Property, blank: list[str], examples: int) -> str:
    return (
        f"{one.name}: all that was compared of {' and '.join(blank)} was NaN in {examples} examples, so finding nothing"
        " means nothing; does the kernel write its results?"
    )
