// Counter-based random numbers from (seed, choice, position): Philox 4x32-10 (Salmon et al., SC 2011). No state.
#pragma once

#include <array>
#include <cstdint>

namespace ink {

using Words4 = std::array<uint32_t, 4>;

inline Words4 philox(Words4 c, uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = uint64_t{c[0]} * 0xD2511F53u, p1 = uint64_t{c[2]} * 0xCD9E8D57u;
        c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
             static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

// In [0, 1), 53 bits: the upper 27 of one word, the upper 26 of the next.
inline double uniform(int64_t seed, int64_t choice, int64_t position) {
    const auto low = [](int64_t value) { return static_cast<uint32_t>(static_cast<uint64_t>(value)); };
    const auto high = [](int64_t value) { return static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32); };
    const Words4 words = philox({low(position), high(position), low(choice), 0}, low(seed), high(seed));
    return (static_cast<double>(words[0] >> 5) * 67108864.0 + static_cast<double>(words[1] >> 6)) * 0x1p-53;
}

}  // namespace ink
