// The approximate functions of the special function unit.
#include "inputs.cuh"

enum Special : uint32_t { EX2, LG2, RCP, TANH };

#define SPECIAL(NAME, INSTRUCTION)                                                    \
    __device__ uint32_t NAME(uint32_t x, uint32_t) {                                  \
        float y;                                                                      \
        asm volatile(INSTRUCTION " %0, %1;" : "=f"(y) : "f"(__uint_as_float(x)));     \
        return __float_as_uint(y);                                                    \
    }
SPECIAL(ex2, "ex2.approx.ftz.f32")
SPECIAL(lg2, "lg2.approx.ftz.f32")
SPECIAL(rcp, "rcp.approx.ftz.f32")
SPECIAL(tanh_of, "tanh.approx.f32")

const Function KNOWN[] = {
    {EX2, answer<ex2>}, {LG2, answer<lg2>}, {RCP, answer<rcp>}, {TANH, answer<tanh_of>},
};

int main(int count, char **arguments) { return answer_files(KNOWN, count, arguments); }
