// mma.sync m16n8, with and without block scales. One warp a tile, the accumulator stays in registers.
// FLAMIA_ARCH is ten times the compute capability's number: 900 for sm_90a, 1200 for sm_120a.
#include "tiles.cuh"

constexpr uint32_t M = 16, N = 8;

struct Operands {
    uint32_t a[4], b[2], a_scales, b_scales;
};

// D of float32 takes four registers, of float16 two; A and B of 16 bytes a row take half of those of 32.
#define MMA_F32_32(NAME, TEXT)                                                                                 \
    struct NAME {                                                                                              \
        __device__ static void go(uint32_t (&d)[4], const Operands &x) {                                       \
            asm volatile("mma.sync.aligned." TEXT                                                              \
                         " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                    \
                         : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                      \
                         : "r"(x.a[0]), "r"(x.a[1]), "r"(x.a[2]), "r"(x.a[3]), "r"(x.b[0]), "r"(x.b[1]));      \
        }                                                                                                      \
    };
#define MMA_F32_16(NAME, TEXT)                                                                                 \
    struct NAME {                                                                                              \
        __device__ static void go(uint32_t (&d)[4], const Operands &x) {                                       \
            asm volatile("mma.sync.aligned." TEXT " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"       \
                         : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                      \
                         : "r"(x.a[0]), "r"(x.a[1]), "r"(x.b[0]));                                             \
        }                                                                                                      \
    };
#define MMA_F16_32(NAME, TEXT)                                                                                 \
    struct NAME {                                                                                              \
        __device__ static void go(uint32_t (&d)[4], const Operands &x) {                                       \
            asm volatile("mma.sync.aligned." TEXT " {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"           \
                         : "+r"(d[0]), "+r"(d[1])                                                              \
                         : "r"(x.a[0]), "r"(x.a[1]), "r"(x.a[2]), "r"(x.a[3]), "r"(x.b[0]), "r"(x.b[1]));      \
        }                                                                                                      \
    };
#define MMA_F16_16(NAME, TEXT)                                                                                 \
    struct NAME {                                                                                              \
        __device__ static void go(uint32_t (&d)[4], const Operands &x) {                                       \
            asm volatile("mma.sync.aligned." TEXT " {%0, %1}, {%2, %3}, {%4}, {%0, %1};"                       \
                         : "+r"(d[0]), "+r"(d[1])                                                              \
                         : "r"(x.a[0]), "r"(x.a[1]), "r"(x.b[0]));                                             \
        }                                                                                                      \
    };
// The scales of a row of A come from the first two threads of four, those of a column of B from the first, byte 0 on.
#define MMA_SCALED(NAME, TEXT)                                                                                 \
    struct NAME {                                                                                              \
        __device__ static void go(uint32_t (&d)[4], const Operands &x) {                                       \
            constexpr uint16_t zero = 0;                                                                       \
            asm volatile("mma.sync.aligned." TEXT " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "            \
                         "{%0, %1, %2, %3}, {%10}, {%12, %12}, {%11}, {%12, %12};"                             \
                         : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                      \
                         : "r"(x.a[0]), "r"(x.a[1]), "r"(x.a[2]), "r"(x.a[3]), "r"(x.b[0]), "r"(x.b[1]),       \
                           "r"(x.a_scales), "r"(x.b_scales), "h"(zero));                                       \
        }                                                                                                      \
    };

MMA_F32_32(F16K16, "m16n8k16.row.col.f32.f16.f16.f32")
MMA_F32_16(F16K8, "m16n8k8.row.col.f32.f16.f16.f32")
MMA_F32_32(Bf16K16, "m16n8k16.row.col.f32.bf16.bf16.f32")
MMA_F32_16(Bf16K8, "m16n8k8.row.col.f32.bf16.bf16.f32")
MMA_F32_32(Tf32K8, "m16n8k8.row.col.f32.tf32.tf32.f32")
MMA_F32_16(Tf32K4, "m16n8k4.row.col.f32.tf32.tf32.f32")
MMA_F16_32(F16K16ToF16, "m16n8k16.row.col.f16.f16.f16.f16")
MMA_F16_16(F16K8ToF16, "m16n8k8.row.col.f16.f16.f16.f16")

#define EACH_FP8(DO)                                                \
    DO(e4m3, E4M3, e4m3, E4M3) DO(e4m3, E4M3, e5m2, E5M2)           \
    DO(e5m2, E5M2, e4m3, E4M3) DO(e5m2, E5M2, e5m2, E5M2)
#define EACH_B(DO, a, A)                                            \
    DO(a, A, e4m3, E4M3) DO(a, A, e5m2, E5M2) DO(a, A, e2m3, E2M3)  \
    DO(a, A, e3m2, E3M2) DO(a, A, e2m1, E2M1)
#define EACH_NARROW(DO)                                             \
    EACH_B(DO, e4m3, E4M3) EACH_B(DO, e5m2, E5M2)                   \
    EACH_B(DO, e2m3, E2M3) EACH_B(DO, e3m2, E3M2) EACH_B(DO, e2m1, E2M1)

// Plain FP8 is offered where it is one fused sum: sm_89 and sm_120. On sm_90 and sm_100 it is something else.
#define HAS_FP8 (FLAMIA_ARCH == 890 || FLAMIA_ARCH >= 1200)
#define HAS_BLOCK_SCALES (FLAMIA_ARCH >= 1200)

#if HAS_FP8
#define FP8(a, A, b, B)                                                            \
    MMA_F32_32(Fp8K32_##a##_##b, "m16n8k32.row.col.f32." #a "." #b ".f32")         \
    MMA_F32_16(Fp8K16_##a##_##b, "m16n8k16.row.col.f32." #a "." #b ".f32")         \
    MMA_F16_32(Fp8K32ToF16_##a##_##b, "m16n8k32.row.col.f16." #a "." #b ".f16")    \
    MMA_F16_16(Fp8K16ToF16_##a##_##b, "m16n8k16.row.col.f16." #a "." #b ".f16")
EACH_FP8(FP8)
#endif
#if HAS_BLOCK_SCALES
#define SCALED_SHAPE "m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32."
#define NARROW(a, A, b, B)                                                                                \
    MMA_F32_32(Narrow_##a##_##b, "m16n8k32.row.col.kind::f8f6f4.f32." #a "." #b ".f32")                   \
    MMA_F16_32(NarrowToF16_##a##_##b, "m16n8k32.row.col.kind::f8f6f4.f16." #a "." #b ".f16")              \
    MMA_SCALED(Scaled_##a##_##b, SCALED_SHAPE #a "." #b ".f32.ue8m0")
EACH_NARROW(NARROW)
// nvcc 13.0 refuses ue8m0 with scale_vec::4X here, so that form is not among them.
#define FP4_SHAPE(KIND, VEC) "m16n8k64.row.col.kind::" KIND ".block_scale.scale_vec::" VEC ".f32.e2m1.e2m1.f32."
MMA_SCALED(Mxf4, FP4_SHAPE("mxf4", "2X") "ue8m0")
MMA_SCALED(Nvf4By32, FP4_SHAPE("mxf4nvf4", "2X") "ue8m0")
MMA_SCALED(Nvf4, FP4_SHAPE("mxf4nvf4", "4X") "ue4m3")
#endif

// Four bytes of a row, from byte 4 * word of its form in registers on.
__device__ uint32_t packed(const uint8_t *codes, uint32_t word, uint32_t kind, uint32_t format) {
    if (kind == KIND_MXF4 || kind == KIND_MXF4NVF4) {
        uint32_t found = 0;
        for (int i = 0; i < 8; i++) found |= uint32_t(codes[8 * word + i] & 15) << (4 * i);
        return found;
    }
    // FP4 beside wider formats sits in the middle of its byte.
    const int shift = kind == KIND_F8F6F4 || kind == KIND_MXF8F6F4 ? (format == E2M1 ? 2 : 0) : 0;
    uint32_t found = 0;
    for (int i = 0; i < 4; i++) found |= uint32_t(codes[4 * word + i] << shift & 255) << (8 * i);
    return found;
}

__device__ uint32_t packed_scales(const uint8_t *scales, uint32_t count) {
    uint32_t found = 0;
    for (uint32_t i = 0; i < count; i++) found |= uint32_t(scales[i]) << (8 * i);
    return found;
}

template <typename Instruction>
__global__ void kernel(Tiles tiles) {
    const Header &h = tiles.header;
    const size_t tile = blockIdx.x;
    const uint32_t lane = threadIdx.x, group = lane / 4, pair = lane % 4;
    const bool narrow = h.accumulator == FLOAT16;
    uint32_t d[4] = {};
    for (int i = 0; i < 4; i++) {
        uint32_t word = tiles.c[tile * M * N + (group + i / 2 * 8) * N + pair * 2 + i % 2];
        if (narrow) d[i / 2] |= (word & 0xffff) << (i % 2 * 16);
        else d[i] = word;
    }
    const uint32_t a_row = h.k * code_bytes(h.a_format), b_row = h.k * code_bytes(h.b_format);
    const bool fp4 = h.kind == KIND_MXF4 || h.kind == KIND_MXF4NVF4;
    const uint32_t words = fp4 ? 8 : a_row / 4;  // of a row
    for (uint32_t step = 0; step < h.steps; step++) {
        const size_t at = tile * h.steps + step;
        const uint8_t *a = tiles.a + at * M * a_row, *b = tiles.b + at * N * b_row;
        Operands x = {};
        for (uint32_t i = 0; i < words / 2; i++)
            x.a[i] = packed(a + (group + i % 2 * 8) * a_row, pair + i / 2 * 4, h.kind, h.a_format);
        for (uint32_t i = 0; i < words / 4; i++)
            x.b[i] = packed(b + group * b_row, pair + i * 4, h.kind, h.b_format);
        x.a_scales = packed_scales(tiles.a_scales + (at * M + group + lane % 2 * 8) * h.scales, h.scales);
        x.b_scales = packed_scales(tiles.b_scales + (at * N + group) * h.scales, h.scales);
        Instruction::go(d, x);
    }
    for (int i = 0; i < 4; i++) {
        uint32_t word = narrow ? d[i / 2] >> (i % 2 * 16) & 0xffff : d[i];
        tiles.d[tile * M * N + (group + i / 2 * 8) * N + pair * 2 + i % 2] = word;
    }
}

template <typename Instruction>
void launch(const Tiles &tiles) {
    kernel<Instruction><<<tiles.header.tiles, 32>>>(tiles);
}

struct Known {
    uint32_t kind, a, b, k, accumulator, scale_format, scales;
    Launch launch;
};

const Known KNOWN[] = {
    {KIND_F16, FP16, FP16, 16, FLOAT32, NO_SCALES, 0, launch<F16K16>},
    {KIND_F16, FP16, FP16, 8, FLOAT32, NO_SCALES, 0, launch<F16K8>},
    {KIND_F16, BF16, BF16, 16, FLOAT32, NO_SCALES, 0, launch<Bf16K16>},
    {KIND_F16, BF16, BF16, 8, FLOAT32, NO_SCALES, 0, launch<Bf16K8>},
    {KIND_TF32, TF32, TF32, 8, FLOAT32, NO_SCALES, 0, launch<Tf32K8>},
    {KIND_TF32, TF32, TF32, 4, FLOAT32, NO_SCALES, 0, launch<Tf32K4>},
    {KIND_F16, FP16, FP16, 16, FLOAT16, NO_SCALES, 0, launch<F16K16ToF16>},
    {KIND_F16, FP16, FP16, 8, FLOAT16, NO_SCALES, 0, launch<F16K8ToF16>},
#if HAS_FP8
#define FP8_ROWS(a, A, b, B)                                                                \
    {KIND_FP8, A, B, 32, FLOAT32, NO_SCALES, 0, launch<Fp8K32_##a##_##b>},                  \
        {KIND_FP8, A, B, 16, FLOAT32, NO_SCALES, 0, launch<Fp8K16_##a##_##b>},              \
        {KIND_FP8, A, B, 32, FLOAT16, NO_SCALES, 0, launch<Fp8K32ToF16_##a##_##b>},         \
        {KIND_FP8, A, B, 16, FLOAT16, NO_SCALES, 0, launch<Fp8K16ToF16_##a##_##b>},
    EACH_FP8(FP8_ROWS)
#endif
#if HAS_BLOCK_SCALES
#define NARROW_ROWS(a, A, b, B)                                                             \
    {KIND_F8F6F4, A, B, 32, FLOAT32, NO_SCALES, 0, launch<Narrow_##a##_##b>},               \
        {KIND_F8F6F4, A, B, 32, FLOAT16, NO_SCALES, 0, launch<NarrowToF16_##a##_##b>},      \
        {KIND_MXF8F6F4, A, B, 32, FLOAT32, E8M0, 1, launch<Scaled_##a##_##b>},
    EACH_NARROW(NARROW_ROWS)
    {KIND_MXF4, E2M1, E2M1, 64, FLOAT32, E8M0, 2, launch<Mxf4>},
    {KIND_MXF4NVF4, E2M1, E2M1, 64, FLOAT32, E8M0, 2, launch<Nvf4By32>},
    {KIND_MXF4NVF4, E2M1, E2M1, 64, FLOAT32, UE4M3, 4, launch<Nvf4>},
#endif
};

Launch find_kernel(const Header &h) {
    if (h.m != M || h.n != N) return nullptr;
    for (const Known &one : KNOWN)
        if (one.kind == h.kind && one.a == h.a_format && one.b == h.b_format && one.k == h.k &&
            one.accumulator == h.accumulator && one.scale_format == h.scale_format && one.scales == h.scales)
            return one.launch;
    return nullptr;
}
