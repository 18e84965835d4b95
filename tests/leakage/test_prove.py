"""`prove` on the simulator and on planted leaks: exactly the illegal pairs that theory gives, and no other."""

import dataclasses
import json

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

from flamia_ref.attention import RECIPES
from flamia_ref.leakage import prove, verify
from flamia_ref.leakage.certificate import Proof
from flamia_ref.leakage.legal import LEGAL, Severity
from tests.leakage import planted_in_jax

N = 64
LOWER = np.tril(np.ones((N, N), dtype=bool))
SAME_BLOCK = np.kron(np.eye(N // 32, dtype=bool), np.ones((32, 32), dtype=bool))
LATER, EARLIER = SAME_BLOCK & ~LOWER, SAME_BLOCK & ~LOWER.T
OTHERS = SAME_BLOCK & ~np.eye(N, dtype=bool)

# What each leak reaches, by hand from the dataflow: 2 blocks on the diagonal, of 496 pairs above it each.
# "future": later tokens of the block; "past": earlier ones; "others": both.
_V_LEAK = {("out", "v"): "future", ("delta", "v"): "future", ("dq", "v"): "future"}
TABLE = {
    ("s.q", "col"): {
        **{(o, "q"): "others" for o in ("out", "lse", "delta", "dq")},
        ("dk", "q"): "past",
        ("dv", "q"): "past",
    },
    ("s.k", "col"): {(o, "k"): "future" for o in ("out", "lse", "delta", "dq")},
    ("o.p", "col"): {
        **{(o, "q"): "others" for o in ("out", "delta", "dq")},
        **{(o, "k"): "future" for o in ("out", "delta", "dq")},
        ("dk", "q"): "past",
    },
    ("o.v", "col"): _V_LEAK,
    ("dp.do", "col"): {("dq", "dout"): "others", ("dk", "dout"): "past"},
    ("dp.v", "col"): {("dq", "v"): "future"},
    ("dv.p", "col"): {},
    ("dv.do", "col"): {("dv", "dout"): "past"},
    ("dq.ds", "col"): {
        **{("dq", source): "others" for source in ("q", "dout")},
        **{("dq", source): "future" for source in ("k", "v")},
    },
    ("dq.k", "col"): {("dq", "k"): "future"},
    ("dk.ds", "col"): {},
    ("dk.q", "col"): {("dk", "q"): "past"},
    ("dv.p", "tile"): {("dv", "q"): "past"},
    ("dk.ds", "tile"): {("dk", "q"): "past", ("dk", "dout"): "past"},
}
PAIRS = {"future": LATER, "past": EARLIER, "others": OTHERS}
USES = (
    "s.q",
    "s.k",
    "o.p",
    "o.v",
    "dp.do",
    "dp.v",
    "dv.p",
    "dv.do",
    "dq.ds",
    "dq.k",
    "dk.ds",
    "dk.q",
)


def illegal(certificate):
    """The illegal pairs by output and input, as matrices."""
    found = {}
    for output, out_token, source, in_token in certificate.illegal:
        found.setdefault((output, source), np.zeros((N, N), dtype=bool))[out_token, in_token] = True
    return found


@pytest.mark.parametrize("block", ["tok", "col", "tile"])
@pytest.mark.parametrize("use", USES)
def test_each_use_leaks_what_its_block_couples(use, block):
    """The 36 rows of the operand table, pair by pair."""
    kernel = planted_in_jax.attention({use: block}, LOWER)
    certificate = prove(kernel, lengths=[N], head_dim=32, dtype="float32")
    expected = {} if block == "tok" else TABLE.get((use, block), TABLE[use, "col"])
    assert not certificate.unknown
    found = illegal(certificate)
    assert set(found) == set(expected)
    for key, kind in expected.items():
        np.testing.assert_array_equal(found[key], PAIRS[kind], err_msg=str(key))
    assert certificate.legal == (not expected)
    assert all(count.missing == 0 for count in certificate.counts)
    forward = {output for output, _ in expected} & {"out", "lse"}
    assert (Severity.FORWARD in certificate.severities) == bool(forward)


def test_a_column_of_v_under_documents():
    """Blocks that documents of 20, 30 and 14 tokens share: 1844 pairs."""
    document = np.repeat([0, 1, 2], [20, 30, 14])
    visible = LOWER & (document[:, None] == document)
    kernel = planted_in_jax.attention({"o.v": "col"}, visible)
    certificate = prove(kernel, lengths=[20, 30, 14], head_dim=32, dtype="float32")
    found = illegal(certificate)
    # A row's output sees the scale of every block that it has a visible key in.
    touched = (visible.reshape(N, 2, 32).any(axis=2)).repeat(32, axis=1)
    np.testing.assert_array_equal(found["out", "v"], touched & ~visible)
    assert found["out", "v"].sum() == 1844
    assert certificate.severities[Severity.CROSS_DOCUMENT] > 0


SAFE = (
    "bf16-fa4",
    "cudnn-mxfp8-pv-bf16",
    "flamia-mxfp8",
    "flamia-mxfp8-folded",
    "flamia-nvfp4-fp8",
    "flamia-nvfp4-fp8-ue4m3",
)
LEAKY = {
    "cudnn-mxfp8": {
        "o.v": "col",
        "dv.do": "col",
        "dq.k": "col",
        "dk.q": "col",
    },
    "cudnn-mxfp8-reference": {"o.v": "col", "dv.do": "col", "dq.k": "col", "dk.q": "col"},
    "flamia-mxfp8-unguarded": dict.fromkeys(USES, "tile"),
}


def test_every_recipe_is_here():
    # test_smoothing.py, test_mask_value_recipe.py, test_descales.py
    elsewhere = {"sage3-nvfp4", "attn-qat-nvfp4", "cutlass-fp8", "fp8-fa3", "fp8-fa4"}
    assert {*SAFE, *LEAKY, *elsewhere} == set(RECIPES)


@pytest.mark.parametrize("recipe", SAFE)
@pytest.mark.parametrize("lengths", [[64], [20, 0, 33, 1, 10]], ids=["one", "packed"])
def test_a_safe_recipe_has_exactly_the_legal_dependencies(recipe, lengths):
    certificate = prove(recipe, lengths=lengths, head_dim=32)
    assert certificate.exact
    assert certificate.verdict is Proof.PROVED
    assert not certificate.unknown
    assert {(one.output, one.input) for one in certificate.counts} == {
        (output, source) for output, of in LEGAL.items() for source in of
    }


def test_what_leaks_of_cudnn_is_what_its_blocks_couple():
    """V, dO, K and Q by columns in O, dV, dQ and dK, and nothing else."""
    found = illegal(prove("cudnn-mxfp8", lengths=[N], head_dim=32))
    expected = {}
    for use in ("o.v", "dv.do", "dq.k", "dk.q"):
        expected |= TABLE[use, "col"]
    assert set(found) == set(expected)
    for key, kind in expected.items():
        np.testing.assert_array_equal(found[key], PAIRS[kind], err_msg=str(key))


def test_what_leaks_without_safeguards_is_what_square_blocks_couple():
    """All twelve uses by 32 x 32."""
    found = illegal(prove("flamia-mxfp8-unguarded", lengths=[N], head_dim=32))
    expected = {}
    for use in USES:
        for key, kind in TABLE.get((use, "tile"), TABLE[use, "col"]).items():
            expected[key] = expected.get(key, False) | PAIRS[kind]
    assert set(found) == set(expected)
    for key, pairs in expected.items():
        np.testing.assert_array_equal(found[key], pairs, err_msg=str(key))


@pytest.mark.parametrize(
    "setting",
    [
        {"causal": False},
        {"window": (10, 0)},
        {"causal": False, "window": (3, 40)},
        {"lengths_k": [44, 20], "alignment": "top_left"},
        {"lengths_k": [44, 20]},
        {"heads": 4, "kv_heads": 2, "value_dim": 64},
        {"sink": True, "softcap": 5.0},
    ],
    ids=str,
)
def test_every_mask_and_shape(setting):
    certificate = prove("flamia-mxfp8", **({"lengths": [20, 44], "head_dim": 32} | setting))
    assert certificate.exact, str(certificate)


def test_strict_finds_what_a_nan_reaches():
    """A NaN of a masked V is in the product of a row that does not see it."""
    certificate = prove("flamia-mxfp8-folded", lengths=[N], head_dim=32, strict=True)
    assert not certificate.legal
    assert not certificate.assumptions
    found = illegal(certificate)
    np.testing.assert_array_equal(found["out", "v"], ~LOWER)
    assert ("lse", "k") not in found
    assert ("lse", "q") not in found


def test_finite_masks_leak():
    """Where all scores that a row sees are below the mask's value, it attends to what is masked: 2016 pairs."""

    def kernel(q, k, v):
        s = jnp.einsum("qhd,khd->hqk", q, k)
        s = jnp.where(jnp.asarray(LOWER), s, -1e9)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(s, axis=-1), v)

    certificate = prove(kernel, lengths=[N], head_dim=32, dtype="float32", backward=False)
    assert {key: found.sum() for key, found in illegal(certificate).items()} == {("out", "v"): 2016}


def test_an_unknown_primitive_is_named_and_makes_everything_of_everything():
    from jax.extend.core import Primitive

    strange = Primitive("strange")
    strange.def_abstract_eval(lambda x: x)

    def kernel(q, k, v):
        return strange.bind(v)

    certificate = prove(kernel, lengths=[4], head_dim=32, backward=False)
    assert certificate.unknown == {"strange": 1}
    assert certificate.verdict is Proof.INCONCLUSIVE
    assert certificate.exit_code == 2
    assert "strange" in str(certificate)
    assert len([one for one in certificate.illegal if one.input == "v"]) == 6


def test_a_certificate_is_verified_and_a_forged_one_is_not():
    text = prove("cudnn-mxfp8", lengths=[32], head_dim=32, backward=False).to_json()
    assert verify(text).holds
    forged = json.loads(text)
    forged["illegal"] = []
    forged["legal"], forged["exact"], forged["verdict"] = True, True, "proved"
    found = verify(json.dumps(forged))
    assert not found.holds
    assert found.exit_code == 1
    assert {name for name, *_ in found.differences} == {"illegal", "legal", "exact", "verdict"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("strict"), "strict"),
        (lambda data: data.update(schema="x"), "schema"),
        (lambda data: data.update(schema_version=99), "schema_version"),
        (lambda data: data["subject"].update(data="{}"), "recipe"),
        (lambda data: data["setting"].update(lengths=["a"]), "lengths"),
        (lambda data: data.update(subject={"function": "no.such:thing"}), "no.such"),
    ],
)
def test_a_broken_certificate_is_refused(change, message):
    data = json.loads(prove("bf16-fa4", lengths=[4], head_dim=32, backward=False).to_json())
    change(data)
    with pytest.raises(ValueError, match=message) as caught:
        verify(json.dumps(data))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [0]}, "no token"),
        ({"lengths": [5000]}, "5000"),
        ({"lengths": 4}, "lengths"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 10**30}, "head_dim"),
        ({"softmax_scale": -1.0}, "softmax_scale"),
        ({"softcap": "x"}, "softcap"),
        ({"heads": 3, "kv_heads": 2}, "multiple"),
        ({"dtype": "int8"}, "int8"),
        ({"window": (1, 1)}, "window"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        prove("bf16-fa4", **({"lengths": [4], "head_dim": 32} | arguments))
    assert "\n" not in str(caught.value)


def test_functions_that_cannot_be_read_are_refused():
    def of_numpy(q, k, v):
        return np.asarray(q) + 1

    def of_another_shape(q, k, v):
        return q[:2]

    def of_other_names(q, k, v):
        return {"o": q}

    def of_a_callback(q, k, v):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(q.shape, q.dtype), q)

    for kernel, message in (
        (of_numpy, "cannot be traced"),
        (of_a_callback, "pure_callback"),
        (of_another_shape, "shape"),
        (of_other_names, "no out"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            prove(kernel, lengths=[4], head_dim=32, backward=False)
        assert "\n" not in str(caught.value)
    with pytest.raises(TypeError, match="recipe"):
        prove(3, lengths=[4], head_dim=32)


def plain(q, k, v):
    """Causal attention of one head."""
    n = q.shape[0]
    s = jnp.einsum("qhd,khd->hqk", q, k)
    s = jnp.where(jnp.tril(jnp.ones((n, n), dtype=bool)), s, -jnp.inf)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(s, axis=-1), v)


SMALL = {"lengths": [8], "head_dim": 4, "dtype": "float32"}


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v, **keywords: plain(q, k, v),
        lambda q, k, v: plain(q, k, v),
    ],
    ids=["any keyword", "none"],
)
def test_gradients_that_a_function_does_not_give_are_those_of_jax(function):
    certificate = prove(function, **SMALL)
    assert certificate.exact
    assert certificate.setting["gradients"] == "jax.vjp"
    assert {count.output for count in certificate.counts} == {"out", "dq", "dk", "dv"}
    assert "out, dq, dk, dv" in str(certificate)


def test_results_that_are_missing_are_not_proved():
    def without_gradients(q, k, v, dout=None):
        return plain(q, k, v)

    def without_dv(q, k, v, dout):
        return {"out": plain(q, k, v), "dq": dout, "dk": dout}

    for function, message in (
        (without_gradients, "returns no dq, dk, dv"),
        (without_dv, "returns no dv"),
        (lambda q, k, v: {"o": q, "lse": q[:, :, 0].T}, "no out"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            prove(function, **SMALL)
        assert "\n" not in str(caught.value)


def test_the_verdict_says_what_it_takes_for_granted():
    """The way from exp to a later 0 times infinity is closed by the assumption alone."""

    def by_a_product(q, k, v):
        n = q.shape[0]
        p = jnp.exp(jnp.einsum("qhd,khd->hqk", q, k)) * jnp.tril(jnp.ones((n, n)))
        return jnp.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v)

    text = str(prove(by_a_product, backward=False, **SMALL)).partition("\n")[0]
    assert "nothing that comes of the inputs is infinite or NaN" in text
    assert "signs of zeros aside" in text
    strict = prove(by_a_product, backward=False, strict=True, **SMALL)
    assert not strict.legal
    text = str(prove("bf16-fa4", lengths=[4], head_dim=32, backward=False)).partition("\n")[0]
    assert "divisor" not in text


@pytest.mark.parametrize("name", ["bf16-fa4", "flamia-mxfp8"])
def test_a_certificate_shows_the_evidence_of_its_recipe(name):
    text = str(prove(name, lengths=[4], head_dim=32, backward=False))
    assert f"evidence {RECIPES[name].label}:" in text


def test_a_recipe_under_the_name_of_another_says_so():
    disguised = dataclasses.replace(RECIPES["bf16-fa4"], name="cudnn-mxfp8")
    certificate = prove(disguised, lengths=[4], head_dim=32, backward=False)
    assert str(certificate).startswith("cudnn-mxfp8 (NOT the registered recipe of that name): ")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"legal": true', '"legal": true, "legal": true', "twice"),
        ('"schema_version": 1', '"schema_version": true', "schema_version"),
        ('"program": "', '"program": null, "x": "', "fields"),
    ],
)
def test_a_certificate_is_read_strictly(old, new, message):
    text = prove("bf16-fa4", lengths=[4], head_dim=32, backward=False).to_json()
    assert old in text
    with pytest.raises(ValueError, match=message):
        verify(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("entry", "value"), [("legal", 1), ("primitives", {"magic": 1}), ("strict", True)]
)
def test_every_entry_of_a_certificate_is_compared(entry, value):
    data = json.loads(prove("bf16-fa4", lengths=[4], head_dim=32, backward=False).to_json())
    data[entry] = value
    assert not verify(json.dumps(data)).holds


def test_a_changed_recipe_is_proved_by_its_data():
    """The certificate holds the recipe, not its name."""
    recipe = RECIPES["flamia-mxfp8-unguarded"]
    disguised = dataclasses.replace(recipe, name="flamia-mxfp8-folded")
    assert not prove(disguised, lengths=[32], head_dim=32, backward=False).legal
