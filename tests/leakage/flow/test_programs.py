"""Programs within programs: kernels, meshes of devices, and what is refused by name."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, PartitionSpec

from flamia_ref.leakage.flow.context import Refused
from tests.leakage.flow.brute import analysed
from tests.leakage.flow.masks import dependencies, differences, mask_of

N, D, TILE = 64, 8, 16
CAUSAL = mask_of([N])


def _kernel(q_ref: Any, k_ref: Any, v_ref: Any, o_ref: Any, lse_ref: Any, *, fault: str) -> None:
    """A tile of queries over the tiles of keys that it sees."""
    row = pl.program_id(0)
    q = q_ref[...]
    place = row * TILE + lax.broadcasted_iota(np.int32, (TILE, TILE), 0)

    def body(index: Any, state: Any) -> Any:
        m, total, out = state
        keys, values = (ref[pl.ds(index * TILE, TILE), :] for ref in (k_ref, v_ref))
        column = index * TILE + lax.broadcasted_iota(np.int32, (TILE, TILE), 1)
        s = q @ keys.T
        if fault == "unmasked maximum":
            new = jnp.maximum(m, s.max(axis=1))
        s = jnp.where(place >= column, s, -jnp.inf)
        if fault != "unmasked maximum":
            new = jnp.maximum(m, s.max(axis=1))
        p = jnp.exp(s - new[:, None])
        scale = jnp.exp(m - new)
        return new, total * scale + p.sum(axis=1), out * scale[:, None] + p @ values

    start = (jnp.full(TILE, -jnp.inf), jnp.zeros(TILE), jnp.zeros((TILE, D)))
    m, total, out = lax.fori_loop(0, row + 1, body, start)
    o_ref[...] = out / total[:, None]
    lse_ref[...] = m + jnp.log(total)


def _flash(fault: str = "") -> Callable[..., Any]:
    rows = pl.BlockSpec((TILE, D), lambda i: (i, 0))
    whole = pl.BlockSpec((N, D), lambda i: (0, 0))
    return pl.pallas_call(
        functools.partial(_kernel, fault=fault),
        grid=(N // TILE,),
        in_specs=[rows, whole, whole],
        out_specs=[rows, pl.BlockSpec((TILE,), lambda i: (i,))],
        out_shape=[
            jax.ShapeDtypeStruct((N, D), np.float32),
            jax.ShapeDtypeStruct((N,), np.float32),
        ],
        interpret=True,
    )


def test_kernel_depends_on_exactly_what_it_may() -> None:
    found, context = dependencies(_flash(), [(N, D)] * 3)
    assert differences(found, CAUSAL, ("out", "lse")) == {}
    assert not context.unknown


def test_fault_of_a_kernel_is_found() -> None:
    found, _ = dependencies(_flash("unmasked maximum"), [(N, D)] * 3)
    illegal = N // TILE * (TILE * (TILE - 1) // 2)  # within diagonal tiles
    assert differences(found, CAUSAL, ("out", "lse")) == {
        "out<-k": (illegal, 0),
        "lse<-k": (illegal, 0),
    }


def _accumulate(x_ref: Any, y_ref: Any, o_ref: Any, scratch: Any) -> None:
    """A sum over the last axis of the grid in scratch memory; a masked load; a block that does not fit."""
    step = pl.program_id(1)

    @pl.when(step == 0)
    def _() -> None:
        scratch[...] = jnp.zeros_like(scratch)

    scratch[...] += x_ref[...] * y_ref[0]

    @pl.when(step == pl.num_programs(1) - 1)
    def _() -> None:
        o_ref[...] = scratch[...]


def test_grid_scratch_and_blocks_that_do_not_fit() -> None:
    """Output block i sees rows 2i, 2i + 1 of every second pair of columns, and the weight of each."""
    call = pl.pallas_call(
        _accumulate,
        grid=(3, 2),
        in_specs=[
            pl.BlockSpec((2, 2), lambda i, j: (i, 2 * j)),
            pl.BlockSpec((1,), lambda i, j: (j,)),
        ],
        out_specs=pl.BlockSpec((2, 2), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((5, 2), np.float32),
        scratch_shapes=[pltpu.VMEM((2, 2), np.float32)],
        interpret=True,
    )
    x, y = np.ones((5, 8), np.float32), np.ones(2, np.float32)
    found = analysed(call, [x, y], [np.ones(x.shape, bool), np.ones(2, bool)])
    expected = np.zeros((5, 2, 42), dtype=np.bool_)
    for row in range(5):
        for column in range(2):
            expected[row, column, [8 * row + column, 8 * row + 4 + column, 40, 41]] = True
    assert (found.members[0] == expected).all()


def test_kernel_that_cannot_be_followed_is_named() -> None:
    """Copies in the background have no plain program: all results depend on all operands."""

    def kernel(x_ref: Any, o_ref: Any, semaphore: Any) -> None:
        copy = pltpu.make_async_remote_copy(x_ref, o_ref, semaphore, semaphore, device_id=(0,))
        copy.start()
        copy.wait()

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((4,), np.float32),
        scratch_shapes=[pltpu.SemaphoreType.DMA],
    )
    found = analysed(call, [np.ones(4, np.float32)], [np.ones(4, bool)])
    assert found.context.unknown == {"pallas_call": 1}
    assert found.members[0].all()


# Meshes.

MESH = AbstractMesh((2, 2), ("a", "b"))
P = PartitionSpec


def _mapped(function: Any, in_specs: Any, out_specs: Any, mesh: Any = MESH, **given: Any) -> Any:
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **given)


def _members(function: Any, *shapes: tuple[int, ...]) -> Any:
    arrays = [np.ones(shape, np.float32) for shape in shapes]
    return analysed(function, arrays, [np.ones(shape, bool) for shape in shapes])


def test_each_device_sees_its_shards() -> None:
    inside = _mapped(
        lambda x, y: (x.sum(0) + y, y * lax.axis_index("a").astype(np.float32)),
        (P("a", "b"), P("b")),
        (P(("a", "b")), P(("a", "b"))),
    )
    found = _members(inside, (4, 6), (6,))
    rows = np.arange(24).reshape(4, 6)
    for device, (a, b) in enumerate(np.ndindex(2, 2)):
        for place in range(3):
            column = 3 * b + place
            expected = {*rows[2 * a : 2 * a + 2, column].tolist(), 24 + column}
            assert set(np.flatnonzero(found.members[0][3 * device + place])) == expected
            weighted = {24 + column} if a else set()  # times the known index 0 or 1
            assert set(np.flatnonzero(found.members[1][3 * device + place])) == weighted
    assert not found.context.unknown


def test_heads_over_two_devices() -> None:
    mesh = AbstractMesh((2,), ("heads",))
    inside = jax.vmap(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v)
    found, context = dependencies(
        _mapped(inside, (P("heads"),) * 3, P("heads"), mesh), [(4, N, D)] * 3
    )
    for pairs in found[0]:
        assert (pairs == np.eye(4, dtype=np.bool_)).all()
    assert not context.unknown


def test_devices_that_exchange_data_are_refused_by_name() -> None:
    inside = _mapped(lambda x: lax.psum(x, "a"), P("a"), P())
    found = _members(inside, (4,))
    assert found.context.unknown == {"psum_invariant": 1, "shard_map": 1}
    assert found.members[0].all()


def test_collectives_of_one_device() -> None:
    mesh = AbstractMesh((1,), ("a",))

    def inside(x: Any) -> Any:
        y = lax.psum(x, "a") + lax.pmax(x, "a") + lax.ppermute(x, "a", [(0, 0)])
        z = lax.all_gather(y, "a") + lax.axis_index("a").astype(np.float32)
        return (
            lax.psum_scatter(z, "a"),
            lax.all_gather(y, "a", tiled=True),
            lax.all_to_all(z, "a", 0, 0),
        )

    found = _members(
        _mapped(inside, P("a"), (P("a"), P("a"), P(None, "a")), mesh, check_vma=False), (3,)
    )
    assert len(found.members) == 3
    for members in found.members:
        assert (members.reshape(3, 3) == np.eye(3, dtype=np.bool_)).all()
    assert not found.context.unknown


def test_collectives_over_an_axis_of_vmap() -> None:
    """`vmap` makes a sum over an array's axis of them; a maximum over one of two named axes leaves the other."""
    inside = jax.vmap(lambda x: x - lax.psum(x, "a"), axis_name="a")
    found = _members(inside, (3, 2))
    rows = np.arange(6) % 2
    assert (found.members[0].reshape(6, 6) == (rows[:, None] == rows)).all()
    inside = jax.vmap(jax.vmap(lambda x: lax.pmax(x, "b"), axis_name="b"), axis_name="a")
    found = _members(inside, (2, 3))
    rows = np.arange(6) // 3
    assert (found.members[0].reshape(6, 6) == (rows[:, None] == rows)).all()


# Refusals.


def _pure(x: Any) -> Any:
    return jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct((3,), np.float32), x)


def _io(x: Any) -> Any:
    return jax.experimental.io_callback(lambda a: a, jax.ShapeDtypeStruct((3,), np.float32), x)


def _debug(x: Any) -> Any:
    jax.debug.callback(lambda a: None, x)
    return x


def _printed(x: Any) -> Any:
    jax.debug.print("{}", x)
    return x


@pytest.mark.parametrize("function", [_pure, _io, _debug, _printed])
def test_callbacks_are_refused(function: Any) -> None:
    with pytest.raises(Refused, match=r"^the program calls back to Python \(\w+\), [^\n]*$"):
        _members(function, (3,))


def test_arrays_changed_in_place_are_refused() -> None:
    def function(x: Any) -> Any:
        box = jax.new_ref(x)
        box[0] = 2.0
        return box[...]

    with pytest.raises(Refused, match=r"^the program works on an array in place \(\w+\)[^\n]*$"):
        _members(function, (3,))


def test_unknown_primitive_is_all_on_all_and_named() -> None:
    strange = Primitive("strange")
    strange.def_abstract_eval(lambda x, y: x)
    found = _members(lambda x, y: (strange.bind(x, y), x), (3,), (2,))
    assert found.context.unknown == {"strange": 1}
    assert found.members[0].all()
    assert (found.members[1] == np.eye(3, 5, dtype=np.bool_)).all()
