// Make the inputs of a golden pack's cases anew, and compare them with the pack: cuda_inputs PACK
//
// Compiled by nvcc, every element is made on the GPU; compiled as C++, on the host, by the same source.
// One line a tensor: case, tensor, SHA-256 of its bytes, "same" or "differs". Cases of recorded inputs
// have no formula and are left out. Exit status: 0 all are the same, 1 some differ, 2 no pack, or no GPU.
//
//     nvcc -std=c++17 -I "$(python -m flamia_ref.golden.headers)" cuda_inputs.cu -o cuda_inputs
//     g++ -std=c++17 -I "$(python -m flamia_ref.golden.headers)" -x c++ cuda_inputs.cu -o host_inputs
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "flamia_ref/inputs.hpp"
#include "flamia_ref/pack.hpp"

namespace inputs = flamia_ref::inputs;

namespace {

struct Shape {
    std::uint64_t tokens, heads, channels;
    std::uint64_t size() const { return tokens * heads * channels; }
};

FLAMIA_REF_HD std::uint16_t element(const inputs::Generator& made, const inputs::Box* boxes, std::uint64_t count, std::uint64_t i) {
    std::uint16_t bits = made(i);
    const std::uint64_t c = i % made.head_dim, h = i / made.head_dim % made.heads, t = i / made.head_dim / made.heads;
    for (std::uint64_t box = 0; box < count; ++box)
        if (boxes[box].holds(t, h, c)) bits = boxes[box].value(t, h, c);
    return bits;
}

#ifdef __CUDACC__
void require(cudaError_t status) {
    if (status != cudaSuccess) throw flamia_ref::Error(std::string("CUDA: ") + cudaGetErrorString(status));
}

__global__ void fill(std::uint16_t* out, std::uint64_t size, inputs::Generator made, const inputs::Box* boxes, std::uint64_t count) {
    const std::uint64_t i = static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < size) out[i] = element(made, boxes, count, i);
}

std::vector<std::uint16_t> make(Shape shape, const inputs::Generator& made, const std::vector<inputs::Box>& boxes) {
    std::vector<std::uint16_t> host(shape.size());
    if (host.empty()) return host;
    std::uint16_t* out = nullptr;
    inputs::Box* on_device = nullptr;
    require(cudaMalloc(&out, host.size() * sizeof(std::uint16_t)));
    require(cudaMalloc(&on_device, (boxes.size() + 1) * sizeof(inputs::Box)));
    require(cudaMemcpy(on_device, boxes.data(), boxes.size() * sizeof(inputs::Box), cudaMemcpyHostToDevice));
    fill<<<static_cast<unsigned>((host.size() + 255) / 256), 256>>>(out, host.size(), made, on_device, boxes.size());
    require(cudaGetLastError());
    require(cudaMemcpy(host.data(), out, host.size() * sizeof(std::uint16_t), cudaMemcpyDeviceToHost));
    require(cudaFree(on_device));
    require(cudaFree(out));
    return host;
}
#else
std::vector<std::uint16_t> make(Shape shape, const inputs::Generator& made, const std::vector<inputs::Box>& boxes) {
    std::vector<std::uint16_t> host(shape.size());
    for (std::uint64_t i = 0; i < host.size(); ++i) host[i] = element(made, boxes.data(), boxes.size(), i);
    return host;
}
#endif

bool distribution_of(const std::string& name, inputs::Distribution& found) {
    static const char* const names[] = {"bell", "outliers", "wide", "ladder", "integers"};
    for (int i = 0; i < 5; ++i) {
        if (name != names[i]) continue;
        found = static_cast<inputs::Distribution>(i);
        return true;
    }
    return false;
}

std::vector<inputs::Box> boxes_of(const flamia_ref::Spec& spec, const std::string& tensor) {
    std::vector<inputs::Box> boxes;
    for (const auto& one : spec.fills) {
        if (one.tensor != tensor) continue;
        boxes.push_back({{one.tokens[0], one.tokens[1]}, {one.heads[0], one.heads[1]}, {one.channels[0], one.channels[1]},
                         one.bits, {one.steps[0], one.steps[1], one.steps[2]}});
    }
    return boxes;
}

int run(const char* folder) {
    static const char* const tensors[] = {"q", "k", "v", "dout"};
    int status = flamia_ref::exit_pass;
    const auto pack = flamia_ref::Pack::open(folder);
    for (const auto& one : pack.cases()) {
        const auto& spec = one.spec;
        inputs::Distribution how;
        if (!distribution_of(spec.distribution, how)) {
            if (spec.distribution != "recorded") throw flamia_ref::Error(one.name + " has a distribution unknown here");
            continue;
        }
        for (int number = 0; number < 4; ++number) {
            const bool query = number == 0 || number == 3;
            const Shape shape{query ? spec.tokens() : spec.key_tokens(), query ? spec.heads : spec.kv_heads, spec.head_dim};
            const inputs::Generator made(static_cast<inputs::Tensor>(number), spec.seed, how, spec.exponent, shape.heads, shape.channels);
            const auto bits = make(shape, made, boxes_of(spec, tensors[number]));
            const auto digest = flamia_ref::sha256(bits.data(), bits.size() * 2);
            const bool same = digest == one.find(tensors[number])->sha256;
            std::printf("%s %s %s %s\n", one.name.c_str(), tensors[number], digest.c_str(), same ? "same" : "differs");
            if (!same) status = flamia_ref::exit_mismatch;
        }
    }
    return status;
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 2) {
        std::fprintf(stderr, "usage: cuda_inputs PACK\n");
        return flamia_ref::exit_bad_input;
    }
    try {
        return run(arguments[1]);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "cuda_inputs: %s\n", error.what());
        return flamia_ref::exit_bad_input;
    }
}
