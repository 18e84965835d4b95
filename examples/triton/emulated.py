"""What Triton's interpreter lacks, by the models of flamia_ref: the MX instruction, the special functions, E4M3.

With these in place of the interpreter's own float32 matmul, `numpy.exp2` and conversions, the kernels give the bits of
a golden pack on a machine without a GPU (TRITON_INTERPRET=1). Functions of the names that `instructions.py` has, of
tensors of the interpreter.
"""

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from flamia_ref.arithmetic import float32, matmul_bits, special
from flamia_ref.arithmetic.reductions import reduce
from flamia_ref.formats import encode

_MODEL = "mufu.sm90"
_INSTRUCTION = "sm100.tcgen05.mxf8f6f4"


def _bits(x):
    if isinstance(x, float):
        return np.float32(x).view(np.uint32)
    return np.ascontiguousarray(x.handle.data).view(np.uint32)


def _tensor(array, element):
    return tl.tensor(TensorHandle(array, element), tl.block_type(element, list(array.shape)))


def _floats(bits):
    return _tensor(bits.view(np.float32), tl.float32)


def ex2(x):
    return _floats(special.exp2_bits(_bits(x), model=_MODEL))


def lg2(x):
    return _floats(special.log2_bits(_bits(x), model=_MODEL))


def rcp(x):
    return _floats(special.reciprocal_bits(_bits(x), model=_MODEL))


def fused(x, y, z):
    return _floats(float32.fma(*np.broadcast_arrays(_bits(x), _bits(y), _bits(z))))


def e4m3(x):
    return _tensor(encode(_bits(x).view(np.float32), "e4m3"), tl.uint8)


def bfloat16(x):
    return _tensor(encode(_bits(x).view(np.float32), "bf16", overflow="native"), tl.bfloat16)


def summed(p, start):
    """The row sum in the recipe's own order, where the GPU has Triton's."""
    return _floats(reduce(_bits(p), "fa4.row_sum", 1, _bits(start)))


def scaled_dot(a, a_scales, b, b_scales, accumulator):
    data = [np.ascontiguousarray(x.handle.data) for x in (a, a_scales, b, b_scales)]
    left, left_scales, right, right_scales = data
    bits = matmul_bits(
        left,
        right,
        _INSTRUCTION,
        _bits(accumulator),
        a_format="e4m3",
        b_format="e4m3",
        a_scales=left_scales,
        b_scales=right_scales.T,
    )
    return _floats(bits)
