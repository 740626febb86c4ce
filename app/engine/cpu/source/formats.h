// Formats of weights: how a matrix is packed, and how products read it.
//
// A format is used in products of x in float32 (by its FloatSteps) and in bfloat16 (by its PairSteps). Such a struct says
//   Number, kStep, kUnit, kLastFirst, Operand, broadcast(), add()  what a product computes with, from FloatSteps or
//                PairSteps. kLastFirst: whether add() adds the second number of a step first
//   kName        as in model/weight_formats.py
//   kBytes       of one vector of packed weights: 16 outputs, one step
//   Stored       type of the numbers that are packed
//   put()        packs one of them
//   weights()    reads a vector
//   floats()     the i-th numbers of a step of 16 outputs
//   kHasTiles    whether its packed weights are the tiles of tiles.h
// Formats in which columns share scales are other structs, which grouped.h describes.
#pragma once

#include <tuple>
#include <type_traits>

#include "grouped.h"
#include "operands.h"
#include "tiles.h"
#include "vectors.h"

namespace ink {

struct F32 : FloatSteps {
    static constexpr const char* kName = "float32";
    static constexpr int kBytes = 64;
    using Stored = float;
    INK_INLINE static Operand weights(const char* at) { return load(reinterpret_cast<const float*>(at)); }
    INK_INLINE static Floats floats(const char* at, int) { return weights(at); }
    INK_INLINE static void put(char* at, int lane, int, Stored number) {
        std::memcpy(at + lane * sizeof number, &number, sizeof number);
    }
};

// A pair is in one lane.
struct BF16 : PairSteps {
    static constexpr const char* kName = "bfloat16";
    static constexpr int kBytes = 64;
    using Stored = bf16;
    INK_INLINE static Operand weights(const char* at) { return load(reinterpret_cast<const uint32_t*>(at)); }
    INK_INLINE static void put(char* at, int lane, int i, Stored number) {
        std::memcpy(at + (lane * kStep + i) * sizeof number, &number, sizeof number);
    }
    INK_INLINE static Floats floats(const char* at, int i) { return half_of(weights(at), i); }
    static constexpr bool kHasTiles = true;
};

// bfloat16 that is computed in float32, which changes no number. Packed as BF16.
struct WideBF16 {
    using Number = float;
    static constexpr int kStep = 2, kUnit = 1;
    static constexpr bool kLastFirst = false;
    struct Operand {
        Floats first, second;
    };
    static constexpr const char* kName = BF16::kName;
    static constexpr int kBytes = BF16::kBytes;
    using Stored = bf16;
    INK_INLINE static Operand broadcast(const Number* x) { return {x[0], x[1]}; }
    INK_INLINE static Floats add(const Operand& w, const Operand& x, const Floats& sum) {
        return fma(w.second, x.second, fma(w.first, x.first, sum));
    }
    INK_INLINE static Operand weights(const char* at) { return {floats(at, 0), floats(at, 1)}; }
    INK_INLINE static Floats floats(const char* at, int i) { return BF16::floats(at, i); }
    INK_INLINE static void put(char* at, int lane, int i, Stored number) { BF16::put(at, lane, i, number); }
};

// float16 that is computed in float32.
struct WideF16 : FloatSteps {
    static constexpr const char* kName = "float16";
    static constexpr int kBytes = 32;
    using Stored = f16;
    INK_INLINE static Operand weights(const char* at) { return from_f16(load(reinterpret_cast<const uint16_t*>(at))); }
    INK_INLINE static Floats floats(const char* at, int) { return weights(at); }
    INK_INLINE static void put(char* at, int lane, int, Stored number) {
        std::memcpy(at + lane * sizeof number, &number, sizeof number);
    }
};

// The struct of a format by the number format X of x, F32 or BF16.
struct Unquantized {
    template <class X>
    using In = X;
};

// Numbers of 16 bits as the file has them: in products of float32. Those of bfloat16 have their own (Unquantized).
template <class Wide>
struct Stored {
    template <class X>
    using In = std::conditional_t<std::is_same_v<X, F32>, Wide, X>;
};

// Integers of 4 or 8 bits in groups of columns that share a scale.
template <int BITS>
struct Grouped {
    template <class X>
    using In = std::conditional_t<std::is_same_v<X, F32>, GroupedFloats<BITS>, GroupedPairs<BITS>>;
};

// All formats. A format's number is its place; ink_format() tells Python.
using Formats = std::tuple<Unquantized, Stored<WideBF16>, Stored<WideF16>, Grouped<4>, Grouped<8>>;
constexpr int kFormats = std::tuple_size_v<Formats>;

// f(the struct of format number `format` in products of X).
template <class X, int N = 0, class F>
auto with_format(int format, F&& f) {
    if constexpr (N + 1 < kFormats)
        if (format != N) return with_format<X, N + 1>(format, f);
    return f(typename std::tuple_element_t<N, Formats>::template In<X>());
}

}  // namespace ink
