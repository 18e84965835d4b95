"""delta, the sum over channels of out * dout, in each recipe's products and order."""

from collections.abc import Sequence

from tests.independent import float32

VECTOR = 8  # channels a thread of FlashAttention-4's preprocess loads at once
THREADS = 8  # of cuDNN's


def total(kind: str, x: Sequence[int], y: Sequence[int]) -> int:
    """The sum over channels of x * y, both float32 bits, in a recipe's way."""
    return SUMS[kind](x, y)


def ascending(weighted: Sequence[int], out: Sequence[int]) -> int:
    """FMA in ascending channels from +0; float32 dout' times bfloat16 out."""
    return _ascending(weighted, _widened(out))


def flash_attention(dout: Sequence[int], out: Sequence[int]) -> int:
    """float32 products of bfloat16, vectors of 8 channels a thread, then a butterfly."""
    return _thread_vectors(_widened(dout), _widened(out))


def cudnn(dout: Sequence[int], out: Sequence[int]) -> int:
    """Products rounded to bfloat16, pairs of channels dealt to 8 threads, then a butterfly."""
    return _half_products(_widened(dout), _widened(out))


def _widened(row: Sequence[int]) -> list[int]:
    return [float32.from_bfloat16(x) for x in row]


def _ascending(x: Sequence[int], y: Sequence[int]) -> int:
    total = 0
    for a, b in zip(x, y, strict=True):
        total = float32.fused_multiply_add(a, b, total)
    return total


def _thread_vectors(x: Sequence[int], y: Sequence[int]) -> int:
    products = [float32.multiply(a, b) for a, b in zip(x, y, strict=True)]
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


def _half_products(x: Sequence[int], y: Sequence[int]) -> int:
    products = [float32.from_bfloat16(_half_product(a, b)) for a, b in zip(x, y, strict=True)]
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


def _half_product(a: int, b: int) -> int:
    """a * b of two float32, rounded once to bfloat16."""
    exact = float32.multiply(a, b)  # for its special values: zeros, infinities, NaN
    if any(float32.is_nan(x) or float32.is_infinite(x) for x in (a, b)):
        return float32.to_bfloat16(exact)
    (a_significand, a_exponent), (b_significand, b_exponent) = float32.split(a), float32.split(b)
    product = a_significand * b_significand
    return float32.round_dyadic(product, a_exponent + b_exponent, exact >> 31, 7)


def _exchange(threads: Sequence[int], distance: int) -> list[int]:
    """Every thread adds the sum of the thread whose number differs in one bit."""
    return [float32.add(x, threads[index ^ distance]) for index, x in enumerate(threads)]


SUMS = {
    "fma_ascending": _ascending,
    "thread_vectors": _thread_vectors,
    "half_products": _half_products,
}
