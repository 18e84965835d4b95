"""What a check found, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """The verdict on a tensor, a case or a report. Only PASS passes."""

    PASS = "pass"  # equal bit for bit
    BIT_MISMATCH = "bit mismatch"  # some elements differ
    SHAPE = "shape mismatch"
    DTYPE = "dtype mismatch"
    MISSING = "missing"  # an output, or a whole case, was not given
    UNKNOWN = "unknown tensor"  # a name that is no tensor of the case


@dataclass(frozen=True, kw_only=True, slots=True)
class Bits:
    """One stored number: its bits in hexadecimal, and its value as text."""

    bits: str
    value: str

    def __str__(self) -> str:
        return f"{self.bits} ({self.value})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """What was expected and what was given. None: not given."""

    expected: Bits
    actual: Bits | None

    def __str__(self) -> str:
        return f"expected {self.expected}, actual {self.actual or 'not given'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first element of a tensor that differs.

    `where` names its place in the order of reading: document, head, token, tile, block, element.
    `element` holds the number itself; beside a code stands the scale of its block, beside a scale
    the first code under it.
    """

    where: Mapping[str, int | str]
    index: tuple[int, ...]
    element: Pair
    scale: Pair | None = None
    code: Pair | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorResult:
    """The comparison of one tensor.

    `differing` of `elements` differ. `largest_steps` is the largest distance in representable
    numbers, and `largest` in value; None where a side is NaN or nothing differs. `note` says what
    else there is to say.
    """

    name: str
    stage: str
    status: Status
    elements: int = 0
    differing: int = 0
    largest_steps: int | None = None
    largest: float | None = None
    first: Difference | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """The comparison of one case, its tensors in the order of the dataflow.

    `departs` is the first stage that departs. `suspects` are stages before it that were not given
    and lead to it: where there are any, that it is the first is an inference.
    """

    name: str
    status: Status
    tensors: tuple[TensorResult, ...] = ()
    not_given: tuple[str, ...] = ()
    departs: str | None = None
    suspects: tuple[str, ...] = ()
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether every tensor is equal and every output was given."""
        return self.status is Status.PASS

    @property
    def first(self) -> TensorResult | None:
        """The first tensor that does not pass."""
        return next((one for one in self.tensors if one.status is not Status.PASS), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The comparison of a kernel with a pack. `str(report)` is its text."""

    pack: str
    subject: str
    numerics_version: int
    evidence: Mapping[str, str] = field(default_factory=dict)
    cases: tuple[CaseResult, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> Status:
        """The status of the first case that does not pass, or PASS."""
        return next((case.status for case in self.cases if not case.passed), Status.PASS)

    @property
    def passed(self) -> bool:
        """Whether there is a case, and every case passes."""
        return bool(self.cases) and all(case.passed for case in self.cases)

    @property
    def exit_code(self) -> int:
        """Exit status of a command that reports this: 0 passed, 1 not."""
        return 0 if self.passed else 1

    def to_text(self) -> str:
        """Return the report for people."""
        from flamia_ref.report.text import render

        return render(self)

    def to_json(self) -> str:
        """Return the report as JSON."""
        from flamia_ref.report.document import render

        return render(self)

    def __str__(self) -> str:
        return self.to_text()
