"""What a check found, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """The verdict on a tensor, a case or a report. Only PASS passes."""

    PASS = "pass"  # equal bit for bit, or inside the envelope where the recipe leaves an order open
    BIT_MISMATCH = "bit mismatch"  # some elements differ where one value is permitted
    OUTSIDE_ENVELOPE = (
        "outside envelope"  # no order of additions that the recipe permits gives them
    )
    SHAPE = "shape mismatch"
    DTYPE = "dtype mismatch"
    LAYOUT = "layout mismatch"  # the right elements in another order
    NAN_PATTERN = "nan pattern"  # NaN where none may be, or none where it must
    MISSING = "missing"  # an output, or a whole case, was not given
    NONDETERMINISTIC = "nondeterministic"  # two calls on the same inputs gave different bits
    LEAK = "leak"  # twins of the pack differ where they may not
    FAILED = "failed"  # the kernel raised, or returned no results
    UNKNOWN = "unknown tensor"  # a name that is no tensor of the case
    SKIPPED = "skipped"  # the kernel takes no such input as the case has; neither passed nor failed


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
    the first code under it. `before` is the exact value of a code, or of a rounded float, before it was
    rounded, and `boundary` its distance from there to the nearest value that is rounded otherwise, in
    steps of the format; None where the pack does not hold what it is made of.
    """

    where: Mapping[str, int | str]
    index: tuple[int, ...]
    element: Pair
    scale: Pair | None = None
    code: Pair | None = None
    before: float | None = None
    boundary: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Width:
    """How wide the envelope of a tensor is.

    `relative` is the mean width of its elements over the root mean square of the tensor, `ambiguous`
    the number of elements that may have more than one value in the tensor's own format, `unbounded`
    the number of those that may have any: they were not judged.
    """

    relative: float
    ambiguous: int
    unbounded: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatMap:
    """Where in a tensor elements fail, counted by cells.

    A row of `counts` is `row_size` steps along the axis `rows`, a column `column_size` along
    `columns`; all other axes are added up. `sizes` counts the elements of each cell.
    """

    rows: str
    columns: str
    row_size: int
    column_size: int
    counts: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorResult:
    """The comparison of one tensor.

    `differing` of `elements` differ; `inside` of those are permitted by the envelope, all others
    fail. `largest_steps` is the largest distance in representable numbers, and `largest` in value;
    None where a side is NaN or nothing differs. `steps` counts the elements that differ by their
    distance in representable numbers: "0" for zeros of different sign, "1", "2", "3-4", "5-8", ...,
    and "NaN". `note` says what else
    there is to say.
    """

    name: str
    stage: str
    status: Status
    elements: int = 0
    differing: int = 0
    inside: int = 0
    envelope: Width | None = None
    heat_map: HeatMap | None = None
    steps: Mapping[str, int] = field(default_factory=dict)
    largest_steps: int | None = None
    largest: float | None = None
    first: Difference | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """A known mistake that explains the data of a stage that departs.

    `mistake` is its name, `sentence` says it for people. With the mistake made, `explained` of the
    `failing` elements of tensor `name` come out as given.
    """

    mistake: str
    sentence: str
    name: str
    explained: int
    failing: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """The comparison of one case, its tensors in the order of the dataflow.

    `why` and `flags` are those of the case. `departs` is the first stage that departs. `suspects`
    are stages before it that were not given and lead to it: where there are any, that it is the first
    is an inference. `consistent`: whether every output is what some permitted way from the inputs to
    the outputs gives, whatever the stages between; None where that was not asked. `diagnoses`: known
    mistakes that explain the first stage that departs, the best one first. `command`: the line that
    repeats this case alone.
    """

    name: str
    status: Status
    why: str = ""
    flags: tuple[str, ...] = ()
    tensors: tuple[TensorResult, ...] = ()
    not_given: tuple[str, ...] = ()
    departs: str | None = None
    suspects: tuple[str, ...] = ()
    consistent: bool | None = None
    diagnoses: tuple[Diagnosis, ...] = ()
    command: str = ""
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether every tensor is equal or inside its envelope, and every output was given."""
        return self.status is Status.PASS

    @property
    def failed(self) -> bool:
        """Whether it was compared, and does not pass."""
        return self.status not in (Status.PASS, Status.SKIPPED)

    @property
    def first(self) -> TensorResult | None:
        """The first tensor that does not pass."""
        return next((one for one in self.tensors if one.status is not Status.PASS), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The comparison of a kernel with a pack. `str(report)` is its text.

    `environment` says where the kernel ran: versions of Python, numpy and what the kernel uses, and
    the device.
    """

    pack: str
    subject: str
    numerics_version: int
    evidence: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    cases: tuple[CaseResult, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> Status:
        """The status of the first case that fails, or PASS; SKIPPED where no case was compared."""
        if all(case.status is Status.SKIPPED for case in self.cases):
            return Status.SKIPPED
        return next((case.status for case in self.cases if case.failed), Status.PASS)

    @property
    def passed(self) -> bool:
        """Whether some case was compared, and none failed. Skipped cases count neither way."""
        return self.status is Status.PASS

    @property
    def exit_code(self) -> int:
        """Exit status of a command that reports this: 0 passed, 1 not, 2 nothing was compared."""
        return {Status.PASS: 0, Status.SKIPPED: 2}.get(self.status, 1)

    def to_text(self) -> str:
        """Return the report for people."""
        from flamia_ref.report.text import render

        return render(self)

    def to_html(self) -> str:
        """Return the report as one HTML file that needs nothing else."""
        from flamia_ref.report.html import render

        return render(self)

    def to_junit(self) -> str:
        """Return the report as JUnit XML."""
        from flamia_ref.report.junit import render

        return render(self)

    def to_json(self) -> str:
        """Return the report as JSON."""
        from flamia_ref.report.document import render

        return render(self)

    def __str__(self) -> str:
        return self.to_text()
