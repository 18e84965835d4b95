"""The properties: what each holds a kernel to, and how one example is checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from flamia_ref._errors import Registry
from flamia_ref.leakage.legal import Severity
from flamia_ref.properties.data import inputs_of
from flamia_ref.properties.drawn import BLOCK, Edit, Example, Space
from flamia_ref.properties.faults import shared_scale
from flamia_ref.properties.perturbing import INSIDE, Observed, numbers_of, perturbed
from flamia_ref.properties.subject import (
    PropertyFailure,
    Results,
    Subject,
    first_difference,
)

Check = Callable[[Subject, Example], Observed]


class Gradients(StrEnum):
    """What a property has to do with the backward."""

    UNUSED = "unused"
    """Nothing: dout is not given."""
    COMPARED = "compared"
    """dq, dk and dv are compared where the kernel gives them."""
    NEEDED = "needed"
    """It is about them: skipped for a kernel that has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """A fault that a property must find when it is planted in front of the kernel: else it proves nothing.

    Attributes:
        operand: what one scale is shared in.
        tokens: by how many tokens; None for all.
        edit: what is changed.
    """

    operand: str
    tokens: int | None
    edit: Edit

    def example(self, name: str, space: Space) -> Example:
        """An example that shows it: its first tokens are in one block, and in two documents for a shared tensor."""
        length = space.at_least(2)[0] if self.tokens else space.at_least(1)[0]
        return Example(
            property=name,
            lengths=(length,) if self.tokens else (length, length),
            family="bell",
            **space.shape,
            edits=(self.edit,),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Property:
    """One property of kernels.

    Attributes:
        name: what options, files and examples call it.
        says: what holds of a kernel that has it, bit for bit.
        gradients: what it has to do with the backward.
        check: one example on a kernel. Raises PropertyFailure.
        control: the fault that must be found where it is planted; None where nothing is perturbed.
    """

    name: str
    says: str
    gradients: Gradients
    check: Check
    control: Control | None = None

    @property
    def with_gradients(self) -> bool:
        """Whether the kernel is given dout."""
        return self.gradients is not Gradients.UNUSED


def check(kernel: Any, example: Example) -> None:
    """Hold a kernel, or a `Subject`, to one example of a property.

    Raises PropertyFailure where the kernel does not have the property, KernelError where it fails or returns something
    else than the protocol of `flamia_ref.kernels` says, and ValueError for an unknown property.
    """
    subject = kernel if isinstance(kernel, Subject) else Subject(kernel=kernel)
    PROPERTIES[example.property].check(subject, example)


def planted(one: Property, subject: Subject) -> Subject:
    """The kernel with the fault of the property's control."""
    if one.control is None:
        raise ValueError(f"{one.name} perturbs nothing, so nothing is planted")
    return subject.planted(shared_scale(one.control.operand, tokens=one.control.tokens))


def _perturbing(severities: frozenset[Severity], *, gradients: bool) -> Check:
    def one(subject: Subject, example: Example) -> Observed:
        before = inputs_of(example)
        after = before.edited(example.edits)
        return perturbed(subject, example, before, after, severities, gradients=gradients)

    return one


def _determinism(subject: Subject, example: Example) -> Observed:
    inputs, other = inputs_of(example), inputs_of(replace(example, seed=example.seed ^ 1))
    first = subject.run(inputs, example, gradients=True)
    again = subject.run(inputs, example, gradients=True)
    _require_equal(subject, example, first, again, "a second call with the same inputs changes")
    subject.run(other, example, gradients=True)
    later = subject.run(inputs, example, gradients=True)
    return _require_equal(
        subject, example, first, later, "a call with other inputs in between changes"
    )


def _prefix_parity(subject: Subject, example: Example) -> Observed:
    inputs = inputs_of(example)
    whole = subject.run(inputs.document(example.document), example, gradients=True)
    part = subject.run(
        inputs.document(example.document, tokens=example.cut), example, gradients=True
    )
    names = [name for name in ("out", "lse", "dq") if name in whole and name in part]
    length = example.lengths[example.document]
    return _require_equal(
        subject,
        example,
        {name: part[name] for name in names},
        {name: whole[name][: example.cut] for name in names},
        f"the presence of tokens {example.cut} to {length - 1} changes",
    )


def _packing_invariance(subject: Subject, example: Example) -> Observed:
    inputs = inputs_of(example)
    together = subject.run(inputs, example, gradients=True)
    alone = subject.run(inputs.document(example.document), example, gradients=True)
    start, stop = inputs.starts[example.document : example.document + 2]
    return _require_equal(
        subject,
        example,
        alone,
        {name: x[start:stop] for name, x in together.items()},
        f"packing document {example.document} at token {start} with the others changes, counted from its start,",
    )


def _document_isolation(subject: Subject, example: Example) -> Observed:
    before = inputs_of(example)
    return perturbed(
        subject, example, before, before.edited(example.edits), _CROSSING, gradients=True
    )


def _padding_garbage(subject: Subject, example: Example) -> Observed:
    before = inputs_of(example)
    after = before.with_garbage(example.document, example.garbage)
    cause = f"{example.garbage} in every token outside document {example.document}"
    return perturbed(subject, example, before, after, _CROSSING, gradients=True, cause=cause)


def _scale_invariance(subject: Subject, example: Example) -> Observed:
    operand, exponent = example.operand, example.exponent
    inputs = inputs_of(example)
    before = subject.run(inputs, example, gradients=False)
    other = inputs.scaled(operand, exponent)
    cause = f"{operand} times 2^{exponent}"
    if operand != "v":
        other = replace(other, softmax_scale=inputs.softmax_scale * 2.0**-exponent)
        cause += f", with softmax_scale times 2^{-exponent}, changes"
    else:
        before["out"] = _times(before["out"], exponent)
        cause += f" changes, besides by 2^{exponent},"
    after = subject.run(other, example, gradients=False)
    return _require_equal(subject, example, before, after, cause)


def _zero_length_documents(subject: Subject, example: Example) -> Observed:
    inputs = inputs_of(example)
    without = replace(inputs, lengths=tuple(length for length in inputs.lengths if length))
    before = subject.run(without, example, gradients=True)
    after = subject.run(inputs, example, gradients=True)
    lengths = ",".join(map(str, inputs.lengths))
    return _require_equal(
        subject, example, before, after, f"empty documents in lengths {lengths} change"
    )


def _grouped_heads(subject: Subject, example: Example) -> Observed:
    inputs = inputs_of(example)
    group = example.heads // example.kv_heads
    repeated = replace(inputs, k=np.repeat(inputs.k, group, 1), v=np.repeat(inputs.v, group, 1))
    before = subject.run(repeated, example, gradients=True)
    after = subject.run(inputs, example, gradients=True)
    names = [name for name in ("out", "lse", "dq") if name in before and name in after]
    return _require_equal(
        subject,
        example,
        {name: before[name] for name in names},
        {name: after[name] for name in names},
        f"{example.kv_heads} kv_heads in the place of each of them {group} times change",
    )


def _times(bits: npt.NDArray[np.uint32], exponent: int) -> npt.NDArray[np.uint32]:
    with np.errstate(all="ignore"):
        return np.ldexp(bits.view(np.float32), exponent).view(np.uint32)


def _require_equal(
    subject: Subject, example: Example, before: Results, after: Results, cause: str
) -> Observed:
    """Raises PropertyFailure unless all results are equal, those that both have."""
    found = first_difference(before, after)
    if found is not None:
        raise PropertyFailure(f"{subject.name}: {cause} {found}", example)
    compared = {name: x for name, x in before.items() if name in after}
    return Observed(elements=sum(x.size for x in compared.values()), numbers=numbers_of(compared))


_CROSSING = frozenset({Severity.CROSS_DOCUMENT})
_RAISE = 40  # of a control's edit: far more than one scale reaches

PROPERTIES: Mapping[str, Property] = Registry(
    "property",
    (
        (one.name, one)
        for one in (
            Property(
                name="determinism",
                says="the same inputs give the same bits, also after a call with other inputs",
                gradients=Gradients.COMPARED,
                check=_determinism,
            ),
            Property(
                name="causality",
                says="out and lse of a token do not depend on later tokens",
                gradients=Gradients.UNUSED,
                check=_perturbing(frozenset({Severity.FORWARD}), gradients=False),
                control=Control(
                    operand="v", tokens=BLOCK, edit=Edit(operand="v", token=1, exponent=_RAISE)
                ),
            ),
            Property(
                name="locality",
                says="out and lse of a token do not depend on q of earlier tokens, nor lse on any v, nor out and lse"
                " on keys before the window",
                gradients=Gradients.UNUSED,
                check=_perturbing(frozenset({Severity.PAST}), gradients=False),
                control=Control(
                    operand="q", tokens=BLOCK, edit=Edit(operand="q", token=0, exponent=_RAISE)
                ),
            ),
            Property(
                name="prefix_parity",
                says="out, lse and dq of a document's first tokens are those of these tokens alone",
                gradients=Gradients.COMPARED,
                check=_prefix_parity,
            ),
            Property(
                name="document_isolation",
                says="no result of a document depends on another document",
                gradients=Gradients.COMPARED,
                check=_document_isolation,
                control=Control(
                    operand="v", tokens=None, edit=Edit(operand="v", token=0, exponent=_RAISE)
                ),
            ),
            Property(
                name="packing_invariance",
                says="a packed document gives what it gives alone, at any offset and in any company",
                gradients=Gradients.COMPARED,
                check=_packing_invariance,
            ),
            Property(
                name="backward_legality",
                says="dq, dk and dv of a token depend on no token of its document that the exact gradients do not"
                " depend on",
                gradients=Gradients.NEEDED,
                check=_perturbing(frozenset({Severity.BACKWARD}), gradients=True),
                control=Control(
                    operand="dout",
                    tokens=BLOCK,
                    edit=Edit(operand="dout", token=0, exponent=_RAISE),
                ),
            ),
            Property(
                name="nan_poison",
                says="NaN and infinity in a token do not reach results of its document that may not depend on it",
                gradients=Gradients.COMPARED,
                check=_perturbing(INSIDE, gradients=True),
                control=Control(
                    operand="v", tokens=BLOCK, edit=Edit(operand="v", token=1, poison="nan")
                ),
            ),
            Property(
                name="padding_garbage",
                says="NaN, infinity and huge values in all other documents change nothing of a document",
                gradients=Gradients.COMPARED,
                check=_padding_garbage,
                control=Control(
                    operand="v", tokens=None, edit=Edit(operand="v", token=0, poison="nan")
                ),
            ),
            Property(
                name="scale_invariance",
                says="v times 2^k gives out times 2^k and the same lse; q or k times 2^k with softmax_scale times 2^-k"
                " changes nothing",
                gradients=Gradients.UNUSED,
                check=_scale_invariance,
            ),
            Property(
                name="zero_length_documents",
                says="empty documents, at any place, change nothing",
                gradients=Gradients.COMPARED,
                check=_zero_length_documents,
            ),
            Property(
                name="grouped_heads",
                says="out, lse and dq are those of key/value heads repeated for each query head",
                gradients=Gradients.COMPARED,
                check=_grouped_heads,
            ),
        )
    ),
)
"""All properties by name, the plainest first."""
