"""delta, the sum over channels of out * dout, in each recipe's products and order."""

from collections.abc import Sequence

from tests.independent import float32

VECTOR = 8  # channels a thread of FlashAttention-4's preprocess loads at once
THREADS = 8  # of cuDNN's


def ascending(weighted: Sequence[int], out: Sequence[int]) -> int:
    """FMA in ascending channels from +0; float32 dout' times bfloat16 out."""
    total = 0
    for x, y in zip(weighted, out, strict=True):
        total = float32.fused_multiply_add(x, float32.from_bfloat16(y), total)
    return total


def flash_attention(dout: Sequence[int], out: Sequence[int]) -> int:
    """float32 products of bfloat16, vectors of 8 channels a thread, then a butterfly."""
    products = [
        float32.multiply(float32.from_bfloat16(x), float32.from_bfloat16(y))
        for x, y in zip(out, dout, strict=True)
    ]
    width = -(-len(products) // 32) * 32
    products += [0] * (width - len(products))
    part = next(size for size in (128, 64, 32) if width % size == 0)
    threads = []
    for thread in range(part // VECTOR):
        total = 0
        for start in range(thread * VECTOR, width, part):
            for channel in range(start, start + VECTOR):
                total = float32.add(total, products[channel])
        threads.append(total)
    distance = 1
    while distance < len(threads):
        threads = _exchange(threads, distance)
        distance *= 2
    return threads[0]


def cudnn(dout: Sequence[int], out: Sequence[int]) -> int:
    """Products rounded to bfloat16, pairs of channels dealt to 8 threads, then a butterfly."""
    products = [
        float32.from_bfloat16(float32.multiply_bfloat16(x, y))
        for x, y in zip(out, dout, strict=True)
    ]
    products += [0] * (len(products) % 2)
    threads = []
    for thread in range(THREADS):
        total = 0
        for first in range(2 * thread, len(products), 2 * THREADS):
            pair = float32.add(float32.add(0, products[first]), products[first + 1])
            total = float32.add(total, pair)
        threads.append(total)
    for distance in (4, 2, 1):
        threads = _exchange(threads, distance)
    return threads[0]


def _exchange(threads: Sequence[int], distance: int) -> list[int]:
    """Every thread adds the sum of the thread whose number differs in one bit."""
    return [float32.add(x, threads[index ^ distance]) for index, x in enumerate(threads)]
