"""Bad input of the backward, and of a foreign kernel's results: one line, before work starts."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from flamia_ref import attention
from flamia_ref._errors import InputRounded
from flamia_ref.attention import RECIPES, Forward, backward_stages
from tests.attention.passes import WITH_BACKWARD, every_recipe, passes, with_dout
from tests.attention.samples import BF16, any_bits, assert_same, bell, bits, wide, with_specials

RECIPE = "flamia-mxfp8-folded"
Q, K, V, DOUT, CU_SEQLENS = with_dout(bell, 0, [5, 0, 3], 4, 2, 32)
FORWARD = attention.forward(Q, K, V, RECIPE, cu_seqlens=CU_SEQLENS)
OUT, LSE = FORWARD.out, FORWARD.lse


def backward(q=Q, k=K, v=V, dout=DOUT, forward=FORWARD, **options):
    return attention.backward(q, k, v, dout, forward, **options)


def from_kernel(out=OUT, lse=LSE, recipe=RECIPE, **options):
    return Forward.from_kernel(out, lse, recipe, **{"cu_seqlens": CU_SEQLENS, **options})


def one_line(call, kind, message: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert message in text
    assert "\n" not in text
    assert len(text) < 360  # up to twelve names of recipes


BAD_BACKWARD = [
    ({"dout": DOUT[:4]}, ValueError, "dout has shape (4, 4, 32); for these q and v it must be"),
    ({"dout": DOUT[:, :2]}, ValueError, "dout has shape (8, 2, 32)"),
    ({"dout": DOUT[0]}, ValueError, "dout has shape (4, 32); it must be (tokens, heads, head_dim)"),
    ({"dout": DOUT.astype(np.float64)}, TypeError, "dout holds float64; it must be float32 or"),
    ({"dout": DOUT.view(np.uint16)}, TypeError, "dout holds uint16"),
    ({"dout": DOUT.tolist()}, TypeError, "dout is a list; it must be a numpy or JAX array"),
    ({"dout": None}, TypeError, "dout is a NoneType"),
    ({"dout": np.ma.masked_array(DOUT, DOUT == 0)}, TypeError, "dout is a MaskedArray"),
    (
        {"forward": (OUT, LSE)},
        TypeError,
        "forward is a tuple; pass the result of attention.forward",
    ),
    ({"forward": None}, TypeError, "forward is a NoneType"),
    (
        {"q": Q[:7], "k": K[:7], "v": V[:7], "dout": DOUT[:7]},
        ValueError,
        "documents of 8 tokens, but",
    ),
    (
        {"q": Q[:, :2], "dout": DOUT[:, :2]},
        ValueError,
        "the forward's out has shape (8, 4, 32), for these q and v it would be (8, 2, 32)",
    ),
    ({"k": K[:, :, :16], "v": V[:, :, :16]}, ValueError, "q has head_dim 32 and k 16"),
    ({"k": K[:4], "v": V[:4]}, ValueError, "ran on documents of 8 tokens, but k has 4"),
    ({"v": V[:, :1]}, ValueError, "both have the same tokens and kv_heads"),
    ({"trace": ("dS",)}, ValueError, "unknown stage 'dS'; did you mean 'ds'"),
    ({"trace": ("s",)}, ValueError, "unknown stage 's'"),  # the forward's
    ({"trace": 3}, TypeError, "trace is 3; it must be names of stages"),
    ({"q": Q * BF16.type(8), "k": K * BF16.type(8)}, ValueError, "the query sees alone gives"),
    ({"forward": dataclasses.replace(FORWARD, lse=-LSE)}, ValueError, "is it negated, or of other"),
    (
        {"forward": dataclasses.replace(FORWARD, out=OUT * 64)},
        ValueError,
        "does it belong to these",
    ),
    (
        {"forward": dataclasses.replace(FORWARD, softmax_scale=4.0)},
        ValueError,
        "the query sees alone gives",
    ),
]


@pytest.mark.parametrize(("options", "kind", "message"), BAD_BACKWARD, ids=range(len(BAD_BACKWARD)))
def test_one_line_at_the_boundary_of_backward(options, kind, message: str) -> None:
    one_line(lambda: backward(**options), kind, message)


def changed(x, place, value):
    x = x.copy()
    x[place] = value
    return x


BAD_RESULTS = [
    ({"out": OUT[0]}, ValueError, "out has shape (4, 32); it must be (tokens, heads, head_dim)"),
    (
        {"out": OUT.astype(np.float64)},
        TypeError,
        "out holds float64; it must be float32 or bfloat16",
    ),
    ({"out": OUT.tolist()}, TypeError, "out is a list"),
    (
        {"lse": LSE.T},
        ValueError,
        "lse has shape (8, 4); for out of (8, 4, 32) it must be (heads, tok",
    ),
    ({"lse": LSE[:, :7]}, ValueError, "lse has shape (4, 7)"),
    ({"lse": LSE.astype(np.float64)}, TypeError, "lse holds float64; it must be float32"),
    ({"lse": LSE.astype(BF16)}, TypeError, "lse holds bfloat16; it must be float32"),
    ({"lse": LSE.tolist()}, TypeError, "lse is a list; it must be a numpy or JAX array"),
    ({"lse": None}, TypeError, "lse is a NoneType"),
    ({"lse": np.ma.masked_array(LSE, LSE > 0)}, TypeError, "lse is a MaskedArray"),
    (
        {"lse": changed(LSE, (1, 6), np.nan)},
        ValueError,
        "lse of head 1, token 6 is NaN, but its out",
    ),
    ({"lse": changed(LSE, (0, 7), np.inf)}, ValueError, "lse of head 0, token 7 is +inf"),
    (
        {"lse": changed(LSE, (3, 0), -np.inf)},
        ValueError,
        "a row that sees no key, but its out is not 0",
    ),
    ({"cu_seqlens": [0, 5]}, ValueError, "cu_seqlens ends at 5, but 8 tokens were given"),
    ({"cu_seqlens": [0, 9]}, ValueError, "cu_seqlens[1] is 9, beyond the 8 tokens given"),
    ({"causal": None}, TypeError, "causal is None; it must be True or False"),
    ({"softmax_scale": -1}, ValueError, "softmax_scale is -1.0; it must be finite and above 0"),
    ({"recipe": "cudnn"}, ValueError, "unknown recipe 'cudnn'"),
    ({"recipe": 3}, TypeError, "recipe is 3; it must be a Recipe or a name"),
    ({"window": (2, 1)}, ValueError, "window is (2, 1) with causal=True"),
    ({"window": (2, -2), "causal": False}, ValueError, "window is (2, -2); its sides must be 0 or"),
    ({"softcap": 0}, ValueError, "softcap is 0; it must be finite and above 0"),
    ({"sink": OUT}, ValueError, "sink has shape (8, 4, 32); it must be (heads,) = (4,)"),
    ({"sink": np.float32([0, np.nan, 0, 0])}, ValueError, "sink"),
    ({"sink": np.zeros(4)}, TypeError, "sink holds float64; it must be float32"),
    ({"cu_seqlens_k": [0, 8]}, ValueError, "3 documents and cu_seqlens_k 1; give equally many"),
    ({"cu_seqlens_k": [0, 5, 4, 8]}, ValueError, "cu_seqlens_k[2] is 4, less than cu_seqlens_k[1]"),
    ({"cu_seqlens_k": [1, 5, 5, 8]}, ValueError, "cu_seqlens_k[0] is 1; the first document starts"),
    ({"saved": {"o": OUT}}, ValueError, "unknown saved array 'o'"),
    ({"saved": 3}, (TypeError, ValueError), "saved"),
    ({"alignment": "left"}, ValueError, "unknown alignment 'left'"),
]


@pytest.mark.parametrize(("options", "kind", "message"), BAD_RESULTS, ids=range(len(BAD_RESULTS)))
def test_one_line_at_the_boundary_of_from_kernel(options, kind, message: str) -> None:
    one_line(lambda: from_kernel(**options), kind, message)


@every_recipe
@pytest.mark.parametrize("make", [bell, wide, any_bits, with_specials])
def test_a_recipe_does_not_refuse_its_own_results(recipe: str, make) -> None:
    """Whatever the inputs are: what quantization took away is no sign of another forward."""
    for causal in (True, False):
        *arrays, cu_seqlens = with_dout(make, 3, [20, 12], 2, 1, 32)
        passes(*arrays, recipe, stages=False, cu_seqlens=cu_seqlens, causal=causal)
    # Two key tiles with scores of 10^9: rows of cuDNN's recipes have l = NaN beside a finite accumulator.
    *arrays, cu_seqlens = with_dout(make, 1, [150], 1, 1, 4)
    passes(*arrays, recipe, stages=False, cu_seqlens=cu_seqlens, causal=False)


KEEPING = dataclasses.replace(
    RECIPES[RECIPE],
    gradient=dataclasses.replace(
        RECIPES[RECIPE].gradient, delta_source="unrounded_out", p_for_dv="forward"
    ),
)
KEPT = attention.forward(Q, K, V, KEEPING, cu_seqlens=CU_SEQLENS).saved


@pytest.mark.parametrize(
    ("saved", "kind", "message"),
    [
        (None, ValueError, "needs o, row_base of the forward for its backward; give saved={...}"),
        ({}, ValueError, "needs o, row_base of the forward for its backward"),
        ({"o": KEPT["o"]}, ValueError, "needs row_base of the forward for its backward"),
        (KEPT | {"p": OUT}, ValueError, "unknown saved array 'p'"),
        (KEPT | {"o": OUT.astype(np.float64)}, TypeError, "saved['o'] holds float64; it must be"),
        (KEPT | {"o": OUT.tolist()}, TypeError, "saved['o'] is a list; it must be a numpy or JAX"),
        (
            KEPT | {"o": OUT[:4]},
            ValueError,
            "saved['o'] has shape (4, 4, 32); for this out and these",
        ),
        (
            KEPT | {"row_base": LSE[:2, :, None]},
            ValueError,
            "saved['row_base'] has shape (2, 8, 1)",
        ),
        (KEPT | {"row_base": LSE}, ValueError, "saved['row_base'] has shape (4, 8)"),
        (KEPT | {"row_base": LSE[:, :, None][:, :, :0]}, ValueError, "saved['row_base'] has shape"),
    ],
)
def test_what_a_recipe_keeps_is_asked_for(saved, kind, message: str) -> None:
    one_line(lambda: from_kernel(recipe=KEEPING, saved=saved), kind, message)


def test_a_forward_without_what_its_recipe_keeps() -> None:
    kernel = from_kernel(recipe=KEEPING, saved=KEPT)
    expected = backward(forward=attention.forward(Q, K, V, KEEPING, cu_seqlens=CU_SEQLENS))
    assert_same(backward(forward=kernel).dv, expected.dv, "dv")
    without = dataclasses.replace(kernel, saved={"o": KEPT["o"]})
    one_line(lambda: backward(forward=without), ValueError, "needs row_base of the forward")


@pytest.mark.parametrize("recipe", [name for name in WITH_BACKWARD if "nvfp4" not in name])
def test_a_negated_lse_is_seen(recipe: str) -> None:
    """Of rows that see many keys: their lse is at least the score of the last key that they see. In FP4 that score may
    be so far from the exact one that little can be said."""
    q, k, v, dout, cu_seqlens = with_dout(bell, 2, [40, 60], 2, 1, 64)
    one = attention.forward(q, k, v, recipe, cu_seqlens=cu_seqlens)
    negated = Forward.from_kernel(one.out, -one.lse, recipe, cu_seqlens=cu_seqlens)
    one_line(lambda: attention.backward(q, k, v, dout, negated), ValueError, "is it negated")


def test_a_base_2_lse_cannot_be_seen() -> None:
    """It is a possible natural one, of more keys; the documentation says so."""
    q, k, v, dout, _ = with_dout(bell, 2, [40], 2, 1, 64)
    one = attention.forward(q, k, v, RECIPE)
    in_base_2 = (one.lse * np.float32(np.log2(np.e))).astype(np.float32)
    kernel = Forward.from_kernel(one.out, in_base_2, RECIPE)
    attention.backward(q, k, v, dout, kernel)
    assert "base-2 lse cannot be told" in " ".join(Forward.from_kernel.__doc__.split())
    assert "lse in base 2" in " ".join(attention.backward.__doc__.split())


def test_from_kernel_keeps_what_it_is_given() -> None:
    kernel = from_kernel(causal=False, softmax_scale=0.25)
    assert (kernel.out == OUT).all()
    assert (kernel.lse == LSE).all()
    assert kernel.recipe is RECIPES[RECIPE]
    assert kernel.documents == FORWARD.documents
    assert (kernel.causal, kernel.softmax_scale) == (False, 0.25)
    assert not kernel.trace
    assert not kernel.saved


def test_the_backward_of_from_kernel_is_that_of_the_forward() -> None:
    expected = backward(trace=backward_stages(RECIPES[RECIPE]))
    for out in (OUT, OUT.astype(BF16), OUT.astype(">f4")):
        found = backward(forward=from_kernel(out), trace=backward_stages(RECIPES[RECIPE]))
        for name in ("dq", "dk", "dv"):
            assert_same(getattr(found, name), getattr(expected, name), name)
        for name, value in expected.trace.items():
            assert_same(found.trace[name], value, name)


def test_an_out_that_is_not_bfloat16_is_rounded_with_a_warning() -> None:
    moved = np.nextafter(OUT, np.float32(np.inf))
    with pytest.warns(InputRounded, match="1024 of 1024 values of out are not bfloat16") as caught:
        kernel = from_kernel(moved)
    assert {warning.filename for warning in caught} == {__file__}
    assert_same(kernel.out, OUT, "out")


def test_float32_inputs_are_rounded_with_a_warning() -> None:
    exact = [x.astype(np.float32) for x in (Q, K, V, DOUT)]
    expected = backward()
    assert_same(backward(*exact).dk, expected.dk, "dk")
    assert_same(backward(*(x.astype(">f4") for x in exact)).dk, expected.dk, "dk")
    moved = np.nextafter(exact[3], np.float32(np.inf))
    with pytest.warns(InputRounded, match="1024 of 1024 values of dout are not") as caught:
        found = backward(*exact[:3], moved)
    assert {warning.filename for warning in caught} == {__file__}
    assert_same(found.dk, expected.dk, "dk")


def test_no_tokens() -> None:
    empty = np.zeros((0, 2, 32), ml_dtypes.bfloat16)
    for name, recipe in RECIPES.items():
        for cu_seqlens in (None, [0, 0], [0, 0, 0]):
            found = passes(empty, empty, empty, empty, name, cu_seqlens=cu_seqlens)
            assert found["out"].shape == (0, 2, 32)
            if not recipe.has_backward:
                continue
            assert found["dq"].shape == found["dk"].shape == found["dv"].shape == (0, 2, 32)
            assert found["delta"].shape == (2, 0)
            documents = 2 if cu_seqlens == [0, 0, 0] else 1
            for stage in backward_stages(recipe):
                if isinstance(found[stage], list):
                    assert [x.shape for x in found[stage]] == [(2, 0, 0)] * documents, stage


@pytest.mark.parametrize("recipe", RECIPES)
def test_empty_documents_beside_others(recipe: str) -> None:
    q, k, v, dout, _ = with_dout(bell, 1, [3], 2, 1, 32)
    alone = passes(q, k, v, dout, recipe, stages=False)
    for cu_seqlens in ([0, 0, 3], [0, 3, 3], [0, 0, 0, 3, 3]):
        found = passes(q, k, v, dout, recipe, stages=False, cu_seqlens=cu_seqlens)
        for name, value in alone.items():
            assert_same(found[name], value, name)


def test_bad_numbers_are_no_error() -> None:
    for recipe in WITH_BACKWARD:
        clean = passes(Q, K, V, DOUT, recipe, stages=False, cu_seqlens=CU_SEQLENS)
        for value in (np.nan, -np.inf):
            dout = DOUT.copy()
            dout[1, 0, 0] = value
            found = passes(Q, K, V, dout, recipe, stages=False, cu_seqlens=CU_SEQLENS)
            assert not np.isfinite(found["dv"][:2, 0]).all(), recipe
            assert_same(found["dv"][5:], clean["dv"][5:], "dv of the other document")


def test_inputs_are_not_changed() -> None:
    given = (Q, K, V, DOUT, OUT, LSE)
    before = [bits(x).copy() for x in given]
    backward()
    for old, x in zip(before, given, strict=True):
        assert (bits(x) == old).all()


def test_read_only_inputs_views_and_other_memory_orders() -> None:
    expected = backward()
    for change in (
        np.asfortranarray,
        lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
        lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    ):
        kernel = from_kernel(change(OUT), change(LSE))
        found = backward(*(change(x) for x in (Q, K, V, DOUT)), kernel)
        for name in ("dq", "dk", "dv"):
            assert_same(getattr(found, name), getattr(expected, name), name)


def test_a_users_floating_point_errors_change_nothing() -> None:
    for make in (with_specials, any_bits):
        *arrays, cu_seqlens = with_dout(make, 3, [20], 1, 1, 32)
        for recipe in RECIPES:
            expected = passes(*arrays, recipe, cu_seqlens=cu_seqlens)
            with np.errstate(all="raise"):
                found = passes(*arrays, recipe, cu_seqlens=cu_seqlens)
            for name, value in expected.items():
                assert_same(found[name], value, name)


def test_arrays_of_two_libraries() -> None:
    import jax

    one = jax.device_put(DOUT)
    one_line(lambda: backward(dout=one), TypeError, "dout is a JAX array and the rest numpy")
    one_line(lambda: from_kernel(lse=jax.device_put(LSE)), TypeError, "lse is a JAX array and the")
    of_jax = [jax.device_put(x) for x in (Q, K, V, DOUT)]
    one_line(lambda: backward(*of_jax), TypeError, "are JAX arrays and the rest numpy")


def test_traced_values_that_select_shapes() -> None:
    import jax

    out, lse = map(jax.device_put, (OUT, LSE))
    with pytest.raises(TypeError, match="cu_seqlens is traced; it selects shapes"):
        jax.jit(lambda c: Forward.from_kernel(out, lse, RECIPE, cu_seqlens=c).out)(CU_SEQLENS)
    with pytest.raises(TypeError, match="softmax_scale is traced"):
        jax.jit(lambda s: Forward.from_kernel(out, lse, RECIPE, softmax_scale=s).out)(0.1)


def test_results_are_pytrees() -> None:
    import jax

    given = [jax.device_put(x) for x in (Q, K, V)]
    one = attention.forward(*given, RECIPE, cu_seqlens=CU_SEQLENS, trace=("s", "q.codes"))
    leaves, tree = jax.tree.flatten(one)
    assert len(leaves) == 2 + 3 + 1  # out, lse, a list of three documents, codes
    again = jax.tree.unflatten(tree, leaves)
    assert again.documents == one.documents
    assert again.recipe == one.recipe
    assert (np.asarray(again.out) == np.asarray(one.out)).all()
