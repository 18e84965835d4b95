"""Foreign results, changed results and sinks: in either byte order, and one line where they cannot be used."""

import dataclasses
import re
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from flamia_ref import attention
from flamia_ref._errors import InputRounded
from flamia_ref.attention import RECIPES, Forward
from flamia_ref.attention.belonging import check_belonging
from tests.attention.passes import with_dout
from tests.attention.samples import assert_same, bell

RECIPE = "flamia-mxfp8-folded"
Q, K, V, DOUT, CU_SEQLENS = with_dout(bell, 0, [5, 3], 4, 2, 32)
FORWARD = attention.forward(Q, K, V, RECIPE, cu_seqlens=CU_SEQLENS)
OUT, LSE = FORWARD.out, FORWARD.lse
KEEPING = dataclasses.replace(
    RECIPES[RECIPE],
    gradient=dataclasses.replace(
        RECIPES[RECIPE].gradient, delta_source="unrounded_out", p_for_dv="forward"
    ),
)
KEPT = attention.forward(Q, K, V, KEEPING, cu_seqlens=CU_SEQLENS)
SINK = np.float32([0.5, -1, 2, -np.inf])


def one_line(call, kind, message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 300


def from_kernel(out=OUT, lse=LSE, recipe=RECIPE, **options) -> Forward:
    return Forward.from_kernel(out, lse, recipe, **{"cu_seqlens": CU_SEQLENS, **options})


def other_order(x):
    return x.astype(x.dtype.newbyteorder())


def test_either_byte_order_is_the_same() -> None:
    """Of lse, of the sink and of what a recipe keeps, given to `from_kernel` or put into a forward."""
    expected = attention.backward(Q, K, V, DOUT, KEPT)
    saved = {name: other_order(x) for name, x in KEPT.saved.items()}
    for forward in (
        from_kernel(KEPT.out, other_order(KEPT.lse), KEEPING, saved=saved),
        dataclasses.replace(
            KEPT, out=other_order(KEPT.out), lse=other_order(KEPT.lse), saved=saved
        ),
    ):
        found = attention.backward(Q, K, V, DOUT, forward)
        for name in ("dq", "dk", "dv"):
            assert_same(getattr(found, name), getattr(expected, name), name)
        rows = attention.preprocess(DOUT, forward)
        assert_same(rows.base, attention.preprocess(DOUT, KEPT).base, "base")
    with_sink = attention.forward(Q, K, V, RECIPE, cu_seqlens=CU_SEQLENS, sink=SINK)
    expected = attention.backward(Q, K, V, DOUT, with_sink)
    kernel = from_kernel(with_sink.out, other_order(with_sink.lse), sink=other_order(SINK))
    assert kernel.lse.dtype.isnative
    assert kernel.sink.dtype.isnative
    assert_same(attention.backward(Q, K, V, DOUT, kernel).dsink, expected.dsink, "dsink")


def test_a_folded_gradient_in_the_other_byte_order() -> None:
    dout = np.random.default_rng(0).standard_normal((8, 4, 32)).astype(np.float32)
    expected = attention.prepare_dout(dout, RECIPE)
    found = attention.prepare_dout(other_order(dout), RECIPE)
    for name, copy in expected.operands.items():
        np.testing.assert_array_equal(found.operands[name].codes, copy.codes, name)


@pytest.mark.parametrize(
    ("head_dim", "kind"),
    [
        (0, ValueError),
        (-4, ValueError),
        (10**400, ValueError),
        (2**31, ValueError),
        ("64", TypeError),
        (64.5, TypeError),
        (True, TypeError),
        (float("nan"), TypeError),
    ],
)
@pytest.mark.parametrize("scale", [None, 0.125])
def test_a_head_dim_is_a_whole_number(head_dim, kind, scale) -> None:
    one_line(
        lambda: from_kernel(head_dim=head_dim, softmax_scale=scale),
        kind,
        "; it must be a whole number from 1 on",
    )


def test_a_head_dim_of_numpy() -> None:
    assert from_kernel(head_dim=np.int32(64)).softmax_scale == 0.125


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softmax_scale": 1e-300}, "softmax_scale is 1e-300; alone and times log2(e) it must be"),
        ({"softmax_scale": 3e38}, "softmax_scale is 3e+38; alone and times log2(e) it must be a"),
        ({"softcap": 1e38, "softmax_scale": 1e-5}, "their quotient must be a normal float32"),
        ({"softcap": 1e38, "softmax_scale": 1e39}, "softmax_scale is 1e+39; alone and times log2"),
    ],
)
def test_scales_have_the_range_of_the_forward(options, message: str) -> None:
    one_line(lambda: from_kernel(**options), ValueError, message)
    changed = dataclasses.replace(FORWARD, **options)
    one_line(lambda: attention.backward(Q, K, V, DOUT, changed), ValueError, message)
    one_line(lambda: attention.preprocess(DOUT, changed), ValueError, message)
    # Before anything is rounded: the warning of that is no error here, so it would be first.
    moved = np.nextafter(Q.astype(np.float32), np.float32(9))
    with pytest.warns(InputRounded):
        attention.forward(moved, K, V, RECIPE)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_line(lambda: attention.forward(moved, K, V, RECIPE, **options), ValueError, message)


CHANGED = [
    ({"lse": LSE.T}, ValueError, "forward.lse has shape (8, 4); for out of (8, 4, 32) it must be"),
    ({"lse": LSE.astype(np.float64)}, TypeError, "forward.lse holds float64; it must be float32"),
    ({"lse": LSE.astype(ml_dtypes.bfloat16)}, TypeError, "forward.lse holds bfloat16"),
    ({"lse": LSE.tolist()}, TypeError, "forward.lse is a list; it must be a numpy or JAX array"),
    ({"lse": None}, TypeError, "forward.lse is a NoneType"),
    ({"out": OUT.tolist()}, TypeError, "forward.out is a list"),
    ({"out": OUT.astype(ml_dtypes.bfloat16)}, TypeError, "forward.out holds bfloat16; it must be"),
    ({"out": OUT[0]}, ValueError, "forward.out has shape (4, 32); it must be (tokens, heads, "),
    ({"out": OUT[:5], "lse": LSE[:, :5]}, ValueError, "forward.out has 5 tokens and the documents"),
    ({"recipe": RECIPE}, TypeError, "recipe is 'flamia-mxfp8-folded'; it must be a Recipe, such"),
    ({"recipe": None}, TypeError, "recipe is None; it must be a Recipe"),
    ({"mask": None}, TypeError, "forward.mask is a NoneType; it must be a Mask"),
    ({"saved": 3}, TypeError, "saved is 3; it must be a mapping of names to arrays"),
    ({"saved": {"o": OUT}}, ValueError, "unknown saved array 'o'"),
    ({"sink": SINK[:2]}, ValueError, "sink has shape (2,); it must be (heads,) = (4,)"),
    ({"softmax_scale": None}, TypeError, "forward.softmax_scale is None; it must be a float"),
    ({"softmax_scale": "1"}, TypeError, "softmax_scale is '1'; it must be a float"),
    ({"softcap": 0.0}, ValueError, "softcap is 0.0; it must be finite and above 0"),
]


@pytest.mark.parametrize(("fields", "kind", "message"), CHANGED, ids=range(len(CHANGED)))
def test_a_changed_forward_is_refused(fields, kind, message: str) -> None:
    changed = dataclasses.replace(FORWARD, **fields)
    for call in (
        lambda: attention.backward(Q, K, V, DOUT, changed),
        lambda: attention.preprocess(DOUT, changed),
    ):
        one_line(call, kind, message)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((1, 6, 0), 0.5, "with base 'integer_max' it is a whole number"),
        ((1, 6, 0), np.nan, "key tile 0 is nan; the lse of that row is a number"),
    ],
)
def test_a_row_base_that_is_none(place, value, message: str) -> None:
    base = KEPT.saved["row_base"].copy()
    base[place] = base[place] + 0.5 if value == 0.5 else value
    saved = {**KEPT.saved, "row_base": base}
    one_line(lambda: from_kernel(KEPT.out, KEPT.lse, KEEPING, saved=saved), ValueError, message)
    changed = dataclasses.replace(KEPT, saved=saved)
    one_line(lambda: attention.backward(Q, K, V, DOUT, changed), ValueError, message)
    one_line(lambda: attention.preprocess(DOUT, changed), ValueError, message)


@pytest.mark.parametrize("value", [3e38, -3e38, 2.4e38])
def test_a_sink_out_of_range_is_refused(value: float) -> None:
    """Times log2(e) = 1.4427 it passes float32's largest number, 3.4028e38."""
    sink = np.float32([0, value, 0, 0])
    message = f"sink[1] is {sink[1]:.9g}; times log2(e) it must be a finite float32"
    one_line(lambda: attention.forward(Q, K, V, RECIPE, sink=sink), ValueError, message)
    one_line(lambda: from_kernel(sink=sink), ValueError, message)
    changed = dataclasses.replace(FORWARD, sink=sink)
    one_line(lambda: attention.backward(Q, K, V, DOUT, changed), ValueError, message)
    operands = attention.prepare(Q, K, V, RECIPE)
    one_line(lambda: attention.forward_from_operands(operands, sink=sink), ValueError, message)


def test_the_largest_sink_gives_numbers() -> None:
    sink = np.full(4, 2.3586e38, np.float32)
    found = attention.forward(Q, K, V, RECIPE, sink=sink)
    assert not found.out.any()
    assert (np.abs(found.lse / sink[0] - 1) < 1e-6).all()


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
def test_numbers_that_are_arrays(name: str) -> None:
    import jax.numpy as jnp

    for number, library in ((jnp.float32(0.5), "JAX"), (np.array(0.5), "numpy")):
        one_line(
            lambda number=number: attention.forward(Q, K, V, RECIPE, **{name: number}),
            TypeError,
            f"{name} is a {library} array; it must be a float",
        )
    attention.forward(Q, K, V, RECIPE, **{name: np.float32(0.5)})


def test_a_traced_head_dim() -> None:
    import jax

    out, lse = jax.device_put(OUT), jax.device_put(LSE)
    with pytest.raises(TypeError, match="head_dim is traced; it selects shapes") as caught:
        jax.jit(lambda d: Forward.from_kernel(out, lse, RECIPE, head_dim=d).out)(64)
    assert "\n" not in str(caught.value)


def test_what_looks_at_out_and_lse_takes_less_than_they_do() -> None:
    rng = np.random.default_rng(0)
    shape = (4096, 8, 64)
    bits = {name: rng.integers(0, 2**30, shape, dtype=np.uint32) for name in "qkv"}
    out, lse = np.zeros(shape, np.float32), np.full((8, 4096), np.inf, np.float32)
    forward = from_kernel(out, lse, cu_seqlens=None)
    tracemalloc.start()
    check_belonging(bits, out, lse, forward)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * out.nbytes
