// Golden packs of flamia-ref in C++17: read them, and check a kernel's results against them.
//
// One header, no dependency. Usable from host code of .cpp and .cu files:
//
//     const auto pack = flamia_ref::Pack::open("pack");
//     for (const auto& one : pack.cases()) {
//         const auto data = pack.load(one);                  // every digest checked
//         const auto q = data["q"];                          // q.shape, q.data, q.bytes, q.at<std::uint16_t>(i)
//         flamia_ref::Results given;
//         given.add("out", data["out"].like(pointer, bytes));  // what the kernel gave, copied
//         const auto result = flamia_ref::check(data, given);
//         std::puts(result.text().c_str());                  // the first stage that departs, and where
//     }
//
// A pack and the results are untrusted: sizes are bounded by those of the files, nothing is followed
// out of the pack, and the SHA-256 of every tensor is checked before use. Whatever is wrong with them
// is a flamia_ref::Error with a message of one line. Results are compared bit for bit, in the order of
// the dataflow; NaN equals NaN. What a float tensor may be beside the bits of the pack is a matter for
// `flamia-ref golden check`, which reads what Results::write writes.
#ifndef FLAMIA_REF_PACK_HPP
#define FLAMIA_REF_PACK_HPP

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#define FLAMIA_REF_POSIX 1
#endif

#if defined(__BYTE_ORDER__) && defined(__ORDER_BIG_ENDIAN__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#error "pack.hpp reads little-endian data in place; this machine is big-endian"
#endif

namespace flamia_ref {

/// Something is wrong with a pack, with results, or with how they are used. what() is one line.
class Error : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

constexpr std::uint64_t schema_version = 3;  // the packs that this header reads

// Exit status of programs that check, as of the command line: every tensor equal; some differ; bad input.
constexpr int exit_pass = 0;
constexpr int exit_mismatch = 1;
constexpr int exit_bad_input = 2;

using Shape = std::vector<std::uint64_t>;
using Bytes = std::vector<unsigned char>;

namespace detail {

constexpr std::uint64_t most_manifest_bytes = UINT64_C(64) << 20;
constexpr std::uint64_t most_results_header = UINT64_C(1) << 20;
constexpr std::uint64_t largest_count = UINT64_C(1) << 24;  // of heads, channels, tokens
constexpr std::size_t most_documents = std::size_t{1} << 14;
constexpr int deepest = 64;

// ------------------------------------------------------------------------------------- text

/// A foreign string for a message: quoted, one line, and short.
inline std::string shown(std::string_view text) {
    static const char* digits = "0123456789abcdef";
    std::string out = "'";
    for (const char one : text.substr(0, 80)) {
        const auto byte = static_cast<unsigned char>(one);
        if (byte >= 0x20 && byte < 0x7f) {
            out += one;
        } else {
            out += "\\x";
            out += digits[byte >> 4];
            out += digits[byte & 15];
        }
    }
    return out + (text.size() > 80 ? "...'" : "'");
}

inline std::string hexadecimal(std::uint64_t value, int count) {
    static const char* digits = "0123456789abcdef";
    std::string out(static_cast<std::size_t>(count), '0');
    for (int i = count - 1; i >= 0; --i, value >>= 4) out[static_cast<std::size_t>(i)] = digits[value & 15];
    return out;
}

inline std::string listed(const Shape& shape) {
    std::string out = "[";
    for (std::size_t i = 0; i < shape.size(); ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
    return out + "]";
}

/// Whether a name is plain: at most 80 of a-z 0-9 . _ -, a letter or digit first and last.
inline bool plain_name(std::string_view name) {
    const auto alphanumeric = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); };
    if (name.empty() || name.size() > 80 || !alphanumeric(name.front()) || !alphanumeric(name.back())) return false;
    return std::all_of(name.begin(), name.end(),
                       [&](char c) { return alphanumeric(c) || c == '.' || c == '_' || c == '-'; });
}

/// How many elements a shape has. `what` names the tensor in the Error for more than 2^48, which no pack holds.
inline std::uint64_t product(const Shape& shape, const std::string& what) {
    constexpr std::uint64_t limit = UINT64_C(1) << 48;
    // A size of 0 makes the tensor empty, and must not hide that the others overflow.
    std::uint64_t all = 1;
    bool empty = false;
    for (const auto size : shape) {
        empty = empty || size == 0;
        const auto factor = std::max<std::uint64_t>(size, 1);
        if (factor > limit / all) throw Error(what + " has more than 2^48 elements");
        all *= factor;
    }
    return empty ? 0 : all;
}

// ------------------------------------------------------------------------------------- SHA-256

/// SHA-256 (FIPS 180-4) of bytes, in hexadecimal.
inline std::string sha256(const unsigned char* data, std::uint64_t count) {
    static constexpr std::array<std::uint32_t, 64> k = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    std::array<std::uint32_t, 8> state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                          0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    const auto turned = [](std::uint32_t x, int n) { return (x >> n) | (x << (32 - n)); };
    const auto block = [&](const unsigned char* at) {
        std::array<std::uint32_t, 64> w{};
        for (std::size_t i = 0; i < 16; ++i) {
            w[i] = (static_cast<std::uint32_t>(at[4 * i]) << 24) | (static_cast<std::uint32_t>(at[4 * i + 1]) << 16) |
                   (static_cast<std::uint32_t>(at[4 * i + 2]) << 8) | static_cast<std::uint32_t>(at[4 * i + 3]);
        }
        for (std::size_t i = 16; i < 64; ++i) {
            const auto a = turned(w[i - 15], 7) ^ turned(w[i - 15], 18) ^ (w[i - 15] >> 3);
            const auto b = turned(w[i - 2], 17) ^ turned(w[i - 2], 19) ^ (w[i - 2] >> 10);
            w[i] = w[i - 16] + a + w[i - 7] + b;
        }
        auto s = state;
        for (std::size_t i = 0; i < 64; ++i) {
            const auto e = turned(s[4], 6) ^ turned(s[4], 11) ^ turned(s[4], 25);
            const auto one = s[7] + e + ((s[4] & s[5]) ^ (~s[4] & s[6])) + k[i] + w[i];
            const auto a = turned(s[0], 2) ^ turned(s[0], 13) ^ turned(s[0], 22);
            const auto two = a + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
            s = {one + two, s[0], s[1], s[2], s[3] + one, s[4], s[5], s[6]};
        }
        for (std::size_t i = 0; i < 8; ++i) state[i] += s[i];
    };
    std::uint64_t done = 0;
    for (; count - done >= 64; done += 64) block(data + done);
    std::array<unsigned char, 128> tail{};
    const auto rest = static_cast<std::size_t>(count - done);
    if (rest != 0) std::memcpy(tail.data(), data + done, rest);
    tail[rest] = 0x80;
    const std::size_t end = rest < 56 ? 64 : 128;
    for (std::size_t i = 0; i < 8; ++i) tail[end - 1 - i] = static_cast<unsigned char>((count << 3) >> (8 * i));
    for (std::size_t at = 0; at < end; at += 64) block(tail.data() + at);
    std::string out;
    for (const auto word : state) out += hexadecimal(word, 8);
    return out;
}

inline std::string sha256(std::string_view text) {
    return sha256(reinterpret_cast<const unsigned char*>(text.data()), text.size());
}

// ------------------------------------------------------------------------------------- files

/// The bytes of a regular file of at most `limit` bytes; an Error for anything else. A symbolic link
/// is one unless `follow`.
inline Bytes read_plain(const std::filesystem::path& path, std::uint64_t limit, bool follow) {
    const auto refuse = [&](const std::string& why) { throw Error(path.string() + " " + why); };
    Bytes data;
#ifdef FLAMIA_REF_POSIX
    struct Handle {
        int number;
        ~Handle() {
            if (number >= 0) ::close(number);
        }
    };
    if (!follow) {
        std::error_code ignored;
        if (std::filesystem::is_symlink(path, ignored)) refuse("is a symbolic link; a pack holds plain files only");
    }
    const Handle file{::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC | (follow ? 0 : O_NOFOLLOW))};
    if (file.number < 0) refuse("cannot be read: " + std::generic_category().message(errno));
    struct stat status {};
    if (::fstat(file.number, &status) != 0 || !S_ISREG(status.st_mode)) refuse("is not a regular file");
    const auto size = static_cast<std::uint64_t>(status.st_size);
    if (size > limit) refuse("has " + std::to_string(size) + " bytes; at most " + std::to_string(limit) + " are expected");
    data.resize(static_cast<std::size_t>(size));
    std::size_t done = 0;
    while (done < data.size()) {
        const auto got = ::read(file.number, data.data() + done, data.size() - done);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) refuse("cannot be read to its end");
        done += static_cast<std::size_t>(got);
    }
#else
    std::error_code failed;
    const auto state = follow ? std::filesystem::status(path, failed) : std::filesystem::symlink_status(path, failed);
    if (failed || !std::filesystem::is_regular_file(state)) refuse("is missing, or is not a regular file");
    const std::uint64_t size = std::filesystem::file_size(path, failed);
    if (failed) refuse("cannot be read");
    if (size > limit) refuse("has " + std::to_string(size) + " bytes; at most " + std::to_string(limit) + " are expected");
    data.resize(static_cast<std::size_t>(size));
    std::ifstream file(path, std::ios::binary);
    if (!data.empty()) file.read(reinterpret_cast<char*>(data.data()), static_cast<std::streamsize>(data.size()));
    if (!file) refuse("cannot be read to its end");
#endif
    return data;
}

// ------------------------------------------------------------------------------------- JSON

enum class Kind : unsigned char { null, no, yes, integer, string, list, object };

/// A value of a JSON text. `end` is the number of the first value after it and all that it holds.
struct Node {
    Kind kind;
    std::uint32_t end;
    std::string_view key;   // its name in an object, as written
    std::string_view text;  // a string without quotes, or a number, as written
};

/// JSON without floats, as a flat list of values over a text that must outlive it.
///
/// At most one value for four bytes of text, and 64 levels, so that a text takes memory in proportion.
class Json {
   public:
    Json(std::string_view text, std::string source) : text_(text), source_(std::move(source)) {
        if (text.size() >= std::numeric_limits<std::uint32_t>::max()) refuse("is too long");
        most_ = 1024 + text.size() / 4;
        value({}, 0);
        space();
        if (at_ != text_.size()) refuse("goes on after its end");
    }

    const std::vector<Node>& nodes() const { return nodes_; }
    const std::string& source() const { return source_; }

    /// The text in canonical form: keys sorted, an indent of one space, a newline at the end.
    ///
    /// An Error where keys are not in order already, or come twice.
    std::string canonical() const {
        std::string out;
        render(0, 0, out);
        return out + "\n";
    }

    [[noreturn]] void refuse(const std::string& why) const {
        throw Error(source_ + " is no JSON that can be read: it " + why + " at byte " + std::to_string(at_));
    }

   private:
    std::string_view text_;
    std::string source_;
    std::vector<Node> nodes_;
    std::size_t at_ = 0;
    std::size_t most_ = 0;

    char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

    void space() {
        while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\r' || text_[at_] == '\t'))
            ++at_;
    }

    void expect(char wanted) {
        if (peek() != wanted || at_ >= text_.size()) refuse(std::string("lacks a ") + wanted);
        ++at_;
    }

    std::string_view string() {
        expect('"');
        const auto start = at_;
        while (at_ < text_.size() && text_[at_] != '"') {
            const auto byte = static_cast<unsigned char>(text_[at_]);
            if (byte < 0x20) refuse("has a control character in a string");
            if (byte == '\\') {
                ++at_;
                const char kind = peek();
                if (kind == 'u') {
                    for (int i = 0; i < 4; ++i) {
                        ++at_;
                        const char d = peek();
                        if (!((d >= '0' && d <= '9') || (d >= 'a' && d <= 'f') || (d >= 'A' && d <= 'F')))
                            refuse("has a broken escape");
                    }
                } else if (kind == '\0' || std::strchr("\"\\/bfnrt", kind) == nullptr) {
                    refuse("has an unknown escape");
                }
            }
            ++at_;
        }
        const auto found = text_.substr(start, at_ - start);
        expect('"');
        return found;
    }

    void value(std::string_view key, int depth) {
        if (depth > deepest) refuse("is nested too deeply");
        if (nodes_.size() >= most_) refuse("has too many values");
        space();
        const auto mine = nodes_.size();
        nodes_.push_back({Kind::null, 0, key, {}});
        const char first = peek();
        if (first == '{' || first == '[') {
            nodes_[mine].kind = first == '{' ? Kind::object : Kind::list;
            items(first == '{', depth);
        } else if (first == '"') {
            const auto found = string();
            nodes_[mine].kind = Kind::string;
            nodes_[mine].text = found;
        } else if (first == '-' || (first >= '0' && first <= '9')) {
            const auto start = at_;
            if (first == '-') ++at_;
            const auto digits = at_;
            while (peek() >= '0' && peek() <= '9') ++at_;
            const auto count = at_ - digits;
            if (count == 0 || count > 20 || (text_[digits] == '0' && (count > 1 || first == '-')))
                refuse("has no whole number of at most 64 bits");
            if (peek() == '.' || peek() == 'e' || peek() == 'E') refuse("has a number that is not whole");
            nodes_[mine].kind = Kind::integer;
            nodes_[mine].text = text_.substr(start, at_ - start);
        } else {
            static constexpr std::array<std::pair<std::string_view, Kind>, 3> words = {
                {{"null", Kind::null}, {"false", Kind::no}, {"true", Kind::yes}}};
            const auto found = std::find_if(words.begin(), words.end(), [&](const auto& word) {
                return text_.substr(at_, word.first.size()) == word.first;
            });
            if (found == words.end()) refuse("has no value");
            nodes_[mine].kind = found->second;
            at_ += found->first.size();
        }
        nodes_[mine].end = static_cast<std::uint32_t>(nodes_.size());
    }

    void items(bool named, int depth) {
        const char close = named ? '}' : ']';
        ++at_;
        space();
        std::vector<std::string_view> keys;
        for (bool first = true; peek() != close || at_ >= text_.size(); first = false) {
            if (!first) {
                expect(',');
                space();
            }
            std::string_view key;
            if (named) {
                key = string();
                if (key.find('\\') != std::string_view::npos) refuse("has a key with an escape");
                keys.push_back(key);
                space();
                expect(':');
            }
            value(key, depth + 1);
            space();
        }
        ++at_;
        std::sort(keys.begin(), keys.end());
        if (std::adjacent_find(keys.begin(), keys.end()) != keys.end()) refuse("has a key twice");
    }

    void render(std::size_t index, int depth, std::string& out) const {
        const auto& node = nodes_[index];
        switch (node.kind) {
            case Kind::null: out += "null"; return;
            case Kind::no: out += "false"; return;
            case Kind::yes: out += "true"; return;
            case Kind::integer: out += node.text; return;
            case Kind::string: (out += '"').append(node.text) += '"'; return;
            case Kind::list:
            case Kind::object: break;
        }
        const bool named = node.kind == Kind::object;
        if (node.end == index + 1) {
            out += named ? "{}" : "[]";
            return;
        }
        out += named ? '{' : '[';
        std::string_view before;
        for (std::size_t i = index + 1; i < node.end; i = nodes_[i].end) {
            if (named && i != index + 1 && nodes_[i].key <= before)
                throw Error(source_ + " was changed since it was written: its form is not canonical");
            before = nodes_[i].key;
            out += i == index + 1 ? "\n" : ",\n";
            out.append(static_cast<std::size_t>(depth) + 1, ' ');
            if (named) ((out += '"').append(before)) += "\": ";
            render(i, depth + 1, out);
        }
        out += '\n';
        out.append(static_cast<std::size_t>(depth), ' ');
        out += named ? '}' : ']';
    }
};

/// A value of a Json with methods that throw an Error where it is not what they are asked for.
class Reader {
   public:
    Reader(const Json& json, std::uint32_t index, std::string path) : json_(&json), index_(index), path_(std::move(path)) {}
    explicit Reader(const Json& json) : Reader(json, 0, json.source()) {}

    std::string_view key() const { return node().key; }
    bool null() const { return node().kind == Kind::null; }
    const std::string& path() const { return path_; }

    std::vector<Reader> entries(Kind kind = Kind::list) const {
        if (node().kind != kind) wrong(kind == Kind::list ? "a list" : "an object");
        std::vector<Reader> found;
        for (std::uint32_t i = index_ + 1; i < node().end; i = json_->nodes()[i].end) {
            const auto& one = json_->nodes()[i];
            const auto name = kind == Kind::list ? std::to_string(found.size()) : short_name(one.key);
            found.emplace_back(*json_, i, path_ + ": " + name);
        }
        return found;
    }
    std::vector<Reader> members() const { return entries(Kind::object); }

    std::optional<Reader> find(std::string_view name) const {
        if (node().kind != Kind::object) wrong("an object");
        for (std::uint32_t i = index_ + 1; i < node().end; i = json_->nodes()[i].end)
            if (json_->nodes()[i].key == name) return Reader(*json_, i, path_ + ": " + std::string(name));
        return std::nullopt;
    }
    Reader operator[](std::string_view name) const {
        const auto found = find(name);
        if (!found) throw Error(path_ + " has no field '" + std::string(name) + "'");
        return *found;
    }

    /// A string that needs no escapes, such as a name.
    std::string text() const {
        if (node().kind != Kind::string || node().text.find('\\') != std::string_view::npos) wrong("a plain string");
        return std::string(node().text);
    }
    /// Any string, in UTF-8.
    std::string prose() const {
        if (node().kind != Kind::string) wrong("a string");
        return unescaped(node().text);
    }
    std::uint64_t integer(std::uint64_t most = std::numeric_limits<std::uint64_t>::max()) const {
        if (node().kind != Kind::integer || node().text.front() == '-') wrong("a whole number, not negative");
        std::uint64_t value = 0;
        for (const char digit : node().text) {
            const auto one = static_cast<std::uint64_t>(digit - '0');
            if (value > (most - one) / 10 || one > most) wrong("at most " + std::to_string(most));
            value = value * 10 + one;
        }
        return value;
    }
    /// An integer in [-most, most].
    std::int64_t signed_integer(std::int64_t most) const {
        if (node().kind != Kind::integer) wrong("a whole number");
        std::int64_t value = 0;
        const bool negative = node().text.front() == '-';
        for (const char digit : node().text.substr(negative ? 1 : 0)) {
            const std::int64_t one = digit - '0';
            if (one > most || value > (most - one) / 10) wrong("at most " + std::to_string(most) + " from 0");
            value = value * 10 + one;
        }
        return negative ? -value : value;
    }
    bool boolean() const {
        if (node().kind != Kind::yes && node().kind != Kind::no) wrong("true or false");
        return node().kind == Kind::yes;
    }
    /// A float, which canonical JSON writes as its bits.
    double number() const {
        const auto bits = (*this)["bits"].text();
        if (bits.size() != 18 || bits.compare(0, 2, "0x") != 0 ||
            bits.find_first_not_of("0123456789abcdef", 2) != std::string::npos)
            wrong("a float by its bits");
        const std::uint64_t word = std::stoull(bits.substr(2), nullptr, 16);
        double value = 0;
        static_assert(sizeof value == sizeof word && std::numeric_limits<double>::is_iec559);
        std::memcpy(&value, &word, sizeof value);
        return value;
    }
    std::string digest() const {
        auto found = text();
        if (found.size() != 64 || found.find_first_not_of("0123456789abcdef") != std::string::npos)
            wrong("64 hexadecimal digits");
        return found;
    }

    [[noreturn]] void wrong(const std::string& wanted) const {
        static constexpr std::array<const char*, 7> kinds = {"null", "false", "true", "", "", "a list", "an object"};
        const auto kind = static_cast<std::size_t>(node().kind);
        const auto found = *kinds[kind] != '\0' ? std::string(kinds[kind]) : shown(node().text);
        throw Error(path_ + " is " + found + "; it must be " + wanted);
    }

   private:
    const Json* json_;
    std::uint32_t index_;
    std::string path_;

    const Node& node() const { return json_->nodes()[index_]; }

    static std::string short_name(std::string_view key) {
        return plain_name(key) ? std::string(key) : shown(key);
    }

    static std::string unescaped(std::string_view text) {
        std::string out;
        const auto unit = [&](std::size_t at) {
            return static_cast<std::uint32_t>(std::stoul(std::string(text.substr(at, 4)), nullptr, 16));
        };
        for (std::size_t i = 0; i < text.size(); ++i) {
            if (text[i] != '\\') {
                out += text[i];
                continue;
            }
            const char kind = text[++i];
            if (kind != 'u') {
                static constexpr std::string_view from = "bfnrt", to = "\b\f\n\r\t";
                const auto found = from.find(kind);
                out += found == std::string_view::npos ? kind : to[found];
                continue;
            }
            auto point = unit(i + 1);
            i += 4;
            const bool high = point >= 0xd800 && point < 0xdc00;
            if (high && i + 6 < text.size() && text[i + 1] == '\\' && text[i + 2] == 'u') {
                const auto low = unit(i + 3);
                if (low >= 0xdc00 && low < 0xe000) {
                    point = 0x10000 + ((point - 0xd800) << 10) + (low - 0xdc00);
                    i += 6;
                }
            }
            if (point >= 0xd800 && point < 0xe000) point = 0xfffd;  // a half of a pair alone
            const auto put = [&](std::uint32_t byte) { out += static_cast<char>(static_cast<unsigned char>(byte)); };
            if (point < 0x80) {
                put(point);
            } else if (point < 0x800) {
                put(0xc0 | (point >> 6)), put(0x80 | (point & 63));
            } else if (point < 0x10000) {
                put(0xe0 | (point >> 12)), put(0x80 | ((point >> 6) & 63)), put(0x80 | (point & 63));
            } else {
                put(0xf0 | (point >> 18)), put(0x80 | ((point >> 12) & 63));
                put(0x80 | ((point >> 6) & 63)), put(0x80 | (point & 63));
            }
        }
        return out;
    }
};

// ------------------------------------------------------------------------------------- safetensors

/// Bits of an element of a safetensors dtype; 0 for one that there is not.
inline std::uint64_t bits_of(std::string_view dtype) {
    static constexpr std::array<std::pair<std::string_view, int>, 23> known = {
        {{"BOOL", 8},    {"U8", 8},        {"I8", 8},          {"F8_E4M3", 8},     {"F8_E5M2", 8}, {"F8_E8M0", 8},
         {"I16", 16},    {"U16", 16},      {"F16", 16},        {"BF16", 16},       {"I32", 32},    {"U32", 32},
         {"F32", 32},    {"I64", 64},      {"U64", 64},        {"F64", 64},        {"C64", 64},    {"F4", 4},
         {"F6_E2M3", 6}, {"F6_E3M2", 6},   {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"F4_E2M1", 8}}};
    const auto found = std::find_if(known.begin(), known.end(), [&](const auto& one) { return one.first == dtype; });
    return found == known.end() ? 0 : static_cast<std::uint64_t>(found->second);
}

struct Stored {
    std::string dtype;
    Shape shape;
    std::uint64_t offset;  // in the file
    std::uint64_t bytes;
};

/// The tensors of a safetensors file by name: every one inside the file, without holes or overlaps.
inline std::map<std::string, Stored> safetensors(const Bytes& file, const std::string& source) {
    const auto refuse = [&](const std::string& why) { throw Error(source + " is no whole safetensors file: " + why); };
    if (file.size() < 8) refuse("it has no header");
    std::uint64_t length = 0;
    for (std::size_t i = 0; i < 8; ++i) length |= static_cast<std::uint64_t>(file[i]) << (8 * i);
    if (length > file.size() - 8) refuse("its header is longer than the file");
    const std::string_view text(reinterpret_cast<const char*>(file.data()) + 8, static_cast<std::size_t>(length));
    const Json json(text, source);
    const std::uint64_t start = 8 + length, payload = file.size() - start;
    std::map<std::string, Stored> found;
    std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
    for (const auto& entry : Reader(json).members()) {
        if (entry.key() == "__metadata__") continue;
        Stored one;
        one.dtype = entry["dtype"].text();
        for (const auto& size : entry["shape"].entries()) one.shape.push_back(size.integer());
        const auto offsets = entry["data_offsets"].entries();
        if (offsets.size() != 2) entry["data_offsets"].wrong("a list of 2");
        const auto begin = offsets[0].integer(), end = offsets[1].integer();
        if (begin > end || end > payload) refuse("tensor " + shown(entry.key()) + " lies outside it");
        const auto bits = bits_of(one.dtype);
        if (bits == 0) refuse("tensor " + shown(entry.key()) + " has dtype " + shown(one.dtype));
        if (product(one.shape, entry.path()) * bits != (end - begin) * 8)
            refuse("tensor " + shown(entry.key()) + " has " + std::to_string(end - begin) + " bytes for " + one.dtype +
                   " " + listed(one.shape));
        one.offset = start + begin;
        one.bytes = end - begin;
        ranges.emplace_back(begin, end);
        found.emplace(std::string(entry.key()), std::move(one));
    }
    std::sort(ranges.begin(), ranges.end());
    std::uint64_t reached = 0;
    for (const auto& [begin, end] : ranges) {
        if (begin != reached) refuse("its tensors leave a hole, or overlap");
        reached = end;
    }
    if (reached != payload) refuse("it has bytes that belong to no tensor");
    return found;
}

// ------------------------------------------------------------------------------------- dataflow

/// The stages of any recipe in the order of its dataflow, by name.
///
/// A tensor that has several copies of codes names each by its first use; `late`: delta is made from
/// P and dP, and so after them.
inline std::vector<std::string> dataflow(bool late) {
    std::vector<std::string> order = {"cu_seqlens", "q", "k", "v", "dout", "cu_seqlens_k", "sink"};
    const auto copies = [&](std::initializer_list<const char*> names) {
        for (const auto* name : names)
            for (const auto* part : {".token_scales", ".scales", ".scales.tiled", ".scales.tiled_transposed", ".codes"})
                order.push_back(std::string(name) + part);
    };
    const auto stages = [&](std::initializer_list<const char*> names) { order.insert(order.end(), names.begin(), names.end()); };
    copies({"q", "q.s", "k", "k.s", "v", "v.o"});
    stages({"s", "row_max", "p"});
    copies({"p.o"});
    stages({"row_sum", "o", "high_precision_out", "out", "lse"});
    copies({"q.dk", "k.dq", "v.dp", "do", "do.dp", "do.dv"});
    if (!late) stages({"delta"});
    stages({"dp", "p.dv"});
    copies({"p.dv"});
    if (late) stages({"delta"});
    stages({"ds"});
    copies({"ds", "ds.dq", "ds.dk"});
    stages({"dsink", "dq", "dk", "dv"});
    return order;
}

inline bool among(std::string_view name, std::initializer_list<std::string_view> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
}

struct View {
    std::string_view name, storage;
    int bytes;
    std::initializer_list<std::string_view> accepted;  // dtypes that results may have
};

inline const View* view_of(std::string_view name) {
    static const std::array<View, 7> views = {{{"F4_E2M1", "U8", 1, {"U8", "F4_E2M1"}},
                                               {"F8_E4M3", "U8", 1, {"U8", "F8_E4M3"}},
                                               {"F8_E8M0", "U8", 1, {"U8", "F8_E8M0"}},
                                               {"F8_UE4M3", "U8", 1, {"U8"}},
                                               {"BF16", "U16", 2, {"U16", "BF16", "F32"}},
                                               {"F32", "F32", 4, {"F32", "U32"}},
                                               {"I32", "I32", 4, {"I32", "I64"}}}};
    const auto found = std::find_if(views.begin(), views.end(), [&](const auto& one) { return one.name == name; });
    return found == views.end() ? nullptr : &*found;
}

}  // namespace detail

/// How many elements a shape has.
inline std::uint64_t elements(const Shape& shape) { return detail::product(shape, "a tensor"); }

/// Whether a stage is what kernels are given, and not what they give.
inline bool is_input(std::string_view stage) {
    return detail::among(stage, {"cu_seqlens", "cu_seqlens_k", "q", "k", "v", "dout", "sink"});
}

/// SHA-256 of bytes in hexadecimal, as manifests write it.
inline std::string sha256(const void* data, std::uint64_t bytes) {
    return detail::sha256(static_cast<const unsigned char*>(data), bytes);
}

// ---------------------------------------------------------------------------------------- packs

/// A box of an input that the case overwrites after the formula, tokens, heads and channels each
/// [first, end): element (t, h, c) gets the bfloat16 bits bits + (t - tokens[0]) * steps[0] +
/// (h - heads[0]) * steps[1] + (c - channels[0]) / 32 * steps[2], modulo 2^16.
struct Fill {
    std::string tensor;
    std::array<std::uint64_t, 2> tokens, heads, channels;
    std::uint16_t bits = 0;
    std::array<std::int32_t, 3> steps = {};
};

/// What a case is, without its results.
struct Spec {
    std::string name, why;
    std::vector<std::uint64_t> lengths;      // queries of each document
    std::vector<std::uint64_t> key_lengths;  // keys of each document
    bool own_keys = false;                   // whether they are other tokens than the queries
    std::uint64_t heads = 0, kv_heads = 0, head_dim = 0;
    bool causal = false, top_left = false;
    std::optional<std::int64_t> left, right;  // keys seen to either side of the own one; none: all
    double softmax_scale = 0;
    std::string distribution;
    std::uint64_t seed = 0;
    std::int32_t exponent = 0;
    std::vector<Fill> fills;  // in order; the last ones are its plants, boxes of one element
    std::vector<std::string> flags;
    std::optional<double> softcap;
    bool sinks = false;              // whether there are the tensors sink and dsink
    std::uint64_t scale_padding = 0; // the byte in the padding of tiled scales

    std::uint64_t tokens() const { return sum(lengths); }
    std::uint64_t key_tokens() const { return sum(key_lengths); }

    /// Whether a query of a document sees a key of it, both counted from its start.
    bool visible(std::size_t document, std::uint64_t query, std::uint64_t key) const {
        const auto keys = static_cast<std::int64_t>(key_lengths[document]);
        const auto shift = top_left ? 0 : keys - static_cast<std::int64_t>(lengths[document]);
        const auto stand = static_cast<std::int64_t>(query) + shift;
        const auto at = static_cast<std::int64_t>(key);
        if (left && at < stand - *left) return false;
        if (causal) return at <= stand;
        return !right || at <= stand + *right;
    }

   private:
    static std::uint64_t sum(const std::vector<std::uint64_t>& counts) {
        std::uint64_t all = 0;
        for (const auto count : counts) all += count;
        return all;
    }
};

/// A tensor of a case: how it is stored, and what it means.
struct Entry {
    std::string name, stage;
    std::optional<std::uint64_t> document;  // of a stage that has an array for each
    std::string dtype, view, layout, sha256;
    Shape shape;
    std::uint64_t bytes = 0;
};

/// A case of a pack: its data, its recipe, its file, and its tensors in the order of the dataflow.
struct Case {
    std::string name, recipe, file, sha256;
    std::uint64_t size = 0;
    Spec spec;
    std::vector<Entry> tensors;
    bool backward = true;  // whether the recipe has one
    bool owes_lse = true;  // not where it is that of smoothed scores, which a kernel need not return

    const Entry* find(std::string_view tensor) const {
        const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const auto& one) { return one.name == tensor; });
        return found == tensors.end() ? nullptr : &*found;
    }
};

/// A tensor in memory, row-major. It does not own its bytes.
struct Array {
    std::string dtype;
    Shape shape;
    const unsigned char* data = nullptr;
    std::uint64_t bytes = 0;

    /// Element `i`, as a type of the element's size. The bytes need not be aligned.
    template <class T>
    T at(std::uint64_t i) const {
        if (i >= bytes / sizeof(T)) throw Error("element " + std::to_string(i) + " lies outside the tensor");
        T value;
        std::memcpy(&value, data + i * sizeof(T), sizeof(T));
        return value;
    }
    /// All elements, as a type of the element's size.
    template <class T>
    std::vector<T> copy() const {
        std::vector<T> all(static_cast<std::size_t>(bytes / sizeof(T)));
        if (!all.empty()) std::memcpy(all.data(), data, all.size() * sizeof(T));
        return all;
    }
    /// The same shape and dtype with other bytes: what a kernel gave for this tensor.
    Array like(const void* other, std::uint64_t count) const {
        if (count != bytes) throw Error("a tensor of " + std::to_string(bytes) + " bytes was given as " + std::to_string(count));
        return {dtype, shape, static_cast<const unsigned char*>(other), count};
    }
};

/// The tensors of one case, read and verified.
class Data {
   public:
    Data(Case one, Bytes file, std::map<std::string, detail::Stored> stored)
        : case_(std::move(one)), file_(std::make_shared<const Bytes>(std::move(file))), stored_(std::move(stored)) {}

    const Case& about() const { return case_; }
    bool has(const std::string& tensor) const { return stored_.count(tensor) != 0; }

    /// A tensor by name, such as "q", "v.scales" or "s.0". It lives as long as this object.
    Array operator[](const std::string& tensor) const {
        const auto found = stored_.find(tensor);
        if (found == stored_.end()) throw Error(case_.name + " has no tensor " + detail::shown(tensor));
        const auto& one = found->second;
        return {one.dtype, one.shape, file_->data() + one.offset, one.bytes};
    }

   private:
    Case case_;
    std::shared_ptr<const Bytes> file_;
    std::map<std::string, detail::Stored> stored_;
};

namespace detail {

inline std::vector<std::uint64_t> lengths(const Reader& reader) {
    std::vector<std::uint64_t> found;
    std::uint64_t all = 0;
    for (const auto& one : reader.entries()) {
        found.push_back(one.integer(largest_count));
        all += found.back();
        if (found.size() > most_documents || all > largest_count) reader.wrong("fewer documents, or shorter ones");
    }
    return found;
}

inline std::vector<Reader> exactly(const Reader& reader, std::size_t count) {
    auto found = reader.entries();
    if (found.size() != count) reader.wrong("a list of " + std::to_string(count));
    return found;
}

inline std::array<std::uint64_t, 2> range(const Reader& reader) {
    const auto ends = exactly(reader, 2);
    return {ends[0].integer(largest_count), ends[1].integer(largest_count)};
}

inline Spec spec(const Reader& reader) {
    Spec made;
    made.name = reader["name"].text();
    made.why = reader["why"].prose();
    made.lengths = lengths(reader["lengths"]);
    const auto keys = reader["key_lengths"];
    made.own_keys = !keys.null();
    made.key_lengths = made.own_keys ? lengths(keys) : made.lengths;
    if (made.key_lengths.size() != made.lengths.size()) keys.wrong("a list of one length a document");
    made.heads = reader["heads"].integer(largest_count);
    made.kv_heads = reader["kv_heads"].integer(largest_count);
    made.head_dim = reader["head_dim"].integer(largest_count);
    if (made.heads == 0 || made.kv_heads == 0 || made.head_dim == 0 || made.heads % made.kv_heads != 0)
        throw Error(reader.path() + " has heads, kv_heads or head_dim that no case can have");
    made.causal = reader["causal"].boolean();
    const auto alignment = reader["alignment"];
    made.top_left = alignment.text() == "top_left";
    if (!made.top_left && alignment.text() != "bottom_right") alignment.wrong("top_left or bottom_right");
    if (const auto window = reader["window"]; !window.null()) {
        const auto sides = exactly(window, 2);
        const auto side = [](const Reader& one) { return static_cast<std::int64_t>(one.integer(largest_count)); };
        if (!sides[0].null()) made.left = side(sides[0]);
        if (!sides[1].null()) made.right = side(sides[1]);
    }
    made.softmax_scale = reader["softmax_scale"].number();
    if (!(std::isfinite(made.softmax_scale) && made.softmax_scale > 0)) reader["softmax_scale"].wrong("above 0");
    made.distribution = reader["distribution"].text();
    made.seed = reader["seed"].integer();
    made.exponent = static_cast<std::int32_t>(reader["exponent"].signed_integer(64));
    const auto add = [&](const Reader& one, Fill fill) {
        const bool query = fill.tensor == "q" || fill.tensor == "dout";
        const auto inside = [](const auto& range, std::uint64_t size) { return range[0] < range[1] && range[1] <= size; };
        if (!(query || fill.tensor == "k" || fill.tensor == "v") ||
            !inside(fill.tokens, query ? made.tokens() : made.key_tokens()) ||
            !inside(fill.heads, query ? made.heads : made.kv_heads) || !inside(fill.channels, made.head_dim))
            one.wrong("a part of an input");
        made.fills.push_back(std::move(fill));
    };
    const auto bits = [](const Reader& one) { return static_cast<std::uint16_t>(one["bits"].integer(0xffff)); };
    for (const auto& one : reader["fills"].entries()) {
        const auto steps = exactly(one["steps"], 3);
        constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
        const auto step = [&](std::size_t axis) { return static_cast<std::int32_t>(steps[axis].signed_integer(most)); };
        add(one, {one["tensor"].text(), range(one["tokens"]), range(one["heads"]), range(one["channels"]), bits(one),
                  {step(0), step(1), step(2)}});
    }
    for (const auto& one : reader["plants"].entries()) {
        const auto alone = [&](const char* axis) {
            const auto at = one[axis].integer(largest_count);
            return std::array<std::uint64_t, 2>{at, at + 1};
        };
        add(one, {one["tensor"].text(), alone("token"), alone("head"), alone("channel"), bits(one), {}});
    }
    if (const auto softcap = reader["softcap"]; !softcap.null()) {
        made.softcap = softcap.number();
        if (!(std::isfinite(*made.softcap) && *made.softcap > 0)) softcap.wrong("above 0");
    }
    const auto sinks = reader["sinks"].entries();
    made.sinks = !sinks.empty();
    if (made.sinks && sinks.size() != made.heads) reader["sinks"].wrong("a list of one a head");
    made.scale_padding = reader["scale_padding"].integer(255);
    for (const auto& flag : reader["flags"].entries()) made.flags.push_back(flag.text());
    return made;
}

/// The shape that a tensor must have for the data of its case, where this header relies on it.
inline std::optional<Shape> required_shape(const Spec& spec, const Entry& entry) {
    const auto& stage = entry.stage;
    const auto documents = static_cast<std::uint64_t>(spec.lengths.size());
    if (among(stage, {"cu_seqlens", "cu_seqlens_k"})) return Shape{documents + 1};
    if (among(stage, {"q", "dout", "out", "dq"})) return Shape{spec.tokens(), spec.heads, spec.head_dim};
    if (among(stage, {"k", "v", "dk", "dv"})) return Shape{spec.key_tokens(), spec.kv_heads, spec.head_dim};
    if (among(stage, {"sink", "dsink"})) return Shape{spec.heads};
    if (stage == "lse") return Shape{spec.heads, spec.tokens()};
    if (among(stage, {"s", "dp"})) {
        if (!entry.document) throw Error(entry.name + " has no document");
        const auto document = static_cast<std::size_t>(*entry.document);
        return Shape{spec.heads, spec.lengths[document], spec.key_lengths[document]};
    }
    return std::nullopt;
}

inline Entry entry(const Reader& reader, const Spec& spec, const std::vector<std::string>& order) {
    Entry made;
    made.name = reader.key();
    made.stage = made.name;
    const auto dot = made.name.rfind('.');
    const auto number = dot == std::string::npos ? std::string() : made.name.substr(dot + 1);
    if (!number.empty() && number.size() <= 5 && number.find_first_not_of("0123456789") == std::string::npos) {
        made.document = std::stoull(number);
        made.stage = made.name.substr(0, dot);
        if (*made.document >= spec.lengths.size() || number != std::to_string(*made.document))
            throw Error(reader.path() + " is of a document that the case has not");
    }
    if (std::find(order.begin(), order.end(), made.stage) == order.end())
        throw Error(reader.path() + " is no tensor that this header knows; take the header of the version that wrote the pack");
    made.dtype = reader["dtype"].text();
    made.view = reader["view"].text();
    made.layout = reader["layout"].prose();
    made.sha256 = reader["sha256"].digest();
    const auto* view = view_of(made.view);
    if (view == nullptr || view->storage != made.dtype)
        throw Error(reader.path() + " has view " + shown(made.view) + " in dtype " + shown(made.dtype));
    for (const auto& size : reader["shape"].entries()) made.shape.push_back(size.integer());
    made.bytes = product(made.shape, reader.path()) * static_cast<std::uint64_t>(view->bytes);
    const auto wanted = required_shape(spec, made);
    if (wanted && *wanted != made.shape)
        throw Error(reader.path() + " has shape " + listed(made.shape) + "; in this case it is " + listed(*wanted));
    return made;
}

inline Case case_of(const Reader& reader, const Reader& recipes) {
    Case made;
    made.spec = spec(reader["spec"]);
    made.recipe = reader["recipe"].text();
    made.name = reader["name"].text();
    made.file = reader["file"].text();
    if (!plain_name(made.spec.name) || !plain_name(made.recipe) || made.name != made.spec.name + "." + made.recipe ||
        made.file != made.name + ".safetensors")
        // The only file name that a case can have, so no path can lead out of the pack.
        throw Error(reader.path() + " has name " + shown(made.name) + " and file " + shown(made.file) +
                    "; they must be DATA.RECIPE and DATA.RECIPE.safetensors");
    made.sha256 = reader["sha256"].digest();
    made.size = reader["size"].integer();
    const auto gradient = recipes[made.recipe]["recipe"]["gradient"];
    const auto backward = !gradient.null();  // some recipes have none
    const auto delta = backward ? gradient.find("delta_source") : std::nullopt;
    made.backward = backward;
    const auto smoothing = recipes[made.recipe]["recipe"]["s"]["right"].find("smoothing");
    made.owes_lse = !smoothing || smoothing->prose() == "none";
    const auto order = dataflow(delta && delta->prose() == "p_dp");
    for (const auto& one : reader["tensors"].members()) made.tensors.push_back(entry(one, made.spec, order));
    const auto rank = [&](const Entry& one) {
        return std::pair(std::find(order.begin(), order.end(), one.stage) - order.begin(), one.document.value_or(0));
    };
    std::sort(made.tensors.begin(), made.tensors.end(), [&](const auto& a, const auto& b) { return rank(a) < rank(b); });
    for (const auto* name : {"cu_seqlens", "q", "k", "v", "dout", "out", "lse"})
        if (made.find(name) == nullptr) throw Error(reader.path() + " lists no " + name);
    const auto require = [&](const char* name, bool wanted) {
        if ((made.find(name) != nullptr) != wanted)
            throw Error(reader.path() + (wanted ? " lists no " : " has no use for ") + name);
    };
    require("cu_seqlens_k", made.spec.own_keys);
    require("sink", made.spec.sinks);
    require("dsink", made.spec.sinks && backward);
    for (const auto* name : {"dq", "dk", "dv"}) require(name, backward);
    return made;
}

/// The cases of a manifest: canonical JSON with its own digest.
inline std::vector<Case> manifest(std::string_view text, const std::string& source) {
    const Json json(text, source);
    const Reader root(json);
    if (root["schema"].text() != "flamia-ref golden pack") throw Error(source + " is not the manifest of a golden pack");
    if (root["schema_version"].integer() != schema_version)
        throw Error(source + " has schema version " + std::to_string(root["schema_version"].integer()) +
                    ", this header reads " + std::to_string(schema_version) + "; make the pack again");
    if (json.canonical() != text) throw Error(source + " was changed since it was written: its form is not canonical");
    // The digest is that of the canonical text without its line.
    const auto digest = root["digest"].digest();
    const auto line = "\n \"digest\": \"" + digest + "\",";
    const auto at = text.find(line);
    if (at == std::string_view::npos) throw Error(source + " has its digest in another place");
    const auto rest = std::string(text.substr(0, at)) + std::string(text.substr(at + line.size()));
    if (sha256(rest) != digest) throw Error(source + " was changed since it was written: its digest differs");
    std::vector<Case> cases;
    std::vector<std::string> names;
    for (const auto& one : root["cases"].entries()) {
        cases.push_back(case_of(one, root["recipes"]));
        names.push_back(cases.back().name);
    }
    std::sort(names.begin(), names.end());
    if (std::adjacent_find(names.begin(), names.end()) != names.end()) throw Error(source + " lists a case twice");
    if (cases.empty()) throw Error(source + " lists no case");
    return cases;
}

/// The tensors of a case file, every one as the manifest says.
inline std::map<std::string, Stored> verified(const Case& one, const Bytes& file, const std::string& source) {
    if (file.size() != one.size)
        throw Error(source + " has " + std::to_string(file.size()) + " bytes; the manifest says " + std::to_string(one.size));
    auto stored = safetensors(file, source);
    for (const auto& [name, tensor] : stored)
        if (one.find(name) == nullptr) throw Error(source + " holds tensor " + shown(name) + ", which the manifest does not list");
    for (const auto& entry : one.tensors) {
        const auto found = stored.find(entry.name);
        if (found == stored.end()) throw Error(source + " lacks tensor " + entry.name + ", which the manifest lists");
        const auto& tensor = found->second;
        if (tensor.dtype != entry.dtype || tensor.shape != entry.shape)
            throw Error(source + ": tensor " + entry.name + " is " + tensor.dtype + " " + listed(tensor.shape) +
                        "; the manifest says " + entry.dtype + " " + listed(entry.shape));
        if (sha256(file.data() + tensor.offset, tensor.bytes) != entry.sha256)
            throw Error(source + ": tensor " + entry.name + " was changed since it was written");
    }
    if (sha256(file.data(), file.size()) != one.sha256)
        throw Error(source + " was changed since it was written, outside its tensors");
    const auto starts = [&](const char* name, const std::vector<std::uint64_t>& counts) {
        const auto found = stored.find(name);
        if (found == stored.end()) return;
        std::uint64_t start = 0;
        for (std::size_t i = 0; i <= counts.size(); ++i) {
            std::int32_t value = 0;
            std::memcpy(&value, file.data() + found->second.offset + 4 * i, 4);
            if (value < 0 || static_cast<std::uint64_t>(value) != start)
                throw Error(source + ": " + name + " does not hold the starts of the documents");
            if (i < counts.size()) start += counts[i];
        }
    };
    starts("cu_seqlens", one.spec.lengths);
    starts("cu_seqlens_k", one.spec.key_lengths);
    return stored;
}

}  // namespace detail

/// A golden pack on disk.
class Pack {
   public:
    /// Open a pack: its manifest, and the sizes of all files, are checked now. Error: it is none.
    static Pack open(const std::filesystem::path& folder) {
        const auto path = folder / "manifest.json";
        const auto bytes = detail::read_plain(path, detail::most_manifest_bytes, false);
        const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
        Pack pack(folder, detail::manifest(text, path.string()));
        for (const auto& one : pack.cases_) {
            std::error_code failed;
            const auto file = folder / one.file;
            if (!std::filesystem::is_regular_file(std::filesystem::symlink_status(file, failed)))
                throw Error(file.string() + " is missing, or is no plain file");
            const auto size = std::filesystem::file_size(file, failed);
            if (failed || size != one.size)
                throw Error(file.string() + " has " + std::to_string(size) + " bytes; the manifest says " + std::to_string(one.size));
        }
        return pack;
    }

    const std::filesystem::path& folder() const { return folder_; }
    const std::vector<Case>& cases() const { return cases_; }

    /// Read a case and check every digest. Error: the file is not what the manifest says.
    Data load(const Case& one) const {
        const auto path = folder_ / one.file;
        auto file = detail::read_plain(path, one.size, false);
        auto stored = detail::verified(one, file, path.string());
        return Data(one, std::move(file), std::move(stored));
    }

   private:
    Pack(std::filesystem::path folder, std::vector<Case> cases) : folder_(std::move(folder)), cases_(std::move(cases)) {}

    std::filesystem::path folder_;
    std::vector<Case> cases_;
};

// -------------------------------------------------------------------------------------- results

/// What a kernel gave for one case: tensors by name.
class Results {
   public:
    /// Add a tensor; its bytes are copied. Error: its bytes do not fit its shape and dtype, or it is there.
    void add(const std::string& name, const Array& array) {
        const auto bits = detail::bits_of(array.dtype);
        if (bits == 0 || array.bytes >> 56 != 0 || elements(array.shape) * bits != array.bytes * 8)
            throw Error(name + " has " + std::to_string(array.bytes) + " bytes for " + detail::shown(array.dtype) + " " +
                        detail::listed(array.shape));
        auto copy = std::make_shared<Bytes>(static_cast<std::size_t>(array.bytes));
        if (!copy->empty()) std::memcpy(copy->data(), array.data, copy->size());
        insert(name, {array.dtype, array.shape, copy->data(), array.bytes}, copy);
    }

    /// The tensors of a file CASE.safetensors. Error: it is none, or longer than results can be.
    static Results read(const std::filesystem::path& path, const Case& one) {
        std::uint64_t limit = detail::most_results_header;
        for (const auto& entry : one.tensors) limit += 4 * entry.bytes;
        const auto file = std::make_shared<const Bytes>(detail::read_plain(path, limit, true));
        Results results;
        for (const auto& [name, stored] : detail::safetensors(*file, path.string()))
            results.insert(name, {stored.dtype, stored.shape, file->data() + stored.offset, stored.bytes}, file);
        return results;
    }

    /// Write a file for `flamia-ref golden check PACK FOLDER`; name it CASE.safetensors. Error: the disk refuses.
    void write(const std::filesystem::path& path) const {
        std::string header = "{";
        std::uint64_t offset = 0;
        for (const auto& [name, array] : arrays_) {
            auto shape = detail::listed(array.shape);
            header += (offset || header.size() > 1 ? ",\"" : "\"") + name + "\":{\"dtype\":\"" + array.dtype + "\",\"shape\":" +
                      shape + ",\"data_offsets\":[" + std::to_string(offset) + "," + std::to_string(offset + array.bytes) + "]}";
            offset += array.bytes;
        }
        header += "}";
        header.append((8 - header.size() % 8) % 8, ' ');
        std::ofstream file(path, std::ios::binary | std::ios::trunc);
        for (std::size_t i = 0; i < 8; ++i)
            file.put(static_cast<char>(static_cast<unsigned char>(static_cast<std::uint64_t>(header.size()) >> (8 * i))));
        file << header;
        for (const auto& [name, array] : arrays_)
            if (array.bytes != 0) file.write(reinterpret_cast<const char*>(array.data), static_cast<std::streamsize>(array.bytes));
        file.close();
        if (!file) throw Error(path.string() + " cannot be written");
    }

    const std::map<std::string, Array>& arrays() const { return arrays_; }

   private:
    std::map<std::string, Array> arrays_;
    std::vector<std::shared_ptr<const void>> owned_;

    void insert(const std::string& name, Array array, std::shared_ptr<const void> owner) {
        if (!name.empty() && name.find_first_of("\"\\") != std::string::npos) throw Error("a tensor has the name " + detail::shown(name));
        if (!arrays_.emplace(name, std::move(array)).second) throw Error(name + " is given twice");
        owned_.push_back(std::move(owner));
    }
};

/// The verdict on a tensor or a case. Only pass passes.
enum class Status { pass, bit_mismatch, shape, dtype, missing, unknown };

/// The name of a verdict, as in reports.
inline const char* name_of(Status status) {
    static constexpr std::array<const char*, 6> names = {"pass",           "bit mismatch", "shape mismatch",
                                                         "dtype mismatch", "missing",      "unknown tensor"};
    return names[static_cast<std::size_t>(status)];
}

/// The comparison of one tensor. `index`, `expected` and `actual` are those of the first element that differs.
struct TensorResult {
    std::string name, stage;
    Status status = Status::pass;
    std::uint64_t elements = 0, differing = 0;
    Shape index;
    std::string expected, actual, note;
};

/// The comparison of one case, its tensors in the order of the dataflow.
struct CaseResult {
    std::string name;
    Status status = Status::pass;
    std::vector<TensorResult> tensors;
    std::string departs;                // the first stage that departs; empty where none does
    std::vector<std::string> not_given; // tensors of the pack before it that were not given
    std::string note;                   // what it passes without; empty where that is nothing

    int exit_code() const { return status == Status::pass ? exit_pass : exit_mismatch; }

    /// One line, one more where a stage departs and some before it were not given, and one for the note.
    std::string text() const { return verdict() + (note.empty() ? "" : "\n     " + note); }

   private:
    std::string verdict() const {
        if (status == Status::pass) return "PASS " + name + ": " + std::to_string(tensors.size()) + " tensors, bit for bit";
        std::string out = "FAIL " + name;
        const auto first = std::find_if(tensors.begin(), tensors.end(), [](const auto& one) { return one.status != Status::pass; });
        if (first == tensors.end()) return out + ": " + name_of(status);
        out += departs.empty() ? ": " : ": first departs at " + departs + ": ";
        out += std::string(name_of(first->status)) + " in " + detail::shown(first->name);
        if (first->differing != 0)
            out += ", " + std::to_string(first->differing) + " of " + std::to_string(first->elements) +
                   " elements, first at " + detail::listed(first->index) + ": expected " + first->expected + ", actual " + first->actual;
        if (!first->note.empty()) out += ", " + first->note;
        if (!departs.empty() && !not_given.empty()) {
            out += "\n     an inference: not given before it:";
            for (const auto& one : not_given) out += " " + one;
        }
        return out;
    }
};

namespace detail {

inline std::uint64_t element(const unsigned char* data, std::uint64_t i, int bytes) {
    std::uint64_t value = 0;
    std::memcpy(&value, data + i * static_cast<std::uint64_t>(bytes), static_cast<std::size_t>(bytes));
    return value;
}

inline TensorResult compared(const Spec& spec, const Entry& entry, const Array& expected, const Array& given) {
    TensorResult result;
    result.name = entry.name;
    result.stage = entry.stage;
    const auto& view = *view_of(entry.view);
    if (!among(given.dtype, view.accepted)) {
        result.status = Status::dtype;
        result.note = "given as " + shown(given.dtype);
        return result;
    }
    if (given.shape != expected.shape) {
        result.status = Status::shape;
        result.note = "given as " + listed(given.shape) + ", expected " + listed(expected.shape);
        return result;
    }
    result.elements = product(expected.shape, entry.name);
    const int width = view.bytes, actual_width = static_cast<int>(bits_of(given.dtype) / 8);
    if (width == actual_width && (expected.bytes == 0 || std::memcmp(expected.data, given.data, expected.bytes) == 0))
        return result;
    const bool widened = entry.view == "BF16" && actual_width == 4;
    const bool half = entry.view == "BF16" && !widened;
    const bool real = half || widened || entry.view == "F32";
    const auto is_nan = [&](std::uint64_t bits) { return half ? (bits & 0x7fff) > 0x7f80 : (bits & 0x7fffffff) > 0x7f800000; };
    const auto is_skipped = [&](std::uint64_t bits) {  // 0, NaN, or -1e4 and less, down to -infinity: not computed
        return half ? (bits & 0x7fff) == 0 || (bits >= 0xc61d && bits <= 0xff80) || is_nan(bits)
                    : (bits & 0x7fffffff) == 0 || (bits >= 0xc61c4000 && bits <= 0xff800000) || is_nan(bits);
    };
    const bool optional = among(entry.stage, {"s", "dp"});
    for (std::uint64_t i = 0; i < result.elements; ++i) {
        auto wanted = element(expected.data, i, width);
        const auto actual = element(given.data, i, actual_width);
        if (widened) wanted <<= 16;
        if (entry.view == "I32" && actual_width == 8)  // the same number in 64 bits
            wanted = static_cast<std::uint64_t>(static_cast<std::int64_t>(static_cast<std::int32_t>(static_cast<std::uint32_t>(wanted))));
        if (wanted == actual || (real && is_nan(wanted) && is_nan(actual))) continue;
        Shape index(expected.shape.size());
        for (std::uint64_t rest = i, axis = index.size(); axis-- > 0; rest /= expected.shape[axis]) index[axis] = rest % expected.shape[axis];
        if (optional && is_skipped(actual) && !spec.visible(static_cast<std::size_t>(*entry.document), index[1], index[2])) continue;
        if (result.differing++ == 0) {
            result.status = Status::bit_mismatch;
            result.index = index;
            result.expected = "0x" + hexadecimal(wanted, 2 * actual_width);
            result.actual = "0x" + hexadecimal(actual, 2 * actual_width);
        }
    }
    return result;
}

}  // namespace detail

/// Compare what a kernel gave for a case with the pack, bit for bit.
///
/// Every tensor that is given is compared. A case passes where all of them are equal and out and lse
/// are among them; dq, dk and dv need not be. Where the recipe has no backward they are not compared, which the
/// note says, and where its lse is that of smoothed scores lse need not be given. Error: nothing that was given is a stage or an output.
inline CaseResult check(const Data& data, const Results& given) {
    const auto& one = data.about();
    CaseResult result;
    result.name = one.name;
    bool any = false;
    std::vector<std::string> absent;
    for (const auto& entry : one.tensors) {
        const auto found = given.arrays().find(entry.name);
        if (found == given.arrays().end()) {
            if (!is_input(entry.stage) && entry.stage.find(".tiled") == std::string::npos) absent.push_back(entry.name);
            continue;
        }
        any = any || !is_input(entry.stage);
        result.tensors.push_back(detail::compared(one.spec, entry, data[entry.name], found->second));
        if (result.departs.empty() && result.tensors.back().status != Status::pass) {
            result.departs = entry.stage;
            result.not_given = absent;
        }
    }
    if (!any) throw Error("the results of " + one.name + " hold no stage and no output; give at least out and lse");
    const auto other = [&](const std::string& name, Status status, const char* note) {
        TensorResult more;
        more.name = more.stage = name;
        more.status = status;
        more.note = note;
        result.tensors.push_back(std::move(more));
    };
    const auto say = [&](const std::string& what) { result.note += (result.note.empty() ? "" : "; ") + what; };
    if (!one.backward) say("forward alone: this recipe has no backward");
    std::string beside;
    for (const auto& [name, array] : given.arrays()) {
        if (one.find(name) != nullptr) continue;
        if (!one.backward && detail::among(name, {"dq", "dk", "dv", "dsink"}))
            beside += (beside.empty() ? "" : ", ") + name;
        else
            other(name, Status::unknown, "the case has no such tensor");
    }
    if (!beside.empty()) say("given and not compared: " + beside);
    for (const auto* name : {"out", "lse"}) {
        if (given.arrays().count(name) != 0) continue;
        if (name == std::string_view("lse") && !one.owes_lse)
            say("lse not given: this recipe's is that of the smoothed scores, which a kernel need not return");
        else
            other(name, Status::missing, "every kernel gives it");
    }
    for (const auto& tensor : result.tensors)
        if (result.status == Status::pass) result.status = tensor.status;
    return result;
}

/// Compare the files CASE.safetensors of a folder with a pack. A case without a file is missing.
///
/// Error: the pack or a file is damaged, a file is the pack's own, or there is none.
inline std::vector<CaseResult> check(const Pack& pack, const std::filesystem::path& folder) {
    std::vector<CaseResult> results;
    bool any = false;
    for (const auto& one : pack.cases()) {
        const auto file = folder / one.file;
        std::error_code ignored;
        if (!std::filesystem::exists(std::filesystem::symlink_status(file, ignored))) {
            CaseResult missing;
            missing.name = one.name;
            missing.status = Status::missing;
            results.push_back(std::move(missing));
            continue;
        }
        if (std::filesystem::equivalent(file, pack.folder() / one.file, ignored))
            throw Error(file.string() + " is the pack's own file; give the results of a kernel");
        any = true;
        results.push_back(check(pack.load(one), Results::read(file, one)));
    }
    if (!any) throw Error(folder.string() + " holds no results of this pack; name the files CASE.safetensors");
    return results;
}

}  // namespace flamia_ref

#endif  // FLAMIA_REF_PACK_HPP
