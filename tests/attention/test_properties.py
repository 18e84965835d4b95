"""What must hold between runs: packing, prefixes, perturbations, libraries. Expected values come from other runs."""

import itertools

import numpy as np
import pytest

from flamia_ref import attention
from flamia_ref.attention import forward_stages
from flamia_ref.attention.stages import DOCUMENT_STAGES
from tests.attention.samples import assert_same, bell, bits, wide

RECIPE = "flamia-mxfp8-folded"


def run(q, k, v, cu_seqlens=None, **options):
    options.setdefault("trace", forward_stages)
    return attention.forward(q, k, v, RECIPE, cu_seqlens=cu_seqlens, **options)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("make", [bell, wide])
def test_packed_equals_each_document_alone(make, causal: bool) -> None:
    lengths = [33, 0, 130, 1, 64, 200]
    q, k, v, cu_seqlens = make(7, lengths, 2, 1, 64)
    packed = run(q, k, v, cu_seqlens, causal=causal)
    for index, (start, end) in enumerate(itertools.pairwise(cu_seqlens)):
        alone = run(q[start:end], k[start:end], v[start:end], causal=causal)
        assert_same(packed.out[start:end], alone.out, f"out of document {index}")
        assert_same(packed.lse[:, start:end], alone.lse, f"lse of document {index}")
        for stage in DOCUMENT_STAGES:
            assert_same(packed.trace[stage][index], alone.trace[stage][0], f"{stage} of {index}")


@pytest.mark.parametrize("length", [1, 31, 32, 33, 127, 128, 129, 199])
def test_prefix_parity(length: int) -> None:
    q, k, v, _ = wide(11, [200], 2, 1, 64)
    whole = run(q, k, v)
    part = run(q[:length], k[:length], v[:length])
    assert_same(part.out, whole.out[:length], "out")
    assert_same(part.lse, whole.lse[:, :length], "lse")
    assert_same(part.trace["o"], whole.trace["o"][:length], "o")


@pytest.mark.parametrize("cut", [0, 1, 31, 32, 40, 127, 128, 150])
@pytest.mark.parametrize("factor", [2.0**15, -(2.0**100), 2.0**-60])
def test_later_tokens_change_nothing_earlier(cut: int, factor: float) -> None:
    q, k, v, _ = bell(5, [160], 2, 1, 64)
    base = run(q, k, v, trace=())
    changed = []
    for x in (q, k, v):
        x = x.astype(np.float32)
        x[cut + 1 :] *= factor
        changed.append(x.astype(q.dtype))
    other = run(*changed, trace=())
    assert_same(other.out[: cut + 1], base.out[: cut + 1], "out")
    assert_same(other.lse[:, : cut + 1], base.lse[:, : cut + 1], "lse")
    assert (bits(other.out[cut + 1 :]) != bits(base.out[cut + 1 :])).any()


@pytest.mark.parametrize("value", [2.0**100, 1e30, np.nan, np.inf])
def test_other_documents_change_nothing(value: float) -> None:
    lengths = [45, 70, 20]
    q, k, v, cu_seqlens = bell(6, lengths, 2, 1, 64)
    base = run(q, k, v, cu_seqlens)
    changed = [x.copy() for x in (q, k, v)]
    for x in changed:
        x[cu_seqlens[1] : cu_seqlens[2]] = value
    other = run(*changed, cu_seqlens)
    for index in (0, 2):
        tokens = slice(cu_seqlens[index], cu_seqlens[index + 1])
        assert_same(other.out[tokens], base.out[tokens], f"out of document {index}")
        assert_same(other.lse[:, tokens], base.lse[:, tokens], f"lse of document {index}")
        for stage in DOCUMENT_STAGES:
            assert_same(other.trace[stage][index], base.trace[stage][index], stage)


@pytest.mark.parametrize("make", [bell, wide])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_numpy_equals_jax_in_every_stage(make, causal: bool) -> None:
    import jax.numpy as jnp

    q, k, v, cu_seqlens = make(8, [130, 40, 3, 0, 70], 4, 2, 64)
    plain = run(q, k, v, cu_seqlens, causal=causal)
    compiled = run(*map(jnp.asarray, (q, k, v)), cu_seqlens, causal=causal)
    for stage in forward_stages:
        assert_same(compiled.trace[stage], plain.trace[stage], stage)
    assert_same(compiled.out, plain.out, "out")
    assert_same(compiled.lse, plain.lse, "lse")


@pytest.fixture
def uncached():
    """No persistent compilation cache: a user's program holds the function tables as constants, 128 MB to store."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize("wide_types", [False, True])
def test_numpy_equals_a_users_jit_of_vmap_in_every_stage(wide_types: bool) -> None:
    import jax
    import jax.numpy as jnp

    batches = [wide(seed, [9, 0, 24], 2, 1, 32)[:3] for seed in (1, 2)]
    cu_seqlens = np.array([0, 9, 9, 33], np.int64)

    def traced(q, k, v):
        result = run(q, k, v, cu_seqlens)
        return result.out, result.lse, result.trace

    with jax.enable_x64(wide_types):
        stacked = [jnp.stack([jnp.asarray(x) for x in xs]) for xs in zip(*batches, strict=True)]
        mapped = jax.jit(jax.vmap(traced))(*stacked)
        on_host = run(*map(jnp.asarray, batches[0]), cu_seqlens)
    for index, batch in enumerate(batches):
        plain = run(*batch, cu_seqlens)
        out, lse, trace = jax.tree.map(lambda x, at=index: x[at], mapped)
        assert out.dtype == lse.dtype == jnp.float32
        assert_same(out, plain.out, "out")
        assert_same(lse, plain.lse, "lse")
        for stage in forward_stages:
            assert_same(trace[stage], plain.trace[stage], stage)
    assert on_host.out.dtype == jnp.float32
    assert_same(on_host.out, run(*batches[0], cu_seqlens).out, "out on the host")


def test_tracing_changes_nothing() -> None:
    q, k, v, cu_seqlens = wide(9, [140, 20], 2, 1, 64)
    traced, plain = run(q, k, v, cu_seqlens), run(q, k, v, cu_seqlens, trace=())
    assert_same(plain.out, traced.out, "out")
    assert_same(plain.lse, traced.lse, "lse")
    assert not plain.trace
