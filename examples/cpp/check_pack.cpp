// Check a kernel's results against a golden pack: check_pack PACK RESULTS
//
// RESULTS is a folder of CASE.safetensors. Exit status: 0 every tensor is equal bit for bit, 1 some
// differ, 2 the pack or the results cannot be used.
#include <cstdio>
#include <exception>

#include "flamia_ref/pack.hpp"

int main(int count, char** arguments) {
    if (count != 3) {
        std::fprintf(stderr, "usage: check_pack PACK RESULTS\n");
        return flamia_ref::exit_bad_input;
    }
    try {
        const auto pack = flamia_ref::Pack::open(arguments[1]);
        int status = flamia_ref::exit_pass;
        for (const auto& result : flamia_ref::check(pack, arguments[2])) {
            std::puts(result.text().c_str());
            if (result.exit_code() != flamia_ref::exit_pass) status = result.exit_code();
        }
        return status;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "check_pack: %s\n", error.what());
        return flamia_ref::exit_bad_input;
    }
}
