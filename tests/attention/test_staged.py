"""The stages one by one: the bits of the whole passes, and one line for what does not fit."""

import re
from dataclasses import replace

import numpy as np
import pytest

from flamia_ref import attention
from flamia_ref.attention import RECIPES
from tests.attention.passes import with_dout
from tests.attention.samples import assert_same, bell

FOLDED, GUARDED = "flamia-mxfp8-folded", "flamia-mxfp8"
Q, K, V, DOUT, CU_SEQLENS = with_dout(bell, 0, [25, 15], 4, 2, 32)


def one_line(call, kind, message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 300


class Staged:
    """All stages of one recipe."""

    def __init__(self, recipe, arrays=(Q, K, V, DOUT), cu_seqlens=CU_SEQLENS) -> None:
        *qkv, self.dout = arrays
        self.operands = attention.prepare(*qkv, recipe, cu_seqlens=cu_seqlens)
        self.forward = attention.forward_from_operands(self.operands, cu_seqlens=cu_seqlens)
        if self.forward.recipe.has_backward:
            self.before = attention.preprocess(self.dout, self.forward)

    def backward(self, **changes):
        before = replace(self.before, **changes)
        return attention.backward_from_operands(self.operands, before, self.forward)


STAGED = {name: Staged(name) for name in (FOLDED, GUARDED)}


def arrays_of(operands, which=("codes", "scales", "token_scales")) -> dict:
    """Operands by stage name."""
    return {
        f"{name}.{part}": getattr(copy, part)
        for name, copy in operands.operands.items()
        for part in which
        if getattr(copy, part) is not None
    }


def guards_of(operands) -> dict:
    return {name: guard.codes for name, guard in operands.guards.items()}


def given(recipe=FOLDED, *, changes=None, guards=None, **options):
    operands = STAGED[recipe].operands
    return attention.operands_from(
        arrays_of(operands) | (changes or {}),
        recipe,
        guards=guards_of(operands) if guards is None else guards,
        **options,
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_stages_give_the_bits_of_the_passes(recipe: str) -> None:
    found = Staged(recipe)
    forward = attention.forward(Q, K, V, recipe, cu_seqlens=CU_SEQLENS)
    assert_same(found.forward.out, forward.out, "out")
    assert_same(found.forward.lse, forward.lse, "lse")
    brought = attention.operands_from(
        arrays_of(found.operands), recipe, guards=guards_of(found.operands), cu_seqlens=CU_SEQLENS
    )
    again = attention.forward_from_operands(brought, cu_seqlens=CU_SEQLENS)
    assert_same(again.out, forward.out, "out")
    assert_same(again.lse, forward.lse, "lse")
    if not RECIPES[recipe].has_backward:
        return
    expected = attention.backward(Q, K, V, DOUT, forward)
    for gradients in (
        found.backward(),
        attention.backward_from_operands(brought, found.before, forward),
    ):
        for name in ("dq", "dk", "dv"):
            assert_same(getattr(gradients, name), getattr(expected, name), name)


def test_either_byte_order_is_the_same() -> None:
    def other_order(x):
        return x.astype(x.dtype.newbyteorder())

    staged = STAGED[GUARDED]
    expected = staged.backward()
    rows = ("base", "rest", "delta")
    found = staged.backward(**{name: other_order(getattr(staged.before, name)) for name in rows})
    assert_same(found.dq, expected.dq, "dq")
    guards = {name: other_order(x) for name, x in guards_of(staged.operands).items()}
    brought = given(GUARDED, guards=guards)
    forward = attention.forward_from_operands(brought, cu_seqlens=CU_SEQLENS)
    assert_same(forward.out, staged.forward.out, "out")


@pytest.mark.parametrize("arrays", [None, [1, 2], [("q.codes", Q)], "q.codes"])
def test_operands_are_a_mapping(arrays) -> None:
    one_line(
        lambda: attention.operands_from(arrays, FOLDED), TypeError, "it must be a mapping of stage"
    )
    one_line(
        lambda: given(GUARDED, guards=[1]), TypeError, "guards is [1]; it must be a mapping of 'q'"
    )


TOKENS, CODES = 40, STAGED[FOLDED].operands.operands["q"].codes

BAD_OPERANDS = [
    (FOLDED, {"changes": {3: CODES}}, ValueError, "unknown operand 3"),
    (FOLDED, {"changes": {"q.codes": CODES.astype(np.uint16)}}, TypeError, "q.codes holds uint16"),
    (
        FOLDED,
        {"changes": {"q.codes": CODES.astype(">u2")}},
        TypeError,
        "q.codes holds uint16 in the other byte order (>u2); it must be uint8",
    ),
    (FOLDED, {"changes": {"q.codes": CODES[0]}}, ValueError, "it must have three axes"),
    (FOLDED, {"changes": {"q.codes": CODES.tolist()}}, TypeError, "q.codes is a list; it must be"),
    (FOLDED, {"changes": {"q.codes": CODES[:39]}}, ValueError, "q.scales has shape (40, 4, 1); "),
    (
        GUARDED,
        {"guards": {"q": np.zeros((3, 4, 32), np.uint16)}},
        ValueError,
        "guards['q'] has shape (3, 4, 32); bfloat16 codes beside q.codes must be of shape (40, 4, 32",
    ),
    (GUARDED, {"guards": {"k": np.zeros((40, 1, 32), np.uint16)}}, ValueError, "guards['k'] has"),
    (GUARDED, {"guards": {"q": np.zeros((50, 4, 32), np.uint16)}}, ValueError, "guards['q'] has"),
    (GUARDED, {"guards": {"q": np.zeros((40, 32), np.uint16)}}, ValueError, "guards['q'] has sha"),
    (GUARDED, {"guards": {"q": Q}}, TypeError, "guards['q'] holds bfloat16; it must be uint16"),
    (GUARDED, {"guards": {"p": CODES}}, ValueError, "unknown guard 'p'"),
    (
        FOLDED,
        {"guards": {"q": Q.view(np.uint16)}},
        ValueError,
        "guards has 'q', but recipe 'flamia-mxfp8-folded' takes no guards; leave it out",
    ),
    (
        GUARDED,
        {"guards": {"do": DOUT.view(np.uint16)}},
        ValueError,
        "guards has 'do' without codes of do",
    ),
    (
        FOLDED,
        {"cu_seqlens": [0, 41]},
        ValueError,
        "cu_seqlens[1] is 41, beyond the 40 tokens given",
    ),
    (FOLDED, {"cu_seqlens_k": [0, 20]}, ValueError, "cu_seqlens_k ends at 20, but 40 tokens were"),
    (
        FOLDED,
        {"cu_seqlens": [0, 40], "cu_seqlens_k": [0, 20, 40]},
        ValueError,
        "1 documents and cu_seqlens_k 2",
    ),
    (GUARDED, {"cu_seqlens": [0, 5, 40]}, ValueError, ".scales has shape (2, "),
]


@pytest.mark.parametrize(
    ("recipe", "options", "kind", "message"), BAD_OPERANDS, ids=range(len(BAD_OPERANDS))
)
def test_operands_that_do_not_fit(recipe: str, options, kind, message: str) -> None:
    one_line(lambda: given(recipe, **options), kind, message)


def test_operands_know_their_documents() -> None:
    """One document of 40 tokens has two blocks, as two of 20 have."""
    arrays = arrays_of(attention.prepare(Q, K, V, GUARDED))
    guards = guards_of(STAGED[GUARDED].operands)
    brought = attention.operands_from(arrays, GUARDED, guards=guards, cu_seqlens=[0, 40])
    attention.forward_from_operands(brought)
    attention.forward_from_operands(brought, cu_seqlens=[0, 40])
    one_line(
        lambda: attention.forward_from_operands(brought, cu_seqlens=[0, 20, 40]),
        ValueError,
        "the operands were made for Documents(lengths=(40,)) and cu_seqlens means",
    )
    unsaid = attention.operands_from(arrays, GUARDED, guards=guards)
    assert unsaid.queries is unsaid.keys is None
    dout = attention.prepare_dout(DOUT, GUARDED, cu_seqlens=CU_SEQLENS)
    alone = attention.operands_from(
        arrays_of(dout), GUARDED, guards=guards_of(dout), cu_seqlens=CU_SEQLENS
    )
    assert (alone.queries, alone.keys) == (dout.queries, dout.keys)


def without(x, axis: int):
    return np.take(x, [], axis=axis)


@pytest.mark.parametrize(
    ("names", "axis"), [(("q",), 1), (("k", "v"), 1), (("v",), 2), (("q", "k"), 2)]
)
def test_no_heads_and_no_channels(names, axis: int) -> None:
    operands = attention.prepare(Q, K, V, "bf16-fa4", cu_seqlens=CU_SEQLENS)
    arrays = arrays_of(operands)
    arrays = {
        stage: without(x, axis) if stage.split(".")[0] in names else x
        for stage, x in arrays.items()
    }
    empty = attention.operands_from(arrays, "bf16-fa4")
    one_line(
        lambda: attention.forward_from_operands(empty, cu_seqlens=CU_SEQLENS),
        ValueError,
        "heads and head_dim must be at least 1",
    )


def test_the_parts_of_a_forward_from_operands_are_checked() -> None:
    operands = STAGED[FOLDED].operands
    copy = operands.operands["q"]
    for changed, kind, message in (
        (replace(copy, scales=copy.scales[:39]), ValueError, "q.scales has shape (39, 4, 1); fo"),
        (replace(copy, scales=None), ValueError, "operand 'q' has no scales; give them too"),
        (
            replace(copy, token_scales=copy.scales),
            ValueError,
            "operand 'q' has token_scales, which",
        ),
        (copy.codes, TypeError, "operand 'q' is a ndarray; it must be an OperandCopy"),
    ):
        broken = replace(operands, operands={**operands.operands, "q": changed})
        one_line(
            lambda broken=broken: attention.forward_from_operands(broken, cu_seqlens=CU_SEQLENS),
            kind,
            message,
        )
    named = replace(operands, recipe=FOLDED)
    one_line(
        lambda: attention.forward_from_operands(named), TypeError, "recipe is 'flamia-mxfp8-folded'"
    )


BASE = STAGED[FOLDED].before.base

BAD_ROWS = [
    (
        {"base": BASE.T},
        ValueError,
        "preprocessed.base has shape (40, 4); for these operands it must",
    ),
    ({"rest": BASE[:, :39]}, ValueError, "preprocessed.rest has shape (4, 39)"),
    ({"delta": BASE.T}, ValueError, "preprocessed.delta has shape (40, 4)"),
    (
        {"delta": BASE.astype(float)},
        TypeError,
        "preprocessed.delta holds float64; it must be float",
    ),
    (
        {"delta": BASE.tolist()},
        TypeError,
        "preprocessed.delta is a list; it must be a numpy or JAX",
    ),
    (
        {"delta": None},
        ValueError,
        "preprocessed.delta is None, but recipe 'flamia-mxfp8-folded' ta",
    ),
    ({"base": None}, TypeError, "preprocessed.base is a NoneType; it must be a numpy or JAX array"),
    ({"dead": BASE.astype(float)}, TypeError, "preprocessed.dead holds float64; it must be bool"),
    ({"dead": BASE > 0}, None, ""),
    (
        {"operands": None},
        TypeError,
        "preprocessed.operands is a NoneType; pass what attention.prep",
    ),
    (
        {"operands": STAGED[FOLDED].operands},
        ValueError,
        "preprocessed.operands has no do",
    ),
    ({"operands": STAGED[GUARDED].before.operands}, ValueError, "are of recipe 'flamia-mxfp8' and"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_rows_that_do_not_fit(changes, kind, message: str) -> None:
    if kind is None:
        STAGED[FOLDED].backward(**changes)
        return
    one_line(lambda: STAGED[FOLDED].backward(**changes), kind, message)


def test_a_delta_that_the_recipe_adds_up_itself() -> None:
    recipe = RECIPES[FOLDED]
    adding = replace(recipe, gradient=replace(recipe.gradient, delta_source="p_dp"))
    staged = Staged(adding)
    assert staged.before.delta is None
    one_line(
        lambda: staged.backward(delta=staged.before.base),
        ValueError,
        "preprocessed.delta is given, but recipe 'flamia-mxfp8-folded' adds it up in the backward",
    )


@pytest.mark.parametrize("preprocessed", [None, STAGED[FOLDED].before.operands, (BASE, BASE)])
def test_what_is_not_preprocessed(preprocessed) -> None:
    staged = STAGED[FOLDED]
    one_line(
        lambda: attention.backward_from_operands(staged.operands, preprocessed, staged.forward),
        TypeError,
        f"preprocessed is a {type(preprocessed).__name__}; pass what attention.preprocess gives",
    )


def test_arrays_of_two_libraries() -> None:
    import jax

    staged = STAGED[FOLDED]
    for name in ("base", "rest", "dead", "delta"):
        one = jax.device_put(getattr(staged.before, name))
        one_line(
            lambda name=name, one=one: staged.backward(**{name: one}),
            TypeError,
            f"{name} is a JAX array and the rest numpy",
        )


def small(xp) -> Staged:
    return Staged(FOLDED, [xp.asarray(x[:8, :1]) for x in (Q, K, V, DOUT)], None)


def test_a_partly_traced_preprocess() -> None:
    """What is traced decides where the rest is laid out."""
    import jax
    import jax.numpy as jnp

    staged = small(jnp)
    delta = jax.jit(
        lambda lse: attention.preprocess(staged.dout, replace(staged.forward, lse=lse)).delta
    )(staged.forward.lse)
    assert_same(np.asarray(delta), small(np).before.delta, "delta")


@pytest.mark.nightly
def test_partly_traced_stages() -> None:
    import jax
    import jax.numpy as jnp

    expected, staged = small(np), small(jnp)
    sink = np.zeros(1, np.float32)
    with_sink = attention.forward_from_operands(expected.operands, sink=sink)
    found = jax.jit(lambda s: attention.forward_from_operands(staged.operands, sink=s).out)(sink)
    assert_same(np.asarray(found), with_sink.out, "out")
    dq = jax.jit(lambda delta: staged.backward(delta=delta).dq)(staged.before.delta)
    assert_same(np.asarray(dq), expected.backward().dq, "dq")
