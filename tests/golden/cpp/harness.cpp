// The headers under test, driven from test_headers.py; compiled with every warning and the sanitizers.
//
// Exit status: 0 done, 1 a check found a difference, 2 flamia_ref::Error. Anything else is a fault.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "flamia_ref/inputs.hpp"
#include "flamia_ref/pack.hpp"
#include "flamia_ref/pack.hpp"  // a second time does no harm

namespace ref = flamia_ref;
namespace inputs = flamia_ref::inputs;
using Words = std::vector<std::string>;

namespace {

int check(const Words& words) {
    int status = ref::exit_pass;
    for (const auto& result : ref::check(ref::Pack::open(words.at(0)), words.at(1))) {
        std::puts(result.text().c_str());
        status = std::max(status, result.exit_code());
    }
    return status;
}

// Read all of a pack: its cases, and their tensors in the order of the dataflow.
int list(const Words& words) {
    const auto pack = ref::Pack::open(words.at(0));
    for (const auto& one : pack.cases()) {
        const auto data = pack.load(one);
        std::printf("%s %s", one.name.c_str(), one.spec.why.c_str());
        for (const auto& entry : one.tensors) std::printf(" %s", entry.name.c_str());
        std::puts("");
    }
    return 0;
}

// order 0|1: the stages that any recipe may have, delta early or late.
int order(const Words& words) {
    for (const auto& name : ref::detail::dataflow(words.at(0) == "1")) std::puts(name.c_str());
    return 0;
}

int digest(const Words& words) {
    for (const auto& path : words) {
        const auto bytes = ref::detail::read_plain(path, 1 << 20, true);
        std::puts(ref::sha256(bytes.data(), bytes.size()).c_str());
    }
    return 0;
}

// Lines of: queries keys causal top_left left right, -1 for none. A row of 0 and 1 for each query.
int masks() {
    long long queries, keys, causal, top_left, left, right;
    while (std::cin >> queries >> keys >> causal >> top_left >> left >> right) {
        ref::Spec spec;
        spec.lengths = {5, static_cast<std::uint64_t>(queries)};
        spec.key_lengths = {2, static_cast<std::uint64_t>(keys)};
        spec.causal = causal != 0;
        spec.top_left = top_left != 0;
        if (left >= 0) spec.left = left;
        if (right >= 0) spec.right = right;
        std::string text;
        for (std::uint64_t i = 0; i < spec.lengths[1]; ++i)
            for (std::uint64_t j = 0; j < spec.key_lengths[1]; ++j) text += spec.visible(1, i, j) ? '1' : '0';
        std::puts(("." + text).c_str());
    }
    return 0;
}

// Lines of: tensor distribution seed exponent tokens heads channels, by their numbers. SHA-256 of the bits.
int generate() {
    int tensor, how, exponent;
    std::uint64_t seed, tokens, heads, channels;
    while (std::cin >> tensor >> how >> seed >> exponent >> tokens >> heads >> channels) {
        const inputs::Generator made(static_cast<inputs::Tensor>(tensor), seed, static_cast<inputs::Distribution>(how),
                                     exponent, heads, channels);
        std::vector<std::uint16_t> bits(tokens * heads * channels);
        for (std::uint64_t i = 0; i < bits.size(); ++i) bits[i] = made(i);
        std::puts(ref::sha256(bits.data(), bits.size() * 2).c_str());
    }
    return 0;
}

// Pairs of n and an exponent: the bits of n * 2^exponent.
int round() {
    int n, exponent;
    while (std::cin >> n >> exponent) std::printf("%d\n", inputs::bfloat16_bits(n, exponent));
    return 0;
}

static_assert(inputs::splitmix64(1234567, 0) == UINT64_C(6457827717110365317), "usable at compile time");

// ------------------------------------------------------------------------------------- fuzzing

struct Random {
    std::uint64_t seed, count = 0;
    std::uint64_t operator()(std::uint64_t below) { return inputs::splitmix64(seed, count++) % below; }
};

std::string read(const std::filesystem::path& path) {
    const auto bytes = ref::detail::read_plain(path, UINT64_C(1) << 30, true);
    return std::string(bytes.begin(), bytes.end());
}

const std::vector<std::string>& fragments() {
    static const std::vector<std::string> all = {
        "0", "1", "-1", "-0", "16777217", "9223372036854775807", "18446744073709551615", "18446744073709551616",
        "1152921504606846976", "1.5", "1e9", "null", "true", "\"\"", "\"../x\"", "\"U8\"", "\"BF16\"", "\"s.99999\"",
        "\"\\u0000\"", "\"\\ud800\"", "[]", "{}", "[", "]", "{", "}", ",", ":", "\"", "\\", " ", "\n", std::string(1, '\0')};
    return all;
}

// Change text at a few places: characters, fragments in place of values, parts cut out or doubled.
std::string mutated(std::string text, Random& random) {
    for (auto rounds = random(3) == 0 ? 3 : 1; rounds > 0 && !text.empty(); --rounds) {
        const auto at = random(text.size());
        const auto start = text.find_last_of(" [:,", at), end = text.find_first_of(",]}\n", at);
        const auto& fragment = fragments()[random(fragments().size())];
        const auto length = 1 + random(std::min<std::uint64_t>(text.size() - at, 300));
        switch (random(8)) {
            case 0: text[at] = static_cast<char>(random(256)); break;
            case 1: text.insert(at, fragment); break;
            case 2: text.erase(at, length); break;
            case 3: text.insert(at, text.substr(at, length)); break;
            default:
                if (start != std::string::npos && end != std::string::npos && start < end)
                    text.replace(start + 1, end - start - 1, fragment);
        }
    }
    return text;
}

// Give a changed manifest the digest that fits, as somebody who means harm would.
std::string forged(std::string text) {
    const std::string key = "\n \"digest\": \"";
    const auto at = text.find(key);
    if (at == std::string::npos || at + key.size() + 66 > text.size()) return text;
    auto rest = text;
    rest.erase(at, key.size() + 66);
    return text.replace(at + key.size(), 64, ref::sha256(rest.data(), rest.size()));
}

ref::Bytes with_header(const ref::Bytes& file, Random& random) {
    std::uint64_t length = 0;
    for (std::size_t i = 8; i-- > 0;) length = length << 8 | file[i];
    const auto body = file.begin() + 8 + static_cast<std::ptrdiff_t>(length);
    const auto header = mutated(std::string(file.begin() + 8, body), random);
    auto claimed = random(20) == 0 ? UINT64_C(1) << random(64) : header.size();
    ref::Bytes made;
    for (int i = 0; i < 8; ++i, claimed >>= 8) made.push_back(static_cast<unsigned char>(claimed & 255));
    made.insert(made.end(), header.begin(), header.end());
    made.insert(made.end(), body, file.end());
    return made;
}

// fuzz PACK FOLDER COUNT SEED: of each kind of input, how many were accepted and how many refused.
int fuzz(const Words& words) {
    const std::filesystem::path folder = words.at(0), scratch = words.at(1);
    const auto manifest = read(folder / "manifest.json");
    const auto pack = ref::Pack::open(folder);
    const auto& one_case = pack.cases().back();
    const auto data = pack.load(one_case);
    const auto file = ref::detail::read_plain(folder / one_case.file, one_case.size, false);
    ref::Results whole;
    for (const auto& entry : one_case.tensors) whole.add(entry.name, data[entry.name]);
    whole.write(scratch / "whole");
    const auto results = ref::detail::read_plain(scratch / "whole", 1 << 30, false);
    Random random{std::stoull(words.at(3))};
    std::uint64_t accepted[3] = {}, refused[3] = {};
    for (auto left = std::stoull(words.at(2)); left > 0; --left) {
        const auto kind = left % 3;
        try {
            if (kind == 0) {
                auto text = mutated(manifest, random);
                if (random(4) != 0) text = forged(std::move(text));
                for (const auto& one : ref::detail::manifest(text, "fuzzed"))
                    if (one.name == one_case.name) ref::detail::verified(one, file, "file");
            } else if (kind == 1) {
                const auto bytes = with_header(file, random);
                for (const auto& [name, one] : ref::detail::safetensors(bytes, "fuzzed"))
                    ref::sha256(bytes.data() + one.offset, one.bytes);
            } else {
                auto bytes = random(2) == 0 ? with_header(results, random) : results;
                bytes[random(bytes.size())] ^= static_cast<unsigned char>(1 + random(255));
                std::ofstream out(scratch / "fuzzed", std::ios::binary | std::ios::trunc);
                out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
                out.close();
                ref::check(data, ref::Results::read(scratch / "fuzzed", one_case)).text();
            }
            ++accepted[kind];
        } catch (const ref::Error& error) {
            ++refused[kind];
            const std::string what = error.what();
            if (what.empty() || what.find('\n') != std::string::npos) throw std::logic_error("a message of two lines");
        }
    }
    for (int kind = 0; kind < 3; ++kind)
        std::printf("%llu %llu\n", static_cast<unsigned long long>(accepted[kind]), static_cast<unsigned long long>(refused[kind]));
    return 0;
}

int run(const std::string& what, const Words& words) {
    if (what == "check") return check(words);
    if (what == "list") return list(words);
    if (what == "order") return order(words);
    if (what == "digest") return digest(words);
    if (what == "masks") return masks();
    if (what == "generate") return generate();
    if (what == "round") return round();
    if (what == "fuzz") return fuzz(words);
    return 3;
}

}  // namespace

int main(int count, char** arguments) {
    try {
        return count < 2 ? 3 : run(arguments[1], Words(arguments + 2, arguments + count));
    } catch (const ref::Error& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 2;
    }
}
