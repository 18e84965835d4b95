// Files of single inputs: a Request and then, for a list, its words. Used for conversions and special functions.
#pragma once

#include <cstring>

#include "files.cuh"

// What is asked for: results of `count` float32 bit patterns from `start` on; results of the `count` inputs that
// follow, two words each (float32 bits, random bits); or all 2^32 bit patterns, as the places where the result changes.
enum Mode : uint32_t { RANGE, LIST, RUNS };

struct Request {
    uint32_t magic, version, function, mode, start, count, reserved[2];
};
static_assert(sizeof(Request) == 32, "the header of a file");

constexpr uint32_t MOST_RUNS = 1u << 22;

using Rule = uint32_t (*)(uint32_t, uint32_t);

template <Rule RULE>
__global__ void results(const uint32_t *inputs, uint32_t start, uint32_t count, uint32_t *to) {
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
        to[i] = inputs ? RULE(inputs[2 * i], inputs[2 * i + 1]) : RULE(start + uint32_t(i), 0);
}

template <Rule RULE>
__global__ void runs(uint32_t *found, unsigned long long *count) {
    const uint64_t all = uint64_t(1) << 32, stride = uint64_t(gridDim.x) * blockDim.x;
    for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < all; i += stride) {
        uint32_t result = RULE(uint32_t(i), 0);
        if (i && result == RULE(uint32_t(i) - 1, 0)) continue;
        unsigned long long at = atomicAdd(count, 1ull);
        if (at < MOST_RUNS) found[2 * at] = uint32_t(i), found[2 * at + 1] = result;
    }
}

constexpr unsigned BLOCKS = 4096, THREADS = 256;

template <Rule RULE>
void answer(const Request &request, const uint32_t *words, const char *output) {
    if (request.mode == RUNS) {
        Buffer<uint32_t> found(2 * size_t(MOST_RUNS));
        Buffer<unsigned long long> count(1);
        unsigned long long total = 0;
        count.fill(&total);
        runs<RULE><<<BLOCKS, THREADS>>>(found.data, count.data);
        finish_kernel();
        count.fetch(&total, 1);
        const size_t kept = total < MOST_RUNS ? total : MOST_RUNS;
        std::vector<uint32_t> file(1 + 2 * kept);
        file[0] = total > 0xffffffffull ? 0xffffffffu : uint32_t(total);
        found.fetch(file.data() + 1, 2 * kept);
        write_file(output, file);
        return;
    }
    Buffer<uint32_t> inputs(request.mode == LIST ? 2 * size_t(request.count) : 0), to(request.count);
    if (request.mode == LIST) inputs.fill(words);
    const uint32_t *from = request.mode == LIST ? inputs.data : nullptr;
    if (request.count) results<RULE><<<BLOCKS, THREADS>>>(from, request.start, request.count, to.data);
    finish_kernel();
    std::vector<uint32_t> file(request.count);
    to.fetch(file.data(), request.count);
    write_file(output, file);
}

struct Function {
    uint32_t number;
    void (*answer)(const Request &, const uint32_t *, const char *);
};

inline void answer_file(const Function *known, size_t count, const char *input, const char *output) {
    std::vector<uint8_t> file = read_file(input);
    if (file.size() < sizeof(Request)) stop("too short", input);
    Request request;
    std::memcpy(&request, file.data(), sizeof(Request));
    if (request.magic != FILE_MAGIC || request.version != FILE_VERSION) stop("not a request of this version", input);
    const size_t words = request.mode == LIST ? 2 * size_t(request.count) : 0;
    if (request.mode > RUNS || file.size() != sizeof(Request) + 4 * words) stop("of the wrong size", input);
    for (size_t i = 0; i < count; i++)
        if (known[i].number == request.function) {
            known[i].answer(request, reinterpret_cast<const uint32_t *>(file.data() + sizeof(Request)), output);
            return;
        }
    stop("this program has no function for", input, EXIT_NOT_HERE);
}

template <size_t COUNT>
int answer_files(const Function (&known)[COUNT], int count, char **arguments) {
    if (count < 3 || count % 2 == 0) stop("usage", "INPUT OUTPUT [INPUT OUTPUT]...");
    for (int i = 1; i < count; i += 2) answer_file(known, COUNT, arguments[i], arguments[i + 1]);
    return 0;
}
