"""The compiled programs: what primitives they hold, and that new lengths compile nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from flamia_ref import attention
from tests.attention.samples import bell

RECIPE = "flamia-mxfp8-folded"

PRIMITIVES = {
    "abs",
    "add",
    "and",
    "bitcast_convert_type",
    "broadcast_in_dim",
    "ceil",
    "concatenate",
    "convert_element_type",
    "custom_jvp_call",
    "eq",
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
    "not",
    "or",
    "reduce_max",
    "reduce_or",
    "reshape",
    "scan",
    "select_n",
    "shift_left",
    "shift_right_logical",
    "slice",
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


def test_forward_holds_only_listed_primitives() -> None:
    q, k, v, cu_seqlens = bell(0, [33, 7], 2, 1, 64)
    program = jax.make_jaxpr(
        lambda q, k, v: attention.forward(q, k, v, RECIPE, cu_seqlens=cu_seqlens).out
    )(*map(jnp.asarray, (q, k, v)))
    found = primitives(program.jaxpr)
    assert found == PRIMITIVES, (
        f"new: {sorted(found - PRIMITIVES)}; gone: {sorted(PRIMITIVES - found)}"
    )


def test_new_lengths_compile_nothing() -> None:
    rng = np.random.default_rng(0)

    def run(lengths) -> None:
        q, k, v, cu_seqlens = bell(1, lengths, 2, 1, 32)
        inputs = map(jax.device_put, (q, k, v))  # jnp.asarray compiles for each new shape
        attention.forward(*inputs, RECIPE, cu_seqlens=cu_seqlens)

    run([20, 50, 100, 200])  # every tile shape
    with count_compilations() as compiled:
        for _ in range(30):
            run(rng.integers(0, 220, rng.integers(1, 5)).tolist())
    assert not compiled, compiled


class count_compilations:
    """The names of programs that JAX compiles within the block."""

    def __enter__(self) -> list[str]:
        import logging

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


def test_the_count_sees_a_compilation() -> None:
    with count_compilations() as compiled:
        jax.jit(lambda x: x * 3 + 12345)(jnp.arange(37))
    assert compiled


def test_forward_has_no_gradient() -> None:
    q, k, v, _ = bell(2, [8], 1, 1, 32)
    q, k, v = (jnp.asarray(x).astype(jnp.float32) for x in (q, k, v))
    with pytest.raises(TypeError, match="attention"):
        jax.grad(lambda q: attention.forward(q, k, v, RECIPE).out.sum())(q)


def test_other_settings_of_jax() -> None:
    q, k, v, cu_seqlens = bell(3, [9, 4], 2, 1, 32)
    expected = attention.forward(q, k, v, RECIPE, cu_seqlens=cu_seqlens).out
    inputs = [jax.device_put(x) for x in (q, k, v)]
    for setting in (jax.numpy_rank_promotion("raise"), jax.transfer_guard("disallow")):
        with setting:
            out = attention.forward(*inputs, RECIPE, cu_seqlens=cu_seqlens).out
        assert (np.asarray(out) == expected).all()
