"""`attention.attention`: the gradient that JAX takes is the recipe's backward, to the bit, and no other exists."""

import numpy as np
import pytest

from flamia_ref import attention
from flamia_ref._errors import InputRounded
from flamia_ref.attention import Forward
from tests.attention.passes import WITH_BACKWARD, passes, with_dout
from tests.attention.samples import BF16, assert_same, bell, wide

RECIPE = "flamia-mxfp8-folded"
LENGTHS = [70, 0, 66]


def given(make=bell, lengths=LENGTHS, dtype=BF16):
    import jax

    *arrays, cu_seqlens = with_dout(make, 4, lengths, 2, 1, 32)
    return arrays, [jax.device_put(x.astype(dtype)) for x in arrays], cu_seqlens


def values(x) -> np.ndarray:
    return np.asarray(x).astype(np.float32)


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        (RECIPE, np.float32),
        (RECIPE, BF16),
        *(
            pytest.param(recipe, np.float32, marks=pytest.mark.nightly)
            for recipe in WITH_BACKWARD
            if recipe != RECIPE
        ),
    ],
)
def test_gradients_are_those_of_backward(recipe: str, dtype) -> None:
    import jax

    arrays, inputs, cu_seqlens = given(wide, dtype=dtype)
    expected = passes(*arrays, recipe, stages=False, cu_seqlens=cu_seqlens, causal=False)
    q, k, v, dout = inputs
    out, pull = jax.vjp(
        lambda q, k, v: attention.attention(q, k, v, recipe, cu_seqlens=cu_seqlens, causal=False),
        q,
        k,
        v,
    )
    gradients = pull(dout)
    for name, found in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
        assert found.dtype == dtype
        assert_same(values(found), expected[name], name)


def test_keywords_reach_the_forward() -> None:
    import jax

    arrays, inputs, cu_seqlens = given()
    options = {"causal": False, "softmax_scale": 0.3, "cu_seqlens": cu_seqlens}
    expected = passes(*arrays, RECIPE, stages=False, **options)
    gradient = jax.grad(
        lambda q: (
            (attention.attention(q, *inputs[1:3], RECIPE, **options) * inputs[3])
            .astype(np.float32)
            .sum()
        )
    )(inputs[0])
    assert_same(values(gradient), expected["dq"], "dq")


def test_a_gradient_can_be_traced() -> None:
    """Under jit and vmap, for inputs of both dtypes; the test below runs such programs."""
    import jax

    for dtype in (BF16, np.float32):
        _, inputs, cu_seqlens = given(lengths=[20, 9], dtype=dtype)
        batch = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in inputs[:3]]

        def loss(q, k, v, cu_seqlens=cu_seqlens):
            return attention.attention(q, k, v, RECIPE, cu_seqlens=cu_seqlens).sum()

        gradients = jax.eval_shape(jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2)))), *batch)
        assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in batch]


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", WITH_BACKWARD)
def test_under_jit_and_vmap(recipe: str) -> None:
    """A loss of the user's own, over a batch, in one program: gradients of all three inputs."""
    import jax
    import jax.numpy as jnp

    batches = [with_dout(bell, seed, [20, 9], 2, 1, 32) for seed in (1, 2)]
    cu_seqlens = batches[0][4]

    def loss(q, k, v, dout):
        return (attention.attention(q, k, v, recipe, cu_seqlens=cu_seqlens) * dout).sum()

    stacked = [
        jnp.stack([jnp.asarray(x.astype(np.float32)) for x in xs])
        for xs in zip(*(batch[:4] for batch in batches), strict=True)
    ]
    gradients = jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2))))(*stacked)
    for index, batch in enumerate(batches):
        expected = passes(*batch[:4], recipe, stages=False, cu_seqlens=cu_seqlens)
        for name, found in zip(("dq", "dk", "dv"), gradients, strict=True):
            assert_same(found[index], expected[name], name)


def test_numpy_arrays_give_a_numpy_array() -> None:
    q, k, v, dout, cu_seqlens = with_dout(bell, 4, [20, 9], 2, 1, 32)
    expected = passes(q, k, v, dout, RECIPE, stages=False, cu_seqlens=cu_seqlens)["out"]
    for dtype in (BF16, np.float32):
        out = attention.attention(
            *(x.astype(dtype) for x in (q, k, v)), RECIPE, cu_seqlens=cu_seqlens
        )
        assert isinstance(out, np.ndarray)
        assert out.dtype == dtype
        assert_same(values(out), expected, "out")


def test_a_float32_cotangent_is_rounded_as_any_input() -> None:
    import jax

    _, (q, k, v, dout), cu_seqlens = given(dtype=np.float32)
    _, pull = jax.vjp(lambda q: attention.attention(q, k, v, RECIPE, cu_seqlens=cu_seqlens), q)
    (expected,) = pull(dout)
    with pytest.warns(InputRounded, match="values of dout are not bfloat16"):
        (found,) = pull(dout * np.float32(1 + 2**-12))
    assert_same(found, expected, "dq")


REFUSED = "have no gradient; use attention.attention under jax.grad"


def test_forward_and_backward_have_no_gradient() -> None:
    import jax

    _, inputs, cu_seqlens = given(dtype=np.float32)

    def forward(q, k, v):
        return attention.forward(q, k, v, RECIPE, cu_seqlens=cu_seqlens)

    def backward(q, k, v, dout):
        one = Forward.from_kernel(q, lse, RECIPE, cu_seqlens=cu_seqlens)
        return attention.backward(q, k, v, dout, one)

    lse = jax.device_put(np.zeros((2, 136), np.float32))
    for index in range(3):
        for name in ("out", "lse"):
            with pytest.raises(TypeError, match=REFUSED):
                jax.grad(lambda *x, n=name: getattr(forward(*x), n).sum(), index)(*inputs[:3])
    for index in range(4):
        with pytest.raises(TypeError, match=REFUSED):
            jax.grad(lambda *x: backward(*x).dv.sum(), index)(*inputs)


def test_out_and_lse_of_a_forward_have_no_gradient_either() -> None:
    import jax

    _, inputs, cu_seqlens = given(dtype=np.float32)
    one = attention.forward(*inputs[:3], RECIPE, cu_seqlens=cu_seqlens)

    def dq(out, lse):
        kernel = Forward.from_kernel(out, lse, RECIPE, cu_seqlens=cu_seqlens)
        return attention.backward(*inputs, kernel).dq.sum()

    for index in (0, 1):
        with pytest.raises(TypeError, match=REFUSED):
            jax.grad(dq, index)(one.out, one.lse)


def test_only_first_derivatives_exist() -> None:
    import jax

    _, (q, k, v, _), cu_seqlens = given(dtype=np.float32)

    def loss(q):
        return attention.attention(q, k, v, RECIPE, cu_seqlens=cu_seqlens).sum()

    with pytest.raises(TypeError, match=REFUSED):
        jax.grad(lambda q: jax.grad(loss)(q).sum())(q)
    with pytest.raises(TypeError, match="jvp"):
        jax.jvp(loss, (q,), (q,))


def test_bad_arguments_are_those_of_forward() -> None:
    import jax

    _, (q, k, v, _), cu_seqlens = given()
    with pytest.raises(ValueError, match="unknown recipe 'flamia'"):
        attention.attention(q, k, v, "flamia", cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="cu_seqlens ends at 8"):
        jax.grad(lambda q: attention.attention(q, k, v, RECIPE, cu_seqlens=[0, 8]).sum())(q)
    with pytest.raises(TypeError, match="window is 3; it must be"):
        attention.attention(q, k, v, RECIPE, cu_seqlens=cu_seqlens, window=3)
    with pytest.raises(TypeError, match="q is a list"):
        attention.attention([1.0], k, v, RECIPE)
    with pytest.raises(TypeError, match="are JAX arrays and the rest numpy"):
        attention.attention(q, np.asarray(k), v, RECIPE)
