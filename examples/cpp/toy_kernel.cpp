// Where a kernel goes: toy_kernel PACK RESULTS [BROKEN]
//
// For every case of the pack the "kernel" gives the expected tensors, and, where BROKEN names one of
// them, such as v.scales or out, that one with a bit of its first element changed. They are checked
// here, in memory, and written to the folder RESULTS for `flamia-ref golden check PACK RESULTS`.
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>

#include "flamia_ref/pack.hpp"

namespace {

// A real one would copy data["q"], data["v.scales"], ... to the device, launch, and copy back.
flamia_ref::Results kernel(const flamia_ref::Data& data, const std::string& broken) {
    flamia_ref::Results given;
    for (const auto& entry : data.about().tensors) {
        if (flamia_ref::is_input(entry.stage)) continue;
        const auto expected = data[entry.name];
        auto bytes = expected.copy<unsigned char>();
        if (entry.name == broken && !bytes.empty()) bytes[entry.bytes / flamia_ref::elements(entry.shape) - 1] ^= 0x40;
        given.add(entry.name, expected.like(bytes.data(), bytes.size()));
    }
    return given;
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 3 && count != 4) {
        std::fprintf(stderr, "usage: toy_kernel PACK RESULTS [BROKEN]\n");
        return flamia_ref::exit_bad_input;
    }
    try {
        const auto pack = flamia_ref::Pack::open(arguments[1]);
        const std::filesystem::path folder = arguments[2];
        std::filesystem::create_directory(folder);
        int status = flamia_ref::exit_pass;
        for (const auto& one : pack.cases()) {
            const auto data = pack.load(one);
            const auto given = kernel(data, count == 4 ? arguments[3] : "");
            const auto result = flamia_ref::check(data, given);
            std::puts(result.text().c_str());
            if (result.exit_code() != flamia_ref::exit_pass) status = result.exit_code();
            given.write(folder / one.file);
        }
        return status;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "toy_kernel: %s\n", error.what());
        return flamia_ref::exit_bad_input;
    }
}
