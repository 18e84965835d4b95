// tcgen05.mma m128n16, both operands in shared memory, the accumulator and the scales in tensor memory (sm_100a,
// sm_103a). One block a tile, all steps in one go. Never run by its authors, who had no such device.
#include "tiles.cuh"

constexpr uint32_t M = 128, N = 16, MOST_STEPS = 4;
constexpr uint32_t A_BYTES = M * 32, B_BYTES = N * 32;
constexpr uint32_t SCALE_TILE = 512;  // 128 rows by 4 bytes
constexpr uint32_t STEP_BYTES = A_BYTES + B_BYTES + 2 * SCALE_TILE;

// Columns of tensor memory: the accumulator, then 4 for the scales of A and of B each step.
constexpr uint32_t COLUMNS = 64, SCALE_COLUMNS = N;
static_assert(SCALE_COLUMNS + 8 * MOST_STEPS <= COLUMNS, "the scales fit");

// Rows of 16 bytes, no swizzle. Bits 46 to 48 are 1 on this architecture.
__device__ uint64_t descriptor(const uint8_t *shared, uint32_t between_chunks, uint32_t between_row_groups) {
    uint64_t start = __cvta_generic_to_shared(shared);
    return (start & 0x3ffff) >> 4 | uint64_t(between_chunks >> 4) << 16 | uint64_t(between_row_groups >> 4) << 32 |
           uint64_t(1) << 46;
}

// The number of an element format in the instruction descriptor.
__device__ uint32_t format_number(uint32_t kind, uint32_t format) {
    if (kind == KIND_MXF4 || kind == KIND_MXF4NVF4) return 1;
    switch (format) {
        case FP16: case E4M3: return 0;
        case BF16: case E5M2: return 1;
        case TF32: return 2;
        case E2M3: return 3;
        case E3M2: return 4;
        default: return 5;
    }
}

__device__ uint32_t instruction_descriptor(const Header &h) {
    uint32_t common = format_number(h.kind, h.a_format) << 7 | format_number(h.kind, h.b_format) << 10 | N / 8 << 17;
    if (h.scale_format == NO_SCALES) return common | (h.accumulator == FLOAT32 ? 1u : 0u) << 4 | M / 16 << 24;
    return common | (h.scale_format == E8M0 ? 1u : 0u) << 23 | M / 128 << 27;
}

#define PLAIN(NAME, KIND)                                                                                             \
    struct NAME {                                                                                                     \
        __device__ static void go(uint32_t d, uint64_t a, uint64_t b, uint32_t idesc, uint32_t, uint32_t) {           \
            asm volatile("{\n.reg .pred on;\nsetp.eq.u32 on, 0, 0;\n"                                                 \
                         "tcgen05.mma.cta_group::1.kind::" KIND " [%0], %1, %2, %3, on;\n}\n"                         \
                         ::"r"(d), "l"(a), "l"(b), "r"(idesc) : "memory");                                            \
        }                                                                                                             \
    };
#define SCALED(NAME, KIND, VEC)                                                                                       \
    struct NAME {                                                                                                     \
        __device__ static void go(uint32_t d, uint64_t a, uint64_t b, uint32_t idesc, uint32_t a_scales,              \
                                  uint32_t b_scales) {                                                                \
            asm volatile("{\n.reg .pred on;\nsetp.eq.u32 on, 0, 0;\n"                                                 \
                         "tcgen05.mma.cta_group::1.kind::" KIND ".block_scale.scale_vec::" VEC                        \
                         " [%0], %1, %2, %3, [%4], [%5], on;\n}\n"                                                    \
                         ::"r"(d), "l"(a), "l"(b), "r"(idesc), "r"(a_scales), "r"(b_scales) : "memory");              \
        }                                                                                                             \
    };

PLAIN(F16, "f16")
PLAIN(Tf32, "tf32")
PLAIN(Narrow, "f8f6f4")
SCALED(ScaledNarrow, "mxf8f6f4", "1X")
SCALED(Mxf4, "mxf4", "2X")
SCALED(Nvf4By32, "mxf4nvf4", "2X")
SCALED(Nvf4By16, "mxf4nvf4", "4X")

// The scales of 128 rows as tcgen05.cp takes them: row r in the 16 bytes of r mod 32, at 4 (r / 32), a byte a scale.
__device__ void store_scales(uint8_t *shared, const uint8_t *scales, uint32_t rows, uint32_t count) {
    for (uint32_t i = threadIdx.x; i < SCALE_TILE; i += blockDim.x) {
        uint32_t row = i % 16 / 4 * 32 + i / 16, at = i % 4;
        shared[i] = row < rows && at < count ? scales[row * count + at] : 0;
    }
}

template <typename Instruction>
__global__ void __launch_bounds__(128, 1) kernel(Tiles tiles) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ uint32_t memory;
    __shared__ uint64_t barrier;
    const Header &h = tiles.header;
    const size_t tile = blockIdx.x;
    const bool dense = h.kind == KIND_MXF4 || h.kind == KIND_MXF4NVF4;
    const uint32_t barrier_at = uint32_t(__cvta_generic_to_shared(&barrier));

    if (threadIdx.x < 32) {
        asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;"
                     ::"r"(uint32_t(__cvta_generic_to_shared(&memory))), "r"(COLUMNS) : "memory");
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
    }
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier_at) : "memory");
    for (uint32_t step = 0; step < h.steps; step++) {
        const size_t at = tile * h.steps + step;
        uint8_t *to = shared + step * STEP_BYTES;
        store_operand(to, tiles.a + at * M * h.k * code_bytes(h.a_format), M, h.k, h.a_format, dense);
        store_operand(to + A_BYTES, tiles.b + at * N * h.k * code_bytes(h.b_format), N, h.k, h.b_format, dense);
        if (h.scale_format != NO_SCALES) {
            uint8_t *scales = to + A_BYTES + B_BYTES;
            store_scales(scales, tiles.a_scales + at * M * h.scales, M, h.scales);
            store_scales(scales + SCALE_TILE, tiles.b_scales + at * N * h.scales, N, h.scales);
        }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
    __syncthreads();
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");

    // A thread has a row: its warp reaches 32 lanes of tensor memory. A float16 takes the low half of a word.
    const uint32_t d = memory, mine = d + (threadIdx.x / 32 * 32 << 16);
    const size_t first = (tile * M + threadIdx.x) * N;
    for (uint32_t column = 0; column < N; column++)
        asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};"
                     ::"r"(mine + column), "r"(tiles.c[first + column]) : "memory");
    asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
    __syncthreads();

    if (threadIdx.x == 0) {
        asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
        const uint32_t idesc = instruction_descriptor(h);
        for (uint32_t step = 0; step < h.steps; step++) {
            const uint8_t *from = shared + step * STEP_BYTES;
            const uint32_t a_scales = d + SCALE_COLUMNS + 8 * step, b_scales = a_scales + 4;
            if (h.scale_format != NO_SCALES) {
                for (int side = 0; side < 2; side++) {
                    uint64_t source = descriptor(from + A_BYTES + B_BYTES + side * SCALE_TILE, 0, 128);
                    asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;"
                                 ::"r"(side ? b_scales : a_scales), "l"(source) : "memory");
                }
            }
            Instruction::go(d, descriptor(from, BETWEEN_CHUNKS, BETWEEN_ROW_GROUPS),
                            descriptor(from + A_BYTES, BETWEEN_CHUNKS, BETWEEN_ROW_GROUPS), idesc, a_scales, b_scales);
        }
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
                     ::"r"(barrier_at) : "memory");
    }
    uint32_t done = 0;
    while (!done)
        asm volatile("{\n.reg .pred done;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], 0;\nselp.u32 %0, 1, 0, done;\n}\n"
                     : "=r"(done) : "r"(barrier_at) : "memory");
    __syncwarp();
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    for (uint32_t column = 0; column < N; column++) {
        uint32_t word;
        asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];" : "=r"(word) : "r"(mine + column) : "memory");
        asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
        tiles.d[first + column] = h.accumulator == FLOAT16 ? word & 0xffff : word;
    }
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
    __syncthreads();
    if (threadIdx.x < 32) {
        asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(d), "r"(COLUMNS));
    }
}

template <typename Instruction>
void launch(const Tiles &tiles) {
    kernel<Instruction><<<tiles.header.tiles, 128, tiles.header.steps * STEP_BYTES>>>(tiles);
}

Launch find_kernel(const Header &h) {
    if (h.m != M || h.n != N || h.steps > MOST_STEPS) return nullptr;
    if (h.accumulator == FLOAT16 && h.kind != KIND_F16 && h.kind != KIND_F8F6F4) return nullptr;
    switch (h.kind) {
        case KIND_F16: return h.k == 16 && !h.scales ? launch<F16> : nullptr;
        case KIND_TF32: return h.k == 8 && !h.scales ? launch<Tf32> : nullptr;
        case KIND_F8F6F4: return h.k == 32 && !h.scales ? launch<Narrow> : nullptr;
        case KIND_MXF8F6F4: return h.k == 32 && h.scales == 1 ? launch<ScaledNarrow> : nullptr;
        case KIND_MXF4: return h.k == 64 && h.scales == 2 ? launch<Mxf4> : nullptr;
        case KIND_MXF4NVF4:
            if (h.k != 64) return nullptr;
            return h.scales == 2 ? launch<Nvf4By32> : h.scales == 4 ? launch<Nvf4By16> : nullptr;
        default: return nullptr;
    }
}
