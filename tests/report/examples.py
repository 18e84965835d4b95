"""Reports made by hand, with every kind of thing that a report can hold, harmless and hostile."""

from typing import Any

from flamia_ref.report.model import (
    Bits,
    CaseResult,
    Diagnosis,
    Difference,
    HeatMap,
    Pair,
    Report,
    Status,
    TensorResult,
    Width,
)

RECIPE, OTHER = "flamia-mxfp8-folded", "bf16-fa4"

# 10 fails: 4 in one cell of 4, 1 of 4, 2 of 4, 3 of 4; two cells without a failure, two without an element.
MAP = HeatMap(
    rows="tokens",
    columns="head_dim",
    row_size=32,
    column_size=16,
    counts=((4, 1, 2, 3), (0, 0, 0, 0)),
    sizes=((4, 4, 4, 4), (4, 4, 0, 0)),
)

DIFFERENCE = Difference(
    where={"document": 1, "kv head": 0, "token": 75, "tile": 0, "block": 2, "channels": "0 to 63"},
    index=(75, 0, 2),
    element=Pair(expected=Bits(bits="0x75", value="2^-10"), actual=Bits(bits="0x76", value="2^-9")),
    code=Pair(expected=Bits(bits="0x63", value="44.0"), actual=Bits(bits="0x63", value="44.0")),
)

SCALES = TensorResult(
    name="v.scales",
    stage="v.scales",
    status=Status.BIT_MISMATCH,
    elements=151,
    differing=10,
    heat_map=MAP,
    steps={"1": 7, "2": 2, "NaN": 1},
    largest_steps=2,
    largest=0.000976562,
    first=DIFFERENCE,
)

OUT = TensorResult(
    name="out",
    stage="out",
    status=Status.OUTSIDE_ENVELOPE,
    elements=28992,
    differing=9321,
    inside=9000,
    envelope=Width(relative=5.12e-4, ambiguous=77),
    steps={"1": 9000, "2": 300, "3-4": 21},
    largest_steps=4,
    largest=0.386719,
)

LSE = TensorResult(
    name="lse",
    stage="lse",
    status=Status.PASS,
    elements=453,
    differing=12,
    inside=12,
    envelope=Width(relative=3.4e-7, ambiguous=30),
    steps={"1": 12},
    largest_steps=1,
    largest=1e-7,
)

EQUAL = TensorResult(name="q.codes", stage="q.codes", status=Status.PASS, elements=28992)

DIAGNOSIS = Diagnosis(
    mistake="scale-off-by-one",
    sentence="one scale byte of V is too large by one",
    name="v.scales",
    explained=9,
    failing=10,
)


def case(name: str = "real", recipe: str = RECIPE, **changes: Any) -> CaseResult:
    """A case that fails, with all that a case can say."""
    values: dict[str, Any] = {
        "name": f"{name}.{recipe}",
        "status": Status.BIT_MISMATCH,
        "why": "real activations of a small model",
        "flags": ("real", "straddling"),
        "tensors": (EQUAL, SCALES, LSE, OUT),
        "not_given": ("row_max", "ds.dq.codes.1"),
        "departs": "v.scales",
        "consistent": False,
        "diagnoses": (DIAGNOSIS,),
        "command": f"flamia-ref golden check pack --kernel mine:kernel --case {name}.{recipe}",
    }
    return CaseResult(**values | changes)


def good(name: str, recipe: str = RECIPE, **changes: Any) -> CaseResult:
    """A case that passes."""
    values: dict[str, Any] = {
        "name": f"{name}.{recipe}",
        "status": Status.PASS,
        "why": "nothing happens",
        "flags": ("plain",),
        "tensors": (EQUAL, LSE),
        "consistent": True,
    }
    return CaseResult(**values | changes)


def skipped(name: str, recipe: str = RECIPE) -> CaseResult:
    """A case that the kernel takes no input of."""
    return CaseResult(name=f"{name}.{recipe}", status=Status.SKIPPED, note="takes no sink")


def report(*cases: CaseResult, **changes: Any) -> Report:
    """A report of two recipes."""
    values: dict[str, Any] = {
        "pack": "packs/smoke",
        "subject": "mine:kernel",
        "numerics_version": 3,
        "evidence": {RECIPE: "derived", OTHER: "source"},
        "environment": {"python": "3.11.7", "numpy": "2.2.0", "device": "NVIDIA H200"},
        "cases": cases,
        "notes": ("cases not compared: other.flamia-mxfp8-folded",),
    }
    return Report(**values | changes)


def mixed() -> Report:
    """Two cases that fail, in different ways, two that pass, one that was skipped."""
    return report(
        good("alpha"),
        case("real"),
        case(
            "zeta",
            OTHER,
            status=Status.OUTSIDE_ENVELOPE,
            tensors=(EQUAL, OUT),
            departs="out",
            suspects=("s", "p"),
            diagnoses=(),
            flags=("wide",),
        ),
        skipped("sink", OTHER),
        good("beta", OTHER),
    )


HOSTILE = "<script>alert(1)</script>\"'&]]>--><img src=x onerror=alert(2)>\x00\x1b[31m\u202e\ud800\ufffe\n&lt;"


def hostile(length: int = 10_000) -> Report:
    """Everything that is text is markup, control characters, and long."""
    long = HOSTILE + "x" * length + HOSTILE
    bits = Bits(bits=long, value=long)
    pair = Pair(expected=bits, actual=bits)
    first = Difference(where={long: long}, index=(1,), element=pair, scale=pair, code=pair)
    tensor = TensorResult(
        name=long,
        stage=long,
        status=Status.BIT_MISMATCH,
        elements=10**30,
        differing=10**30,
        envelope=Width(relative=float("inf"), ambiguous=-1),
        heat_map=HeatMap(
            rows=long,
            columns=long,
            row_size=1,
            column_size=1,
            counts=((1,), (0,)),
            sizes=((1,), (0,)),
        ),
        steps={long: 10**30},
        largest_steps=10**30,
        largest=float("nan"),
        first=first,
        note=long,
    )
    one = CaseResult(
        name=long,
        status=Status.BIT_MISMATCH,
        why=long,
        flags=(long,),
        tensors=(tensor,),
        not_given=(long,),
        departs=long,
        suspects=(long,),
        diagnoses=(
            Diagnosis(mistake=long, sentence=long, name=long, explained=-1, failing=10**30),
        ),
        command=long,
        note=long,
    )
    return Report(
        pack=long,
        subject=long,
        numerics_version=1,
        evidence={long: long},
        environment={long: long},
        cases=(one, skipped(long, long)),
        notes=(long,),
    )


def large(count: int) -> Report:
    """Very many cases that fail everywhere, each with 30 tensors that have pictures."""
    cells = tuple(tuple((7 * x + 5 * y) % 4 for x in range(60)) for y in range(60))
    sizes = tuple(tuple(3 for _ in row) for row in cells)
    pictured = HeatMap(
        rows="queries", columns="keys", row_size=4, column_size=4, counts=cells, sizes=sizes
    )
    tensors = tuple(
        TensorResult(
            name=f"s.{number}",
            stage="s",
            status=Status.OUTSIDE_ENVELOPE,
            elements=10800,
            differing=5400,
            heat_map=pictured,
            steps={"1": 5000, "2": 400},
        )
        for number in range(30)
    )
    return report(*(case(f"case-{number}", tensors=tensors) for number in range(count)))
