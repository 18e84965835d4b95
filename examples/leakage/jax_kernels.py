"""`jax.nn.dot_product_attention` behind the kernel protocol."""

import functools

from examples.leakage.packed import needed, visible


def jax_sdpa(q, k, v, *, cu_seqlens, causal, softmax_scale, dout=None):
    """`jax.nn.dot_product_attention`, XLA's implementation: one call for the whole pack, documents by a boolean mask.

    Gradients by `jax.vjp`. It masks with a finite number, -0.7 times the largest float32.
    """
    jax = needed("jax")
    mask = visible(cu_seqlens, causal)
    with jax.numpy_dtype_promotion("standard"):  # jax.nn mixes types
        return _compiled()(q, k, v, dout, mask, scale=float(softmax_scale))


@functools.cache
def _compiled():
    import jax

    def run(q, k, v, dout, mask, *, scale):
        def attend(q, k, v):
            out, lse = jax.nn.dot_product_attention(
                q[None],
                k[None],
                v[None],
                mask=mask[None, None],
                scale=scale,
                implementation="xla",
                return_residual=True,
            )
            return out[0], lse[0]

        if dout is None:
            out, lse = attend(q, k, v)
            return {"out": out, "lse": lse.T}
        out, pull, lse = jax.vjp(attend, q, k, v, has_aux=True)
        dq, dk, dv = pull(dout)
        return {"out": out, "lse": lse.T, "dq": dq, "dk": dk, "dv": dv}

    return jax.jit(run, static_argnames="scale")
