"""Mistakes of the codes of P and dS, encoded by hand from values that are not those of the pack."""

from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flamia_ref.golden.mistakes import Name, diagnose
from flamia_ref.golden.mistakes.pairs import encoded
from flamia_ref.golden.mistakes.scene import Scene
from flamia_ref.golden.stage import Role
from tests.golden.mistakes.planting import (
    InMemory,
    aligned,
    case_of,
    diagnosed,
    first_of,
    recipe_of,
)

FOLDED, CUDNN, SQUARES = "flamia-mxfp8-folded", "cudnn-mxfp8", "flamia-mxfp8-unguarded"
nightly = pytest.mark.nightly

Rule = Callable[[Any], Any]


def exponent(x: Any) -> Any:
    """floor(log2(x)) of numbers above 0; of 0, far below any scale."""
    return np.where(x > 0, np.frexp(x)[1] - 1, -(2**20))


RULES: dict[str, Rule] = {
    "over 448, down": lambda amax: exponent(amax / 448),
    "OCP floor": lambda amax: exponent(amax) - 8,
    "ceil": lambda amax: exponent(amax) - 8 + (np.ldexp(1.0, exponent(amax)) < amax),
    # Half a unit of e4m3's last place is added, so 1.9375 and above become 2.
    "even": lambda amax: exponent(amax) + (amax >= np.ldexp(1.9375, exponent(amax))) - 8,
}


def by_hand(x: Any, axis: int, rule: Rule) -> tuple[Any, Any]:
    """Codes and scale bytes of [heads, queries, keys] in blocks of 32 along an axis."""
    x = np.moveaxis(np.asarray(x, np.float64), axis, 2)
    size = x.shape[2]
    blocks = np.pad(x, ((0, 0), (0, 0), (0, -size % 32))).reshape(*x.shape[:2], -1, 32)
    power = np.clip(rule(np.abs(blocks).max(axis=3)), -127, 127)
    scaled = np.clip(np.ldexp(blocks, -power[..., None]), -448, 448)
    codes = scaled.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    codes = codes.reshape(*x.shape[:2], -1)[:, :, :size]
    return np.moveaxis(codes, 2, axis), np.moveaxis((power + 127).astype(np.uint8), 2, axis)


SOURCES = {"p.o": ("p", "v", 2), "p.dv": ("p.dv", "do", 1), "ds.dq": ("ds", "k", 2)}
SOURCES |= {"ds.dk": ("ds", "q", 1)}


def powers(case: InMemory, tensor: str, document: int) -> Any:
    """The powers of two that the folded recipe takes into P or dS, to broadcast against its pairs."""
    a, b = case.spec.starts[document : document + 2]
    scales = case.tensors[f"{tensor}.scales"][a:b, :, 0].T.astype(int) - 127
    if tensor in ("k", "v"):
        return np.repeat(scales, case.spec.heads // case.spec.kv_heads, axis=0)[:, None, :]
    return scales[:, :, None]


def noisy(case: InMemory, stage: str, rule: Rule) -> dict[str, Any]:
    """Every stage before a pair stage, its source off by parts in 2^10, as a kernel's sums may be, and its codes."""
    source, tensor, axis = SOURCES[stage]
    given: dict[str, Any] = {}
    random = np.random.default_rng(3)
    for document in range(len(case.spec.lengths)):
        x = np.array(case.tensors[f"{source}.{document}"])
        x = (x * (1 + random.uniform(-1, 1, x.shape) * 2.0**-10)).astype(np.float32)
        codes, scales = by_hand(
            np.ldexp(x.astype(float), powers(case, tensor, document)), axis, rule
        )
        given |= {
            f"{source}.{document}": x,
            f"{stage}.codes.{document}": codes,
            f"{stage}.scales.{document}": scales,
        }
    return given


DAILY = {("p.o", "over 448, down", "scales"), ("p.dv", "ceil", "codes")}


@pytest.mark.parametrize(
    ("stage", "rule", "kind"),
    [
        pytest.param(*one, marks=() if one in DAILY else nightly)
        for one in product(SOURCES, RULES, ("scales", "codes"))
    ],
)
def test_a_scale_rule_is_named_from_the_given_values(stage: str, rule: str, kind: str) -> None:
    case = case_of("wide", FOLDED)
    given = aligned(case, noisy(case, stage, RULES[rule]))
    first = next(name for name in given if name.startswith(f"{stage}.{kind}"))
    found = diagnose(case, given, first, failing=given[first].differs())  # type: ignore[arg-type]
    assert [one.mistake for one in found] == [Name.SCALE_RULE], found
    words = {"over 448, down": "over 448, rounded down", "OCP floor": "OCP", "ceil": "ceiling"}
    assert words.get(rule, "even") in found[0].sentence


def decoded(codes: Any, scales: Any, axis: int) -> Any:
    repeated = np.repeat(scales.astype(int), 32, axis=axis).take(
        range(codes.shape[axis]), axis=axis
    )
    return np.ldexp(codes.view(ml_dtypes.float8_e4m3fn).astype(float), repeated - 127)


def to_bfloat16(x: Any) -> Any:
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


@pytest.mark.parametrize(
    "rule", ["over 448, down", *(pytest.param(one, marks=nightly) for one in ("ceil", "even"))]
)
@pytest.mark.parametrize("name", ["out", pytest.param("dv", marks=nightly)])
def test_a_scale_rule_is_named_from_the_outputs(name: str, rule: str) -> None:
    """Products in float64 from codes by hand."""
    case = case_of("wide", FOLDED)
    stage, tensor = ("p.o", "v") if name == "out" else ("p.dv", "do")
    source, _, axis = SOURCES[stage]
    rows, group = [], case.spec.heads // case.spec.kv_heads
    for document, (a, b) in enumerate(pairwise(case.spec.starts)):
        x = np.ldexp(
            case.tensors[f"{source}.{document}"].astype(float), powers(case, tensor, document)
        )
        p = decoded(*by_hand(x, axis, RULES[rule]), axis)
        right = case.tensors[f"{tensor}.codes"][a:b].view(ml_dtypes.float8_e4m3fn).astype(float)
        if name == "out":
            right = np.repeat(right, group, axis=1)
            sums = case.tensors["row_sum"][:, a:b].T[:, :, None]
            rows.append(np.einsum("hqk,khd->qhd", p, right) / sums)
        else:
            sums = np.einsum("hqk,qhd->khd", p, right)
            rows.append(sums.reshape(b - a, -1, group, sums.shape[2]).sum(axis=2))
    given = {one: case.tensors[one] for one in ("out", "lse", "dq", "dk", "dv")}
    given[name] = to_bfloat16(np.concatenate(rows))
    first, found = diagnosed(case, given, final=True)
    assert first == name
    assert found
    assert found[0].mistake == Name.SCALE_RULE, found


@pytest.mark.parametrize(
    "recipe", [FOLDED, *(pytest.param(one, marks=nightly) for one in (CUDNN, SQUARES))]
)
def test_the_own_format_gives_the_codes_of_the_pack(recipe: str) -> None:
    from flamia_ref.attention.stages import pair_names
    from flamia_ref.formats import FORMATS, PRESETS

    case, of = case_of("documents", recipe), recipe_of(case_of("documents", recipe))
    heads = tuple(range(case.spec.kv_heads))
    scene = Scene(case=case, documents=(0, 1, 2), kv_heads=heads)  # type: ignore[arg-type]
    tried = 0
    for use, stage in pair_names(of).items():
        for document in range(3):
            form = of.operand(use).format
            made = encoded(
                scene, use, document, PRESETS[form] if form in PRESETS else FORMATS[form]
            )
            if made is None:
                continue
            tried += 1
            assert np.array_equal(made.codes, case.tensors[f"{stage}.codes.{document}"])
            if made.scales is not None:
                assert np.array_equal(made.scales, case.tensors[f"{stage}.scales.{document}"])
    assert tried >= 3


@pytest.mark.parametrize("recipe", [FOLDED, pytest.param(CUDNN, marks=nightly)])
def test_p_in_e5m2_is_named(recipe: str) -> None:
    case = case_of("wide", recipe)
    given = {
        name: case.tensors[name]
        for name, place in case.places.items()
        if place.stage.role != Role.INPUT
    }
    for document in range(len(case.spec.lengths)):
        x = case.tensors[f"p.{document}"].astype(float)
        name = f"p.o.codes.{document}"
        if recipe == FOLDED:
            x = np.ldexp(x, powers(case, "v", document))
            scales = case.tensors[f"p.o.scales.{document}"].astype(int) - 127
            # The scale of e5m2 is of 57344 = 448 * 2^7.
            given[f"p.o.scales.{document}"] = (np.maximum(scales - 7, -127) + 127).astype(np.uint8)
            x = np.ldexp(x, -(np.repeat(scales - 7, 32, axis=2)[:, :, : x.shape[2]]))
        given[name] = x.astype(np.float32).astype(ml_dtypes.float8_e5m2).view(np.uint8)
    tensors = aligned(case, given)
    first = first_of(case, tensors)
    assert first.startswith("p.o")
    found = diagnose(case, tensors, first)  # type: ignore[arg-type]
    assert [one.mistake for one in found] == [Name.PAIR_FORMAT], found
