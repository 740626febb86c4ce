// Matrix products x W^T over packed weights: rows of x share every weight that is read.
//
// Packed layout: panels of 32 rows of W; within a panel, step by step along k, two vectors of 16 outputs each. A step
// is one number of x (float32), or a pair of them (bfloat16, int8). Every output has one accumulator, which adds its
// steps in order, however many rows there are: batch invariance (README.md).
#pragma once

#include <algorithm>

#include "vectors.h"

namespace ink {

constexpr int kPanel = 2 * kLanes;

// Number formats: that of x, and of one vector of packed weights for one step.
struct F32 {
    using Number = float;
    static constexpr int kStep = 1;
    static constexpr int kBytes = 64;  // of 16 outputs, one step
    using Vector = Floats;
    static Vector weights(const char* at) { return load<Floats>(at); }
    static Vector broadcast(const Number* x) { return splat(*x); }
    static Floats add(Vector w, Vector x, Floats sum) { return fma(w, x, sum); }
};

struct BF16 {
    using Number = bf16;
    static constexpr int kStep = 2;
    static constexpr int kBytes = 64;
    using Vector = Words;
    static Vector weights(const char* at) { return load<Words>(at); }
    static Vector broadcast(const Number* x) {
        uint32_t pair;
        std::memcpy(&pair, x, 4);
        return Words{} + pair;
    }
    static Floats add(Vector w, Vector x, Floats sum) { return dot_pairs(w, x, sum); }
};

// Integers up to 127 are exact in bfloat16; the scale of each output is applied after the sum.
struct I8 : BF16 {
    static constexpr int kBytes = 32;
    static Vector weights(const char* at) { return bits(widen(at)) >> 16 | bits(widen(at + 16)); }
};

struct I8F32 : F32 {
    static constexpr int kBytes = 16;
    static Vector weights(const char* at) { return widen(at); }
};

// As many accumulators as the registers hold: 32 of 64 bytes with AVX-512, elsewhere 16 of 32 bytes or fewer.
#if defined(__AVX512F__)
constexpr int kMostRows = 12, kFewRows = 6;
#else
constexpr int kMostRows = 3, kFewRows = 1;
#endif

// R rows by P panels, with all accumulators in registers.
template <class W, int R, int P>
inline void multiply(const typename W::Number* x, long stride, const char* panel, long panel_bytes, int steps,
                     Floats (&sums)[R][2 * P]) {
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 2 * P; v++) sums[r][v] = Floats{};
    // Few rows are bound by memory: prefetch what is needed next. Many rows leave time to prefetch the next panels.
    const long ahead = R <= kFewRows ? 4096 : P * panel_bytes;
    for (int s = 0; s < steps; s++) {
        for (int v = 0; v < 2 * P; v += W::kBytes < 64 ? 2 : 1)
            __builtin_prefetch(panel + (v / 2) * panel_bytes + (2L * s + v % 2) * W::kBytes + ahead, 0, R <= kFewRows ? 3 : 2);
        typename W::Vector w[2 * P];
        for (int v = 0; v < 2 * P; v++)
            w[v] = W::weights(panel + (v / 2) * panel_bytes + (2L * s + v % 2) * W::kBytes);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const typename W::Vector broadcast = W::broadcast(x + r * stride + s * W::kStep);
#pragma GCC unroll 4
            for (int v = 0; v < 2 * P; v++) sums[r][v] = W::add(w[v], broadcast, sums[r][v]);
        }
    }
}

struct Matrix {
    const char* packed;
    int outputs;  // rows of W, a multiple of 32
    int steps;    // along k
};

// Calls epilogue(row, output, sums of 16 outputs, sums of the next 16) for every row and panel.
template <class W, int R, int P, class Epilogue>
void tile(const typename W::Number* x, long stride, int row, const Matrix& m, int panel, Epilogue&& epilogue) {
    const long panel_bytes = 2L * m.steps * W::kBytes;
    Floats sums[R][2 * P];
    multiply<W, R, P>(x + row * stride, stride, m.packed + panel * panel_bytes, panel_bytes, m.steps, sums);
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) epilogue(row + r, (panel + p) * kPanel, sums[r][2 * p], sums[r][2 * p + 1]);
}

template <class W, int P, int R, class Epilogue>
void tile_of(int rows, const typename W::Number* x, long stride, int row, const Matrix& m, int panel,
             Epilogue&& epilogue) {
    if constexpr (R > 1)
        if (rows < R) return tile_of<W, P, R - 1>(rows, x, stride, row, m, panel, epilogue);
    tile<W, R, P>(x, stride, row, m, panel, epilogue);
}

// Rows [first, last) of x times panels [panel, end).
template <class W, class Epilogue>
void product(const typename W::Number* x, long stride, int first, int last, const Matrix& m, int panel, int end,
             Epilogue&& epilogue) {
    const int rows = last - first;
    if (rows <= kFewRows)
        for (; panel + 1 < end; panel += 2) tile_of<W, 2, kFewRows>(rows, x, stride, first, m, panel, epilogue);
    const int tiles = (rows + kMostRows - 1) / kMostRows;
    for (; panel < end; panel++)
        for (int t = 0; t < tiles; t++) {
            const int from = first + rows * t / tiles, to = first + rows * (t + 1) / tiles;
            tile_of<W, 1, kMostRows>(to - from, x, stride, from, m, panel, epilogue);
        }
}

// Copies W [n_rows, k] into panels. `gate_rows`: if not 0, W is a gate matrix stacked on an up matrix of so many rows
// each, and a panel holds 16 rows of the gate and the same 16 of up. Rows and steps beyond the matrix are zeros.
template <class W, class Source>
void pack(const Source* from, int n_rows, int k, int gate_rows, int panels, int steps, char* to) {
    constexpr int numbers = W::kStep, size = W::kBytes / kLanes / numbers;
    std::fill(to, to + 2L * panels * steps * W::kBytes, 0);
    for (int output = 0; output < panels * kPanel; output++) {
        const int panel = output / kPanel, vector = output % kPanel / kLanes, lane = output % kLanes;
        const int index = panel * kLanes + lane;
        const int row = !gate_rows ? output : index < gate_rows ? index + vector * gate_rows : n_rows;
        if (row >= n_rows) continue;
        char* column = to + (2L * panel * steps + vector) * W::kBytes;
        for (int i = 0; i < k; i++) {
            // A bfloat16 pair is in one lane; in int8 the even numbers come first, then the odd ones.
            const int within = size == 1 ? i % numbers * kLanes + lane : lane * numbers + i % numbers;
            std::memcpy(column + 2L * (i / numbers) * W::kBytes + within * size, from + long(row) * k + i, size);
        }
    }
}

}  // namespace ink
