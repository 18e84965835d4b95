"""The instructions that the kernels are made of, as Triton functions.

On a GPU the special functions are inline PTX, because the recipe names those instructions and `tl.exp2` flushes or not
as the version of Triton has it. In Triton's interpreter all of them come from `emulated.py`.
"""

import triton
import triton.language as tl

if triton.knobs.runtime.interpret:
    from examples.triton.emulated import bfloat16, e4m3, ex2, fused, lg2, rcp, scaled_dot, summed
else:

    @triton.jit
    def ex2(x):
        """2^x, subnormals flushed."""
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def lg2(x):
        """log2 x, subnormals flushed."""
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def rcp(x):
        """1 / x, subnormals flushed."""
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def fused(x, y, z):
        """x y + z, rounded once, subnormals kept."""
        return tl.fma(x, y, z)

    @triton.jit
    def e4m3(x):
        """E4M3 codes, to nearest even, saturating."""
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)

    @triton.jit
    def bfloat16(x):
        """To nearest even, overflow to infinity."""
        return x.to(tl.bfloat16)

    @triton.jit
    def summed(p, start):
        """The sums of rows onto `start`, in Triton's order."""
        return start + tl.sum(p, 1)

    @triton.jit
    def scaled_dot(a, a_scales, b, b_scales, accumulator):
        """a [m, K] b [K, n] onto the accumulator, E4M3 codes with E8M0 scales [m, K / 32] and [n, K / 32].

        One instruction a step on Blackwell; before it, Triton multiplies the codes by their scales in bfloat16.
        """
        return tl.dot_scaled(a, a_scales, "e4m3", b, b_scales, "e4m3", acc=accumulator)


__all__ = ["bfloat16", "e4m3", "ex2", "fused", "lg2", "rcp", "scaled_dot", "summed"]
