"""Functions of one primitive each, with their operands: what the rules are tested on."""

from tests.leakage.flow.cases import control, elementwise, indexing, moving, reducing
from tests.leakage.flow.cases.case import Case

CASES: dict[str, Case] = {
    case.name: case
    for family in (elementwise, moving, reducing, indexing, control)
    for case in family.cases()
}
"""By name."""
