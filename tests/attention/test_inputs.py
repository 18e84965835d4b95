"""Bad input raises one line that says what was given and what is allowed, before work starts."""

import ml_dtypes
import numpy as np
import pytest

from flamia_ref import attention
from flamia_ref._errors import InputRounded
from tests.attention.samples import bell

RECIPE = "flamia-mxfp8-folded"
Q, K, V, CU_SEQLENS = bell(0, [5, 3], 4, 2, 32)


def run(q=Q, k=K, v=V, recipe=RECIPE, **options):
    return attention.forward(q, k, v, recipe, **options)


BAD = [
    ({"q": Q[0]}, ValueError, "q has shape (4, 32); it must be (tokens, heads, head_dim)"),
    ({"q": Q.tolist()}, TypeError, "q is a list; it must be a numpy or JAX array"),
    ({"q": Q.astype(np.float64)}, TypeError, "q holds float64; it must be float32 or bfloat16"),
    ({"q": Q.view(np.uint16)}, TypeError, "q holds uint16"),
    ({"k": K[:4]}, ValueError, "k has shape (4, 2, 32) and v (8, 2, 32)"),
    ({"k": K[:4], "v": V[:4]}, ValueError, "q has 8 tokens and k 4"),
    ({"k": K[..., :16], "v": V[..., :16]}, ValueError, "q has head_dim 32 and k 16"),
    ({"q": Q[:, :3]}, ValueError, "q has 3 heads and k 2; the first must be a multiple"),
    ({"q": Q[:, :0]}, ValueError, "heads and head_dim must be at least 1"),
    ({"k": K[:, :0], "v": V[:, :0]}, ValueError, "heads and head_dim must be at least 1"),
    ({"cu_seqlens": [1, 8]}, ValueError, "cu_seqlens[0] is 1; the first document starts at 0"),
    ({"cu_seqlens": [0, 5, 3, 8]}, ValueError, "cu_seqlens[2] is 3, less than cu_seqlens[1] = 5"),
    ({"cu_seqlens": [0, 9]}, ValueError, "cu_seqlens[1] is 9, beyond the 8 tokens given"),
    ({"cu_seqlens": [0, 5]}, ValueError, "cu_seqlens ends at 5, but 8 tokens were given"),
    ({"cu_seqlens": [0, -1, 8]}, ValueError, "cu_seqlens[1] is -1, less than cu_seqlens[0] = 0"),
    ({"cu_seqlens": [0]}, ValueError, "cu_seqlens has shape (1,)"),
    ({"cu_seqlens": np.zeros(0, np.int32)}, ValueError, "cu_seqlens has shape (0,)"),
    ({"cu_seqlens": [[0, 8]]}, ValueError, "cu_seqlens has shape (1, 2)"),
    ({"cu_seqlens": [0.0, 8.0]}, TypeError, "cu_seqlens holds float64; it must be an integer"),
    ({"cu_seqlens": np.array(8)}, ValueError, "cu_seqlens has shape ()"),
    ({"recipe": "flamia-mxfp8-fold"}, ValueError, "did you mean 'flamia-mxfp8-folded' or"),
    ({"recipe": 3}, TypeError, "recipe is 3; it must be a Recipe or a name"),
    ({"trace": ("p.codes",)}, ValueError, "unknown stage 'p.codes'; did you mean"),
    ({"trace": "scores"}, ValueError, "unknown stage 'scores'"),
    ({"trace": (("s", 0),)}, (TypeError, ValueError), "trace has the tile 0 of 's'; it must be"),
    ({"causal": 1}, TypeError, "causal is 1; it must be True or False"),
    ({"causal": None}, TypeError, "causal is None"),
    ({"softmax_scale": 0}, ValueError, "softmax_scale is 0.0; it must be finite and above 0"),
    ({"softmax_scale": -1.0}, ValueError, "softmax_scale is -1.0"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale is nan"),
    ({"softmax_scale": "0.1"}, TypeError, "softmax_scale is '0.1'; it must be a float"),
    ({"softmax_scale": 10**400}, ValueError, "softmax_scale is inf"),
    ({"softmax_scale": 1e-50}, ValueError, "it must be a normal float32"),
    ({"softmax_scale": 1e300}, ValueError, "it must be a normal float32"),
    ({"window": (2, 1)}, ValueError, "window is (2, 1) with causal=True, which hides every key to"),
    ({"window": (-2, 0)}, ValueError, "window is (-2, 0); its sides must be 0 or more, None or -1"),
    ({"window": (2, -3)}, ValueError, "window is (2, -3); its sides must be 0 or more"),
    ({"window": (1.0, 0)}, TypeError, "window is (1.0, 0); its sides must be whole numbers"),
    ({"window": (True, 0)}, TypeError, "its sides must be whole numbers, or None"),
    ({"window": 2}, TypeError, "window is 2; it must be (left, right)"),
    ({"window": (2,)}, TypeError, "window is (2,); it must be (left, right)"),
    ({"window": (2, 0, 0)}, TypeError, "window is (2, 0, 0); it must be (left, right)"),
    ({"window": "20"}, TypeError, "window is '20'; it must be (left, right)"),
    ({"softcap": 0.0}, ValueError, "softcap is 0.0; it must be finite and above 0"),
    ({"softcap": -30.0}, ValueError, "softcap is -30.0; it must be finite and above 0"),
    ({"softcap": float("nan")}, ValueError, "softcap is nan; it must be finite and above 0"),
    ({"softcap": float("inf")}, ValueError, "softcap is inf; it must be finite and above 0"),
    ({"softcap": 1e-40}, ValueError, "softcap is 1e-40; it must be finite and above 0, a normal"),
    ({"softcap": "30"}, TypeError, "softcap is '30'; it must be a float, or None"),
    ({"softcap": True}, TypeError, "softcap is True; it must be a float, or None"),
    ({"softcap": 10**400}, ValueError, "softcap is "),
    (
        {"softcap": 1e-30, "softmax_scale": 1e30},
        ValueError,
        "their quotient must be a normal float",
    ),
    ({"softcap": 1e30, "softmax_scale": 1e-30}, ValueError, "their quotient must be a normal floa"),
    ({"sink": Q}, TypeError, "sink holds bfloat16; it must be float32"),
    ({"sink": [0.0] * 4}, TypeError, "sink is a list; it must be a numpy or JAX array"),
    ({"sink": 0.0}, TypeError, "sink is a float; it must be a numpy or JAX array"),
    ({"sink": np.zeros(4)}, TypeError, "sink holds float64; it must be float32"),
    (
        {"sink": np.zeros(2, np.float32)},
        ValueError,
        "sink has shape (2,); it must be (heads,) = (4",
    ),
    (
        {"sink": np.zeros((4, 1), np.float32)},
        ValueError,
        "sink has shape (4, 1); it must be (heads,",
    ),
    ({"sink": np.float32([0, np.nan, 0, 0])}, ValueError, "sink"),
    ({"sink": np.float32([0, 0, 0, np.inf])}, ValueError, "sink"),
    ({"sink": np.ma.masked_array(np.zeros(4, np.float32))}, TypeError, "sink is a MaskedArray"),
    ({"cu_seqlens_k": CU_SEQLENS}, ValueError, "cu_seqlens is None, which is 1 document, and cu_s"),
    ({"cu_seqlens_k": [0, 9]}, ValueError, "cu_seqlens_k[1] is 9, beyond the 8 tokens given"),
    ({"cu_seqlens_k": [0, 5]}, ValueError, "cu_seqlens_k ends at 5, but 8 tokens were given"),
    ({"cu_seqlens_k": [1, 8]}, ValueError, "cu_seqlens_k[0] is 1; the first document starts at 0"),
    ({"cu_seqlens_k": [0, 5, 3, 8]}, ValueError, "cu_seqlens_k[2] is 3, less than cu_seqlens_k[1]"),
    ({"cu_seqlens_k": [0.0, 8.0]}, TypeError, "cu_seqlens_k holds float64; it must be an integer"),
    ({"cu_seqlens_k": [[0, 8]]}, ValueError, "cu_seqlens_k has shape (1, 2)"),
    ({"cu_seqlens_k": []}, ValueError, "cu_seqlens_k has shape (0,)"),
    ({"cu_seqlens_k": "08"}, (TypeError, ValueError), "cu_seqlens_k"),
    ({"k": K[:4], "v": V[:4], "cu_seqlens_k": [0, 8]}, ValueError, "beyond the 4 tokens given"),
    ({"alignment": None}, ValueError, "unknown alignment"),
    ({"trace": None}, TypeError, "trace is None; it must be names of stages"),
    ({"alignment": np.zeros(2)}, ValueError, "unknown alignment"),
    ({"cu_seqlens": [[0, 8], [8]]}, TypeError, "cu_seqlens is [[0, 8], [8]]; it must be a flat"),
    ({"cu_seqlens": []}, ValueError, "cu_seqlens has shape (0,)"),
    ({"q": np.ma.masked_array(Q, Q == 0)}, TypeError, "q is a MaskedArray; pass a plain array"),
    ({"cu_seqlens": np.ma.masked_array([0, 8])}, TypeError, "cu_seqlens is a MaskedArray"),
    ({"alignment": "top-left"}, ValueError, "did you mean 'top_left'"),
]


@pytest.mark.parametrize(("options", "kind", "message"), BAD, ids=range(len(BAD)))
def test_one_line_at_the_boundary(options, kind, message: str) -> None:
    with pytest.raises(kind) as caught:
        run(**options)
    text = str(caught.value)
    assert message in text
    assert "\n" not in text
    assert len(text) < 360  # "unknown recipe" lists twelve names


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.int16])
def test_integer_widths_of_cu_seqlens(dtype) -> None:
    expected = run(cu_seqlens=[0, 5, 8])
    assert (run(cu_seqlens=np.array([0, 5, 8], dtype)).out == expected.out).all()


def test_traced_values_that_select_shapes() -> None:
    import jax
    import jax.numpy as jnp

    q, k, v = map(jnp.asarray, (Q, K, V))
    with pytest.raises(TypeError, match="cu_seqlens is traced; it selects shapes"):
        jax.jit(lambda c: attention.forward(q, k, v, RECIPE, cu_seqlens=c).out)(CU_SEQLENS)
    with pytest.raises(TypeError, match="softmax_scale is traced"):
        jax.jit(lambda s: attention.forward(q, k, v, RECIPE, softmax_scale=s).out)(0.1)


def test_arrays_of_two_libraries() -> None:
    import jax.numpy as jnp

    with pytest.raises(TypeError, match="q is a JAX array and the rest numpy"):
        run(q=jnp.asarray(Q))


@pytest.mark.nightly
def test_arrays_on_two_devices() -> None:
    import os
    import subprocess
    import sys

    program = (
        "import jax, jax.numpy as jnp\n"
        "from flamia_ref import attention\n"
        "where = jax.devices()[1]\n"
        "x = jax.device_put(jnp.zeros((2, 1, 32)), jax.devices()[0])\n"
        "y = jax.device_put(x, where)\n"
        "try:\n"
        "    attention.forward(x, y, y, 'flamia-mxfp8-folded')\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "print(attention.forward(y, y, y, 'flamia-mxfp8-folded').out.devices() == {where})\n"
        "z = jnp.zeros((2, 1, 32))  # not bound to a device\n"
        "attention.forward(z, y, y, 'flamia-mxfp8-folded')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "inputs are on different devices" in result.stdout
    assert "True" in result.stdout


def test_float32_inputs_are_rounded_with_a_warning() -> None:
    exact = [x.astype(np.float32) for x in (Q, K, V)]
    expected = run()
    assert (run(*[x.astype(">f4") for x in exact]).out == expected.out).all()
    assert (run(*exact).out == expected.out).all()
    moved = [np.nextafter(x, np.float32(np.inf)) for x in exact]
    with pytest.warns(InputRounded, match="values of . are not bfloat16") as caught:
        rounded = attention.forward(*moved, RECIPE)
    assert [str(warning.message)[:26] for warning in caught] == [
        "1024 of 1024 values of q a",
        "512 of 512 values of k are",
        "512 of 512 values of v are",
    ]
    assert {warning.filename for warning in caught} == {__file__}
    assert (rounded.out == expected.out).all()
    specials = exact[0].copy()
    specials[0, 0, 0], specials[1, 0, 0] = np.nan, np.inf
    run(q=specials, k=exact[1], v=exact[2])  # neither is rounded: no warning


def test_no_tokens() -> None:
    empty = np.zeros((0, 2, 32), ml_dtypes.bfloat16)
    for cu_seqlens in (None, [0, 0], [0, 0, 0]):
        result = run(
            empty,
            empty,
            empty,
            cu_seqlens=cu_seqlens,
            trace=attention.forward_stages(attention.RECIPES[RECIPE]),
        )
        assert result.out.shape == (0, 2, 32)
        assert result.lse.shape == (2, 0)
        assert result.trace["q.scales"].shape == (0, 2, 1)
        assert all(x.shape == (2, 0, 0) for x in result.trace["p.o.scales"])


def test_inputs_are_not_changed() -> None:
    copies = [x.copy() for x in (Q, K, V)]
    run()
    for before, after in zip(copies, (Q, K, V), strict=True):
        assert (before.view(np.uint16) == after.view(np.uint16)).all()


def test_views_and_other_memory_orders() -> None:
    expected = run()
    reordered = [np.asfortranarray(x) for x in (Q, K, V)]
    assert (run(*reordered).out == expected.out).all()
    strided = [np.repeat(x, 2, axis=2)[..., ::2] for x in (Q, K, V)]
    assert (run(*strided).out == expected.out).all()
