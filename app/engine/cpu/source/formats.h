// Formats of weights: how a matrix is rounded and packed, and how products read it.
//
// A format is used in products of x in float32 (by its FloatSteps) and in bfloat16 (by its PairSteps). Such a struct says
//   Number, kStep, kUnit, kLastFirst, Operand, broadcast(), add()  what a product computes with, from FloatSteps or
//                PairSteps. kLastFirst: whether add() adds the second number of a step first
//   kName        as in model/weight_formats.py
//   kBytes       of one vector of packed weights: 16 outputs, one step
//   Stored       type of the numbers or codes that are packed
//   put()        packs one of them
//   weights()    reads a vector
//   floats()     the i-th numbers of a step of 16 outputs
//   quantize()   rounds a row to codes and returns its scale, which is applied to the sums; only if there is a scale
//   tile()       the same weights for the tiles of tiles.h; without it a product does without tiles
// An integer format (int8.h) says only how 16 codes are packed and read; Coded does the rest. Formats in which columns
// share scales are other structs, which grouped.h describes.
#pragma once

#include <algorithm>
#include <cmath>
#include <tuple>
#include <type_traits>

#include "grouped.h"
#include "int8.h"
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
    static const char* tile(const char* packed, char*) { return packed; }
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

// Rounds a row to integers and a scale, with which its largest number becomes `largest` or its negative; a row of zeros
// stays zero. quantize() in app/engine/quantization/quantized_weights.py computes the same bits.
template <class Number>
float round_to_integers(const Number* x, int k, int largest, int8_t* codes) {
    float most[kLanes] = {};  // of each lane, so that the loop is vectorized
    for (int first = 0; first < k; first += kLanes)
        for (int lane = 0; lane < std::min(kLanes, k - first); lane++)
            most[lane] = std::max(most[lane], std::fabs(to_float(x[first + lane])));
    const float quotient = *std::max_element(most, most + kLanes) / largest, scale = quotient > 0 ? quotient : 1;
    for (int i = 0; i < k; i++) codes[i] = int8_t(std::rint(to_float(x[i]) / scale));
    return scale;
}

// Integers that are exact in bfloat16. The scale of each output is applied after the sum.
template <class Code>
struct CodedFloats : FloatSteps {
    static constexpr const char* kName = Code::kName;
    static constexpr int kBytes = Code::kBytes;
    static constexpr int kLargest = Code::kLargest;
    using Stored = int8_t;
    INK_INLINE static Operand weights(const char* at) { return Code::numbers(at); }
    INK_INLINE static Floats floats(const char* at, int) { return Code::numbers(at); }
    INK_INLINE static void put(char* at, int lane, int, Stored code) { Code::put(at, lane, code); }
    static float quantize(const Number* x, int k, Stored* codes) { return round_to_integers(x, k, Code::kLargest, codes); }
};

// The even numbers of 16 pairs, then the odd ones.
template <class Code>
struct CodedPairs : PairSteps {
    static constexpr const char* kName = Code::kName;
    static constexpr int kBytes = 2 * Code::kBytes;
    static constexpr int kLargest = Code::kLargest;
    using Stored = int8_t;
    INK_INLINE static Operand weights(const char* at) {
        return bits<uint32_t>(Code::numbers(at)) >> 16 | bits<uint32_t>(Code::numbers(at + Code::kBytes));
    }
    INK_INLINE static Floats floats(const char* at, int i) { return Code::numbers(at + i * Code::kBytes); }
    INK_INLINE static void put(char* at, int lane, int i, Stored code) { Code::put(at + i * Code::kBytes, lane, code); }
    static float quantize(const Number* x, int k, Stored* codes) { return round_to_integers(x, k, Code::kLargest, codes); }
    INK_INLINE static const char* tile(const char* packed, char* buffer) {
        uint32_t* to = reinterpret_cast<uint32_t*>(buffer);
        for (int i = 0; i < 2 * kTileSteps; i++) store(to + i * kLanes, weights(packed + i * kBytes));
        return buffer;
    }
};

// The struct of a format by the number format X of x, F32 or BF16.
struct Unquantized {
    template <class X>
    using In = X;
};
template <class Code>
struct Coded {
    template <class X>
    using In = std::conditional_t<std::is_same_v<X, F32>, CodedFloats<Code>, CodedPairs<Code>>;
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
using Formats = std::tuple<Unquantized, Coded<Int8>, Stored<WideBF16>, Stored<WideF16>, Grouped<4>, Grouped<8>>;
constexpr int kFormats = std::tuple_size_v<Formats>;

// f(the struct of format number `format` in products of X).
template <class X, int N = 0, class F>
auto with_format(int format, F&& f) {
    if constexpr (N + 1 < kFormats)
        if (format != N) return with_format<X, N + 1>(format, f);
    return f(typename std::tuple_element_t<N, Formats>::template In<X>());
}

}  // namespace ink
