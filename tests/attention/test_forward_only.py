"""Recipes without a backward: everything of the forward is there, everything of a backward says that there is none."""

import dataclasses

import numpy as np
import pytest

from flamia_ref import attention, leakage
from flamia_ref.attention import RECIPES, Recipe, Use, consistency
from flamia_ref.attention.description import summary
from flamia_ref.attention.samples import bell
from flamia_ref.golden.dataflow import dataflow
from flamia_ref.leakage import LEGAL

WHOLE = RECIPES["bf16-fa4"]
_BACKWARD = ("dp", "dv", "dq", "dk", "gradient")


def without_backward(recipe: Recipe) -> Recipe:
    kept = {
        path: step for path, step in recipe.steps.items() if path.split(".")[0] not in _BACKWARD
    }
    schedules = tuple(one for one in recipe.schedules if one.splits is not None)
    nothing = dict.fromkeys(_BACKWARD)
    return dataclasses.replace(recipe, name="forward", steps=kept, schedules=schedules, **nothing)


HALF = without_backward(WHOLE)
_SAMPLE = bell((40, 9), 2, 1, 32)
Q, K, V, DOUT = _SAMPLE.q, _SAMPLE.k, _SAMPLE.v, _SAMPLE.dout
CU_SEQLENS = np.array([0, 40, 49], np.int32)


def test_it_is_data() -> None:
    assert not HALF.has_backward
    assert WHOLE.has_backward
    assert [use for use, _ in HALF.uses()] == [Use.S_Q, Use.S_K, Use.O_P, Use.O_V]
    assert [name for name, _ in HALF.products()] == ["s", "o"]
    assert Recipe.from_json(HALF.to_json()) == HALF
    assert HALF != WHOLE
    assert attention.backward_stages(HALF) == ()
    assert attention.forward_stages(HALF) == attention.forward_stages(WHOLE)
    assert summary(HALF) == "q k v: bf16"


@pytest.mark.parametrize("missing", _BACKWARD)
def test_half_a_backward_is_refused(missing: str) -> None:
    with pytest.raises(ValueError, match=f"and no {missing}; a backward needs all of dp, dv"):
        dataclasses.replace(WHOLE, **{missing: None})


def test_the_forward_is_that_of_the_whole_recipe() -> None:
    one, other = (attention.forward(Q, K, V, x, cu_seqlens=CU_SEQLENS) for x in (HALF, WHOLE))
    assert one.out.tobytes() == other.out.tobytes()
    assert one.lse.tobytes() == other.lse.tobytes()
    both = attention.prepare(Q, K, V, RECIPES["cudnn-mxfp8"])
    alone = attention.prepare(Q, K, V, without_backward(RECIPES["cudnn-mxfp8"]))
    assert set(both.operands) == {"q.s", "q.dk", "k.s", "k.dq", "v.o", "v.dp"}
    assert set(alone.operands) == {"q", "k", "v"}
    for name, first in {"q": "q.s", "k": "k.s", "v": "v.o"}.items():
        found, expected = alone.operands[name], both.operands[first]
        assert found.codes.tobytes() == expected.codes.tobytes()
        assert found.scales.tobytes() == expected.scales.tobytes()


def _backward() -> None:
    ahead = attention.forward(Q, K, V, HALF, cu_seqlens=CU_SEQLENS)
    attention.backward(Q, K, V, DOUT, ahead)


def _preprocess() -> None:
    attention.preprocess(DOUT, attention.forward(Q, K, V, HALF, cu_seqlens=CU_SEQLENS))


@pytest.mark.parametrize(
    "call",
    [
        _backward,
        _preprocess,
        lambda: attention.prepare_dout(DOUT, HALF),
        lambda: attention.bytes_kept(HALF, lengths=[49], head_dim=32),
        lambda: HALF.operand("dq.k"),
        lambda: HALF.backward,
    ],
)
def test_a_backward_is_refused_in_one_line(call) -> None:
    with pytest.raises(ValueError, match=r"^recipe 'forward' has no backward: none is public"):
        call()


def test_jax_gradients_are_refused() -> None:
    jax = pytest.importorskip("jax")
    q, k, v = (jax.numpy.asarray(x) for x in (Q, K, V))

    def loss(v):
        return attention.attention(q, k, v, HALF, cu_seqlens=CU_SEQLENS).astype("float32").sum()

    with pytest.raises(ValueError, match="recipe 'forward' has no backward"):
        jax.grad(loss)(v)


def test_what_there_is_nothing_to_say_of() -> None:
    found = consistency.check(HALF)
    verdicts = {one.name: str(one.verdict) for one in found.properties}
    nothing = dict.fromkeys(("C1", "C2", "C3", "C4", "C5", "gradient"), "no backward")
    assert verdicts == nothing | {"packing": "holds", "prefix": "holds"}
    assert found.broken == ()
    assert found.exit_code == 0


def test_leakage_looks_at_the_forward_alone() -> None:
    leaky = without_backward(RECIPES["cudnn-mxfp8"])
    structure = leakage.structure(leaky, lengths=[40])
    assert {one.output for one in structure.illegal} == {"out"}
    assert len(structure.uses) == 4
    whole = leakage.structure(RECIPES["cudnn-mxfp8"], lengths=[40])
    for output in LEGAL:
        for name in ("q", "k", "v", "dout"):
            found = structure.pairs(output, name)
            expected = whole.pairs(output, name) if output in ("out", "lse") else 0
            assert (found == expected).all(), (output, name)
    certificate = leakage.prove(leaky, lengths=[40], head_dim=32)
    assert {output for output, *_ in certificate.illegal} == {"out"}
    assert leakage.prove(HALF, lengths=[40], head_dim=32).legal
    report = leakage.hunt(leaky, lengths=[40], head_dim=32, calls=400)
    assert report.verdict == "leak"
    assert {witness.output for witness in report.witnesses} == {"out"}


def test_packs_hold_the_forward() -> None:
    stages = dataflow(HALF).stages
    assert not any(stage.backward for stage in stages.values())
    whole = [name for name, stage in dataflow(WHOLE).stages.items() if not stage.backward]
    assert list(stages) == whole
