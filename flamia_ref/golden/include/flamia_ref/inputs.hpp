// Inputs of golden cases from a counter hash, bit for bit those of flamia_ref/golden/inputs.py.
//
// C++17 and CUDA from one source: every function is __host__ __device__ under nvcc, uses 64-bit
// integers only, and allocates nothing. The formulas are in the docstring of inputs.py.
//
//     namespace inputs = flamia_ref::inputs;
//     inputs::Generator q(inputs::Tensor::q, seed, inputs::Distribution::bell, exponent, heads, head_dim);
//     bits[i] = q(i);      // element i of [tokens, heads, head_dim], row-major: bfloat16 bits
//
// A case may overwrite boxes of its inputs afterwards, in order: first its fills, then its plants, which
// are boxes of one element. Apply each as `if (box.holds(t, h, c)) bits[i] = box.value(t, h, c)`.
#ifndef FLAMIA_REF_INPUTS_HPP
#define FLAMIA_REF_INPUTS_HPP

#include <cstdint>

#ifdef __CUDACC__
#define FLAMIA_REF_HD __host__ __device__
#else
#define FLAMIA_REF_HD
#endif

namespace flamia_ref {
namespace inputs {

/// The input tensors, by their number in the hash.
enum class Tensor : int { q = 0, k = 1, v = 2, dout = 3 };

/// How inputs are made. Recorded ones are stored and have no formula.
enum class Distribution : int { bell = 0, outliers = 1, wide = 2, ladder = 3, integers = 4 };

constexpr int max_exponent = 64;  // a case's exponent lies in [-64, 64]: no value leaves bfloat16

/// Output number `index` of splitmix64 with a seed; arithmetic modulo 2^64.
FLAMIA_REF_HD constexpr std::uint64_t splitmix64(std::uint64_t seed, std::uint64_t index) {
    std::uint64_t z = seed + (index + 1) * UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

/// n * 2^exponent rounded to bfloat16, to nearest even: its bits. |n| < 2^16; a zero is +0.
///
/// The result must be a normal number, which every exponent of a case sees to.
FLAMIA_REF_HD constexpr std::uint16_t bfloat16_bits(std::int32_t n, std::int32_t exponent) {
    if (n == 0) return 0;
    const std::uint32_t magnitude = n < 0 ? 0u - static_cast<std::uint32_t>(n) : static_cast<std::uint32_t>(n);
    int length = 0;  // bits of the magnitude
    while (length < 32 && (magnitude >> length) != 0) ++length;
    std::uint32_t significand = 0;  // eight bits, or 256 after a carry
    if (length <= 8) {
        significand = magnitude << (8 - length);
    } else {
        const int excess = length - 8;
        const std::uint32_t half = UINT32_C(1) << (excess - 1);
        const std::uint32_t odd = (magnitude >> excess) & 1u;
        significand = (magnitude + half - (1u - odd)) >> excess;
    }
    // A carry to 256 leaves the fraction 0 and moves the exponent up by one: the sum does both.
    const std::uint32_t biased = static_cast<std::uint32_t>(127 + (length - 1) + exponent);
    const std::uint32_t sign = n < 0 ? 0x8000u : 0u;
    return static_cast<std::uint16_t>(sign + (biased << 7) + (significand - 128u));
}

/// Makes the elements of one input tensor of a case.
struct Generator {
    std::uint64_t first;   // the seeds of the two streams
    std::uint64_t second;
    std::uint64_t heads;
    std::uint64_t head_dim;
    std::int32_t exponent;
    Distribution distribution;

    /// `of_heads` are those of the tensor: kv_heads for k and v.
    FLAMIA_REF_HD constexpr Generator(Tensor tensor, std::uint64_t seed, Distribution how, std::int32_t power,
                                      std::uint64_t of_heads, std::uint64_t channels)
        : first(splitmix64(seed, 2 * static_cast<std::uint64_t>(tensor))),
          second(splitmix64(seed, 2 * static_cast<std::uint64_t>(tensor) + 1)),
          heads(of_heads),
          head_dim(channels),
          exponent(power),
          distribution(how) {}

    /// The bfloat16 bits of element `i`, counted row-major over [tokens, heads, head_dim].
    FLAMIA_REF_HD constexpr std::uint16_t operator()(std::uint64_t i) const {
        const std::uint64_t h = splitmix64(first, i);
        if (distribution == Distribution::integers) return bfloat16_bits(static_cast<std::int32_t>(h % 7) - 3, exponent);
        std::int32_t n = -1020;
        for (int byte = 0; byte < 8; ++byte) n += static_cast<std::int32_t>((h >> (8 * byte)) & 255u);
        return bfloat16_bits(n, exponent_of(i));
    }

   private:
    FLAMIA_REF_HD constexpr std::int32_t exponent_of(std::uint64_t i) const {
        if (distribution == Distribution::bell) return exponent;
        if (distribution == Distribution::ladder) {
            const std::uint64_t c = i % head_dim, row = i / head_dim;
            const std::uint64_t rung = (5 * (row / heads) + 19 * (row % heads) + 7 * (c / 16)) % 31;
            return exponent + static_cast<std::int32_t>(rung) - 15;
        }
        const std::uint64_t h = splitmix64(second, i);
        if (distribution == Distribution::outliers) return exponent + ((h & 255u) == 0 ? 16 : 0);
        const std::uint64_t row = splitmix64(second, i - i % head_dim);
        return exponent + static_cast<std::int32_t>(h & 31u) - 28 +
               static_cast<std::int32_t>((row >> 8) & 15u) - 12;
    }
};

/// A box of an input that is overwritten: tokens, heads and channels, each [first, end).
struct Box {
    std::uint64_t tokens[2];
    std::uint64_t heads[2];
    std::uint64_t channels[2];
    std::uint32_t bits;     // of the first element
    std::int32_t steps[3];  // what a token, a head, and 32 channels add to them, modulo 2^16

    FLAMIA_REF_HD constexpr bool holds(std::uint64_t t, std::uint64_t h, std::uint64_t c) const {
        return tokens[0] <= t && t < tokens[1] && heads[0] <= h && h < heads[1] && channels[0] <= c && c < channels[1];
    }

    /// The bfloat16 bits of an element that the box holds.
    FLAMIA_REF_HD constexpr std::uint16_t value(std::uint64_t t, std::uint64_t h, std::uint64_t c) const {
        const std::uint64_t sum = bits + (t - tokens[0]) * step(0) + (h - heads[0]) * step(1) + (c - channels[0]) / 32 * step(2);
        return static_cast<std::uint16_t>(sum & 0xffffu);
    }

   private:
    FLAMIA_REF_HD constexpr std::uint64_t step(int axis) const {
        return static_cast<std::uint64_t>(static_cast<std::int64_t>(steps[axis]));
    }
};

}  // namespace inputs
}  // namespace flamia_ref

#endif  // FLAMIA_REF_INPUTS_HPP
