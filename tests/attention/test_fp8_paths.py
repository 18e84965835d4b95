"""`fp8-fa4`, `fp8-fa3` and `cutlass-fp8` against implementations that share no code with them, and faults that these
must see.

They have a forward alone. Faults are looked for on one pack of two documents, whose first has two key tiles.
"""

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from flamia_ref import _float32
from flamia_ref.attention import (
    RECIPES,
    Recipe,
    copy_numerics,
    float64,
    forward,
    forward_stages,
    forward_tile,
    row_end,
    softmax,
)
from flamia_ref.attention.computed import check_computed
from flamia_ref.attention.product import Accumulation, Scope, TileOrder
from flamia_ref.evidence import Evidence
from tests.attention.changes import changed
from tests.attention.samples import (
    BF16,
    any_bits,
    bell,
    bits,
    edges,
    tiny,
    wide,
    with_specials,
)
from tests.independent import attention as independent
from tests.independent import factors, float32, mufu

FA4, FA3, CUTLASS = "fp8-fa4", "fp8-fa3", "cutlass-fp8"
NAMES = (FA4, FA3, CUTLASS)


def results(recipe: Recipe, q, k, v, cu_seqlens, **options) -> dict[str, Any]:
    """Every stage of the package."""
    one = forward(q, k, v, recipe, cu_seqlens=cu_seqlens, trace=forward_stages(recipe), **options)
    return {**one.trace, "out": one.out, "lse": one.lse}


def departures(name: str, found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """The stages that differ, in the order of the dataflow."""
    stages = (*forward_stages(name), "out", "lse")
    assert set(found) == set(wanted) == set(stages)
    return [stage for stage in stages if not _same(found[stage], wanted[stage])]


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(found, list):
        return all(_same(one, other) for one, other in zip(found, wanted, strict=True))
    if wanted.dtype == np.uint16:
        wanted = wanted.view(BF16).astype(np.float32)
    found, wanted = bits(found), bits(wanted.view(found.dtype))
    return found.shape == wanted.shape and bool((found == wanted).all())


def expected(name: str, q, k, v, cu_seqlens, **options) -> dict[str, Any]:
    arrays = (x.view(np.uint16) for x in (q, k, v))
    return independent.run(name, *arrays, None, cu_seqlens, **options)


KEYS = {
    FA4: 128,
    FA3: 64,
    CUTLASS: 64,
}  # of a tile, so that a short document has two; FA4 emulates the first 96
SCALE = 0.36  # fl(fl(SCALE log2 e) ln 2) is another float32


def small(recipe: Recipe, name: str) -> Recipe:
    """The recipe with tiles of `KEYS`."""
    return changed(recipe, "tiles.key", KEYS[name])


@functools.cache
def given(tokens: int) -> tuple[Any, ...]:
    """Two documents of other magnitudes."""
    q, k, v, cu_seqlens = bell(3, [tokens, 9], 1, 1, 12, spread=2.0)
    for x, powers in ((q, (-2, 3)), (k, (1, 0)), (v, (4, -3))):
        x[:tokens] *= np.float32(2.0 ** powers[0]).astype(BF16)
        x[tokens:] *= np.float32(2.0 ** powers[1]).astype(BF16)
    return q, k, v, cu_seqlens


@functools.cache
def expected_of_given(name: str) -> dict[str, Any]:
    """What the slow implementation gives in those tiles."""
    with pytest.MonkeyPatch.context() as patch:
        own = independent.FORWARD_ONLY[name]
        other = type("Small", (own,), {"key_tile": KEYS[name]})
        patch.setitem(independent.FORWARD_ONLY, name, other)
        return expected(name, *given(KEYS[name] + 12), softmax_scale=SCALE)


def faults(recipe: Recipe, name: str) -> list[str]:
    """What departs on the given pack from the recipe of a name."""
    found = results(recipe, *given(KEYS[name] + 12), softmax_scale=SCALE)
    return departures(name, found, expected_of_given(name))


@pytest.mark.parametrize("name", NAMES)
def test_every_stage_of_the_pack(name: str) -> None:
    assert faults(small(RECIPES[name], name), name) == []


@pytest.mark.parametrize(
    ("make", "lengths", "heads", "channels", "causal"),
    [
        pytest.param(bell, [7, 0, 3], (4, 2), 72, True, id="bell, grouped heads, 72 channels"),
        pytest.param(wide, [23, 7], (1, 1), 16, False, id="wide, full"),
        pytest.param(any_bits, [12], (1, 1), 16, True, id="any bits"),
        pytest.param(with_specials, [40], (1, 1), 4, True, id="specials"),
        *(
            pytest.param(make, [300, 0, 35], (2, 1), 40, causal, marks=pytest.mark.nightly)
            for make in (bell, wide, any_bits, with_specials, tiny, edges)
            for causal in (True, False)
        ),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_every_stage(name, make, lengths, heads, channels, causal) -> None:
    arrays = make(7, lengths, *heads, channels)
    wanted = expected(name, *arrays, causal=causal)
    assert departures(name, results(RECIPES[name], *arrays, causal=causal), wanted) == []


@pytest.mark.parametrize(
    ("name", "path", "value", "first"),
    [
        (FA4, "softmax.exp2_argument", "fused_base", "p"),
        (FA4, "softmax.emulated", None, "p"),
        (FA4, "softmax.row_sum", "quads", "row_sum"),
        (FA4, "softmax.normalisation", "division", "o"),
        (FA4, "softmax.lse", "factor_fma", "lse"),
        (FA4, "o.tile_order", TileOrder.ASCENDING, "p"),
        (FA4, "s.instruction", "sm90.wgmma.fp8", "s"),
        (FA3, "softmax.exp2_argument", "fused", "p"),
        (FA3, "softmax.p_offset", 7, "p"),
        (FA3, "softmax.row_sum", "eight_lanes", "row_sum"),
        (FA3, "softmax.row_sum", "octets", "row_sum"),
        (FA3, "softmax.normalisation", "division", "o"),
        (FA3, "softmax.lse", "log2_fma", "lse"),
        (FA3, "softmax.rescale_threshold", 0, None),  # as it is
        (FA3, "tiles.key", 96, "p"),
        (FA3, "o.tile_order", TileOrder.ASCENDING, "p"),
        (FA3, "o.accumulation", Accumulation.FLOAT32_PARTIALS, "o"),
        (FA3, "o.instruction", "sm100.tcgen05.f8f6f4", "o"),
        (CUTLASS, "softmax.row_sum", "eight_lanes", "row_sum"),
        (CUTLASS, "softmax.normalisation", "division", "o"),
        (CUTLASS, "softmax.lse", "factor_fma", "lse"),
        (CUTLASS, "softmax.lse", "log2_fma", "lse"),
        (CUTLASS, "softmax.p_offset", 8, "p"),
        (CUTLASS, "o.tile_order", TileOrder.DESCENDING, "p"),
        (CUTLASS, "o.right.scope", Scope.HEAD, None),  # other stages
    ],
)
def test_a_changed_knob_shows(name, path, value, first) -> None:
    recipe = changed(small(RECIPES[name], name), path, value)
    if path == "o.right.scope":
        assert "v.scales" in forward_stages(recipe)
        return
    found = faults(recipe, name)
    assert (found[0] if found else None) == first


ROUNDINGS: dict[str, Callable[[float], int]] = {
    "exact_product": factors.exact_product,
    "float64_product": factors.float64_product,
    "float32_product": factors.float32_product,
    "float32_scale": lambda scale: float32.nearest(
        Fraction(float(np.float32(scale)) * factors.LOG2_E_FLOAT64)
    ),
}


@pytest.mark.parametrize(
    ("name", "own"),
    [(FA4, "float32_product"), (FA3, "float32_scale"), (CUTLASS, "float32_product")],
)
def test_the_factors_of_the_scores(name: str, own: str) -> None:
    """Scales at which the roundings of c, and with it of P, are told apart."""
    q, k, v, cu_seqlens = bell(2, [9], 1, 1, 4)
    for other in set(ROUNDINGS) - {own}:
        scale = next(
            scale
            for scale in (x**-0.5 for x in range(3, 10000))
            if ROUNDINGS[own](scale) != ROUNDINGS[other](scale)
        )
        wanted = expected(name, q, k, v, cu_seqlens, softmax_scale=scale)
        for rounding in (own, other):
            recipe = changed(RECIPES[name], "softmax.score_factor", rounding)
            found = results(recipe, q, k, v, cu_seqlens, softmax_scale=scale)
            assert (departures(name, found, wanted) == []) == (rounding == own), rounding


def _words(seed: int, *shape: int) -> Any:
    random = np.random.default_rng(seed)
    return np.exp2(random.uniform(-20, 8, shape)).astype(np.float32).view(np.uint32)


def test_the_lanes_of_quads() -> None:
    """By hand: lane r has columns 2 r and 2 r + 1 of each 8; its first one comes with the rescaled sum."""
    p, held, factor = _words(8, 1, 40, 224), _words(9, 1, 40, 4), _words(10, 1, 40)
    wanted = np.zeros((40, 4), np.uint32)
    for row in range(40):
        for lane in range(4):
            mine = [x for at, x in enumerate(p[0, row].tolist()) if at % 8 // 2 == lane]
            begin = float32.fused_multiply_add(
                int(held[0, row, lane]), int(factor[0, row]), mine[0]
            )
            wanted[row, lane] = functools.reduce(float32.add, mine[1:], begin)
    knobs = RECIPES[FA3].softmax
    found = softmax.summed(held, factor, p, knobs)
    assert (found[0] == wanted).all()
    apart = _float32.multiply(held, np.broadcast_to(factor[:, :, None], held.shape))
    assert (softmax.reductions.partial_sums(p, "fa3.row_sum", 2, apart) != found).any()
    a, b, c, d = (int(x) for x in found[0, 0])
    total = float32.add(float32.add(a, c), float32.add(b, d))
    assert softmax.total(found, knobs)[0, 0] == total
    assert (
        total != float32.add(float32.add(a, b), float32.add(c, d))
        or (
            softmax.total(found, knobs)
            != softmax.total(found, changed(RECIPES[FA3], "softmax.row_sum", "octets").softmax)
        ).any()
    )


def test_halved_lanes() -> None:
    """By hand: both lanes of the first pair begin with half of the sum."""
    p, held, factor = _words(11, 1, 40, 128), _words(12, 1, 40, 1), _words(13, 1, 40)
    found = softmax.summed(held, factor, p, RECIPES[CUTLASS].softmax)
    for row in range(40):
        half = float32.multiply(
            int(held[0, row, 0]), float32.multiply(0x3F000000, int(factor[0, row]))
        )
        lanes = [half, half, 0, 0, 0, 0, 0, 0]
        for column, x in enumerate(p[0, row].tolist()):
            lanes[column % 8] = float32.add(lanes[column % 8], x)
        add = float32.add
        even = add(add(lanes[0], lanes[2]), add(lanes[4], lanes[6]))
        odd = add(add(lanes[1], lanes[3]), add(lanes[5], lanes[7]))
        assert found[0, row, 0] == add(even, odd)


@pytest.mark.parametrize("name", NAMES)
def test_a_sum_that_is_no_number(name: str) -> None:
    """A score of NaN: FlashAttention-4 multiplies O by rcp(1), FlashAttention-3 by 0, CUTLASS by NaN."""
    q, k, v, cu_seqlens = bell(4, [3], 1, 1, 4)
    found = softmax_end(name, total=np.float32(np.nan))
    if name == CUTLASS:
        assert np.isnan(found["o"]).all()
        assert np.isnan(found["lse"]).all()
    else:
        assert (found["o"] == (0 if name == FA3 else 2.0)).all()
        assert (found["lse"] == -np.inf).all()
    k[1] = np.nan
    options = {"causal": False}
    wanted = expected(name, q, k, v, cu_seqlens, **options)
    assert departures(name, results(RECIPES[name], q, k, v, cu_seqlens, **options), wanted) == []


def softmax_end(name: str, total: np.float32) -> dict[str, Any]:
    """The end of one row whose accumulator is 2 and whose maximum is 1."""
    knobs = RECIPES[name].softmax
    lanes = np.zeros((1, 1, softmax.lanes(knobs)), np.float32)
    lanes[0, 0, 0] = total
    row = row_end.finished(
        np.full((1, 1, 3), 2.0, np.float32).view(np.uint32),
        np.ones((1, 1), np.float32).view(np.uint32),
        lanes.view(np.uint32),
        None,
        np.zeros((1, 1), bool),
        np.asarray(softmax.LOG2_E),
        knobs,
    )
    return {"o": row.o.view(np.float32), "lse": row.lse.view(np.float32)}


@pytest.mark.parametrize("cap", [1.5, 3.3])
def test_the_soft_cap_of_flash_attention_3(cap: float) -> None:
    """S' = tanh(S ((s / cap) (dq dk))) and c = cap log2(e), from the codes and descales that are traced."""
    q, k, v, cu_seqlens = bell(5, [6], 1, 1, 8, spread=2.0)
    scale = 0.37
    found = results(
        RECIPES[FA3], q, k, v, cu_seqlens, causal=False, softcap=cap, softmax_scale=scale
    )
    of_q, of_k = (int(found[f"{x}.scales"].view(np.uint32)[0, 0]) for x in "qk")
    quotient = np.float32(scale) / np.float32(cap)
    before = float32.multiply(
        float32.multiply(of_q, of_k), int(np.float32(quotient).view(np.uint32))
    )
    c = float32.nearest(Fraction(float(np.float32(cap)) * factors.LOG2_E_FLOAT64))
    s = found["s"][0].view(np.uint32)[0]
    p = found["p"][0].view(np.uint32)[0]
    for row, line in enumerate(s.tolist()):
        scores = [mufu.tanh(float32.multiply(x, before)) for x in line]
        m = functools.reduce(float32.maxnum, scores)
        assert found["row_max"].view(np.uint32)[0, row] == m
        offset = float32.negate(float32.fused_multiply_add(m, c, 0xC1000000))
        wanted = [mufu.exp2(float32.fused_multiply_add(x, c, offset)) for x in scores]
        assert p[row].tolist() == wanted
    other = changed(RECIPES[FA3], "softmax.softcap", "scaled")
    apart = results(other, q, k, v, cu_seqlens, causal=False, softcap=cap, softmax_scale=scale)
    assert (apart["row_max"] != found["row_max"]).any()
    true = float64.forward(
        q, k, v, cu_seqlens=cu_seqlens, causal=False, softcap=cap, softmax_scale=scale
    )
    assert np.abs(found["lse"] - true.lse).max() < 0.1


def _two_roundings(base, c, knobs):
    """The base multiplied, then 8 taken off."""
    scaled = _float32.multiply(base, np.broadcast_to(softmax.against(c, base), base.shape))
    return _float32.subtract(softmax.integer(knobs.p_offset), scaled)


def _without_descales(factors_, of_q, of_k):
    """S as if q and k had no descale."""
    return factors_


def _eight_lanes(first, second, terms):
    """The whole sum in lane 0."""
    return softmax.reductions.reduce(
        terms, "fa4.row_sum", 2, _float32.multiply(first, np.uint32(0x40000000))
    )


def _exact_inverse(row_sum, knobs):
    """1 / l by division."""
    one = np.full(row_sum.shape, _float32.ONE, np.uint32)
    return _float32.divide(one, row_sum)


def _by_largest(amax, *, operand):
    """A descale that the largest value does not fit."""
    return ORIGINALS["descales"](np.maximum(amax, np.uint32(0x800000)) - 0x800000, operand=operand)


ORIGINALS = {"descales": copy_numerics.descales}

MUTANTS: dict[str, tuple[str, Any, str, Callable[..., Any], str]] = {
    "the base rounded twice": (FA3, softmax, "offset_of", _two_roundings, "p"),
    "no descale in c": (FA3, forward_tile, "descaled", _without_descales, "p"),
    "no descale in c, FA4": (FA4, forward_tile, "descaled", _without_descales, "p"),
    "the sum in one lane": (CUTLASS, softmax, "_onto_both", _eight_lanes, "row_sum"),
    "1 / l by division": (FA3, row_end, "_inverse", _exact_inverse, "o"),
    "1 / l by division, CUTLASS": (CUTLASS, row_end, "_inverse", _exact_inverse, "o"),
    "half a descale": (FA4, copy_numerics, "descales", _by_largest, "q.codes"),
}


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_fault_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, module, function, mutant, first = MUTANTS[fault]
    monkeypatch.setattr(module, function, mutant)
    assert faults(small(RECIPES[name], name), name)[0] == first


@pytest.mark.parametrize("name", NAMES)
def test_near_exact_attention(name: str) -> None:
    """Of values that e4m3 holds, with scores that are far apart, only P is rounded."""
    random = np.random.default_rng(3)
    q, k, v = ((random.integers(-4, 5, (50, heads, 32)) / 2).astype(BF16) for heads in (2, 1, 1))
    for x in (q, k, v):  # a power of two over 448 is a descale that rounds nothing
        x[0, 0, 0] = 1.75 * 2
    found = forward(q, k, v, name)
    true = float64.forward(q, k, v)
    assert np.abs(found.lse - true.lse).max() < (0.02 if name == FA3 else 2e-5)
    error = np.linalg.norm(found.out.astype(np.float64) - true.out) / np.linalg.norm(true.out)
    assert error < 0.04


def test_what_descales_share() -> None:
    """A later token moves the descales of its own document and key/value head, and so earlier rows."""
    q, k, v, cu_seqlens = bell(6, [40, 9], 4, 2, 16)
    for name, moves in ((FA4, True), (FA3, True), (CUTLASS, False)):
        before = results(RECIPES[name], q, k, v, cu_seqlens)
        louder = k.copy()
        louder[39, 1] *= np.float32(64).astype(BF16)
        after = results(RECIPES[name], q, louder, v, cu_seqlens)
        moved = (before["out"] != after["out"]).any(axis=2)
        assert moved[:39, 2:].any() == moves
        assert not moved[:, :2].any()
        assert not moved[40:].any()


@pytest.mark.parametrize("name", NAMES)
def test_evidence(name: str) -> None:
    """Descales and constants are the caller's; what was read is said to be."""
    recipe = RECIPES[name]
    assert recipe.label is Evidence.ASSUMED
    assert recipe.evidence("softmax.row_sum").evidence is Evidence.SOURCE
    assert recipe.evidence("s.left.scope").evidence is Evidence.ASSUMED
    assert recipe.evidence("o.left").evidence is Evidence.SOURCE
    measured = recipe.evidence("softmax.exp2").evidence
    assert measured is (Evidence.MEASURED if name == FA3 else Evidence.ASSUMED)


@pytest.mark.parametrize(
    ("name", "path", "value", "message"),
    [
        (FA3, "softmax.base", "integer_max", "is 'fused_base' with base 'integer_max'; the base"),
        (CUTLASS, "softmax.base", "scaled_max", "lse is 'scale_fma' with base 'scaled_max'"),
        (CUTLASS, "softmax.p_offset", 9, "lets P reach 2^9"),
        (FA3, "softmax.p_offset", 9, "lets P reach 2^9"),
    ],
)
def test_fields_that_contradict_each_other(name, path, value, message) -> None:
    with pytest.raises(ValueError, match=message.replace("^", r"\^")) as caught:
        changed(RECIPES[name], path, value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "path", "value", "message"),
    [
        (FA4, "softmax.lse", "scale_fma", "scope = 'head' with softmax.lse = 'scale_fma'"),
        (FA3, "softmax.normalisation", "quotient", "normalisation = 'quotient'; computed are"),
    ],
)
def test_what_descales_do_not_go_with(name, path, value, message) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_computed(changed(RECIPES[name], path, value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bounds", [[0, 0], [0, 0, 0]])
def test_no_tokens(name: str, bounds: list[int]) -> None:
    """Empty documents have descales of 1."""
    q, k, v = (np.zeros((0, heads, 16), BF16) for heads in (4, 2, 2))
    cu_seqlens = np.array(bounds, np.int32)
    found = results(RECIPES[name], q, k, v, cu_seqlens)
    assert departures(name, found, expected(name, q, k, v, cu_seqlens)) == []
    if name != CUTLASS:
        assert found["q.scales"].shape == (len(bounds) - 1, 2)
        assert (found["q.scales"] == 1).all()
