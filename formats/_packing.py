"""Codes of 4 and 6 bits packed into bytes.

Code i of a row is bits w i to w i + w - 1 of the row, w its width, the low bits of a byte first.
"""

import dataclasses

import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref.formats._layout_arrays import in_order
from flamia_ref.formats.encoding import as_codes
from flamia_ref.formats.scalar import E2M1, E2M3, E8M0, ScalarFormat

# E2M3 and E3M2 codes are packed alike. The names are for messages.
_FP6 = dataclasses.replace(E2M3, name="a 6-bit format")
_BYTE = dataclasses.replace(E8M0, name="a byte")

_CONTAINER = 16  # codes, and bytes, of a padded container of 6-bit codes
_FILLED = 12  # its bytes that hold codes


def pack_fp4(codes: Array) -> Array:
    """Two 4-bit codes a byte, the even index in the low four bits.

    Args:
        codes: E2M1 codes 0 to 15 [..., n], n even.

    Returns:
        uint8 [..., n / 2].

    Raises TypeError for codes that are not integers, ValueError for an odd n, no axis, or codes
    above 15.

    Source: torchao pack_uint4, TransformerEngine, vLLM, FlashInfer, modelopt, Triton, DeepGEMM, all
    alike; PTX `cvt` to e2m1x2, whose second operand is the low half.
    """
    return _pack4(_whole_groups(codes, E2M1, 2, "codes"))


@_backend.jit
def _pack4(codes: Array) -> Array:
    pairs = (codes & np.uint8(15)).reshape((*codes.shape[:-1], codes.shape[-1] // 2, 2))
    return pairs[..., 0] | (pairs[..., 1] << np.uint8(4))


def unpack_fp4(packed: Array) -> Array:
    """The inverse of `pack_fp4`: uint8 [..., n] to codes 0 to 15 [..., 2 n].

    Raises TypeError for bytes that are not integers, ValueError for no axis or bytes above 255.
    """
    return _unpack4(_whole_groups(packed, _BYTE, 1, "packed"))


@_backend.jit
def _unpack4(packed: Array) -> Array:
    xp = _backend.namespace(packed)
    pairs = xp.stack((packed & np.uint8(15), packed >> np.uint8(4)), axis=-1)
    return pairs.reshape((*packed.shape[:-1], 2 * packed.shape[-1]))


def pack_fp6(codes: Array) -> Array:
    """Four 6-bit codes in three bytes, without gaps, the first code in the low bits.

    Codes a, b, c, d become the bytes a | b << 6, b >> 2 | c << 4 and c >> 4 | d << 2, modulo 256.

    Args:
        codes: E2M3 or E3M2 codes 0 to 63 [..., n], n a multiple of 4.

    Returns:
        uint8 [..., 3 n / 4].

    Raises TypeError for codes that are not integers, ValueError for another n, no axis, or codes
    above 63.

    Source: CUTLASS include/cute/container/array_subbyte.hpp, `subbyte_reference`, and AMD rocRoller
    getFp6, alike. PTX says that codes are contiguous in global memory, not which comes first.
    CUDA's own __nv_fp6x4_storage_t and torchao keep one code a byte and pack nothing.
    """
    return _pack6(_whole_groups(codes, _FP6, 4, "codes"))


@_backend.jit
def _pack6(codes: Array) -> Array:
    xp = _backend.namespace(codes)
    fours = (codes & np.uint8(63)).reshape((*codes.shape[:-1], codes.shape[-1] // 4, 4))
    a, b, c, d = (fours[..., i] for i in range(4))
    # Shifts of uint8 drop the bits above 255, which are those of the next byte.
    low = a | (b << np.uint8(6))
    middle = (b >> np.uint8(2)) | (c << np.uint8(4))
    high = (c >> np.uint8(4)) | (d << np.uint8(2))
    threes = xp.stack((low, middle, high), axis=-1)
    return threes.reshape((*codes.shape[:-1], codes.shape[-1] // 4 * 3))


def unpack_fp6(packed: Array) -> Array:
    """The inverse of `pack_fp6`: uint8 [..., n] to codes 0 to 63 [..., 4 n / 3].

    Raises TypeError for bytes that are not integers, ValueError for an n that is not a multiple of
    3, no axis, or bytes above 255.
    """
    return _unpack6(_whole_groups(packed, _BYTE, 3, "packed"))


@_backend.jit
def _unpack6(packed: Array) -> Array:
    xp = _backend.namespace(packed)
    threes = packed.reshape((*packed.shape[:-1], packed.shape[-1] // 3, 3))
    low, middle, high = (threes[..., i] for i in range(3))
    a = low & np.uint8(63)
    b = (low >> np.uint8(6)) | ((middle & np.uint8(15)) << np.uint8(2))
    c = (middle >> np.uint8(4)) | ((high & np.uint8(3)) << np.uint8(4))
    d = high >> np.uint8(2)
    fours = xp.stack((a, b, c, d), axis=-1)
    return fours.reshape((*packed.shape[:-1], packed.shape[-1] // 3 * 4))


def pack_fp6_b6x16_p32(codes: Array) -> Array:
    """Sixteen 6-bit codes in sixteen bytes: twelve packed as `pack_fp6` does, then four of padding.

    So the codes lie in shared memory where `tcgen05.mma` of kind f8f6f4 or mxf8f6f4 reads them; the
    copy from global memory makes this of the packed form. The copy leaves the padding
    uninitialised; here it is 0. The swizzle of shared memory is not applied.

    Args:
        codes: E2M3 or E3M2 codes 0 to 63 [..., n], n a multiple of 16.

    Returns:
        uint8 [..., n].

    Raises TypeError for codes that are not integers, ValueError for another n, no axis, or codes
    above 63.

    Source: PTX ISA, "Padding and alignment of the sub-byte types", type .b6x16_p32; CUDA 13.0
    cuda.h, CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B. Neither gives in words the order within the
    twelve bytes; that of `pack_fp6` is CUTLASS's, which hands its packed rows to this copy.
    """
    return _pack_container(_whole_groups(codes, _FP6, _CONTAINER, "codes"))


@_backend.jit
def _pack_container(codes: Array) -> Array:
    groups = codes.reshape((*codes.shape[:-1], codes.shape[-1] // _CONTAINER, _CONTAINER))
    padding = [(0, 0)] * (groups.ndim - 1) + [(0, _CONTAINER - _FILLED)]
    return _backend.namespace(codes).pad(_pack6(groups), padding).reshape(codes.shape)


def unpack_fp6_b6x16_p32(packed: Array) -> Array:
    """The inverse of `pack_fp6_b6x16_p32`; padding is dropped whatever it holds.

    Takes uint8 [..., n], n a multiple of 16, and gives as many codes 0 to 63. Raises TypeError for
    bytes that are not integers, ValueError for another n, no axis, or bytes above 255.
    """
    return _unpack_container(_whole_groups(packed, _BYTE, _CONTAINER, "packed"))


@_backend.jit
def _unpack_container(packed: Array) -> Array:
    groups = packed.reshape((*packed.shape[:-1], packed.shape[-1] // _CONTAINER, _CONTAINER))
    return _unpack6(groups[..., :_FILLED]).reshape(packed.shape)


def _whole_groups(given: Array, format: ScalarFormat, group: int, name: str) -> Array:
    checked = as_codes(given, format, name)
    if checked.ndim < 1:
        raise ValueError(f"{name} have at least one axis; a single number is not packed")
    if checked.shape[-1] % group:
        many = {2: "even", 3: "a multiple of 3"}.get(group, f"a multiple of {group}")
        raise ValueError(f"{name} have shape {checked.shape}; the last axis must be {many}")
    return in_order(checked)
