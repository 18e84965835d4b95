// Files of operands and results, and errors. Every number in a file is little-endian.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cuda_runtime.h>

constexpr uint32_t FILE_MAGIC = 0x504d4c46;  // "FLMP"
constexpr uint32_t FILE_VERSION = 1;

// Exit statuses that the caller tells apart.
constexpr int EXIT_FAULT = 1, EXIT_NOT_HERE = 3;

[[noreturn]] inline void stop(const char *what, const char *which, int status = EXIT_FAULT) {
    std::fprintf(stderr, "%s: %s\n", what, which);
    std::exit(status);
}

inline void check(cudaError_t error, const char *what) {
    if (error != cudaSuccess) stop(what, cudaGetErrorString(error));
}

inline std::vector<uint8_t> read_file(const char *name) {
    std::FILE *file = std::fopen(name, "rb");
    if (!file) stop("cannot read", name);
    std::vector<uint8_t> data;
    if (std::fseek(file, 0, SEEK_END)) stop("cannot read", name);
    data.resize(std::ftell(file));
    std::rewind(file);
    if (std::fread(data.data(), 1, data.size(), file) != data.size()) stop("cannot read", name);
    std::fclose(file);
    return data;
}

inline void write_words(std::FILE *file, const uint32_t *words, size_t count, const char *name) {
    if (std::fwrite(words, sizeof(uint32_t), count, file) != count) stop("cannot write", name);
}

inline void write_file(const char *name, const std::vector<uint32_t> &words) {
    std::FILE *file = std::fopen(name, "wb");
    if (!file) stop("cannot write", name);
    write_words(file, words.data(), words.size(), name);
    if (std::fclose(file)) stop("cannot write", name);
}

// Memory of the device, freed at the end of its scope.
template <typename T>
struct Buffer {
    T *data = nullptr;
    size_t count;

    explicit Buffer(size_t count) : count(count) {
        check(cudaMalloc(reinterpret_cast<void **>(&data), (count ? count : 1) * sizeof(T)), "cudaMalloc");
    }
    ~Buffer() { cudaFree(data); }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;

    void fill(const void *from) {
        check(cudaMemcpy(data, from, count * sizeof(T), cudaMemcpyHostToDevice), "copy to the device");
    }
    void fetch(void *to, size_t wanted) const {
        check(cudaMemcpy(to, data, wanted * sizeof(T), cudaMemcpyDeviceToHost), "copy from the device");
    }
};

inline void finish_kernel() {
    check(cudaGetLastError(), "launch");
    check(cudaDeviceSynchronize(), "kernel");
}
