"""Strategies reach what they say, shrink to the plainest, and are the same from the same integers."""

import itertools
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis.errors import NoSuchExample

from flamia_ref.attention import RECIPES, forward
from flamia_ref.attention.variants import permitted_changes, with_change
from flamia_ref.formats import FORMATS, decode
from flamia_ref.packing import Documents, Mask
from flamia_ref.properties import PROPERTIES, Edit, Example, Space, strategies
from flamia_ref.properties.data import Inputs, inputs_of, values
from flamia_ref.properties.drawn import LENGTHS, Family, Poison

SEARCH = settings(
    max_examples=2000, database=None, derandomize=True, phases=(Phase.generate, Phase.shrink)
)
QUICK = settings(max_examples=25, database=None, derandomize=True, deadline=None)


def found(strategy: Any, condition: Any) -> Any:
    return find(strategy, condition, settings=SEARCH)


def never(strategy: Any, condition: Any) -> bool:
    try:
        find(strategy, condition, settings=QUICK)
    except NoSuchExample:
        return True
    return False


def single(bits: int) -> np.float32:
    return np.array(bits, np.uint32).view(np.float32)[()]


def half(bits: int) -> np.float32:
    return single(bits << 16)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("e4m3", "e2m1") else pytest.mark.nightly)
        for name, one in FORMATS.items()
        if one.bits <= 8
    ],
)
def test_every_code_of_a_small_format_is_reached(name: str) -> None:
    every = set()

    @settings(QUICK, max_examples=5000, phases=(Phase.generate,))
    @given(code=strategies.codes(name))
    def collect(code: int) -> None:
        every.add(code)

    collect()
    assert every == set(range(1 << FORMATS[name].bits))


def test_codes_without_specials() -> None:
    # E5M2: exponent field 31 is infinity or NaN; E4M3: 0x7f and 0xff are NaN; E8M0: 0xff.
    assert never(strategies.codes("e5m2", specials=False), lambda code: code & 0x7C == 0x7C)
    assert never(strategies.codes("e4m3", specials=False), lambda code: code & 0x7F == 0x7F)
    assert never(strategies.codes("e8m0", specials=False), lambda code: code == 0xFF)
    assert found(strategies.codes("e5m2"), lambda code: code & 0x7F == 0x7C) == 0x7C
    assert found(strategies.codes("fp16"), lambda code: code & 0x7C00 == 0x7C00) == 0x7C00
    assert never(strategies.codes("fp16", specials=False), lambda code: code & 0x7C00 == 0x7C00)
    assert never(strategies.codes("tf32"), lambda code: code & 0x1FFF)


@pytest.mark.parametrize(
    ("strategy", "value", "small"),
    [
        (strategies.float32_bits(), single, 2.0**-126),
        pytest.param(strategies.bfloat16_bits(), half, 2.0**-126, marks=pytest.mark.nightly),
    ],
)
def test_float_bits_reach_the_corners(strategy: Any, value: Any, small: float) -> None:
    for condition in (
        lambda x: x == 0 and np.signbit(x),
        lambda x: 0 < abs(x) < small,
        lambda x: x == 1,
        lambda x: x == small,
        lambda x: x > 3.3e38,
        lambda x: x < -1e30,
    ):
        found(strategy, lambda bits, holds=condition: holds(value(bits)))
    assert never(strategy, lambda bits: not np.isfinite(value(bits)))
    assert found(strategy, lambda bits: True) == 0


def test_float_bits_with_specials() -> None:
    assert np.isnan(
        single(found(strategies.float32_bits(specials=True), lambda b: np.isnan(single(b))))
    )
    assert (
        found(strategies.float32_bits(specials=True), lambda b: np.isinf(single(b))) == 0x7F800000
    )
    assert np.isnan(
        half(found(strategies.bfloat16_bits(specials=True), lambda b: np.isnan(half(b))))
    )


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "e8m0", "ue4m3"])
def test_ties_are_halfway(name: str) -> None:
    numbers = decode(np.arange(1 << FORMATS[name].bits, dtype=np.uint8), name, np.float64)
    finite = {float(x) for x in numbers if np.isfinite(x)}

    @QUICK
    @given(bits=strategies.ties(name))
    def halfway(bits: int) -> None:
        x = float(single(bits))
        low = max(y for y in finite if y < x)
        high = min(y for y in finite if y > x)
        assert x - low == high - x

    halfway()


@pytest.mark.nightly
def test_ties_of_bfloat16_and_among_float32() -> None:
    assert never(strategies.ties("bf16"), lambda bits: bits & 0xFFFF != 0x8000)
    # 17/16 is halfway between 1 and 9/8 in e4m3; a plain float32 is there one time in 2^23.
    found(strategies.float32_bits(ties_of="e4m3"), lambda bits: abs(single(bits)) == 1.0625)
    with pytest.raises(ValueError, match="ties are made for"):
        strategies.ties("fp16")


def test_code_arrays() -> None:
    one = found(strategies.code_arrays("e2m1", (2, 3)), lambda x: x.sum() > 20)
    assert one.shape == (2, 3)
    assert one.max() <= 15
    assert not found(strategies.code_arrays("e4m3", (4,)), lambda x: True).any()


def test_block_data_is_wide_and_has_odd_blocks() -> None:
    def binades(x: Any) -> float:
        held = np.abs(x[x != 0])
        return float(np.log2(held.max() / held.min())) if held.size else 0.0

    strategy = strategies.block_data(32, 32)
    found(strategy, lambda x: binades(x) > 40)
    found(strategy, lambda x: not x.any())
    found(strategy, lambda x: np.count_nonzero(x) == 1)
    found(strategy, lambda x: 0 < np.abs(x).max() < 2.0**-126)
    assert (found(strategy, lambda x: True) == 1).all()
    assert never(strategy, lambda x: x.shape != (32, 32) or x.dtype != np.float32)
    assert never(strategy, lambda x: not np.isfinite(x).all())
    with pytest.raises(ValueError, match="unknown kind of block data 'bel'; did you mean 'bell'"):
        strategies.block_data(kinds=("bel",))


def test_documents_reach_every_length_and_straddle() -> None:
    strategy = strategies.documents()
    for length in LENGTHS:
        assert found(strategy, lambda drawn, n=length: n in drawn) == (length,)
    straddling = found(strategy, lambda drawn: _straddles(drawn))
    assert sum(straddling) <= 34
    assert found(strategy, lambda drawn: len(drawn) == 3) == (0, 0, 0)
    assert found(strategies.cu_seqlens((5, 7)), lambda x: len(x) == 3).tolist() == [0, 5, 10]


def _straddles(lengths: tuple[int, ...]) -> bool:
    starts = [0, *itertools.accumulate(lengths)]
    return any(a % 32 and b > a // 32 * 32 + 32 for a, b in itertools.pairwise(starts))


@pytest.mark.parametrize(
    ("length", "block"), [(2, 32), (33, 32), (34, 32), (65, 16), (3, 2), (100, 32)]
)
def test_cuts_are_all_the_places_inside_blocks(length: int, block: int) -> None:
    reached = set()

    @settings(QUICK, max_examples=1500, phases=(Phase.generate,))
    @given(cut=strategies.cuts(length, block=block))
    def collect(cut: int) -> None:
        reached.add(cut)

    collect()
    assert reached == {c for c in range(1, length) if c % block}
    assert found(strategies.cuts(length, block=block), lambda cut: True) == 1


@pytest.mark.parametrize(("length", "block"), [(0, 32), (1, 32), (64, 1)])
def test_where_there_is_no_cut(length: int, block: int) -> None:
    with pytest.raises(ValueError, match="no cut inside a block"):
        strategies.cuts(length, block=block)


def test_edits_change_something_and_shrink_to_a_doubling() -> None:
    strategy = strategies.edits(range(3, 9))
    assert found(strategy, lambda edit: True) == Edit(operand="q", token=3, channel=0, exponent=1)
    assert never(strategy, lambda edit: edit.exponent == 0 and edit.sign == 1)
    assert found(strategy, lambda edit: edit.exponent == 0).sign == -1
    assert found(strategy, lambda edit: edit.channel is None).token == 3
    assert {found(strategy, lambda e, n=name: e.operand == n).operand for name in ("q", "k", "v", "dout")} == {
        "q", "k", "v", "dout",
    }  # fmt: skip
    found(strategy, lambda edit: edit.exponent >= 30 and edit.token == 8)
    found(strategy, lambda edit: edit.exponent <= -20)


def test_masks() -> None:
    strategy = strategies.masks((0, 1, 33))
    for condition in (
        lambda mask: not mask.causal,
        lambda mask: mask.window[1] == 32,
        lambda mask: mask.alignment == "top_left" and not mask.same_tokens,
        lambda mask: mask.dead().any(),
        lambda mask: len(mask.queries) == 3 and 0 in mask.queries.lengths,
    ):
        found(strategy, condition)
    assert found(strategy, lambda mask: mask.queries.tokens > 0) == Mask(
        Documents((0, 1)), Documents((0, 1))
    )
    assert never(strategy, lambda mask: mask.causal and mask.window[1])


def test_recipes_are_registered_or_computed_variants() -> None:
    assert found(strategies.recipes(), lambda recipe: True) is next(iter(RECIPES.values()))
    strategy = strategies.varied_recipes(("flamia-mxfp8-folded",))
    assert found(strategy, lambda recipe: True) is RECIPES["flamia-mxfp8-folded"]
    twice = found(strategy, lambda recipe: recipe.name.count(", ") >= 2)
    ones = np.ones((3, 1, 32), ml_dtypes.bfloat16)
    assert np.isfinite(forward(ones, ones, ones, twice).out).all()
    one = found(strategy, lambda recipe: recipe.tiles.key != 128)
    assert one == with_change(RECIPES["flamia-mxfp8-folded"], "tiles.key", 32)


def test_permitted_changes_are_those_that_are_computed() -> None:
    folded = RECIPES["flamia-mxfp8-folded"]
    changes = permitted_changes(folded)
    assert ("softmax.exp2", "correct") in changes
    assert ("tiles.key", 64) in changes
    assert ("softmax.normalisation", "quotient") in changes
    # A fused exponent is permitted, a base in units of S needs another lse too.
    assert ("softmax.exp2_argument", "fused") in changes
    assert ("softmax.base", "raw_max") not in changes
    assert with_change(folded, "softmax.base", "raw_max") is None
    assert len(changes) > 25


@pytest.mark.parametrize("family", Family)
def test_inputs_are_the_same_from_the_same_integers(family: Family) -> None:
    example = Example(
        property="causality", lengths=(3, 33), heads=2, head_dim=16, family=str(family), seed=7
    )
    one, other = inputs_of(example), inputs_of(example)
    for name in ("q", "k", "v", "dout"):
        x = getattr(one, name)
        assert (x == getattr(other, name)).all()
        assert x.shape == (36, 2 if name in ("q", "dout") else 1, 16)
        assert np.isfinite(values(x)).all()
    assert one.changed_tokens(other) == {}


def test_attention_inputs_reach_every_length_of_the_space() -> None:
    strategy = strategies.attention_inputs(Space(heads=2, head_dim=8, lengths=(0, 3, 5)))
    inputs = found(strategy, lambda inputs: inputs.lengths == (5, 0, 3))
    assert (inputs.q.shape, inputs.v.shape) == ((8, 2, 8), (8, 1, 8))
    assert (found(strategy, lambda inputs: len(inputs.q)).q == 0x3F80).all()  # ones first
    found(strategy, lambda inputs: len(inputs.v) and np.abs(values(inputs.v)).max() > 2.0**12)


def test_tokens_that_differ_in_size() -> None:
    def sizes(family: str) -> Any:
        example = Example(property="causality", lengths=(64,), head_dim=64, family=family, seed=1)
        v = np.abs(values(inputs_of(example).v)).max(axis=(1, 2))
        return v.max() / v.min()

    assert sizes("bell") < 4
    assert sizes("tokens") > 2**10
    assert sizes("wide") > 2**10


def test_two_kinds_of_blocks() -> None:
    """Logits of a block's own kind are about 15, of the other -15, with the default scale."""
    inputs = inputs_of(Example(property="causality", lengths=(70,), head_dim=64, family="blocks"))
    s = values(inputs.q)[:, 0] @ values(inputs.k)[:, 0].T / 8
    own = (np.arange(70)[:, None] // 32 - np.arange(70) // 32) % 2 == 0
    assert (abs(s[own] - 15) < 2).all()
    assert (abs(s[~own] + 15) < 2).all()


def test_edits_of_inputs() -> None:
    inputs = inputs_of(
        Example(property="causality", lengths=(2, 3), heads=2, head_dim=4, family="ones")
    )

    def q(edit: Edit) -> Any:
        return values(inputs.edited([edit]).q)

    assert (q(Edit(operand="q", token=3, exponent=2, sign=-1))[3] == -4).all()
    assert (q(Edit(operand="q", token=3, channel=1, exponent=2))[3, :, 1] == 4).all()
    assert (q(Edit(operand="q", token=3, channel=1, exponent=2)) == 1).sum() == 5 * 2 * 4 - 2
    huge = Edit(operand="q", token=0, exponent=120)
    twice = inputs.edited([huge, huge])
    assert (twice.q[0] == 0x7F7F).all()  # the largest bfloat16, never infinity
    for poison in Poison:
        x = q(Edit(operand="q", token=1, channel=0, poison=str(poison)))[1, 0, 0]
        assert {"nan": np.isnan(x), "inf": x == np.inf, "-inf": x == -np.inf}.get(
            poison, x == 2.0**127 * 255 / 128
        )
    changed = inputs.edited(
        [Edit(operand="v", token=4, sign=-1), Edit(operand="k", token=2, exponent=1)]
    )
    assert {name: list(at) for name, at in inputs.changed_tokens(changed).items()} == {
        "v": [4],
        "k": [2],
    }
    inputs.v[0] = 0
    assert (values(inputs.edited([Edit(operand="v", token=0, exponent=3)]).v[0]) == 8).all()
    garbage = inputs.with_garbage(1, "nan")
    assert np.isnan(values(garbage.v)[:2]).all()
    assert (garbage.v[2:] == inputs.v[2:]).all()


def test_documents_of_inputs() -> None:
    inputs = inputs_of(Example(property="causality", lengths=(2, 0, 3), head_dim=4, family="bell"))
    assert inputs.starts == (0, 2, 2, 5)
    assert (inputs.document(2).k == inputs.k[2:5]).all()
    assert inputs.document(2).lengths == (3,)
    assert (inputs.document(2, tokens=1).k == inputs.k[2:3]).all()
    assert inputs.document(1).q.shape == (0, 1, 4)
    assert isinstance(inputs, Inputs)


# By day one with edits, one with a cut, one with garbage and one with a scaled operand.
OF_DAY = ("causality", "prefix_parity", "padding_garbage", "scale_invariance")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in OF_DAY else pytest.mark.nightly)
        for name in PROPERTIES
    ],
)
def test_examples_are_of_the_space_and_simple_first(name: str) -> None:
    space = Space(heads=4, kv_heads=2, head_dim=32, lengths=(0, 1, 31, 40), documents=3, window=5)
    strategy = strategies.examples(name, space)

    @QUICK
    @given(example=strategy)
    def of_the_space(example: Example) -> None:
        assert example.property == name
        assert (example.heads, example.kv_heads, example.head_dim, example.window) == (4, 2, 32, 5)
        assert set(example.lengths) <= {0, 1, 31, 40}
        filled = sum(length > 0 for length in example.lengths)
        assert filled <= 3
        assert all(edit.token in range(sum(example.lengths)) for edit in example.edits)
        assert len({edit.operand for edit in example.edits}) <= 1
        if name in ("causality", "locality", "nan_poison", "backward_legality"):
            assert example.edits
            assert {edit.token for edit in example.edits} <= set(example.tokens())
        if name in ("document_isolation", "packing_invariance", "padding_garbage"):
            assert filled >= 2
        if name == "zero_length_documents":
            assert 0 in example.lengths
        if name == "prefix_parity":
            assert 0 < example.cut < example.lengths[0]

    of_the_space()
    simplest = found(strategy, lambda example: True)
    assert (simplest.family, simplest.seed) == ("ones", 0)
    assert sum(simplest.lengths) <= 31


@pytest.mark.nightly
def test_edits_of_causality_share_a_block_with_earlier_tokens() -> None:
    strategy = strategies.examples("causality", Space(lengths=(40, 129)))

    @QUICK
    @given(example=strategy)
    def inside(example: Example) -> None:
        first = example.tokens()[0]
        places = [edit.token - first for edit in example.edits]
        assert min(places) % 32 or max(places) % 32
        assert len({place // 32 for place in places}) == 1

    inside()
    found(strategy, lambda example: min(e.token for e in example.edits) - example.tokens()[0] > 96)


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="unknown property 'causal'; did you mean 'causality'"):
        strategies.examples("causal")
    with pytest.raises(ValueError, match="lengths is empty"):
        strategies.documents(())
    with pytest.raises(ValueError, match="tokens is empty"):
        strategies.edits(range(0))


def test_properties_import_neither_jax_nor_hypothesis_before_use() -> None:
    program = """
import sys
import flamia_ref.properties as properties
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"jax", "hypothesis", "pytest", "numpy"}, loaded
properties.PROPERTIES, properties.check, properties.Example, properties.Space
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"jax", "hypothesis", "pytest"}, loaded
properties.search, properties.strategies.recipes()
assert "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
