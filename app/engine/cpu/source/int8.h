// Weights as integers of 8 bits.
#pragma once

#include "vectors.h"

namespace ink {

struct Int8 {
    static constexpr const char* kName = "int8";
    static constexpr int kLargest = 127;  // the code of a row's largest number; all codes are exact in bfloat16
    static constexpr int kBytes = 16;     // of 16 codes

    // 16 codes as numbers.
    INK_INLINE static Floats numbers(const char* at) { return widen(load(reinterpret_cast<const int8_t*>(at))); }
    // Writes one of 16 codes, whose bytes were zeros before the first one.
    INK_INLINE static void put(char* at, int lane, int8_t code) { at[lane] = char(code); }
};

}  // namespace ink
