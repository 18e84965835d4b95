"""Every recipe packs and checks itself; its places are named, its codes stand beside their scales."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flamia_ref import golden
from flamia_ref._errors import Registry
from flamia_ref.attention import RECIPES
from flamia_ref.golden import making
from flamia_ref.golden.envelope.judging import check_supported
from flamia_ref.golden.inputs import Distribution
from flamia_ref.golden.simulation import simulate
from flamia_ref.golden.simulator import jax_kernel, numpy_kernel
from flamia_ref.golden.stage import Role, View
from flamia_ref.report import Difference, Status
from tests.golden.packs import results, spec


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_simulator_passes_its_own_pack(every: golden.Pack, recipe: str) -> None:
    for name in (f"tiny.{recipe}", f"tiny-poison.{recipe}"):
        report = golden.check(every[name], numpy_kernel)
        assert report.passed, str(report)
        (case,) = report.cases
        alone = "" if RECIPES[recipe].has_backward else "forward alone: this recipe has no backward"
        assert (case.not_given, case.note) == ((), alone)
        gradients = {"dq", "dk", "dv"} if RECIPES[recipe].has_backward else set()
        assert gradients == {"dq", "dk", "dv"} & {tensor.name for tensor in case.tensors}


def enveloped(recipe: str) -> bool:
    """Whether there are envelopes for a recipe; without, every bit counts."""
    try:
        check_supported(RECIPES[recipe])
    except ValueError:
        return False
    return True


def nightly_but(*daily: str) -> list[Any]:
    """Every recipe, these daily."""
    return [
        pytest.param(recipe, marks=() if recipe in daily else pytest.mark.nightly)
        for recipe in RECIPES
    ]


@pytest.mark.parametrize(
    ("recipe", "cases"),
    [
        ("bf16-fa4", ["tiny-poison"]),  # one shape of tiles to compile
        *(
            pytest.param(recipe, ["tiny", "tiny-poison"], marks=pytest.mark.nightly)
            for recipe in RECIPES
        ),
    ],
)
def test_the_compiled_simulator_passes_the_pack(
    every: golden.Pack, recipe: str, cases: list[str]
) -> None:
    for name in (f"{case}.{recipe}" for case in cases):
        report = golden.check(every[name], jax_kernel)
        assert report.passed, str(report)


@pytest.mark.parametrize("recipe", nightly_but("flamia-nvfp4-fp8-ue4m3"))
def test_a_perfect_kernel_passes_and_each_tensor_counts(every: golden.Pack, recipe: str) -> None:
    case = every[f"tiny.{recipe}"]
    assert golden.check(case, {case.name: results(case)}).passed
    for name, place in case.places.items():
        if place.stage.role is Role.INPUT or not case.tensors[name].size:
            continue
        given = results(case)
        exact = bit(case, name) == 1
        given[name].reshape(-1).view(f"u{given[name].itemsize}")[-1] ^= bit(case, name)
        (result,) = golden.check(case, {case.name: given}, diagnose=False).cases
        assert not result.passed
        assert result.departs == place.stage.name, name
        first = result.first
        assert first is not None
        assert (first.name, first.differing) == (name, 1)
        if exact:
            assert result.status is Status.BIT_MISMATCH
        elif first.largest is not None:  # no NaN came of it
            operand = name.split(".")[0] in ("q", "k", "v") or not enveloped(recipe)
            assert result.status is (Status.BIT_MISMATCH if operand else Status.OUTSIDE_ENVELOPE)


def test_recipes_give_different_results() -> None:
    # Narrow data may round alike with the scales of two recipes.
    wide = spec(distribution=Distribution.WIDE)
    made = {name: simulate(wide, recipe) for name, recipe in RECIPES.items()}
    # cuDNN's dV and its reference's are products of the same codes, where P of both is in one code's interval, as here.
    cudnn, reference = made["cudnn-mxfp8"], made["cudnn-mxfp8-reference"]
    assert cudnn["p.dv.2"].tobytes() != reference["p.dv.2"].tobytes()
    for name in ("p.dv.codes.0", "p.dv.codes.2", "do.dv.codes", "do.dv.scales", "dv"):
        assert cudnn[name].tobytes() == reference[name].tobytes(), name
    for output in ("out", "dq", "dk", "dv"):
        found = [
            tensors[output].tobytes()
            for recipe, tensors in made.items()
            if output in tensors and (recipe, output) != ("cudnn-mxfp8-reference", "dv")
        ]
        assert len(set(found)) == len(found), output


@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_of_pairs_come_in_their_types(every: golden.Pack, recipe: str) -> None:
    case = every[f"tiny.{recipe}"]
    given = results(case)
    stages = ("p.o.codes", "p.dv.codes", "ds.dq.codes", "ds.dk.codes", "ds.codes")
    for name in [name for name in given if name.rpartition(".")[0] in stages]:
        if case.places[name].stage.view is View.F4_E2M1:
            continue  # one code a byte
        wide = given[name].dtype == np.uint16
        given[name] = given[name].view(ml_dtypes.bfloat16 if wide else ml_dtypes.float8_e4m3fn)
    for name in ("dq", "dk", "dv") if RECIPES[recipe].has_backward else ():
        given[name] = given[name].view(ml_dtypes.bfloat16).astype(np.float32)
    assert golden.check(case, {case.name: given}).passed


def bit(case: golden.Case, name: str) -> int:
    """The lowest bit of a code or a scale; of a float one that no order of additions changes."""
    floats = case.places[name].stage.view in (View.F32, View.BF16)
    return 1 << 8 * case.places[name].stage.view.dtype.itemsize - 2 if floats else 1


def difference(case: golden.Case, name: str, index: tuple[int, ...]) -> Difference:
    """Change one element and return what the report says of it."""
    given = results(case)
    given[name].view(f"u{given[name].itemsize}")[index] ^= bit(case, name)
    first = golden.check(case, {case.name: given}, diagnose=False).cases[0].first
    assert first is not None
    assert first.first is not None
    assert first.first.index == index
    return first.first


FP4, UE4M3 = "flamia-nvfp4-fp8", "flamia-nvfp4-fp8-ue4m3"


@pytest.mark.parametrize("recipe", [FP4, UE4M3])
def test_fp4_comes_one_code_a_byte_in_its_type_or_as_bytes(every: golden.Pack, recipe: str) -> None:
    case = every[f"tiny.{recipe}"]
    given = results(case)
    for name in ("q.s.codes", "k.s.codes"):
        given[name] = given[name].view(ml_dtypes.float4_e2m1fn)
    assert golden.check(case, {case.name: given}).passed
    given["q.s.codes"] = results(case)["k.s.codes"].view(ml_dtypes.float8_e4m3fn)
    (result,) = golden.check(case, {case.name: given}, diagnose=False).cases
    assert result.status is Status.DTYPE


@pytest.mark.parametrize(("code", "value"), [(0x0F, "-6.0"), (0x10, "nan"), (0xFF, "nan")])
def test_a_byte_beyond_fp4_is_a_mismatch_and_no_number(
    every: golden.Pack, code: int, value: str
) -> None:
    case = every[f"tiny.{FP4}"]
    given = results(case)
    given["q.s.codes"][36, 1, 20] = code
    first = golden.check(case, {case.name: given}, diagnose=False).cases[0].first
    assert first is not None
    assert first.first is not None
    assert first.first.element.actual is not None
    assert (first.first.element.actual.bits, first.first.element.actual.value) == (
        f"0x{code:02x}",
        value,
    )


def test_scales_with_a_mantissa_are_read_as_such(every: golden.Pack) -> None:
    case = every[f"tiny.{UE4M3}"]
    given = results(case)
    given["q.s.scales"][36, 1, 1] = 0x44  # 2^(8 - 7) (1 + 4 / 8)
    given["k.s.scales"][0, 0, 0] = 0x80  # a sign, which the format has not
    first, second = (
        next(
            one
            for one in golden.check(case, {case.name: given}, diagnose=False).cases[0].tensors
            if one.name == x
        )
        for x in ("q.s.scales", "k.s.scales")
    )
    assert first.first is not None
    assert first.first.element.actual is not None
    assert first.first.element.actual.value == "3.0"
    assert second.first is not None
    assert second.first.element.actual is not None
    assert second.first.element.actual.value == "nan"


# The documents have 2, 0 and 35 tokens: blocks of 32 tokens are 1, 0 and 2, of tokens 0 to 1, 2 to 33
# and 34 to 36. One block of 32 channels.
PLACES: list[tuple[str, str, tuple[int, ...], Mapping[str, int | str]]] = [
    (
        "flamia-mxfp8",
        "k.scales",
        (2, 0, 0),
        {
            "document": 2,
            "kv head": 0,
            "tokens": "34 to 36",
            "tile": 0,
            "token block": 1,
            "block": 0,
            "channels": "0 to 31",
        },
    ),
    (
        "flamia-mxfp8",
        "k.scales",
        (0, 0, 0),
        {
            "document": 0,
            "kv head": 0,
            "tokens": "0 to 1",
            "tile": 0,
            "token block": 0,
            "block": 0,
            "channels": "0 to 31",
        },
    ),
    (
        "flamia-mxfp8",
        "k.scales.tiled.2",  # token 33 of the document is in row 33, byte 1 * 16 + 1 * 4
        (0, 0, 0, 20),
        {
            "document": 2,
            "kv head": 0,
            "token": 35,
            "position": 33,
            "tile": 0,
            "block": 0,
            "byte": 20,
        },
    ),
    (
        "flamia-mxfp8",
        "k.scales.tiled_transposed.2",  # channel 5 and token block 1: byte 5 * 16 + 1
        (0, 0, 0, 81),
        {
            "document": 2,
            "kv head": 0,
            "tokens": "34 to 36",
            "tile": 0,
            "token block": 1,
            "block": 0,
            "channel": 5,
            "byte": 81,
        },
    ),
    (
        "flamia-mxfp8",
        "v.scales.tiled_transposed.2",  # token block 2, which the document has not
        (0, 0, 0, 82),
        {"document": 2, "kv head": 0, "row": 5, "column": 2, "in": "the padding"},
    ),
    (
        "cudnn-mxfp8",
        "q.dk.scales",
        (1, 1, 7),
        {
            "document": 2,
            "head": 1,
            "tokens": "2 to 33",
            "tile": 0,
            "token block": 0,
            "block": 0,
            "channel": 7,
        },
    ),
    (
        "cudnn-mxfp8",
        "q.s.scales",
        (36, 1, 0),
        {
            "document": 2,
            "head": 1,
            "token": 36,
            "position": 34,
            "tile": 0,
            "block": 0,
            "channels": "0 to 31",
        },
    ),
    (  # FP4 has two blocks of 16 channels
        FP4,
        "q.s.scales",
        (36, 1, 1),
        {
            "document": 2,
            "head": 1,
            "token": 36,
            "position": 34,
            "tile": 0,
            "block": 1,
            "channels": "16 to 31",
        },
    ),
    (
        FP4,
        "k.s.scales.tiled.2",  # token 33 of the document is in row 33, byte 1 * 16 + 1 * 4 + 1
        (0, 0, 0, 21),
        {
            "document": 2,
            "kv head": 0,
            "token": 35,
            "position": 33,
            "tile": 0,
            "block": 1,
            "byte": 21,
        },
    ),
    (
        FP4,
        "k.s.scales.tiled.2",  # block 2, which the token has not
        (0, 0, 0, 22),
        {"document": 2, "kv head": 0, "row": 33, "column": 2, "in": "the padding"},
    ),
    (
        UE4M3,
        "q.s.token_scales",
        (36, 1, 0),
        {
            "document": 2,
            "head": 1,
            "token": 36,
            "position": 34,
            "tile": 0,
            "block": 0,
            "channels": "0 to 31",
        },
    ),
    *(
        (
            FP4,
            name,
            (36, 1, 20),
            {
                "document": 2,
                "head": 1,
                "token": 36,
                "position": 34,
                "tile": 0,
                "block": block,
                "channel": 20,
            },
        )
        for name, block in (("q.s.codes", 1), ("q.dk.codes", 0))
    ),
    (
        "cudnn-mxfp8",
        "ds.dk.scales.2",
        (1, 1, 33),
        {
            "document": 2,
            "head": 1,
            "query block": 1,
            "queries": "32 to 34",
            "query tile": 0,
            "key tile": 0,
            "block": 1,
            "key": 33,
            "key token": 35,
        },
    ),
    (
        "flamia-mxfp8-unguarded",
        "ds.scales.2",
        (0, 1, 0),
        {
            "document": 2,
            "head": 0,
            "query block": 1,
            "queries": "32 to 34",
            "query tile": 0,
            "key tile": 0,
            "block": 0,
            "keys": "0 to 31",
        },
    ),
    (
        "bf16-fa4",
        "ds.dk.codes.2",
        (1, 34, 33),
        {
            "document": 2,
            "head": 1,
            "token": 36,
            "query": 34,
            "query tile": 0,
            "key tile": 0,
            "block": 1,
            "key": 33,
            "key token": 35,
        },
    ),
    (
        "fp8-fa4",
        "k.scales",  # one for a document and key/value head
        (2, 0),
        {"document": 2, "kv head": 0},
    ),
    (
        "sage3-nvfp4",
        "v.scales",  # for 16 tokens of a channel: 1 block, none, and 3, of tokens 2 to 17, 18 to 33, 34 to 36
        (3, 0, 7),
        {
            "document": 2,
            "kv head": 0,
            "tokens": "34 to 36",
            "tile": 0,
            "token block": 2,
            "block": 0,
            "channel": 7,
        },
    ),
    (
        "attn-qat-nvfp4",
        "p.o.scales.2",  # for 16 keys of a row, in tiles of 32: the third block is in the second tile
        (1, 34, 2),
        {
            "document": 2,
            "head": 1,
            "token": 36,
            "query": 34,
            "query tile": 1,
            "key tile": 1,
            "block": 2,
            "keys": "32 to 34",
        },
    ),
    (
        "attn-qat-nvfp4",
        "high_precision_out",
        (36, 1, 31),
        {
            "document": 2,
            "head": 1,
            "token": 36,
            "position": 34,
            "tile": 1,
            "block": 0,
            "channel": 31,
        },
    ),
    (
        "bf16-fa4",
        "delta",
        (1, 36),
        {"document": 2, "head": 1, "token": 36, "position": 34, "tile": 0},
    ),
    (
        "bf16-fa4",
        "dk",
        (3, 0, 31),
        {
            "document": 2,
            "kv head": 0,
            "token": 3,
            "position": 1,
            "tile": 0,
            "block": 0,
            "channel": 31,
        },
    ),
]


@pytest.mark.parametrize(("recipe", "name", "index", "where"), PLACES)
def test_places_are_named_in_words(
    every: golden.Pack,
    recipe: str,
    name: str,
    index: tuple[int, ...],
    where: Mapping[str, int | str],
) -> None:
    assert difference(every[f"tiny.{recipe}"], name, index).where == where


# Codes, and the scales they are read with.
SCALED: list[tuple[str, str, tuple[int, ...], str, tuple[int, ...]]] = [
    ("flamia-mxfp8-folded", "do.codes", (36, 1, 9), "do.scales", (36, 1, 0)),
    ("cudnn-mxfp8", "do.dp.codes", (36, 1, 9), "do.dp.scales", (36, 1, 0)),
    ("cudnn-mxfp8", "do.dv.codes", (36, 1, 9), "do.dv.scales", (2, 1, 9)),
    ("cudnn-mxfp8", "v.o.codes", (1, 0, 3), "v.o.scales", (0, 0, 3)),
    ("flamia-mxfp8-unguarded", "q.codes", (33, 1, 31), "q.scales", (1, 1, 0)),
    ("cudnn-mxfp8", "ds.dq.codes.2", (1, 34, 33), "ds.dq.scales.2", (1, 34, 1)),
    ("cudnn-mxfp8", "ds.dk.codes.2", (1, 34, 33), "ds.dk.scales.2", (1, 1, 33)),
    ("flamia-mxfp8-unguarded", "p.dv.codes.2", (0, 32, 31), "p.dv.scales.2", (0, 1, 0)),
    (FP4, "q.s.codes", (36, 1, 20), "q.s.scales", (36, 1, 1)),
    (UE4M3, "k.s.codes", (36, 0, 15), "k.s.scales", (36, 0, 0)),
    ("attn-qat-nvfp4", "p.o.codes.2", (1, 34, 33), "p.o.scales.2", (1, 34, 2)),
    ("sage3-nvfp4", "v.codes", (18, 0, 7), "v.scales", (2, 0, 7)),
    (FP4, "k.dq.codes", (36, 0, 20), "k.dq.scales", (36, 0, 0)),
]

# Scales, and the first code under them.
UNDER: list[tuple[str, str, tuple[int, ...], str, tuple[int, ...]]] = [
    ("flamia-mxfp8-folded", "do.scales", (36, 1, 0), "do.codes", (36, 1, 0)),
    ("flamia-mxfp8", "k.scales", (2, 0, 0), "k.codes", (34, 0, 0)),
    ("flamia-mxfp8", "k.scales.tiled.2", (0, 0, 0, 20), "k.codes", (35, 0, 0)),
    ("flamia-mxfp8", "k.scales.tiled_transposed.2", (0, 0, 0, 81), "k.codes", (34, 0, 5)),
    ("cudnn-mxfp8", "q.dk.scales", (2, 1, 7), "q.dk.codes", (34, 1, 7)),
    ("cudnn-mxfp8", "q.dk.scales.tiled_transposed.0", (1, 0, 0, 112), "q.dk.codes", (0, 1, 7)),
    ("cudnn-mxfp8", "ds.dq.scales.2", (1, 34, 1), "ds.dq.codes.2", (1, 34, 32)),
    ("cudnn-mxfp8", "ds.dk.scales.2", (1, 1, 33), "ds.dk.codes.2", (1, 32, 33)),
    ("flamia-mxfp8-unguarded", "ds.scales.2", (0, 1, 0), "ds.codes.2", (0, 32, 0)),
    (FP4, "q.s.scales", (36, 1, 1), "q.s.codes", (36, 1, 16)),
    (UE4M3, "k.s.scales.tiled.2", (0, 0, 0, 21), "k.s.codes", (35, 0, 16)),
    (UE4M3, "q.s.token_scales", (36, 1, 0), "q.s.codes", (36, 1, 0)),
]


@pytest.mark.parametrize(("recipe", "name", "index", "other", "place"), [*SCALED, *UNDER])
def test_a_code_stands_beside_its_scale_and_a_scale_beside_its_first_code(
    every: golden.Pack,
    recipe: str,
    name: str,
    index: tuple[int, ...],
    other: str,
    place: tuple[int, ...],
) -> None:
    case = every[f"tiny.{recipe}"]
    found = difference(case, name, index)
    beside = found.code if "scales" in name else found.scale
    assert beside is not None
    assert beside.actual == beside.expected
    assert beside.expected.bits == f"0x{int(case.tensors[other][place]):02x}"
    # The bits of one code may be those of many; a place that is marked is not.
    given = results(case)
    given[name].view(f"u{given[name].itemsize}")[index] ^= bit(case, name)
    given[other][place] ^= 0x55
    report = golden.check(case, {case.name: given}, diagnose=False).cases[0]
    assert {one.name for one in report.tensors if one.status is not Status.PASS} == {name, other}
    first = report.first
    assert first is not None
    assert first.first is not None
    if first.name == name:  # scales come first
        marked = first.first.code if "scales" in name else first.first.scale
        assert marked is not None
        assert marked.actual is not None
        assert marked.actual.bits == f"0x{int(case.tensors[other][place]) ^ 0x55:02x}"


@pytest.fixture(scope="module")
def descaled(tmp_path_factory: pytest.TempPathFactory) -> golden.Case:
    """Documents of 3 and 2 queries over 1 and 5 keys, 4 heads over 2, by a recipe with descales."""
    folder = tmp_path_factory.mktemp("descaled") / "pack"
    case = spec(lengths=(3, 2), key_lengths=(1, 5), heads=4, kv_heads=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(making, "SUITES", Registry("suite", [("descaled", (case,))]))
        golden.make(folder, ["fp8-fa4"], suite="descaled")
    return golden.load(folder)["tiny.fp8-fa4"]


# Query 3 is the first of document 1, key 1 too; query heads 2 and 3 are of key/value head 1.
@pytest.mark.parametrize(
    ("name", "index", "descale"),
    [
        ("q.codes", (2, 3, 9), (0, 1)),
        ("q.codes", (3, 1, 9), (1, 0)),
        ("k.codes", (0, 1, 9), (0, 1)),
        ("k.codes", (1, 0, 9), (1, 0)),
        ("v.codes", (5, 1, 9), (1, 1)),
    ],
)
def test_a_code_stands_beside_its_descale(
    descaled: golden.Case, name: str, index: tuple[int, ...], descale: tuple[int, int]
) -> None:
    found = difference(descaled, name, index).scale
    wanted = descaled.tensors[name.replace("codes", "scales")][descale]
    assert found is not None
    assert found.actual == found.expected
    assert found.expected.bits == f"0x{int(wanted.view(np.uint32)):08x}"
    assert np.float32(found.expected.value) == wanted


def test_a_descale_is_named_by_its_document_and_head(descaled: golden.Case) -> None:
    for name in ("q.scales", "k.scales", "v.scales"):
        found = difference(descaled, name, (1, 0))
        assert found.where == {"document": 1, "kv head": 0}


def test_padding_has_no_code(every: golden.Pack) -> None:
    case = every["tiny.flamia-mxfp8"]
    for name, index in [
        ("k.scales.tiled.2", (0, 0, 0, 1)),
        ("k.scales.tiled_transposed.2", (0, 0, 0, 82)),
    ]:
        assert difference(case, name, index).code is None


@pytest.mark.parametrize("recipe", nightly_but("cudnn-mxfp8", "flamia-nvfp4-fp8-ue4m3"))
def test_what_else_differs_is_told_of_every_code(every: golden.Pack, recipe: str) -> None:
    # All codes and scales changed at once: each still finds its partner.
    case = every[f"tiny.{recipe}"]
    given: dict[str, Any] = {
        name: tensor ^ np.array(1, tensor.dtype) if tensor.dtype != np.float32 else tensor + 1
        for name, tensor in results(case).items()
    }
    report = golden.check(case, {case.name: given}, diagnose=False)
    assert not report.passed
    assert len(report.cases[0].tensors) == len(given)
