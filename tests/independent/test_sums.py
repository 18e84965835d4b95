"""Orders of addition, by numpy's float32 on arrays arranged as the threads hold them."""

from fractions import Fraction

import numpy as np
import pytest

from tests.independent import deltas, float32, sums
from tests.independent.samples import Array, bell


def float32_values(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bits(x: np.float32) -> int:
    return int(np.float32(x).view(np.uint32))


def test_two_lanes() -> None:
    other_order = 0
    for seed in range(20):
        p = float32_values(bell(seed, 128)) ** 2
        wanted = []
        for lane in (0, 1):
            chunks = []
            for chunk in (p[:64], p[64:]):
                total = chunk[lane]
                for x in chunk[lane + 2 :: 2]:
                    total = total + x
                chunks.append(total)
            wanted.append(bits(chunks[0] + chunks[1]))
        got = sums.two_lanes(p.view(np.uint32).tolist())
        assert list(got) == wanted
        other_order += wanted[0] != bits(np.cumsum(p[::2])[-1])
    assert other_order > 0


@pytest.mark.parametrize(
    ("head_dim", "part"), [(32, 32), (40, 64), (96, 32), (128, 128), (320, 64)]
)
def test_delta_of_flash_attention(head_dim: int, part: int) -> None:
    width = -(-head_dim // 32) * 32
    for seed in range(5):
        out, dout = bell(seed, head_dim), bell(seed + 50, head_dim)
        products = np.zeros(width, np.float32)
        products[:head_dim] = float32_values(out) * float32_values(dout)
        # [part, thread, channel] to a column of additions a thread.
        columns = products.reshape(-1, part // 8, 8).transpose(0, 2, 1).reshape(-1, part // 8)
        threads = np.zeros(part // 8, np.float32)
        for row in columns:
            threads = threads + row
        while len(threads) > 1:
            threads = threads[::2] + threads[1::2]
        assert deltas.flash_attention(dout.tolist(), out.tolist()) == bits(threads[0])


@pytest.mark.parametrize("head_dim", [8, 32, 48, 256])
def test_delta_of_cudnn(head_dim: int) -> None:
    unrounded = 0
    for seed in range(5):
        out, dout = bell(seed, head_dim), bell(seed + 50, head_dim)
        exact = float32_values(out) * float32_values(dout)
        rounded = [float32.to_bfloat16(x) for x in exact.view(np.uint32).tolist()]
        products = np.zeros(-(-head_dim // 16) * 16, np.float32)
        products[:head_dim] = float32_values(np.array(rounded))
        threads = np.zeros(8, np.float32)
        for step in products.reshape(-1, 8, 2):
            threads = threads + (step[:, 0] + step[:, 1])
        threads = threads[:4] + threads[4:]
        threads = threads[:2] + threads[2:]
        got = deltas.cudnn(dout.tolist(), out.tolist())
        assert got == bits(threads[0] + threads[1])
        unrounded += got != deltas.flash_attention(dout.tolist(), out.tolist())
    assert unrounded > 0


def test_delta_in_ascending_order() -> None:
    """1 + 2**-24 + 2**-24 stays 1 in this order and grows in the other; no product is rounded."""
    tiny, one = 0x3980, 0x3F80  # 2**-12, 1
    weighted = [x << 16 for x in (one, tiny, tiny)]
    assert deltas.ascending(weighted, [one, tiny, tiny]) == 0x3F800000
    assert deltas.ascending(weighted[::-1], [tiny, tiny, one]) == 0x3F800001
    # (1 + 2**-23)(1 + 2**-7) - (1 + 2**-7) by FMA is 2**-23 + 2**-30: 0x34010000.
    assert deltas.ascending([0xBF800000, 0x3F800001], [0x3F81, 0x3F81]) == 0x34010000


def test_special_values() -> None:
    one, nan, infinity = 0x3F80, 0x7FC0, 0x7F80
    for delta in (deltas.flash_attention, deltas.cudnn):
        assert delta([one, nan], [0, 0]) == float32.NAN
        assert delta([one, infinity], [one, 0]) == float32.NAN
        assert delta([one, infinity], [one, one]) == float32.INFINITY
        assert delta([0x8000] * 8, [one] * 8) == 0


@pytest.mark.parametrize(
    ("terms", "wanted"),
    [
        ({0: 1.0, 1: 2.0**-8}, 1.0),  # a tie in bfloat16, to even
        ({0: 1.0, 4: 2.0**-8, 5: 2.0**-8}, 1 + 2.0**-7),  # 4 and 5 meet first
        ({0: 1.0, 2: 2.0**-8, 4: 2.0**-8}, 1.0),  # 0 meets 4, then 2
        ({0: 1.0, 8: 2.0**-8, 24: 2.0**-8}, 1 + 2.0**-7),
        ({0: 1 + 2.0**-9}, 1.0),
        (dict.fromkeys(range(32), 1.0), 32.0),
    ],
)
def test_sums_in_bfloat16(terms: dict[int, float], wanted: float) -> None:
    bits = [float32.nearest(Fraction(terms.get(column, 0.0))) for column in range(32)]
    assert sums.in_bfloat16(bits) == float32.nearest(Fraction(wanted))
