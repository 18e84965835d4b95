// wgmma.mma_async m64n8 with both operands in shared memory (sm_90a). One block a tile, all steps in one go.
#include "tiles.cuh"

constexpr uint32_t M = 64, N = 8, MOST_STEPS = 16;
constexpr uint32_t A_BYTES = M * 32, STEP_BYTES = A_BYTES + N * 32;

// Rows of 16 bytes, no swizzle: start, distance of the chunks along K, distance of the groups of 8 rows.
__device__ uint64_t descriptor(const uint8_t *shared) {
    uint64_t start = __cvta_generic_to_shared(shared);
    return (start & 0x3ffff) >> 4 | uint64_t(BETWEEN_CHUNKS >> 4) << 16 | uint64_t(BETWEEN_ROW_GROUPS >> 4) << 32;
}

#define WGMMA_F32(NAME, SHAPE, TYPES, TAIL)                                                              \
    struct NAME {                                                                                        \
        static constexpr int REGISTERS = 4;                                                              \
        __device__ static void go(uint32_t (&d)[4], uint64_t a, uint64_t b) {                            \
            asm volatile("{\n.reg .pred on;\nsetp.eq.u32 on, 0, 0;\n"                                    \
                         "wgmma.mma_async.sync.aligned.m64n8" SHAPE ".f32." TYPES                        \
                         " {%0, %1, %2, %3}, %4, %5, on, 1, 1" TAIL ";\n}\n"                             \
                         : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                \
                         : "l"(a), "l"(b));                                                              \
        }                                                                                                \
    };
#define WGMMA_F16(NAME, SHAPE, TYPES, TAIL)                                                              \
    struct NAME {                                                                                        \
        static constexpr int REGISTERS = 2;                                                              \
        __device__ static void go(uint32_t (&d)[2], uint64_t a, uint64_t b) {                            \
            asm volatile("{\n.reg .pred on;\nsetp.eq.u32 on, 0, 0;\n"                                    \
                         "wgmma.mma_async.sync.aligned.m64n8" SHAPE ".f16." TYPES                        \
                         " {%0, %1}, %2, %3, on, 1, 1" TAIL ";\n}\n"                                     \
                         : "+r"(d[0]), "+r"(d[1])                                                        \
                         : "l"(a), "l"(b));                                                              \
        }                                                                                                \
    };

WGMMA_F32(F16ToF32, "k16", "f16.f16", ", 0, 0")
WGMMA_F32(Bf16ToF32, "k16", "bf16.bf16", ", 0, 0")
WGMMA_F32(Tf32ToF32, "k8", "tf32.tf32", "")
WGMMA_F32(E4m3E4m3ToF32, "k32", "e4m3.e4m3", "")
WGMMA_F32(E4m3E5m2ToF32, "k32", "e4m3.e5m2", "")
WGMMA_F32(E5m2E4m3ToF32, "k32", "e5m2.e4m3", "")
WGMMA_F32(E5m2E5m2ToF32, "k32", "e5m2.e5m2", "")
WGMMA_F16(F16ToF16, "k16", "f16.f16", ", 0, 0")
WGMMA_F16(E4m3E4m3ToF16, "k32", "e4m3.e4m3", "")
WGMMA_F16(E4m3E5m2ToF16, "k32", "e4m3.e5m2", "")
WGMMA_F16(E5m2E4m3ToF16, "k32", "e5m2.e4m3", "")
WGMMA_F16(E5m2E5m2ToF16, "k32", "e5m2.e5m2", "")

template <typename Instruction>
__global__ void __launch_bounds__(128, 1) kernel(Tiles tiles) {
    extern __shared__ __align__(128) uint8_t shared[];
    const Header &h = tiles.header;
    const size_t tile = blockIdx.x;
    for (uint32_t step = 0; step < h.steps; step++) {
        const size_t at = tile * h.steps + step;
        uint8_t *to = shared + step * STEP_BYTES;
        store_operand(to, tiles.a + at * M * h.k * code_bytes(h.a_format), M, h.k, h.a_format, false);
        store_operand(to + A_BYTES, tiles.b + at * N * h.k * code_bytes(h.b_format), N, h.k, h.b_format, false);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();

    constexpr int PER_WORD = 4 / Instruction::REGISTERS;  // results in a register
    const uint32_t row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    const uint32_t *c = tiles.c + tile * M * N;
    uint32_t d[Instruction::REGISTERS];
    for (int i = 0; i < 4; i++) {
        uint32_t word = c[(row + i / 2 * 8) * N + column + i % 2];
        if (PER_WORD == 1) d[i / PER_WORD] = word;
        else d[i / PER_WORD] = i % 2 ? d[i / PER_WORD] | word << 16 : word & 0xffff;
    }
    for (uint32_t step = 0; step < h.steps; step++) {
        const uint8_t *from = shared + step * STEP_BYTES;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        Instruction::go(d, descriptor(from), descriptor(from + A_BYTES));
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < Instruction::REGISTERS; i++) asm volatile("" : "+r"(d[i])::"memory");
    for (int i = 0; i < 4; i++) {
        uint32_t word = d[i / PER_WORD];
        if (PER_WORD == 2) word = i % 2 ? word >> 16 : word & 0xffff;
        tiles.d[tile * M * N + (row + i / 2 * 8) * N + column + i % 2] = word;
    }
}

template <typename Instruction>
void launch(const Tiles &tiles) {
    const uint32_t bytes = tiles.header.steps * STEP_BYTES;
    kernel<Instruction><<<tiles.header.tiles, 128, bytes>>>(tiles);
}

Launch find_kernel(const Header &h) {
    if (h.m != M || h.n != N || h.steps > MOST_STEPS || h.scales) return nullptr;
    if (h.k * code_bytes(h.a_format) != 32) return nullptr;
    struct { uint32_t a, b, accumulator; Launch launch; } known[] = {
        {FP16, FP16, FLOAT32, launch<F16ToF32>},      {BF16, BF16, FLOAT32, launch<Bf16ToF32>},
        {TF32, TF32, FLOAT32, launch<Tf32ToF32>},     {E4M3, E4M3, FLOAT32, launch<E4m3E4m3ToF32>},
        {E4M3, E5M2, FLOAT32, launch<E4m3E5m2ToF32>}, {E5M2, E4M3, FLOAT32, launch<E5m2E4m3ToF32>},
        {E5M2, E5M2, FLOAT32, launch<E5m2E5m2ToF32>}, {FP16, FP16, FLOAT16, launch<F16ToF16>},
        {E4M3, E4M3, FLOAT16, launch<E4m3E4m3ToF16>}, {E4M3, E5M2, FLOAT16, launch<E4m3E5m2ToF16>},
        {E5M2, E4M3, FLOAT16, launch<E5m2E4m3ToF16>}, {E5M2, E5M2, FLOAT16, launch<E5m2E5m2ToF16>},
    };
    for (auto &one : known)
        if (one.a == h.a_format && one.b == h.b_format && one.accumulator == h.accumulator) return one.launch;
    return nullptr;
}
