"""float32 against what an H200 gave for the PTX instructions: tests/oracles/float32."""

from collections.abc import Iterator

import numpy as np
import pytest

from flamia_ref.arithmetic import float32
from tests.arithmetic.operands import Words, differing
from tests.arithmetic.test_float32_directed import VARIANTS, padded, results
from tests.independent import float32 as exact
from tests.independent.oracles import load

INSTRUCTIONS = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "fma": "fma"}
ROUNDINGS = {"nearest_even": "rn", "toward_zero": "rz", "up": "rp", "down": "rm"}


def recorded() -> tuple[list[Words], dict[str, Words]]:
    stored = load("float32", "h200")
    names = stored["operations"].tolist()
    return list(stored["operands"]), dict(zip(names, stored["results"], strict=True))


def instruction(name: str, direction: str, ftz: bool) -> str:
    return f"{name}.{ROUNDINGS[direction]}{'.ftz' if ftz else ''}.f32"


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_roundings(name: str) -> None:
    operands, expected = recorded()
    rows = operands[0].size
    operation = INSTRUCTIONS[name]
    given = padded(*operands[: 3 if operation == "fma" else 2])
    for library, actual in results(operation, *given):
        for (direction, ftz), got in zip(VARIANTS, actual, strict=True):
            wanted = expected[instruction(name, direction, ftz)]
            found = differing(np.asarray(got)[:rows], wanted, *operands)
            assert not found, f"{library}, {instruction(name, direction, ftz)}: {found}"


def extremes() -> Iterator[tuple[str, Words, Words]]:
    """Names of min and max, what we give, and what the device gave."""
    (a, b, _), expected = recorded()
    for name, function in (
        ("max", float32.maximum_number),
        ("max.NaN", float32.maximum),
        ("min", float32.minimum_number),
        ("min.NaN", float32.minimum),
    ):
        for ftz in (False, True):
            short, _, nan = name.partition(".")
            full = f"{short}{'.ftz' if ftz else ''}{'.' + nan if nan else ''}.f32"
            yield full, function(a, b, ftz=ftz), expected[full]


def test_extremes() -> None:
    (a, b, _), _ = recorded()
    names = set()
    for name, actual, wanted in extremes():
        found = differing(actual, wanted, a, b)
        assert not found, f"{name}: {found}"
        names.add(name)
    assert len(names) == 8


def test_when_a_result_is_flushed() -> None:
    """Two other readings of .ftz, flushing what rounds to a subnormal, or what is below 2^-126
    before rounding, are not what the device does."""
    (a, b, _), expected = recorded()
    x, y = float32.flush(a), float32.flush(b)
    after = float32.flush(float32.multiply(x, y))
    cut = float32.multiply(x, y, rounding="toward_zero")
    subnormal = (cut & float32.MAGNITUDE) < 0x00800000
    before = np.where(subnormal, after & float32.SIGN, after)
    wanted = expected["mul.rn.ftz.f32"]
    assert differing(after, wanted, a, b)
    assert differing(before, wanted, a, b)
    assert not differing(float32.multiply(a, b, ftz=True), wanted, a, b)


def test_the_exact_integers_agree() -> None:
    """The expected values of the other tests, on the recorded rows."""
    operands, expected = recorded()
    rows = list(zip(*(x.tolist() for x in operands), strict=True))[::4]
    for name, direction, ftz in (
        ("mul", "nearest_even", True),
        ("mul", "up", True),
        ("fma", "down", True),
        ("fma", "nearest_even", False),
        ("div", "nearest_even", True),
        ("add", "down", False),
    ):
        function = {
            "mul": exact.multiply,
            "fma": exact.fused_multiply_add,
            "div": exact.divide,
            "add": exact.add,
        }[name]
        count = 3 if name == "fma" else 2
        got = [function(*row[:count], direction, ftz) for row in rows]
        assert got == expected[instruction(name, direction, ftz)][::4].tolist()
