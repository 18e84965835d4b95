"""The compiled programs: what primitives they hold, and that new lengths compile nothing."""

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from flamia_ref import attention
from flamia_ref.attention import RECIPES, Forward, Recipe
from flamia_ref.attention.stages import kept_for_backward
from tests.attention.changes import with_changes
from tests.attention.passes import passes, with_dout
from tests.attention.samples import assert_same, bell
from tests.attention.shapes import Shape, run

PRIMITIVES = {
    "abs",
    "add",
    "and",
    "bitcast_convert_type",
    "broadcast_in_dim",
    "ceil",
    "clz",
    "concatenate",
    "convert_element_type",
    "custom_jvp_call",
    "div",
    "eq",
    "floor",
    "fused_sum",
    "gather",
    "ge",
    "gt",
    "iota",
    "jit",
    "le",
    "lt",
    "max",
    "min",
    "mul",
    "ne",
    "neg",
    "not",
    "or",
    "pad",
    "reduce_max",
    "reduce_or",
    "reshape",
    "scan",
    "select_n",
    "shift_left",
    "shift_right_logical",
    "slice",
    "special",
    "squeeze",
    "stack",
    "sub",
    "transpose",
    "xor",
}


def primitives(jaxpr) -> set[str]:
    """The names of all primitives of a program, those of its inner programs too."""
    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        for inner in jaxprs_in_params(equation.params):
            found |= primitives(getattr(inner, "jaxpr", inner))
    return found


@functools.cache
def programs(recipe: str) -> tuple[set[str], set[str]]:
    """The primitives of a recipe's forward and of its backward, of both masks."""
    q, k, v, dout, cu_seqlens = with_dout(bell, 0, [33, 7], 2, 1, 64)
    given = [jnp.asarray(x) for x in (q, k, v, dout)]
    found: tuple[set[str], set[str]] = (set(), set())
    for causal in (True, False):

        def forward(q, k, v, causal=causal):
            return attention.forward(q, k, v, recipe, cu_seqlens=cu_seqlens, causal=causal)

        def backward(q, k, v, dout, out, lse, causal=causal):
            saved = {name: out.astype(jnp.float32) for name in kept_for_backward(RECIPES[recipe])}
            one = Forward.from_kernel(
                out, lse, recipe, saved=saved, cu_seqlens=cu_seqlens, causal=causal
            )
            return attention.backward(q, k, v, dout, one).dq

        lse = jnp.zeros((2, 40), jnp.float32)
        of_forward = jax.make_jaxpr(lambda *x, f=forward: f(*x).out)(*given[:3])
        found[0].update(primitives(of_forward.jaxpr))
        if RECIPES[recipe].has_backward:
            of_backward = jax.make_jaxpr(backward)(*given, given[0], lse)
            found[1].update(primitives(of_backward.jaxpr))
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_programs_hold_only_listed_primitives(recipe: str) -> None:
    forward, backward = programs(recipe)
    assert forward <= PRIMITIVES, f"new: {sorted(forward - PRIMITIVES)}"
    assert backward <= PRIMITIVES, f"new: {sorted(backward - PRIMITIVES)}"
    assert RECIPES[recipe].has_backward == bool(backward)
    for program in (forward, backward) if backward else (forward,):
        assert "fused_sum" in program


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("flamia-mxfp8-folded", {"tiles.splits": 2, "gradient.p_for_dv": "forward"}),
        (
            "flamia-mxfp8-folded",
            {
                "tiles.splits": 2,
                "softmax.combine": "divide_last",
                "gradient.delta_source": "p_dp",
                "dq.tile_order": "shifted",
            },
        ),
        ("flamia-mxfp8", {"guard_operands": "codes"}),
        ("bf16-fa4", {"softmax.mask_value": -1e30, "o.accumulation": "float32_partials"}),
        ("cudnn-mxfp8", {"o.right.scope": "previous_block", "o.right.static_scale": 127}),
    ],
    ids=str,
)
def test_programs_of_masks_and_splits_hold_only_listed_primitives(recipe: str, changes) -> None:
    """With a window, a soft cap, a traced sink, and other keys than queries."""
    shape = Shape(
        lengths=((40, 70), (0, 3), (33, 20)), mask="window, bottom-right", softcap=2.0, head_dim=32
    )
    queries, keys = shape.cu_seqlens
    options = {"cu_seqlens": queries, "cu_seqlens_k": keys, **shape.options}

    def both(q, k, v, dout, sink):
        return run((q, k, v, dout), with_changes(recipe, changes), **options | {"sink": sink})

    given = [jnp.asarray(x) for x in shape.arrays()]
    program = jax.make_jaxpr(both)(*given, jnp.zeros(2, jnp.float32))
    met = primitives(program.jaxpr)
    assert met <= PRIMITIVES, f"new: {sorted(met - PRIMITIVES)}"


def test_every_listed_primitive_is_met() -> None:
    met = set().union(*(names for recipe in RECIPES for names in programs(recipe)))
    assert met == PRIMITIVES, f"gone: {sorted(PRIMITIVES - met)}"


class count_compilations:
    """The names of programs that JAX compiles within the block."""

    def __enter__(self) -> list[str]:
        self.names: list[str] = []
        self.logger = logging.getLogger("jax._src.interpreters.pxla")
        self.handler = logging.Handler()
        self.handler.emit = lambda record: self.names.append(record.getMessage())
        self.handler.addFilter(lambda record: "Compiling" in record.getMessage())
        self.level = self.logger.level
        self.logger.addHandler(self.handler)
        self.logger.setLevel(logging.DEBUG)
        return self.names

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self.handler)
        self.logger.setLevel(self.level)


def run_both(recipe: str, lengths, *, causal: bool) -> None:
    *arrays, cu_seqlens = with_dout(bell, 1, lengths, 1, 1, 32)
    inputs = map(jax.device_put, arrays)  # jnp.asarray compiles for each new shape
    passes(*inputs, recipe, stages=False, cu_seqlens=cu_seqlens, causal=causal)


def run_masked(recipe: Recipe | str, lengths, **options) -> None:
    """Both passes on documents of (queries, keys)."""
    shape = Shape(lengths=lengths, heads=1, head_dim=32, value_dim=32)
    queries, keys = shape.cu_seqlens
    inputs = [jax.device_put(x) for x in shape.arrays()]
    run(inputs, recipe, stages=False, cu_seqlens=queries, cu_seqlens_k=keys, **options)


def nightly_but(*daily: str) -> list[Any]:
    """Every recipe, these daily: the shapes are those of all, and each takes a minute to compile."""
    return [
        name if name in daily else pytest.param(name, marks=pytest.mark.nightly) for name in RECIPES
    ]


@pytest.mark.parametrize("recipe", nightly_but("bf16-fa4", "cudnn-mxfp8"))
def test_new_lengths_compile_nothing(recipe: str) -> None:
    """Documents of more than 64 tokens: one shape of tiles. The test below has them all."""
    rng = np.random.default_rng(0)
    for causal in (
        True,
        False,
    ):  # with a full mask there may be no guarded block in a batch of tiles
        run_both(recipe, [66, 200], causal=causal)
        run_both(recipe, [128], causal=causal)
    with count_compilations() as compiled:
        for index in range(15):
            lengths = [int(rng.integers(65, 180 if index % 5 == 0 else 129))]
            run_both(recipe, lengths, causal=index % 3 > 0)
    assert not compiled, compiled


@pytest.mark.parametrize("recipe", nightly_but("flamia-mxfp8-folded"))
def test_new_lengths_of_every_tile_shape_compile_nothing(recipe: str) -> None:
    rng = np.random.default_rng(0)
    for causal in (True, False):
        run_both(recipe, [20, 50, 100, 200], causal=causal)
    with count_compilations() as compiled:
        for index in range(20):
            lengths = rng.integers(0, 220, rng.integers(1, 5)).tolist()
            run_both(recipe, lengths, causal=index % 3 > 0)
    assert not compiled, compiled


@pytest.mark.parametrize("recipe", nightly_but("bf16-fa4"))
def test_new_masks_and_lengths_of_keys_compile_nothing(recipe: str) -> None:
    """Windows, alignments and other numbers of keys are values, and never shapes: with a sink and a soft cap once
    warm, any will do."""
    rng = np.random.default_rng(1)
    sink = jax.device_put(np.zeros(1, np.float32))
    options = {"sink": sink, "softcap": 5.0}
    for window in ((None, None), (30, 40), (200, 0)):  # of 1, 2 and 4 guarded blocks in a row
        run_masked(recipe, ((200, 300), (300, 200)), causal=False, window=window, **options)
    run_masked(recipe, ((200, 300),), **options)
    with count_compilations() as compiled:
        for index in range(12):
            count = int(rng.integers(1, 4))
            lengths = tuple((int(x), int(y)) for x, y in rng.integers(65, 300, (count, 2)))
            causal = bool(rng.integers(2))
            left, right = (int(x) for x in rng.integers(0, 200, 2))
            run_masked(
                recipe,
                lengths,
                causal=causal,
                window=[None, (left, 0 if causal else right), (left, None)][index % 3],
                alignment=("bottom_right", "top_left")[index % 2],
                **options,
            )
    assert not compiled, compiled


def test_the_count_sees_a_compilation() -> None:
    with count_compilations() as compiled:
        jax.jit(lambda x: x * 3 + 12345)(jnp.arange(37))
    assert compiled


def test_other_settings_of_jax() -> None:
    *arrays, cu_seqlens = with_dout(bell, 3, [70, 66], 2, 1, 32)
    recipe = "flamia-mxfp8-folded"
    expected = passes(*arrays, recipe, stages=False, cu_seqlens=cu_seqlens)
    inputs = [jax.device_put(x) for x in arrays]
    for setting in (jax.numpy_rank_promotion("raise"), jax.transfer_guard("disallow")):
        with setting:
            found = passes(*inputs, recipe, stages=False, cu_seqlens=cu_seqlens)
        for name, value in expected.items():
            assert_same(found[name], value, name)
