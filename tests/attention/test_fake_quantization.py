"""Products that take the values of codes in bfloat16, the O of P in bfloat16, and row sums in bfloat16.

Expected values are exact rationals, hand-made bits, or what another recipe gives that has bfloat16 operands.
"""

import dataclasses
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flamia_ref import attention
from flamia_ref.attention import RECIPES, forward_tile, sides, softmax
from flamia_ref.attention.backward_pass import BackwardRun
from flamia_ref.attention.computed import check_computed
from flamia_ref.attention.copies import Maker
from flamia_ref.attention.memory import bytes_kept
from flamia_ref.attention.product import Operand, Scope, Use
from flamia_ref.attention.protection import Safeguard, safeguards
from flamia_ref.attention.stages import kept_for_backward
from flamia_ref.formats import dequantize, quantize
from tests.attention.changes import with_changes
from tests.attention.test_mutations import departures
from tests.independent import nvfp4

QAT = RECIPES["attn-qat-nvfp4"]
BF16 = ml_dtypes.bfloat16
PLAIN = Operand(format="bf16", scope=Scope.UNIT)


def bell(*shape: int, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape).astype(np.float32).astype(BF16)


def inputs(tokens: int = 70, heads: int = 2, head_dim: int = 40) -> list[Any]:
    return [
        bell(tokens, count, head_dim, seed=seed) for seed, count in enumerate((heads, 1, 1, heads))
    ]


def words(x: Any) -> list[list[int]]:
    return np.asarray(x, np.float32).view(np.uint32).reshape(-1, x.shape[-1]).tolist()


def test_products_take_the_values_of_the_codes() -> None:
    """What a recipe without scales gives for the values, which exact rationals make, in every product of q, k and v."""
    q, k, v, dout = inputs()
    values = []
    for x in (q, k, v):
        made = np.array(nvfp4.values(nvfp4.rows(words(x))), np.uint16)
        values.append(made.view(BF16).reshape(x.shape))
    names = ("s", "p", "row_max", "row_sum", "o")
    late = ("delta", "dp", "p.dv", "ds")
    plain = dataclasses.replace(
        QAT,
        **{
            name: dataclasses.replace(product, **{side: PLAIN})
            for name, side in (
                ("s", "left"),
                ("o", "right"),
                ("dp", "right"),
                ("dq", "right"),
                ("dk", "right"),
            )
            for product in (QAT.product(name),)
        },
    )
    plain = dataclasses.replace(plain, s=dataclasses.replace(plain.s, right=PLAIN))
    found, wanted = (
        attention.forward(*x, recipe, trace=names)
        for x, recipe in (((q, k, v), QAT), (values, plain))
    )
    again = [
        attention.backward(*x, dout, one, trace=late)
        for x, one in (((q, k, v), found), (values, wanted))
    ]
    for name in names:
        np.testing.assert_array_equal(found.trace[name], wanted.trace[name], err_msg=name)
    for name in late:
        np.testing.assert_array_equal(*(one.trace[name] for one in again), err_msg=name)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(*(getattr(one, name) for one in again), err_msg=name)


def test_high_precision_out_is_the_out_of_p_in_bfloat16() -> None:
    """O of the same recipe with P in bfloat16 in O's product, to the bit, splits and a sink too."""
    q, k, v, dout = inputs()
    for changes, options in (
        ({}, {}),
        ({"tiles.splits": 2}, {"causal": False}),
        ({"o.accumulation": "float32_partials"}, {"sink": np.array([0.5, -1.0], np.float32)}),
    ):
        recipe = with_changes(QAT.name, changes)
        other = dataclasses.replace(
            recipe,
            o=dataclasses.replace(recipe.o, left=PLAIN),
            gradient=dataclasses.replace(recipe.backward.gradient, delta_source="returned_out"),
        )
        found = attention.forward(q, k, v, recipe, **options, trace=("high_precision_out",))
        wanted = attention.forward(q, k, v, other, **options)
        kept = found.saved["high_precision_out"]
        np.testing.assert_array_equal(kept, wanted.out)
        np.testing.assert_array_equal(kept, found.trace["high_precision_out"])
        assert (kept != found.out).mean() > 0.5
        # delta takes it and nothing else of the forward's outputs.
        deltas = [
            attention.backward(
                q,
                k,
                v,
                dout,
                dataclasses.replace(found, saved={"high_precision_out": x}, trace={}),
                trace=("delta",),
            ).trace["delta"]
            for x in (kept, kept * np.float32(0.5))
        ]
        np.testing.assert_array_equal(deltas[1], deltas[0] * np.float32(0.5))


def test_what_a_forward_keeps() -> None:
    assert kept_for_backward(QAT) == ("high_precision_out",)
    q, k, v, dout = inputs(tokens=5)
    ahead = attention.forward(q, k, v, QAT)
    with pytest.raises(
        ValueError, match="needs high_precision_out of the forward for its backward"
    ):
        attention.Forward.from_kernel(ahead.out, ahead.lse, QAT)
    again = attention.Forward.from_kernel(
        ahead.out, ahead.lse, QAT, saved=ahead.saved, head_dim=q.shape[2]
    )
    one, other = (attention.backward(q, k, v, dout, x) for x in (ahead, again))
    np.testing.assert_array_equal(one.dq, other.dq)
    kept = bytes_kept(QAT, lengths=(64,), head_dim=128, heads=2, kv_heads=2)
    assert kept.saved["high_precision_out"] == 64 * 2 * 128 * 2
    assert [(copy.name, copy.payload, copy.scales) for copy in kept.copies][:3] == [
        (name, 64 * 2 * 128 * 2, 0) for name in ("q", "k", "v")
    ]


@pytest.mark.parametrize(
    ("terms", "wanted"),
    [
        # 1 + 2^-8 is a tie in bfloat16, to even: 1. So the order shows: 2^-8 twice first is 2^-7, which counts.
        ({0: 1.0, 1: 2.0**-8}, 1.0),
        ({0: 1.0, 4: 2.0**-8, 5: 2.0**-8}, 1 + 2.0**-7),  # 4 and 5 at distance 1
        ({0: 1.0, 2: 2.0**-8, 4: 2.0**-8}, 1.0),  # 0 and 4 meet before 2 comes
        ({0: 1.0, 2: 2.0**-8, 6: 2.0**-8}, 1 + 2.0**-7),  # 2 and 6 at distance 4
        ({0: 1.0, 8: 2.0**-8, 24: 2.0**-8}, 1 + 2.0**-7),  # 8 and 24 at distance 16, before 8
        ({0: 1.0, 8: 2.0**-8, 16: 2.0**-8}, 1.0),
        ({0: 1 + 2.0**-9}, 1.0),  # rounded before it is added
    ],
)
def test_row_sums_in_bfloat16(terms: dict[int, float], wanted: float) -> None:
    p = np.zeros((1, 1, 32), np.float32)
    for column, x in terms.items():
        p[0, 0, column] = x
    zero = np.zeros((1, 1, 1), np.uint32)
    one = np.full((1, 1), 0x3F800000, np.uint32)
    found = softmax.summed(zero, one, p.view(np.uint32), QAT.softmax)
    assert found.view(np.float32).item() == wanted
    # What was there is rescaled in one operation: fl(3 (1 + 2^-23) + sum).
    before = np.full((1, 1, 1), 0x3F800001, np.uint32)
    factor = np.full((1, 1), np.float32(3).view(np.uint32), np.uint32)
    exact = Fraction(3) * (1 + Fraction(1, 2**23)) + Fraction(wanted)
    again = softmax.summed(before, factor, p.view(np.uint32), QAT.softmax)
    assert again.view(np.float32).item() == float(np.float32(float(exact)))


# Faults: each is seen, in the stage that it belongs to.


def test_codes_without_their_scales(monkeypatch) -> None:
    original = Maker.values
    monkeypatch.setattr(
        Maker, "values", lambda self, copy: original(self, copy) & np.uint32(0xFF800000)
    )
    assert departures("attn-qat-nvfp4")[0] == "s"


@pytest.mark.parametrize("use", ["o", "dv"])
def test_p_as_it_was_before_it_was_quantized(use: str, monkeypatch) -> None:
    side = {"o": "left_over_keys", "dv": "left_over_queries"}[use]
    original = getattr(sides, side)

    def wrong(pairs, operand):
        if operand.dequantized:
            pairs = pairs._replace(scales=np.full_like(pairs.scales, 0x38))
        return original(pairs, operand)

    monkeypatch.setattr(sides, side, wrong)
    assert departures("attn-qat-nvfp4")[0] == use


def test_delta_of_the_returned_out(monkeypatch) -> None:
    original = BackwardRun._delta

    def wrong(self, prologue, out):
        self.saved = {"high_precision_out": out}
        return original(self, prologue, out)

    monkeypatch.setattr(BackwardRun, "_delta", wrong)
    assert departures("attn-qat-nvfp4")[0] == "delta"


def test_high_precision_out_of_the_codes(monkeypatch) -> None:
    """The second accumulator takes P^ as the first: `high_precision_out` departs, and delta of the forward's own."""
    original = forward_tile._softmax

    def wrong(*arguments, **options):
        middle = original(*arguments, **options)
        return middle._replace(high=middle.left)

    monkeypatch.setattr(forward_tile, "_softmax", wrong)
    assert departures("attn-qat-nvfp4")[0] == "high_precision_out"


@pytest.mark.parametrize("distances", [(1, 2, 4, 8, 16), (4, 1, 2, 16, 8), (1, 4, 2, 8, 16)])
def test_another_order_of_the_row_sum(distances: tuple[int, ...], monkeypatch) -> None:
    monkeypatch.setattr(softmax, "BUTTERFLY", distances)
    assert departures("attn-qat-nvfp4")[0] == "row_sum"


# What is refused.

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tiles.key": 64}, r"tiles.key = 64; computed is 32: softmax.row_sum 'bfloat16_butterfly'"),
    (
        {"s.left.block": [1, "all"], "s.left.format": "te-mx-e4m3", "s.left.scope": "token"},
        r"s.left.block = \(1, 'all'\); computed are \(1, 16\) or \(1, 32\): the operand is dequantized",
    ),
    ({"dv.left.block": [32, 1], "dv.left.format": "te-mx-e4m3"}, r"dv.left.block = \(32, 1\)"),
    ({"s.left.format": "te-nvfp4"}, "s.left.format = 'te-nvfp4', which has a tensor scale"),
    ({"tiles.masked": "computed"}, "tiles.masked = 'computed'; computed is 'skipped'"),
    (
        {"dq.right.dequantized": False, "dq.right.same_codes_as": None},
        "dq.right in cudnn-qat-nvfp4",
    ),
    ({"dq.right.format": "sage3-nvfp4"}, "dq.right take the codes of s.k, which has another"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_is_not_computed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_computed(with_changes(QAT.name, changes))


def test_what_is_no_operand() -> None:
    with pytest.raises(
        ValueError, match="bf16 is dequantized; a product can take the values of block formats"
    ):
        Operand(format="bf16", scope=Scope.UNIT, dequantized=True)
    with pytest.raises(ValueError, match="te-mx-e4m3 is dequantized with a folded scale"):
        Operand(
            format="te-mx-e4m3",
            block=(1, "all"),
            scope=Scope.TOKEN,
            scale_folded_into=Use.O_P,
            dequantized=True,
        )


def test_high_precision_needs_v_in_bfloat16() -> None:
    with pytest.raises(
        ValueError, match=r"o.right in e4m3; computed are bf16 and dequantized operands"
    ):
        check_computed(with_changes("cudnn-mxfp8", {"gradient.delta_source": "high_precision_out"}))


def test_mx_blocks_may_be_dequantized_too() -> None:
    """Values of e4m3 codes under E8M0 scales, against their dequantizer."""
    recipe = with_changes(
        QAT.name,
        {
            f"{path}.{name}": value
            for path in ("s.left", "s.right", "dq.right", "dk.right")
            for name, value in (("format", "te-mx-e4m3"), ("block", [1, 32]))
        },
    )
    q, k, v, _ = inputs(head_dim=64)
    values = [
        np.asarray(dequantize(quantize(x.astype(np.float32), "te-mx-e4m3"))).astype(BF16)
        for x in (q, k)
    ]
    plain = dataclasses.replace(
        recipe,
        s=dataclasses.replace(recipe.s, left=PLAIN, right=PLAIN),
        dq=dataclasses.replace(recipe.backward.dq, right=PLAIN),
        dk=dataclasses.replace(recipe.backward.dk, right=PLAIN),
    )
    found = attention.forward(q, k, v, recipe, trace=("s",)).trace["s"][0]
    np.testing.assert_array_equal(
        found, attention.forward(*values, v, plain, trace=("s",)).trace["s"][0]
    )


def test_operands_for_kernels_are_the_values() -> None:
    q, k, v, _ = inputs()
    made = attention.prepare(q, k, v, QAT)
    for name, x in (("q", q), ("k", k), ("v", v)):
        copy = made.operands[name]
        wanted = np.array(nvfp4.values(nvfp4.rows(words(x))), np.uint16).reshape(x.shape)
        assert copy.codes.dtype == np.uint8
        for layout in (copy.row_wise, copy.column_wise):
            np.testing.assert_array_equal(layout.codes(), wanted)
            assert layout.scales is layout.token_scales is layout.copied_scales() is None


def test_its_safeguards() -> None:
    found = {str(one.use): one.safeguard for one in safeguards(QAT, lengths=(64,))}
    per_token = {"s.q", "s.k", "o.v", "dp.v", "dq.k", "dk.q"}
    assert {use for use, kind in found.items() if kind is Safeguard.PER_TOKEN} == per_token
    assert found["o.p"] is Safeguard.NONE  # masked pairs are no zeros by select
    selected = dataclasses.replace(QAT, softmax=dataclasses.replace(QAT.softmax, mask_value=None))
    found = {str(one.use): one.safeguard for one in safeguards(selected, lengths=(64,))}
    assert found["o.p"] is Safeguard.ZERO_FILL
    assert all(one.high_precision == 1 for one in safeguards(QAT, lengths=(64,)))


def test_a_row_of_scores_below_the_mask_value_sees_what_is_masked() -> None:
    """Query 0 sees key 0 alone, whose score is about -2^22. The other 31 columns of the tile have -1e6 and outweigh it:
    out is about the 31st part of what the masked key 1 has."""
    q, k, v = (np.zeros((2, 1, 16), np.float32) for _ in range(3))
    q[0, 0, 0], k[0, 0, 0] = 1536, -2731
    v[1] = 6
    selected = dataclasses.replace(QAT, softmax=dataclasses.replace(QAT.softmax, mask_value=None))
    arrays = [x.astype(BF16) for x in (q, k, v)]
    out = attention.forward(*arrays, QAT, softmax_scale=1.0).out
    assert (np.abs(out[0] - 6 / 31) < 0.02).all()
    assert not attention.forward(*arrays, selected, softmax_scale=1.0).out[0].any()
    # At the usual size of scores both are one.
    q, k, v, _ = inputs()
    np.testing.assert_array_equal(*(attention.forward(q, k, v, one).out for one in (QAT, selected)))
