// Matrix products x W^T over packed weights: rows of x share every weight that is read.
//
// Packed layout: panels of 32 rows of W; within a panel, step by step along k, two vectors of 16 outputs each. A step
// is one number of x (float32), or a pair of them (bfloat16, int8). Every output has one accumulator, which adds its
// steps in order, however many rows there are: batch invariance (README.md). tiles.h has products of bfloat16 with AMX.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>

#include "interface.h"
#include "threads.h"
#include "tiles.h"

namespace ink {

constexpr int kPanel = 2 * kLanes;

// Number formats: that of x, and of one vector of packed weights for one step.
struct F32 {
    using Number = float;
    static constexpr int kStep = 1;
    static constexpr int kUnit = 1;    // panels are padded to a multiple of so many steps
    static constexpr int kBytes = 64;  // of 16 outputs, one step
    using Operand = Floats;
    INK_INLINE static Operand weights(const char* at) { return load(reinterpret_cast<const float*>(at)); }
    INK_INLINE static Operand broadcast(const Number* x) { return *x; }
    INK_INLINE static Floats add(const Operand& w, const Operand& x, const Floats& sum) { return fma(w, x, sum); }
};

struct BF16 {
    using Number = bf16;
    static constexpr int kStep = 2;
    static constexpr int kUnit = kTileSteps;
    static constexpr int kBytes = 64;
    using Operand = Words;
    INK_INLINE static Operand weights(const char* at) { return load(reinterpret_cast<const uint32_t*>(at)); }
    INK_INLINE static Operand broadcast(const Number* x) {
        uint32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        return pair;
    }
    INK_INLINE static Floats add(const Operand& w, const Operand& x, const Floats& sum) { return dot_pairs(w, x, sum); }
    // For tiles.h: 16 steps of a panel; the even and the odd numbers of a step.
    static const char* tile(const char* packed, char*) { return packed; }
    INK_INLINE static std::pair<Floats, Floats> halves(const char* at) {
        return {bits<float>(weights(at) << 16), bits<float>(weights(at) & 0xffff0000u)};
    }
};

// Integers up to 127 are exact in bfloat16; the scale of each output is applied after the sum.
struct I8 : BF16 {
    static constexpr int kBytes = 32;
    INK_INLINE static Operand weights(const char* at) {
        const int8_t* numbers = reinterpret_cast<const int8_t*>(at);
        return bits<uint32_t>(widen(load(numbers))) >> 16 | bits<uint32_t>(widen(load(numbers + kLanes)));
    }
    INK_INLINE static const char* tile(const char* packed, char* buffer) {
        uint32_t* to = reinterpret_cast<uint32_t*>(buffer);
        for (int i = 0; i < 2 * kTileSteps; i++) store(to + i * kLanes, weights(packed + i * kBytes));
        return buffer;
    }
    INK_INLINE static std::pair<Floats, Floats> halves(const char* at) {
        const int8_t* numbers = reinterpret_cast<const int8_t*>(at);
        return {widen(load(numbers)), widen(load(numbers + kLanes))};
    }
};

struct I8F32 : F32 {
    static constexpr int kBytes = 16;
    INK_INLINE static Operand weights(const char* at) { return widen(load(reinterpret_cast<const int8_t*>(at))); }
};

template <class W>
constexpr long panel_bytes(int steps) {
    return 2L * ((steps + W::kUnit - 1) / W::kUnit) * W::kUnit * W::kBytes;
}

// As many accumulators as the registers hold: 32 of 64 bytes with AVX-512, elsewhere 16 of 32 bytes or fewer.
#if defined(__AVX512F__)
constexpr int kMostRows = 12, kFewRows = 6;
#else
constexpr int kMostRows = 3, kFewRows = 1;
#endif

// R rows by P panels. The accumulators are in registers, since nothing else has their address.
template <class W, int R, int P>
INK_INLINE void multiply(const typename W::Number* x, long stride, const char* panel, long panel_bytes, int steps,
                         Floats* results) {
    Floats sums[R][2 * P] = {};
    // Few rows are bound by memory: prefetch what is needed next. Many rows leave time to prefetch the next panels.
    const long ahead = R <= kFewRows ? 4096 : P * panel_bytes;
    for (int s = 0; s < steps; s++) {
        for (int v = 0; v < 2 * P; v += W::kBytes < 64 ? 2 : 1)
            __builtin_prefetch(panel + (v / 2) * panel_bytes + (2L * s + v % 2) * W::kBytes + ahead, 0, R <= kFewRows ? 3 : 2);
        typename W::Operand w[2 * P];
        for (int v = 0; v < 2 * P; v++)
            w[v] = W::weights(panel + (v / 2) * panel_bytes + (2L * s + v % 2) * W::kBytes);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const typename W::Operand broadcast = W::broadcast(x + r * stride + s * W::kStep);
#pragma GCC unroll 4
            for (int v = 0; v < 2 * P; v++) sums[r][v] = W::add(w[v], broadcast, sums[r][v]);
        }
    }
    for (int i = 0; i < R * 2 * P; i++) results[i] = sums[i / (2 * P)][i % (2 * P)];
}

// Takes the sums of a tile: [rows][panels][2] vectors, from `row` and `panel` on.
using Epilogue = std::function<void(int row, int rows, int panel, int panels, const Floats* sums)>;

// f(n) for n from 1 to MOST, with n as a constant.
template <int MOST, class F>
void with_constant(int n, F&& f) {
    if constexpr (MOST > 1)
        if (n < MOST) return with_constant<MOST - 1>(n, f);
    f(std::integral_constant<int, MOST>());
}

// Rows [first, last) of x times panels [panel, end).
template <class W>
void product(const typename W::Number* x, long stride, int first, int last, const InkMatrix& m, int panel, int end,
             const Epilogue& epilogue) {
    const long bytes = panel_bytes<W>(m.steps);
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<typename W::Number, bf16>)
        return product_in_tiles<W>(x, stride, first, last, m, bytes, panel, end, epilogue);
#endif
    const auto tile = [&]<int R, int P>(int row, std::integral_constant<int, R>, std::integral_constant<int, P>) {
        Floats sums[R * 2 * P];
        const char* packed = static_cast<const char*>(m.packed) + panel * bytes;
        multiply<W, R, P>(x + row * stride, stride, packed, bytes, m.steps, sums);
        epilogue(row, R, panel, P, sums);
    };
    const int rows = last - first, tiles = (rows + kMostRows - 1) / kMostRows;
    if (rows <= kFewRows)
        for (; panel + 1 < end; panel += 2)
            with_constant<kFewRows>(rows, [&](auto r) { tile(first, r, std::integral_constant<int, 2>()); });
    for (; panel < end; panel++)
        for (int t = 0; t < tiles; t++) {
            const int from = first + rows * t / tiles, to = first + rows * (t + 1) / tiles;
            with_constant<kMostRows>(to - from, [&](auto r) { tile(from, r, std::integral_constant<int, 1>()); });
        }
}

// Copies W [n_rows, k] into panels. `gate_rows`: if not 0, W is a gate matrix stacked on an up matrix of so many rows
// each, and a panel holds 16 rows of the gate and the same 16 of up. Rows and steps beyond the matrix are zeros.
template <class W>
void pack(Pool& pool, const char* from, int n_rows, int k, int gate_rows, int panels, char* to) {
    constexpr int numbers = W::kStep, size = W::kBytes / kLanes / numbers;
    const int steps = (k + numbers - 1) / numbers;
    pool.run(panels, [&](int panel, int) {
        char* start = to + panel * panel_bytes<W>(steps);
        std::fill(start, start + panel_bytes<W>(steps), 0);
        constexpr int kSteps = 64;  // whose panel stays in the L1 cache
        for (int output = 0, first = 0; first < steps; output = (output + 1) % kPanel, first += output ? 0 : kSteps) {
            const int vector = output / kLanes, lane = output % kLanes, index = panel * kLanes + lane;
            const int row = !gate_rows ? panel * kPanel + output : index < gate_rows ? index + vector * gate_rows : n_rows;
            if (row >= n_rows) continue;
            const char* numbers_of_row = from + long(row) * k * size;
            for (int i = first * numbers, end = std::min(k, (first + kSteps) * numbers); i < end; i++) {
                // A bfloat16 pair is in one lane; in int8 the even numbers come first, then the odd ones.
                const int within = size == 1 ? i % numbers * kLanes + lane : lane * numbers + i % numbers;
                std::memcpy(start + (2L * (i / numbers) + vector) * W::kBytes + within * size,
                            numbers_of_row + long(i) * size, size);
            }
        }
    });
}

// Rounds each row of a matrix to int8 numbers and a scale, with which its largest number becomes 127 or -127; a row of
// zeros stays zero. The bits are those of quantize() in app/engine/quantization/quantized_weights.py.
template <class Number>
void quantize(Pool& pool, const Number* from, int n_rows, int k, int8_t* numbers, float* scales) {
    constexpr int kRows = 16;
    pool.run((n_rows + kRows - 1) / kRows, [&](int task, int) {
        for (int row = task * kRows; row < std::min(n_rows, (task + 1) * kRows); row++) {
            const Number* x = from + long(row) * k;
            float most[kLanes] = {};  // of each lane, so that the loop is vectorized
            for (int first = 0; first < k; first += kLanes)
                for (int lane = 0; lane < std::min(kLanes, k - first); lane++)
                    most[lane] = std::max(most[lane], std::fabs(to_float(x[first + lane])));
            const float scale = *std::max_element(most, most + kLanes) / 127;
            scales[row] = scale > 0 ? scale : 1;
            for (int i = 0; i < k; i++) numbers[long(row) * k + i] = int8_t(std::rint(to_float(x[i]) / scales[row]));
        }
    });
}

}  // namespace ink
