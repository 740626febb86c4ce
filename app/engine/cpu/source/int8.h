// Keys and values as integers of 8 bits, which are exact in bfloat16 (cache_formats.h).
//
// Products read them as a format of weights (formats.h); scales multiply the sums.
#pragma once

#include "operands.h"

namespace ink {

struct Int8Floats : FloatSteps {
    static constexpr int kLargest = 127;    // the code of the largest number
    static constexpr int kBytes = kLanes;
    using Stored = int8_t;
    INK_INLINE static Operand weights(const char* at) { return widen(load(reinterpret_cast<const int8_t*>(at))); }
    INK_INLINE static Floats floats(const char* at, int) { return weights(at); }
    // The bytes of a vector were zeros before.
    INK_INLINE static void put(char* at, int lane, int, Stored code) { at[lane] = char(code); }
};

// The even numbers of 16 pairs, then the odd ones.
struct Int8Pairs : PairSteps {
    static constexpr int kLargest = Int8Floats::kLargest;
    static constexpr int kBytes = 2 * kLanes;
    using Stored = int8_t;
    INK_INLINE static Operand weights(const char* at) {
        return bits<uint32_t>(floats(at, 0)) >> 16 | bits<uint32_t>(floats(at, 1));
    }
    INK_INLINE static Floats floats(const char* at, int i) { return Int8Floats::weights(at + i * kLanes); }
    INK_INLINE static void put(char* at, int lane, int i, Stored code) { at[i * kLanes + lane] = char(code); }
};

}  // namespace ink
