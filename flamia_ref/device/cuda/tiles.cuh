// Tiles of a matrix product as a file holds them, and their bytes as the tensor core reads them.
//
// A file is a Header and then, without gaps, the arrays
//     a         [tiles][steps][m][k]       one code an element, in 1, 2 or 4 bytes
//     b         [tiles][steps][n][k]       the columns of B
//     a_scales  [tiles][steps][m][scales]  bytes
//     b_scales  [tiles][steps][n][scales]
//     c         [tiles][m][n]              words: float32 bits, or float16 bits in the low half
// and the results are d [tiles][m][n], words as those of c, after `steps` instructions in a row.
#pragma once

#include "files.cuh"

enum Kind : uint32_t { KIND_F16, KIND_TF32, KIND_FP8, KIND_F8F6F4, KIND_MXF8F6F4, KIND_MXF4, KIND_MXF4NVF4 };
enum Format : uint32_t { E4M3, E5M2, E2M3, E3M2, E2M1, FP16, BF16, TF32 };
enum Accumulator : uint32_t { FLOAT32, FLOAT16 };
enum ScaleFormat : uint32_t { NO_SCALES, E8M0, UE4M3 };

struct Header {
    uint32_t magic, version, kind, a_format, b_format, accumulator, scale_format;
    uint32_t scales;  // a row and step
    uint32_t tiles, steps, m, n, k;
    uint32_t reserved[3];
};
static_assert(sizeof(Header) == 64, "the header of a file");

struct Tiles {
    Header header;
    const uint8_t *a, *b, *a_scales, *b_scales;
    const uint32_t *c;
    uint32_t *d;
};

__host__ __device__ inline uint32_t code_bytes(uint32_t format) {
    return format == TF32 ? 4 : format == FP16 || format == BF16 ? 2 : 1;
}

// Byte `at` (0 to 15) of the 16 bytes that hold the elements from `codes` on, as shared memory wants them. FP4 is
// packed two a byte by the kinds for FP4 alone; beside wider formats 16 elements of 4 or 6 bits are packed into the
// first 8 or 12 of 16 bytes.
__device__ inline uint8_t chunk_byte(const uint8_t *codes, uint32_t format, bool dense, uint32_t at) {
    if (format == E2M1) {
        if (!dense && at >= 8) return 0;
        return (codes[2 * at] & 15) | (codes[2 * at + 1] & 15) << 4;
    }
    if (format == E2M3 || format == E3M2) {
        if (at >= 12) return 0;
        uint32_t bit = 8 * at, first = bit / 6, shift = bit % 6;
        uint32_t pair = codes[first] & 63;
        if (first < 15) pair |= (codes[first + 1] & 63) << 6;
        return pair >> shift;
    }
    return codes[at];
}

// Writes rows of one instruction's operand, 32 bytes each, as core matrices of 8 rows by 16 bytes: those of a row of
// matrices side by side along K. All threads of the block take part.
__device__ inline void store_operand(uint8_t *shared, const uint8_t *codes, uint32_t rows, uint32_t k, uint32_t format,
                                     bool dense) {
    const uint32_t row_bytes = k * code_bytes(format);
    const uint32_t chunk_codes = row_bytes / 2;  // bytes of codes in the file that become 16 here
    for (uint32_t i = threadIdx.x; i < rows * 32; i += blockDim.x) {
        uint32_t row = i / 32, chunk = i % 32 / 16, at = i % 16;
        const uint8_t *from = codes + row * row_bytes + chunk * chunk_codes;
        shared[row / 8 * 256 + chunk * 128 + row % 8 * 16 + at] = chunk_byte(from, format, dense, at);
    }
}

constexpr uint32_t BETWEEN_CHUNKS = 128, BETWEEN_ROW_GROUPS = 256;  // bytes, as store_operand lays them out

using Launch = void (*)(const Tiles &);
Launch find_kernel(const Header &header);  // null where this file has no kernel for it

inline void run_file(const char *input, const char *output) {
    std::vector<uint8_t> file = read_file(input);
    if (file.size() < sizeof(Header)) stop("too short", input);
    Tiles tiles;
    Header &h = tiles.header;
    h = *reinterpret_cast<const Header *>(file.data());
    if (h.magic != FILE_MAGIC || h.version != FILE_VERSION) stop("not a file of tiles of this version", input);
    const size_t rows = size_t(h.tiles) * h.steps, results = size_t(h.tiles) * h.m * h.n;
    const size_t sizes[] = {rows * h.m * h.k * code_bytes(h.a_format), rows * h.n * h.k * code_bytes(h.b_format),
                            rows * h.m * h.scales, rows * h.n * h.scales, results * 4};
    size_t total = sizeof(Header);
    for (size_t size : sizes) total += size;
    if (file.size() != total) stop("of the wrong size", input);
    Launch launch = find_kernel(h);
    if (!launch) stop("this program has no kernel for", input, EXIT_NOT_HERE);

    Buffer<uint8_t> a(sizes[0]), b(sizes[1]), a_scales(sizes[2]), b_scales(sizes[3]);
    Buffer<uint32_t> c(results), d(results);
    const uint8_t *at = file.data() + sizeof(Header);
    a.fill(at);
    b.fill(at += sizes[0]);
    a_scales.fill(at += sizes[1]);
    b_scales.fill(at += sizes[2]);
    c.fill(at += sizes[3]);
    tiles.a = a.data, tiles.b = b.data, tiles.a_scales = a_scales.data, tiles.b_scales = b_scales.data;
    tiles.c = c.data, tiles.d = d.data;
    if (results) launch(tiles);
    finish_kernel();
    std::vector<uint32_t> words(results);
    d.fetch(words.data(), results);
    write_file(output, words);
}

// Arguments: names of files, each of operands followed by one for its results.
int main(int count, char **arguments) {
    if (count < 3 || count % 2 == 0) stop("usage", "INPUT OUTPUT [INPUT OUTPUT]...");
    for (int i = 1; i < count; i += 2) run_file(arguments[i], arguments[i + 1]);
    return 0;
}
