"""`prepare`: one quantized copy in both orientations, and the bytes that kernels read."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from flamia_ref import attention
from flamia_ref._errors import InputRounded
from flamia_ref.attention import RECIPES, Use, copy_numerics, prepare, prepare_dout
from flamia_ref.attention.kernel_layouts import KernelLayout
from flamia_ref.attention.product import Operand, Scope
from flamia_ref.formats import decode, quantize
from tests.attention.samples import BF16, assert_same

LENGTHS, KEY_LENGTHS = (0, 5, 130, 0, 33), (3, 0, 161, 2, 128)
HEADS, KV_HEADS = 4, 2
BOTH = ("row_wise", "column_wise")


def offsets(lengths) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(np.int32)


def inputs(head_dim: int, value_dim: int, seed: int = 0):
    """q, k, v and dO of normal values, tokens of other sizes among them."""
    rng = np.random.default_rng(seed)
    shapes = [
        (sum(LENGTHS), HEADS, head_dim),
        (sum(KEY_LENGTHS), KV_HEADS, head_dim),
        (sum(KEY_LENGTHS), KV_HEADS, value_dim),
        (sum(LENGTHS), HEADS, value_dim),
    ]
    arrays = []
    for shape in shapes:
        powers = np.exp2(rng.integers(-20, 20, (shape[0], 1, 1)))
        arrays.append((rng.standard_normal(shape) * powers).astype(np.float32).astype(BF16))
    return arrays


def prepared(recipe, head_dim: int = 40, value_dim: int = 160, xp=np):
    q, k, v, dout = (xp.asarray(x) for x in inputs(head_dim, value_dim))
    cu_seqlens, cu_seqlens_k = offsets(LENGTHS), offsets(KEY_LENGTHS)
    first = prepare(q, k, v, recipe, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
    has_backward = (RECIPES[recipe] if isinstance(recipe, str) else recipe).has_backward
    if not has_backward:
        return (first,)
    return first, prepare_dout(dout, recipe, cu_seqlens=cu_seqlens)


def with_scopes():
    """Recipes by scopes that no named recipe has: previous block for K and V, static for Q and dO."""
    base = RECIPES["flamia-mxfp8-unguarded"]
    previous = Operand(
        format="te-mx-e4m3", block=(32, 32), scope=Scope.PREVIOUS_BLOCK, static_scale=120
    )
    static = Operand(format="e4m3", scope=Scope.STATIC, static_scale=118)
    changes = {
        "s": replace(base.s, left=static, right=previous),
        "dk": replace(base.dk, right=replace(static, same_codes_as=Use.S_Q)),
        "dq": replace(base.dq, right=replace(previous, same_codes_as=Use.S_K)),
    }
    return replace(base, name="scopes", **changes)


ALL = [*RECIPES.values(), with_scopes()]
ids = {"ids": lambda recipe: recipe.name}


def copies(pair):
    """Every copy of both results with its name, guards too."""
    for result in pair:
        yield from result.operands.items()
        for name, guard in result.guards.items():
            yield f"guard {name}", guard


def taken(copy, layout: KernelLayout):
    """The codes of a copy; of a dequantized one, the values of blocks of 16 channels as bfloat16 codes."""
    if not layout.operand.dequantized:
        return copy.codes
    scales = np.repeat(decode(copy.scales, "ue4m3"), 16, axis=2)[:, :, : copy.codes.shape[2]]
    return (decode(copy.codes, "e2m1") * scales).astype(ml_dtypes.bfloat16).view(np.uint16)


@pytest.mark.parametrize("sizes", [(40, 160), (128, 64), (33, 129)])
@pytest.mark.parametrize("recipe", ALL, **ids)
def test_both_orientations_give_the_copy_back(recipe, sizes) -> None:
    held = set()
    for name, copy in copies(prepared(recipe, *sizes)):
        for orientation in BOTH:
            layout: KernelLayout | None = getattr(copy, orientation)
            if layout is None:
                continue
            np.testing.assert_array_equal(layout.codes(), taken(copy, layout), name)
            scales = layout.copied_scales()
            # A descale of a document and head lies in no layout: kernels take it as an argument.
            beside = layout.operand.dequantized or layout.operand.scope is Scope.HEAD
            assert (scales is None) == (copy.scales is None or beside)
            if scales is not None:
                np.testing.assert_array_equal(scales, copy.scales, name)
            if orientation == "row_wise" and copy.token_scales is not None:
                np.testing.assert_array_equal(layout.copied_token_scales(), copy.token_scales)
            held.add(orientation)
    assert held == ({"row_wise"} if recipe.name == "sage3-nvfp4" else set(BOTH))


@pytest.mark.parametrize("recipe", ALL, **ids)
def test_a_use_takes_the_orientation_of_its_contraction(recipe) -> None:
    first, *second = prepared(recipe)
    for use in (Use.S_Q, Use.S_K, *[Use.DP_V] * len(second)):
        assert first.operand(use).row_wise is not None
    for use in (*[Use.DK_Q, Use.DQ_K] * len(second), Use.O_V):
        # None is made of blocks of 16 tokens.
        assert (first.operand(use).column_wise is None) == (recipe.name == "sage3-nvfp4")
    for of_dout in second:
        assert of_dout.operand("dp.do").row_wise is not None
        assert of_dout.operand("dv.do").column_wise is not None
    with pytest.raises(ValueError, match=r"unknown use of prepared operands 'dp\.do'"):
        first.operand("dp.do")


QUANTIZED = {  # how often the values of q, k, v and dO are quantized
    "flamia-mxfp8": (1, 1, 1, 1),
    "flamia-mxfp8-folded": (1, 1, 1, 1),
    "flamia-mxfp8-unguarded": (1, 1, 1, 1),
    "flamia-nvfp4-fp8": (1, 1, 1, 1),
    "cudnn-mxfp8": (2, 2, 2, 2),
    "cudnn-mxfp8-pv-bf16": (1, 1, 1, 1),
    "bf16-fa4": (0, 0, 0, 0),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_nothing_is_quantized_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of the quantizer, and how many values it got. Both orientations come from what one call gave."""
    calls = []

    def counted(bits, block_format, block=None):
        calls.append(bits)
        return real(bits, block_format, block)

    real = copy_numerics.quantize_bits
    monkeypatch.setattr(copy_numerics, "quantize_bits", counted)
    documents = offsets((256,))  # whole blocks: nothing is filled up
    rng = np.random.default_rng(1)
    q, k, v, dout = (rng.standard_normal((256, 2, d)).astype(BF16) for d in (64, 64, 32, 32))
    first = prepare(q, k, v, name, cu_seqlens=documents)
    second = prepare_dout(dout, name, cu_seqlens=documents)
    wanted = sum(times * x.size for times, x in zip(QUANTIZED[name], (q, k, v, dout), strict=True))
    assert sum(call.size for call in calls) == wanted
    made = [copy for result in (first, second) for copy in result.operands.values()]
    # As many calls as copies that are neither in bfloat16 nor promoted.
    quantized = [c for c in made if c.codes.dtype == np.uint8]
    promoted = 2 if name == "flamia-nvfp4-fp8" else 0
    assert len(calls) == len(quantized) - promoted
    for copy in quantized:
        if copy.row_wise is not None and copy.column_wise is not None:
            np.testing.assert_array_equal(copy.row_wise.codes(), copy.column_wise.codes())


def test_the_codes_are_those_of_each_document() -> None:
    _, k, v, _ = inputs(40, 160)
    first, _ = prepared("cudnn-mxfp8")
    by_use = {"dp.v": (v, (1, 32)), "o.v": (v, (32, 1)), "s.k": (k, (1, 32))}
    for use, (x, block) in by_use.items():
        for start, stop in zip(offsets(KEY_LENGTHS)[:-1], offsets(KEY_LENGTHS)[1:], strict=True):
            alone = quantize(np.moveaxis(x[start:stop], 1, 0), "te-mx-e4m3", block=block)
            found = first.operand(use).codes[start:stop]
            np.testing.assert_array_equal(found, np.moveaxis(alone.codes, 0, 1))


@pytest.mark.parametrize("name", RECIPES)
def test_the_passes_take_the_same_operands(name: str) -> None:
    q, k, v, dout = inputs(40, 40)
    cu_seqlens, cu_seqlens_k = offsets(LENGTHS), offsets(KEY_LENGTHS)
    recipe = RECIPES[name]
    keywords = {"cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens_k}
    forward = attention.forward(q, k, v, name, **keywords, trace=attention.forward_stages(recipe))
    ours, traces = dict(prepare(q, k, v, name, **keywords).operands), dict(forward.trace)
    if recipe.has_backward:
        stages = attention.backward_stages(recipe)
        traces |= attention.backward(q, k, v, dout, forward, trace=stages).trace
        if recipe.gradient.normalisation != "fold_into_dout":
            ours |= prepare_dout(dout, name, cu_seqlens=cu_seqlens).operands
    compared = set()
    for stage, traced in traces.items():
        copy, _, part = stage.rpartition(".")
        if copy in ours:
            assert_same(getattr(ours[copy], part), traced, stage)
            compared.add(copy)
    coded = {copy for copy, operand in ours.items() if operand.codes.dtype == np.uint8}
    assert compared == coded


# The bytes, by the address of each.


def padded_places(lengths) -> tuple[np.ndarray, int]:
    """The row of every packed token, and the number of rows."""
    places, filled = [], 0
    for length in lengths:
        places.extend(range(filled, filled + length))
        filled += -(-length // 128) * 128
    return np.array(places, int), filled


def scale_byte(row: int, column: int, across: int) -> int:
    """Where a scale is in the tiles of a matrix with `across` column tiles. cuDNN's 128x4 layout."""
    tile = (row // 128) * across + column // 4
    return tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4


@pytest.mark.parametrize("sizes", [(40, 160), (256, 300)])
def test_the_bytes_of_rows(sizes) -> None:
    first, _ = prepared("flamia-mxfp8", *sizes)
    places, count = padded_places(KEY_LENGTHS)
    assert count == 128 + 0 + 256 + 128 + 128
    for name, channels in (("k", sizes[0]), ("v", sizes[1])):
        copy = first.operands[name]
        layout = copy.row_wise
        width = -(-channels // 32) * 32
        payload = np.zeros((KV_HEADS, count, width), np.uint8)
        payload[:, places, :channels] = np.moveaxis(copy.codes, 1, 0)
        np.testing.assert_array_equal(layout.payload, payload)
        columns = -(-channels // 32)
        across = -(-columns // 4)
        flat = np.full((KV_HEADS, count * across * 4), 0x7F, np.uint8)
        block_of = np.concatenate([np.arange(n) // 32 for n in KEY_LENGTHS]).astype(int)
        before = np.repeat(np.cumsum([0, *(-(-n // 32) for n in KEY_LENGTHS[:-1])]), KEY_LENGTHS)
        for token, row in enumerate(places):
            for head in range(KV_HEADS):
                for column in range(columns):
                    byte = copy.scales[before[token] + block_of[token], head, column]
                    flat[head, scale_byte(row, column, across)] = byte
        assert layout.scales.shape == (KV_HEADS, count // 128, across, 512)
        np.testing.assert_array_equal(layout.scales.reshape(KV_HEADS, -1), flat)
        assert layout.token_scales is None


@pytest.mark.parametrize("sizes", [(40, 160), (256, 300)])
def test_the_bytes_of_columns(sizes) -> None:
    """From 129 channels on, the planes of 128 channels of the same 128 tokens lie one after another."""
    first, _ = prepared("flamia-mxfp8", *sizes)
    places, count = padded_places(KEY_LENGTHS)
    for name, channels in (("k", sizes[0]), ("v", sizes[1])):
        copy = first.operands[name]
        layout = copy.column_wise
        payload = np.zeros((KV_HEADS, channels, count), np.uint8)
        payload[:, :, places] = np.moveaxis(copy.codes, 0, 2)
        np.testing.assert_array_equal(layout.payload, payload)
        planes, tiles = -(-channels // 128), count // 128
        flat = np.full((KV_HEADS, tiles, planes, 512), 0x7F, np.uint8)
        block = 0
        starts = np.cumsum([0, *(-(-n // 128) * 4 for n in KEY_LENGTHS[:-1])])
        for start, length in zip(starts, KEY_LENGTHS, strict=True):
            for column in range(start, start + -(-length // 32)):
                for head in range(KV_HEADS):
                    for channel in range(channels):
                        at = scale_byte(channel % 128, column % 4, 1)
                        byte = copy.scales[block, head, channel // 32]
                        flat[head, column // 4, channel // 128, at] = byte
                block += 1
        np.testing.assert_array_equal(layout.scales, flat)


def test_folded_scales_stand_beside_unit_ones() -> None:
    first, _ = prepared("flamia-mxfp8")
    places, count = padded_places(LENGTHS)
    copy = first.operand("dk.q")
    assert copy is first.operand("s.q")
    layout = copy.column_wise
    assert (layout.scales == 0x7F).all()
    wanted = np.full((HEADS, count), 0x7F, np.uint8)
    wanted[:, places] = copy.scales[:, :, 0].T
    np.testing.assert_array_equal(layout.token_scales, wanted)
    assert copy.row_wise.token_scales is None


def test_a_static_scale_is_one_where_nothing_is() -> None:
    first, _ = prepared(with_scopes())
    places, count = padded_places(LENGTHS)
    layout = first.operand("s.q").row_wise
    rows = np.full(count, 0x7F)
    rows[places] = 118
    for row in range(count):
        found = layout.scales.reshape(HEADS, -1)[:, [scale_byte(row, c, 1) for c in range(4)]]
        assert found.tolist() == [[rows[row], rows[row], 0x7F, 0x7F]] * HEADS
    blocks = np.full(count // 32, 0x7F)
    blocks[places // 32] = 118
    tiled = first.operand("dk.q").column_wise.scales.reshape(-1)
    for channel, block in np.ndindex(40, count // 32):
        assert tiled[scale_byte(channel, block, HEADS * count // 128)] == blocks[block]


def test_fp4_is_packed_in_whole_steps() -> None:
    first, _ = prepared("flamia-nvfp4-fp8-ue4m3")
    places, count = padded_places(LENGTHS)
    copy = first.operand("s.q")
    layout = copy.row_wise
    wide = np.zeros((HEADS, count, 64), np.uint8)
    wide[:, places, :40] = np.moveaxis(copy.codes, 1, 0)
    np.testing.assert_array_equal(layout.payload, wide[..., ::2] | wide[..., 1::2] << 4)
    assert layout.scales.shape == (HEADS, count // 128, 1, 512)
    empty = np.ones(count, bool)
    empty[places] = False
    for row in np.flatnonzero(empty)[:40]:
        found = [
            layout.scales.reshape(HEADS, -1)[0, scale_byte(row, column, 1)] for column in range(4)
        ]
        assert found == [0x38] * 4  # 1 in UE4M3, where 0x7f is NaN
    powers = np.full((HEADS, count), 0x7F, np.uint8)
    powers[:, places] = copy.token_scales[:, :, 0].T
    np.testing.assert_array_equal(layout.token_scales, powers)
    assert copy.column_wise is None


def test_guards_are_the_inputs() -> None:
    q, k, v, dout = inputs(40, 160)
    first, second = prepared("flamia-mxfp8")
    for name, x in (("q", q), ("k", k), ("v", v)):
        np.testing.assert_array_equal(first.guards[name].codes, x.view(np.uint16))
    np.testing.assert_array_equal(second.guards["do"].codes, dout.view(np.uint16))
    assert first.guards["q"].column_wise is None
    assert first.guards["k"].column_wise is not None
    by_codes = replace(RECIPES["flamia-mxfp8"], guard_operands="codes")
    assert not prepared(by_codes)[0].guards
    assert not prepared("flamia-mxfp8-folded")[0].guards


@pytest.mark.parametrize("recipe", ALL, **ids)
def test_jax_gives_the_same(recipe) -> None:
    with jax.numpy_dtype_promotion("strict"):
        theirs = prepared(recipe, xp=jnp)
    ours = prepared(recipe)
    leaves, others = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    assert len(leaves) == len(others)
    for one, other in zip(leaves, others, strict=True):
        assert isinstance(other, jax.Array)
        assert one.dtype == other.dtype
        assert_same(other, one, recipe.name)
    for (name, one), (_, other) in zip(copies(ours), copies(theirs), strict=True):
        for orientation in BOTH:
            layout = getattr(other, orientation)
            if layout is not None:
                assert isinstance(layout.codes(), jax.Array)
                assert_same(layout.codes(), taken(one, layout), name)


def test_under_jit() -> None:
    q, k, v, _ = (jnp.asarray(x) for x in inputs(40, 40))
    keywords = {"cu_seqlens": offsets(LENGTHS), "cu_seqlens_k": offsets(KEY_LENGTHS)}
    for name in ("flamia-mxfp8", "flamia-nvfp4-fp8"):
        inside = jax.jit(lambda q, k, v, name=name: prepare(q, k, v, name, **keywords))(q, k, v)
        outside = prepare(q, k, v, name, **keywords)
        for one, other in zip(jax.tree.leaves(inside), jax.tree.leaves(outside), strict=True):
            assert_same(one, other, name)


def test_what_is_rounded() -> None:
    """dO of a backward that takes it as it is, in the input format; dO' of one that folds, in float32."""
    dout = (np.arange(96 * 32).reshape(96, 1, 32) / 7).astype(np.float32)
    rounded = dout.astype(ml_dtypes.bfloat16)
    for name in ("cudnn-mxfp8", "cudnn-mxfp8-reference"):
        with pytest.warns(InputRounded, match="dout are not bfloat16"):
            as_it_is = prepare_dout(dout, name)
        wanted = quantize(rounded.astype(np.float32)[:, 0], "te-mx-e4m3")
        np.testing.assert_array_equal(as_it_is.operand("dp.do").codes[:, 0], wanted.codes)
    folded = prepare_dout(dout, "flamia-mxfp8-folded")
    wanted = quantize(dout[:, 0], "te-mx-e4m3", block=(1, "all"))
    np.testing.assert_array_equal(folded.operand("dp.do").codes[:, 0], wanted.codes)
    other = quantize(rounded.astype(np.float32)[:, 0], "te-mx-e4m3", block=(1, "all"))
    assert (wanted.codes != other.codes).any()


def test_bad_arguments() -> None:
    q, k, v, dout = inputs(40, 40)
    with pytest.raises(ValueError, match="unknown recipe 'flamia'"):
        prepare(q, k, v, "flamia")
    with pytest.raises(ValueError, match="give cu_seqlens_k where keys are other tokens"):
        prepare(q, k, v, "flamia-mxfp8", cu_seqlens=offsets(LENGTHS))
    with pytest.raises(ValueError, match=r"dout has shape \(168, 160\)"):
        prepare_dout(dout.reshape(168, -1), "flamia-mxfp8")
    with pytest.raises(ValueError, match="heads and value_dim must be at least 1"):
        prepare_dout(dout[:, :, :0], "flamia-mxfp8")
    with pytest.raises(ValueError, match="cu_seqlens ends at 3"):
        prepare_dout(dout, "flamia-mxfp8", cu_seqlens=np.array([0, 3], np.int32))


@pytest.mark.parametrize("lengths", [(0,), (0, 0)])
def test_no_tokens_at_all(lengths) -> None:
    q, k, v = (np.zeros((0, 2, 40), BF16) for _ in range(3))
    for name in RECIPES:
        result = prepare(q, k, v, name, cu_seqlens=offsets(lengths))
        for copy in result.operands.values():
            for orientation in BOTH:
                layout = getattr(copy, orientation)
                if layout is not None:
                    assert layout.payload.size == 0
                    assert layout.codes().shape == (0, 2, 40)
