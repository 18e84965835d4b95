"""Known mistakes, each with all that follows from it, are caught and named where they start.

A mutation is a changed recipe or mask that the simulator runs under the name of the right one, an
input that moves one scale, or a part of the dataflow computed again by other means. The controls at
the end of the file say that those other means, without the mistake, give the pack.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flamia_ref import attention, golden
from flamia_ref._errors import Registry
from flamia_ref.arithmetic import matmul
from flamia_ref.attention import RECIPES, Recipe
from flamia_ref.attention.knobs import DeltaSum
from flamia_ref.attention.product import Guard
from flamia_ref.formats import dequantize, quantize
from flamia_ref.golden import SUITES, making
from flamia_ref.golden.cases import CaseSpec, Plant
from flamia_ref.golden.inputs import Distribution
from flamia_ref.golden.simulator import numpy_kernel
from flamia_ref.golden.stage import View
from flamia_ref.packing import QueryTiles
from flamia_ref.report import CaseResult, Status
from tests.golden.packs import results, spec

FOLDED, FP4 = "flamia-mxfp8-folded", "flamia-nvfp4-fp8"
MX = "sm100.tcgen05.mxf8f6f4"

# Wide exponents, so that neighbours have other scales, and a dead row: the last document.
DEAD = 70
WIDE = spec(
    name="wide",
    lengths=(2, 0, 35, 33, 1),
    distribution=Distribution.WIDE,
    exponent=-2,
    plants=(
        *(Plant(tensor="q", token=DEAD, head=h, channel=9, bits=0x7180) for h in range(2)),
        Plant(tensor="k", token=DEAD, head=0, channel=9, bits=0xF180),
    ),
    flags=("nan",),  # of cuDNN's recipes
)
TWO_TILES = spec(name="tiles", lengths=(140,), seed=12)

Kernel = Callable[..., dict[str, Any]]


def made(folder: Path, case: CaseSpec, recipes: list[str]) -> golden.Pack:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(making, "SUITES", Registry("suite", [("mutations", (case,))]))
        golden.make(folder, recipes, suite="mutations")
    return golden.load(folder)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> golden.Pack:
    """A pack of every recipe. Nobody may change it."""
    return made(tmp_path_factory.mktemp("mutations") / "pack", WIDE, list(RECIPES))


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> golden.Case:
    """A case of two tiles."""
    folder = tmp_path_factory.mktemp("mutations") / "pack"
    return made(folder, TWO_TILES, [FOLDED])[f"tiles.{FOLDED}"]


def caught(case: golden.Case, kernel: Kernel, stage: str) -> CaseResult:
    """Require that a kernel departs first at a stage, and that this is no inference."""
    (result,) = golden.check(case, kernel, diagnose=False).cases
    assert (result.departs, result.suspects) == (stage, ()), result.name
    view = case.recipe.dataflow.stages[stage].view
    floats = view in (View.F32, View.BF16)
    wrong = (Status.OUTSIDE_ENVELOPE, Status.NAN_PATTERN) if floats else (Status.BIT_MISMATCH,)
    assert result.status in wrong, result.name
    return result


def with_recipe(change: Callable[[Recipe], Recipe]) -> Kernel:
    """The simulator with a changed recipe."""

    def kernel(q: Any, k: Any, v: Any, *, recipe_json: str, **settings: Any) -> dict[str, Any]:
        recipe = change(Recipe.from_json(recipe_json))
        return numpy_kernel(q, k, v, recipe_json=recipe.to_json(), **settings)

    return kernel


def change(path: str, **fields: Any) -> Callable[[Recipe], Recipe]:
    """The change of some fields of one part of a recipe, such as "o.left"."""

    def changed(part: Any, names: list[str]) -> Any:
        if not names:
            return dataclasses.replace(part, **fields)
        inner = changed(getattr(part, names[0]), names[1:])
        return dataclasses.replace(part, **{names[0]: inner})

    return lambda recipe: changed(recipe, path.split("."))


def unguarded(product: str) -> Callable[[Recipe], Recipe]:
    """The change that takes the guard from one product."""

    def change(recipe: Recipe) -> Recipe:
        guarded = getattr(recipe, product)
        plain = dataclasses.replace(guarded.right, guard=Guard.NONE)
        without = dataclasses.replace(guarded, right=plain, guard_instruction=None)
        return dataclasses.replace(recipe, **{product: without})

    return change


MUTATED: list[tuple[str, str, Callable[[Recipe], Recipe], str]] = [
    # P's scale missing: in P, in the code, in the instruction.
    ("cudnn-mxfp8", "p scale", change("softmax", p_offset=0), "p"),
    ("flamia-mxfp8", "p scale", change("softmax", p_offset=0), "p"),
    ("cudnn-mxfp8", "p scale of dv", change("gradient", p_offset=0), "p.dv.codes"),
    ("cudnn-mxfp8", "p scale byte of dv", change("dv.left", static_scale=127), "dv"),
    ("cudnn-mxfp8", "p scale byte of o", change("o.left", static_scale=123), "o"),
    # A guard missing.
    ("flamia-mxfp8", "guard of s", unguarded("s"), "s"),
    ("flamia-mxfp8", "guard of o", unguarded("o"), "p.o.codes"),
    ("flamia-mxfp8", "guard of dp", unguarded("dp"), "dp"),
    ("flamia-mxfp8", "guard of dq", unguarded("dq"), "ds.dq.scales"),
    # A rule or a function of another kernel.
    (FOLDED, "rule of p", change("o.left", format="ocp-mx-floor-e4m3"), "p.o.scales"),
    (FOLDED, "rule of p of dv", change("dv.left", format="ocp-mx-floor-e4m3"), "p.dv.scales"),
    ("cudnn-mxfp8", "rule of ds", change("dk.left", format="ocp-mx-floor-e4m3"), "ds.dk.scales"),
    (FOLDED, "exp2", change("softmax", exp2="correct"), "p"),
    (FOLDED, "delta", change("gradient", delta=DeltaSum.HALF_PRODUCTS), "delta"),
    # A promotion that quantizes the input a second time.
    (FP4, "promoted q", change("dk.right", promoted_from=None), "q.dk.scales"),
    (FP4, "promoted k", change("dq.right", promoted_from=None), "k.dq.scales"),
    (f"{FP4}-ue4m3", "promoted k", change("dq.right", promoted_from=None), "k.dq.codes"),
]


def some_daily(rows: list[tuple[Any, ...]], daily: set[int]) -> list[Any]:
    """The rows as parameters, nightly but for some."""
    return [
        pytest.param(
            recipe,
            *rest,
            id=f"{recipe}: {name}",
            marks=() if number in daily else pytest.mark.nightly,
        )
        for number, (recipe, name, *rest) in enumerate(rows)
    ]


@pytest.mark.parametrize(("recipe", "changed", "stage"), some_daily(MUTATED, {2, 4, 9, 12, 13, 14}))
def test_a_changed_recipe(
    pack: golden.Pack, recipe: str, changed: Callable[[Recipe], Recipe], stage: str
) -> None:
    caught(pack[f"wide.{recipe}"], with_recipe(changed), stage)


# Other ways to add the same terms, all of them within what the recipe leaves open.
OPEN: list[tuple[str, str, Callable[[Recipe], Recipe], str]] = [
    ("bf16-fa4", "tree of delta", change("gradient", delta=DeltaSum.FMA_ASCENDING), "delta"),
    (FOLDED, "exact s", change("s", instruction="exact"), "s"),
    (FOLDED, "exact o", change("o", instruction="exact"), "o"),
    (FOLDED, "exact dp", change("dp", instruction="exact"), "dp"),
    (FOLDED, "exact dv", change("dv", instruction="exact"), "dv"),
    ("bf16-fa4", "float32 s", change("s", instruction="float32"), "s"),
]


@pytest.mark.parametrize(("recipe", "changed", "stage"), some_daily(OPEN, {0, 1}))
def test_what_a_recipe_leaves_open_differs_and_passes(
    pack: golden.Pack, recipe: str, changed: Callable[[Recipe], Recipe], stage: str
) -> None:
    permitted(pack[f"wide.{recipe}"], with_recipe(changed), stage)


def permitted(case: golden.Case, kernel: Kernel, stage: str) -> None:
    """Require that a kernel has other bits of a stage, and passes."""
    (result,) = golden.check(case, kernel, diagnose=False).cases
    assert result.passed, result.departs
    first = next(one for one in result.tensors if one.inside)
    assert first.stage == stage


def test_another_order_of_the_row_sum(tiles: golden.Case) -> None:
    permitted(tiles, with_recipe(change("softmax", row_sum="two_lanes")), "row_sum")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("changed", "stage"),
    [
        pytest.param(change("dq", instruction="exact"), "dq", id="exact dq"),
        pytest.param(change("dk", instruction="exact"), "dk", id="exact dk"),
    ],
)
def test_sums_of_gradients_that_bfloat16_nearly_hides(
    tmp_path: Path, changed: Callable[[Recipe], Recipe], stage: str
) -> None:
    (case,) = (case for case in SUITES["smoke"] if case.name == "one-head-200")
    permitted(made(tmp_path / "pack", case, [FOLDED])[case.name], with_recipe(changed), stage)


TILES_OF_KEYS = spec(name="five-tiles", lengths=(520,), heads=1, seed=21, exponent=-6)


@pytest.mark.nightly
def test_another_order_of_key_tiles(tmp_path: Path) -> None:
    case = made(tmp_path / "pack", TILES_OF_KEYS, ["bf16-fa4"])["five-tiles.bf16-fa4"]
    caught(case, with_recipe(change("o", tile_order="ascending")), "row_max")


@pytest.mark.nightly
def test_another_order_of_tiles_that_is_a_schedule(tmp_path: Path) -> None:
    case = made(tmp_path / "pack", TILES_OF_KEYS, [FOLDED])[f"five-tiles.{FOLDED}"]
    permitted(case, with_recipe(change("dq", tile_order="descending")), "dq")


Bounds = Callable[[QueryTiles, Any], tuple[Any, Any]]


def off_by_one(step: int) -> Bounds:
    """The last key that each row sees, one too far or one too near."""
    right = QueryTiles.bounds

    def moved(tiles: QueryTiles, mask: Any) -> tuple[Any, Any]:
        first, last = right(tiles, mask)
        most = np.maximum(last, np.minimum(last + step, tiles.key_length[:, None] - 1))
        last = most if step > 0 else np.where(last < 0, last, last + step)
        return first, last.astype(np.int32)

    return moved


def first_key_missing(tiles: QueryTiles, mask: Any) -> tuple[Any, Any]:
    """The first key that each row sees, one too near where there is another."""
    first, last = RIGHT_BOUNDS(tiles, mask)
    return np.where(first < last, first + 1, first).astype(np.int32), last


RIGHT_BOUNDS = QueryTiles.bounds


DAILY_MASKS = {(FOLDED, "far"), ("bf16-fa4", "near"), ("flamia-mxfp8", "first")}


@pytest.mark.parametrize(
    ("recipe", "bounds"),
    [
        pytest.param(
            recipe,
            bounds,
            id=f"{recipe}: {name}",
            marks=() if (recipe, name) in DAILY_MASKS else pytest.mark.nightly,
        )
        for recipe in RECIPES
        for name, bounds in (
            ("far", off_by_one(1)),
            ("near", off_by_one(-1)),
            ("first", first_key_missing),
        )
    ],
)
def test_a_mask_off_by_one(
    pack: golden.Pack, recipe: str, bounds: Bounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = pack[f"wide.{recipe}"]
    right = attention.backward

    def backward(*arguments: Any, **settings: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(QueryTiles, "bounds", bounds)
            return right(*arguments, **settings)

    # The kernel alone is wrong: the check works with the same tiles.
    def ahead(*tensors: Any, **settings: Any) -> dict[str, Any]:
        with monkeypatch.context() as patch:
            patch.setattr(QueryTiles, "bounds", bounds)
            return forward_alone(*tensors, **settings)

    (result,) = golden.check(case, ahead, diagnose=False).cases
    # The products of guarded blocks are others where the mask is another.
    assert result.departs == ("s" if recipe == "flamia-mxfp8" else "row_max")
    assert result.suspects == ()
    with monkeypatch.context() as patch:
        patch.setattr(attention, "backward", backward)
        caught(case, numpy_kernel, "dp" if recipe == "flamia-mxfp8" else "p.dv")


def forward_alone(*tensors: Any, dout: Any, **settings: Any) -> dict[str, Any]:
    """The simulator without its backward, which would refuse the results of another mask."""
    from flamia_ref.attention import backward_stages

    later = backward_stages(Recipe.from_json(settings["recipe_json"]))
    settings["trace"] = [name for name in settings["trace"] if name not in later]
    return numpy_kernel(*tensors, **settings)


@pytest.mark.parametrize(
    ("recipe", "operand", "stage"),
    [
        (FOLDED, "q", "s"),
        pytest.param(FOLDED, "k", "s", marks=pytest.mark.nightly),
        pytest.param(FOLDED, "v", "p.o.scales", marks=pytest.mark.nightly),
        pytest.param("flamia-mxfp8-unguarded", "k", "s", marks=pytest.mark.nightly),
        ("flamia-mxfp8-unguarded", "v", "o"),
    ],
)
def test_the_scale_of_the_neighbouring_block(
    pack: golden.Pack, recipe: str, operand: str, stage: str
) -> None:
    case = pack[f"wide.{recipe}"]
    block: tuple[Any, Any] = (1, "all") if recipe == FOLDED else (32, 32)

    def kernel(q: Any, k: Any, v: Any, **settings: Any) -> dict[str, Any]:
        tensors = {"q": q, "k": k, "v": v}
        right = numpy_kernel(q, k, v, **settings)
        tensors[operand] = with_scale_of_neighbour(tensors[operand], slice(2, 37), block)
        wrong = numpy_kernel(*tensors.values(), **settings)
        assert np.array_equal(wrong[f"{operand}.codes"], right[f"{operand}.codes"])
        assert np.sum(wrong[f"{operand}.scales"] != right[f"{operand}.scales"]) == 1
        # The byte that the kernel wrote is right; it reads another.
        return wrong | {f"{operand}.scales": right[f"{operand}.scales"]}

    caught(case, kernel, stage)


def with_scale_of_neighbour(x: Any, rows: slice, block: tuple[Any, Any]) -> Any:
    """The values of x if a block of head 0 had the scale of the one before it, in bfloat16, which holds them.

    It is one that keeps its codes when it is quantized again: its largest is above half of e4m3's.
    """
    tensor = quantize(np.asarray(x[rows, 0], np.float32), "te-mx-e4m3", block=block)
    codes, scales = np.asarray(tensor.codes), np.asarray(tensor.scales)
    values = np.asarray(dequantize(tensor))
    height = tensor.block[0]
    for index in range(1, len(scales)):
        part = slice(index * height, (index + 1) * height)
        step = int(scales[index - 1, 0]) - int(scales[index, 0])
        if step and np.max(codes[part] & 0x7F) > 0x76:  # 224
            moved = x.copy()
            moved[rows, 0][part] = (values[part] * 2.0**step).astype(x.dtype)
            return moved
    raise AssertionError("no two neighbours have different scales")


DAILY = ("bf16-fa4", "flamia-mxfp8")
MOST_NIGHTLY = [
    pytest.param(recipe, marks=() if recipe in DAILY else pytest.mark.nightly) for recipe in RECIPES
]


@pytest.mark.parametrize("recipe", MOST_NIGHTLY)
def test_the_sum_of_p_divided_by_twice(pack: golden.Pack, recipe: str) -> None:
    def kernel(*tensors: Any, **settings: Any) -> dict[str, Any]:
        given = numpy_kernel(*tensors, **settings)
        with np.errstate(all="ignore"):
            again = given["o"] / given["row_sum"].T[:, :, None]
        return given | {"o": again, "out": to_bfloat16(again)}

    caught(pack[f"wide.{recipe}"], kernel, "o")


@pytest.mark.parametrize(
    ("recipe", "stage"),
    [
        ("bf16-fa4", "p.dv"),
        pytest.param("cudnn-mxfp8", "p.dv", marks=pytest.mark.nightly),
        pytest.param(FOLDED, "do.scales", marks=pytest.mark.nightly),
        ("flamia-mxfp8", "do.scales"),
    ],
)
def test_the_sum_of_p_divided_by_twice_in_the_backward(
    pack: golden.Pack, recipe: str, stage: str
) -> None:
    def kernel(*tensors: Any, **settings: Any) -> dict[str, Any]:
        return with_other_forward(
            *tensors,
            change=lambda forward: {"lse": twice(forward)},
            **settings,
        )

    caught(pack[f"wide.{recipe}"], kernel, stage)


def twice(forward: attention.Forward) -> Any:
    """lse with the logarithm of the row sum added twice, where that is not what a backward refuses."""
    sums = np.asarray(forward.trace["row_sum"])
    return forward.lse + np.log(np.maximum(sums, np.float32(1)))


def to_bfloat16(x: Any) -> Any:
    """Finite float32 values rounded to bfloat16, to nearest even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def with_other_forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    dout: Any,
    recipe_json: str,
    trace: Any,
    change: Callable[[attention.Forward], Mapping[str, Any]],
    recipe: str,
    **settings: Any,
) -> dict[str, Any]:
    """The simulator, whose backward takes something else for the results of the forward."""
    right = Recipe.from_json(recipe_json)
    later = [name for name in trace if name in attention.backward_stages(right)]
    earlier = [name for name in trace if name not in later]
    forward = attention.forward(q, k, v, right, trace=earlier, **settings)
    other = dataclasses.replace(forward, **change(forward))
    backward = attention.backward(q, k, v, dout, other, trace=later)
    outputs = {"out": forward.out, "lse": forward.lse}
    gradients = {"dq": backward.dq, "dk": backward.dk, "dv": backward.dv}
    return {**forward.trace, **outputs, **backward.trace, **gradients}


def test_delta_of_an_output_without_the_guard(pack: golden.Pack) -> None:
    def kernel(q: Any, k: Any, v: Any, **settings: Any) -> dict[str, Any]:
        plain = with_recipe(unguarded("o"))
        without = plain(q, k, v, **settings | {"dout": None, "trace": ()})["out"]
        return with_other_forward(q, k, v, change=lambda _: {"out": without}, **settings)

    caught(pack["wide.flamia-mxfp8"], kernel, "delta")


@pytest.mark.parametrize(
    "recipe",
    [
        FOLDED,
        *(
            pytest.param(recipe, marks=pytest.mark.nightly)
            for recipe in ("flamia-mxfp8", "flamia-mxfp8-unguarded")
        ),
    ],
)
def test_delta_without_the_guard_of_dead_rows(pack: golden.Pack, recipe: str) -> None:
    def kernel(*tensors: Any, **settings: Any) -> dict[str, Any]:
        given = numpy_kernel(*tensors, **settings)
        assert np.isneginf(given["lse"][:, DEAD]).all()
        assert not given["delta"][:, DEAD].any()
        delta, ds = given["delta"].copy(), list(given["ds"])
        delta[:, DEAD] = np.nan  # dO times 2^(floor(r) - r), r = -infinity
        ds[-1] = np.full_like(ds[-1], np.nan)  # 0 times NaN
        return given | {"delta": delta, "ds": ds}

    caught(pack[f"wide.{recipe}"], kernel, "delta")


def keys_of_pairs(
    case: golden.Case, fold: np.ndarray, roll: int = 0
) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """The scales and the codes of dS for dK, and dK, of `flamia-mxfp8-folded`, from dS and the codes of Q.

    `fold` [tokens, heads] are the bytes that dS takes. `roll`: the product reads the scales of the
    block as many queries of blocks before.
    """
    tensors, given = case.tensors, case.spec
    scales, codes, sums = [], [], np.zeros((given.tokens, given.heads, given.head_dim), np.float32)
    for document, length in enumerate(given.lengths):
        rows = slice(given.starts[document], given.starts[document + 1])
        ds = tensors[f"ds.{document}"]
        powers = 2.0 ** (fold[rows].T.astype(np.float64)[:, :, None] - 127)
        folded = (ds.astype(np.float64) * powers).astype(np.float32)
        tensor = quantize(folded, "te-mx-e4m3", block=(32, 1))
        scales.append(np.asarray(tensor.scales))
        codes.append(np.asarray(tensor.codes))
        short = -length % 32
        for head in range(given.heads if length else 0):
            read = np.roll(scales[-1][head], roll, axis=0)
            sums[rows, head] = matmul(
                np.pad(codes[-1][head], ((0, short), (0, 0))).T,
                np.pad(tensors["q.codes"][rows, head], ((0, short), (0, 0))),
                MX,
                a_format="e4m3",
                b_format="e4m3",
                a_scales=np.ascontiguousarray(read.T),
                b_scales=np.full((len(read), given.head_dim), 127, np.uint8),
            )
    group = given.heads // given.kv_heads
    by_group = sums.reshape(given.tokens, given.kv_heads, group, given.head_dim)
    total = by_group[:, :, 0].copy()
    for head in range(1, group):
        total += by_group[:, :, head]
    return scales, codes, to_bfloat16(total * np.float32(given.softmax_scale))


@pytest.mark.parametrize("name", ["wide", "tiles"])
def test_control_dk_from_the_scales_of_q_is_that_of_the_pack(
    pack: golden.Pack, tiles: golden.Case, name: str
) -> None:
    case = pack[f"wide.{FOLDED}"] if name == "wide" else tiles
    scales, codes, dk = keys_of_pairs(case, case.tensors["q.scales"][:, :, 0])
    given = results(case) | {"dk": dk}
    for stage, arrays in (("ds.dk.scales", scales), ("ds.dk.codes", codes)):
        given |= {f"{stage}.{document}": array for document, array in enumerate(arrays)}
    assert golden.check(case, {case.name: given}).passed


@pytest.mark.parametrize(
    "operand", ["k", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("v", "do"))]
)
def test_ds_folded_with_the_scale_of_the_wrong_operand(pack: golden.Pack, operand: str) -> None:
    case = pack[f"wide.{FOLDED}"]
    fold = case.tensors[f"{operand}.scales"][:, :, 0]
    fold = np.repeat(fold, 2 // fold.shape[1], axis=1)  # K and V: two query heads over one

    def kernel(*tensors: Any, **settings: Any) -> dict[str, Any]:
        scales, codes, dk = keys_of_pairs(case, fold)
        given = numpy_kernel(*tensors, **settings)
        return given | {"ds.dk.scales": scales, "ds.dk.codes": codes, "dk": dk}

    result = caught(case, kernel, "ds.dk.scales")
    wrong = {one.stage for one in result.tensors if one.status is not Status.PASS}
    differs = {one.stage for one in result.tensors if one.differing}
    assert wrong <= {"ds.dk.scales", "ds.dk.codes"}  # dK is what these give
    assert "dk" in differs
    assert not {"ds", "ds.dq.scales", "ds.dq.codes", "dq", "dv"} & differs


def test_ds_read_with_the_scale_of_the_neighbouring_block(pack: golden.Pack) -> None:
    case = pack[f"wide.{FOLDED}"]

    def kernel(*tensors: Any, **settings: Any) -> dict[str, Any]:
        _, _, dk = keys_of_pairs(case, case.tensors["q.scales"][:, :, 0], roll=1)
        return numpy_kernel(*tensors, **settings) | {"dk": dk}

    caught(case, kernel, "dk")


@pytest.mark.parametrize("recipe", MOST_NIGHTLY)
def test_control_the_right_recipe_passes(pack: golden.Pack, recipe: str) -> None:
    case = pack[f"wide.{recipe}"]
    report = golden.check(case, with_recipe(lambda right: right))
    assert report.passed, str(report)

    def kernel(*tensors: Any, **settings: Any) -> dict[str, Any]:
        return with_other_forward(*tensors, change=lambda _: {}, **settings)

    report = golden.check(case, kernel)
    assert report.passed, str(report)
