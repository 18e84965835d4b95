// Conversions of float32, in every rounding that the instructions offer. FLAMIA_ARCH as in mma.cu.
#include "inputs.cuh"

enum Conversion : uint32_t {
    FP16_RN, FP16_RZ, FP16_RM, FP16_RP, BF16_RN, BF16_RZ, TF32_RNA, TF32_RN, TF32_RZ, E4M3_RN_SAT, E5M2_RN_SAT,
    E2M1_RN_SAT, E2M3_RN_SAT, E3M2_RN_SAT, E8M0_RZ, E8M0_RP, E8M0_RZ_SAT, E8M0_RP_SAT,
    E4M3_RS_SAT, E5M2_RS_SAT, E2M3_RS_SAT, E3M2_RS_SAT, E2M1_RS_SAT,
};

// One value to 16 bits.
#define TO_16(NAME, INSTRUCTION)                                                          \
    __device__ uint32_t NAME(uint32_t x, uint32_t) {                                      \
        uint16_t y;                                                                       \
        asm volatile(INSTRUCTION " %0, %1;" : "=h"(y) : "f"(__uint_as_float(x)));         \
        return y;                                                                         \
    }
// One value to TF32, whose low 13 bits do not count.
#define TO_TF32(NAME, INSTRUCTION)                                                        \
    __device__ uint32_t NAME(uint32_t x, uint32_t) {                                      \
        uint32_t y;                                                                       \
        asm volatile(INSTRUCTION " %0, %1;" : "=r"(y) : "f"(__uint_as_float(x)));         \
        return y & 0xffffe000;                                                            \
    }
// Two values to two bytes, of which the second operand is the low one.
#define TO_PAIR(NAME, INSTRUCTION)                                                        \
    __device__ uint32_t NAME(uint32_t x, uint32_t) {                                      \
        uint16_t y;                                                                       \
        asm volatile(INSTRUCTION " %0, %1, %2;" : "=h"(y) : "f"(0.0f), "f"(__uint_as_float(x))); \
        return y & 0xff;                                                                  \
    }
#define TO_FP4_PAIR(NAME, INSTRUCTION)                                                    \
    __device__ uint32_t NAME(uint32_t x, uint32_t) {                                      \
        uint16_t y;                                                                       \
        asm volatile("{\n.reg .b8 both;\n" INSTRUCTION " both, %1, %2;\ncvt.u16.u8 %0, both;\n}\n" \
                     : "=h"(y) : "f"(0.0f), "f"(__uint_as_float(x)));                     \
        return y & 0xf;                                                                   \
    }
// Four values with random bits. Of the last one they are taken as written: the low half of the word, and for FP4 its
// bytes 0 and 2.
#define TO_FOUR(NAME, INSTRUCTION)                                                        \
    __device__ uint32_t NAME(uint32_t x, uint32_t random) {                               \
        uint32_t y;                                                                       \
        asm volatile(INSTRUCTION " %0, {%1, %1, %1, %2}, %3;"                             \
                     : "=r"(y) : "f"(0.0f), "f"(__uint_as_float(x)), "r"(random & 0xffff)); \
        return y & 0xff;                                                                  \
    }
#define TO_FP4_FOUR(NAME, INSTRUCTION)                                                    \
    __device__ uint32_t NAME(uint32_t x, uint32_t random) {                               \
        uint16_t y;                                                                       \
        asm volatile(INSTRUCTION " %0, {%1, %1, %1, %2}, %3;"                             \
                     : "=h"(y) : "f"(0.0f), "f"(__uint_as_float(x)),                      \
                       "r"((random & 0xff) | (random >> 8 & 0xff) << 16));                \
        return y & 0xf;                                                                   \
    }

TO_16(fp16_rn, "cvt.rn.f16.f32")
TO_16(fp16_rz, "cvt.rz.f16.f32")
TO_16(fp16_rm, "cvt.rm.f16.f32")
TO_16(fp16_rp, "cvt.rp.f16.f32")
TO_16(bf16_rn, "cvt.rn.bf16.f32")
TO_16(bf16_rz, "cvt.rz.bf16.f32")
TO_TF32(tf32_rna, "cvt.rna.tf32.f32")
#if FLAMIA_ARCH >= 900
TO_TF32(tf32_rn, "cvt.rn.tf32.f32")
TO_TF32(tf32_rz, "cvt.rz.tf32.f32")
#endif
#if FLAMIA_ARCH >= 890
TO_PAIR(e4m3_rn, "cvt.rn.satfinite.e4m3x2.f32")
TO_PAIR(e5m2_rn, "cvt.rn.satfinite.e5m2x2.f32")
#endif
#if FLAMIA_ARCH >= 1000
TO_FP4_PAIR(e2m1_rn, "cvt.rn.satfinite.e2m1x2.f32")
TO_PAIR(e2m3_rn, "cvt.rn.satfinite.e2m3x2.f32")
TO_PAIR(e3m2_rn, "cvt.rn.satfinite.e3m2x2.f32")
TO_PAIR(e8m0_rz, "cvt.rz.ue8m0x2.f32")
TO_PAIR(e8m0_rp, "cvt.rp.ue8m0x2.f32")
TO_PAIR(e8m0_rz_sat, "cvt.rz.satfinite.ue8m0x2.f32")
TO_PAIR(e8m0_rp_sat, "cvt.rp.satfinite.ue8m0x2.f32")
#endif
#define HAS_STOCHASTIC (FLAMIA_ARCH == 1000 || FLAMIA_ARCH == 1030)
#if HAS_STOCHASTIC
TO_FOUR(e4m3_rs, "cvt.rs.satfinite.e4m3x4.f32")
TO_FOUR(e5m2_rs, "cvt.rs.satfinite.e5m2x4.f32")
TO_FOUR(e2m3_rs, "cvt.rs.satfinite.e2m3x4.f32")
TO_FOUR(e3m2_rs, "cvt.rs.satfinite.e3m2x4.f32")
TO_FP4_FOUR(e2m1_rs, "cvt.rs.satfinite.e2m1x4.f32")
#endif

const Function KNOWN[] = {
    {FP16_RN, answer<fp16_rn>},          {FP16_RZ, answer<fp16_rz>},          {FP16_RM, answer<fp16_rm>},
    {FP16_RP, answer<fp16_rp>},          {BF16_RN, answer<bf16_rn>},          {BF16_RZ, answer<bf16_rz>},
    {TF32_RNA, answer<tf32_rna>},
#if FLAMIA_ARCH >= 900
    {TF32_RN, answer<tf32_rn>},          {TF32_RZ, answer<tf32_rz>},
#endif
#if FLAMIA_ARCH >= 890
    {E4M3_RN_SAT, answer<e4m3_rn>},      {E5M2_RN_SAT, answer<e5m2_rn>},
#endif
#if FLAMIA_ARCH >= 1000
    {E2M1_RN_SAT, answer<e2m1_rn>},      {E2M3_RN_SAT, answer<e2m3_rn>},      {E3M2_RN_SAT, answer<e3m2_rn>},
    {E8M0_RZ, answer<e8m0_rz>},          {E8M0_RP, answer<e8m0_rp>},          {E8M0_RZ_SAT, answer<e8m0_rz_sat>},
    {E8M0_RP_SAT, answer<e8m0_rp_sat>},
#endif
#if HAS_STOCHASTIC
    {E4M3_RS_SAT, answer<e4m3_rs>},      {E5M2_RS_SAT, answer<e5m2_rs>},      {E2M3_RS_SAT, answer<e2m3_rs>},
    {E3M2_RS_SAT, answer<e3m2_rs>},      {E2M1_RS_SAT, answer<e2m1_rs>},
#endif
};

int main(int count, char **arguments) { return answer_files(KNOWN, count, arguments); }
