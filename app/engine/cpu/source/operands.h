// What a product computes with: a number of x in float32, or a pair of numbers in bfloat16.
#pragma once

#include "tiles.h"
#include "vectors.h"

namespace ink {

// A step is one number of x.
struct FloatSteps {
    using Number = float;
    static constexpr int kStep = 1;
    static constexpr int kUnit = 1;  // panels are padded to a multiple of so many steps
    static constexpr bool kLastFirst = false;
    using Operand = Floats;
    INK_INLINE static Operand broadcast(const Number* x) { return *x; }
    INK_INLINE static Floats add(const Operand& w, const Operand& x, const Floats& sum) { return fma(w, x, sum); }
};

// A step is a pair of bfloat16 numbers of x.
struct PairSteps {
    using Number = bf16;
    static constexpr int kStep = 2;
    static constexpr int kUnit = kTileSteps;
    static constexpr bool kLastFirst = true;
    using Operand = Words;
    INK_INLINE static Operand broadcast(const Number* x) {
        uint32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        return pair;
    }
    INK_INLINE static Floats add(const Operand& w, const Operand& x, const Floats& sum) { return dot_pairs(w, x, sum); }
};

}  // namespace ink
