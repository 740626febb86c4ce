// Matrix products x W^T over packed weights: rows of x share every weight that is read.
//
// Packed layout: panels of 32 rows of W; within a panel, step by step along k, two vectors of 16 outputs each. A step
// is one number of x (float32), or a pair of them (bfloat16). Every output has one accumulator, which adds its steps in
// order, however many rows there are: batch invariance (README.md). W: a format of weights (formats.h). tiles.h has
// products of bfloat16 with AMX, grouped.h the layout of matrices whose columns share scales.
#pragma once

#include <algorithm>
#include <functional>

#include "float_blocks.h"
#include "formats.h"
#include "grouped.h"
#include "interface.h"
#include "threads.h"
#include "tiles.h"

namespace ink {

template <class W>
constexpr long panel_bytes(int steps) {
    return 2L * ((steps + W::kUnit - 1) / W::kUnit) * W::kUnit * W::kBytes;
}

template <class W>
long panel_bytes(const InkMatrix& m) {
    if constexpr (IsGrouped<W>) return grouped_panel_bytes<W>(m);
    else return panel_bytes<W>(m.steps);
}

// Takes the sums of a tile: [rows][panels][2] vectors, from `row` and `panel` on.
using Epilogue = std::function<void(int row, int rows, int panel, int panels, const Floats* sums)>;

#if defined(__AVX512F__)
constexpr int kMostRows = 12, kFewRows = 6;  // accumulators for 32 registers of 64 bytes

// Up to so many rows take one panel after the other, as do more than kFewRows: one stream of memory is faster than two
// (PERFORMANCE.md). Those in between take two panels at once, which share the time that splitting pairs of x takes.
#if !defined(__AVX512BF16__)
template <class W>
constexpr int kRowsBoundByReading = W::kStep > 1 ? W::kBytes / 32 : kFewRows;
#else
template <class W>
constexpr int kRowsBoundByReading = kFewRows;
#endif

// Adds the products of R rows by P panels to the sums [R][P][2]. The accumulators are in registers, since nothing else
// has their address. ahead: distance of what is prefetched. One function for dense matrices and for blocks of others.
template <class W, int R, int P>
__attribute__((noinline)) void multiply(const typename W::Number* x, long stride, const char* panel, long panel_bytes, int steps,
                         long ahead, Floats* results) {
    Floats sums[R][2 * P];
    for (int i = 0; i < R * 2 * P; i++) sums[i / (2 * P)][i % (2 * P)] = results[i];
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

// See product().
template <class W>
void product_in_registers(const typename W::Number* x, long stride, int first, int last, const InkMatrix& m, long bytes,
                          int panel, int end, const Epilogue& epilogue) {
    const auto tile = [&]<int R, int P>(int row, std::integral_constant<int, R>, std::integral_constant<int, P>) {
        Floats sums[R * 2 * P] = {};
        const char* packed = static_cast<const char*>(m.packed) + panel * bytes;
        // Few rows are bound by memory: prefetch what is needed next. Many rows leave time to prefetch the next panels.
        multiply<W, R, P>(x + row * stride, stride, packed, bytes, m.steps, R <= kFewRows ? 4096 : P * bytes, sums);
        epilogue(row, R, panel, P, sums);
    };
    const int rows = last - first, tiles = (rows + kMostRows - 1) / kMostRows;
    if constexpr (kRowsBoundByReading<W> < kFewRows)
        if (rows > kRowsBoundByReading<W> && rows <= kFewRows)
            for (; panel + 1 < end; panel += 2)
                with_constant<kFewRows>(rows, [&](auto r) { tile(first, r, std::integral_constant<int, 2>()); });
    for (; panel < end; panel++)
        for (int t = 0; t < tiles; t++) {
            const int from = first + rows * t / tiles, to = first + rows * (t + 1) / tiles;
            with_constant<kMostRows>(to - from, [&](auto r) { tile(from, r, std::integral_constant<int, 1>()); });
        }
}
#endif

// See product().
template <class W>
void product_of_numbers(const typename W::Number* x, long stride, int first, int last, const InkMatrix& m, int panel,
                        int end, const Epilogue& epilogue) {
    const long bytes = panel_bytes<W>(m.steps);
#if defined(__AMX_BF16__)
    if constexpr (requires { W::kHasTiles; })
        return product_in_tiles<W>(x, stride, first, last, m, bytes, panel, end, epilogue);
#endif
#if defined(__AVX512F__)
    product_in_registers<W>(x, stride, first, last, m, bytes, panel, end, epilogue);
#else
    product_in_float_blocks<W>(x, stride, first, last, m, bytes, panel, end, epilogue);
#endif
}

// The bits of a product with the dense matrix of the same numbers: F32 of the format's float32, BF16 of its bfloat16.
//
// Few rows compute with weights that are converted in registers (multiply_groups()). For more rows, a block of columns is
// converted once for all of them, to the dense layout, and stays in the L1 cache; between blocks the sums are in memory,
// which rounds nothing. With tiles a row that is alone takes this way, too.
#if defined(__AVX512F__)
constexpr int kRowsThatConvert = 8;       // accumulators, scales and offsets in 32 registers
constexpr int kBlockBytes = 32 << 10;     // about the L1 cache; smaller ones load and store the sums more often
#else
constexpr int kRowsThatConvert = 2;       // in 16 registers
constexpr int kBlockBytes = 16 << 10;     // kBlockNumbers of each output
#endif

// R rows by a panel.
template <class W, int R>
void multiply_groups(const typename W::Number* x, long stride, const InkMatrix& m, const char* panel, Floats* results) {
    Floats sums[R][2] = {};
    GroupReader<W> reader(m, panel);
    reader.for_each_step(m.steps * W::kStep, [&](int column, const typename W::Operand* w) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const typename W::Operand broadcast = W::broadcast(x + r * stride + column);
            sums[r][0] = W::add(w[0], broadcast, sums[r][0]), sums[r][1] = W::add(w[1], broadcast, sums[r][1]);
        }
    });
    for (int r = 0; r < R; r++) results[2 * r] = sums[r][0], results[2 * r + 1] = sums[r][1];
}

// Adds the products of rows by a block of `columns` columns of a panel to sums [rows][2]. Dense: F32 or BF16.
template <class Dense>
void add_dense_block(const typename Dense::Number* x, long stride, int rows, const char* block, int columns,
                     Floats* sums) {
#if defined(__AMX_BF16__)
    if constexpr (Dense::kStep == 2) return add_in_tiles<Dense>(x, stride, rows, block, columns / 2, sums);
#endif
#if defined(__AVX512F__)
    for (int t = 0, tiles = (rows + kMostRows - 1) / kMostRows; t < tiles; t++) {
        const int row = rows * t / tiles, end = rows * (t + 1) / tiles;
        with_constant<kMostRows>(end - row, [&](auto r) {
            multiply<Dense, r, 1>(x + row * stride, stride, block, 0, columns / Dense::kStep, 0, sums + 2 * row);
        });
    }
#else
    add_float_block<Widened<Dense>>(x, stride, rows, block, columns / Dense::kStep, sums);
#endif
}

// See product().
template <class W>
void product_of_groups(const typename W::Number* x, long stride, int first, int last, const InkMatrix& m, int panel,
                       int end, const Epilogue& epilogue) {
    using Dense = std::conditional_t<W::kStep == 1, F32, BF16>;
    constexpr bool kHasTiles = W::kStep == 2 && kTileSteps > 1;
    constexpr int kBlockColumns = kBlockBytes / (2 * W::kPutBytes) * W::kStep;
    alignas(64) char block[kBlockBytes];
    Floats sums[2 * kMostProductRows];
    const int rows = last - first, columns = m.steps * W::kStep;
    const long bytes = grouped_panel_bytes<W>(m);
    for (; panel < end; panel++) {
        const char* packed = static_cast<const char*>(m.packed) + panel * bytes;
        if (!kHasTiles && rows <= kRowsThatConvert) {
            with_constant<kHasTiles ? 1 : kRowsThatConvert>(rows, [&](auto r) {
                if constexpr (!kHasTiles) multiply_groups<W, r>(x + first * stride, stride, m, packed, sums);
            });
        } else {
            std::fill_n(sums, 2 * rows, Floats{});
            GroupReader<W> reader(m, packed);
            for (int column = 0; column < columns; column += kBlockColumns) {
                const int count = std::min(kBlockColumns, columns - column);
                reader.convert(count, block);
                if (kHasTiles) {
                    char* tail = block + count / W::kStep * 2 * W::kPutBytes;
                    const int steps_left = (kTileSteps - count / W::kStep % kTileSteps) % kTileSteps;
                    std::fill_n(tail, steps_left * 2 * W::kPutBytes, 0);
                }
                add_dense_block<Dense>(x + first * stride + column, stride, rows, block, count, sums);
            }
        }
        epilogue(first, rows, panel, 1, sums);
    }
}

// Rows [first, last) of x times panels [panel, end).
template <class W>
void product(const typename W::Number* x, long stride, int first, int last, const InkMatrix& m, int panel, int end,
             const Epilogue& epilogue) {
    if constexpr (IsGrouped<W>)
        with_codes<W>(m, [&]<class Of>(Of) { product_of_groups<Of>(x, stride, first, last, m, panel, end, epilogue); });
    else product_of_numbers<W>(x, stride, first, last, m, panel, end, epilogue);
}
// The row of W that an output of a panel has; n_rows or more for padding.
inline int source_row(int panel, int output, int n_rows, int gate_rows) {
    if (!gate_rows) return panel * kPanel + output;
    const int row = panel * kLanes + output % kLanes;
    return row < gate_rows ? row + output / kLanes * gate_rows : n_rows;
}

// Copies W [n_rows, k] into panels. `gate_rows`: if not 0, W is a gate matrix stacked on an up matrix of so many rows
// each, and a panel holds 16 rows of the gate and the same 16 of up. Rows and steps beyond the matrix are zeros.
template <class W>
void pack(Pool& pool, const typename W::Stored* from, int n_rows, int k, int gate_rows, int panels, char* to) {
    constexpr int numbers = W::kStep;
    const int steps = (k + numbers - 1) / numbers;
    pool.run(panels, [&](int panel, int) {
        char* start = to + panel * panel_bytes<W>(steps);
        std::fill(start, start + panel_bytes<W>(steps), 0);
        constexpr int kSteps = 64;  // whose panel stays in the L1 cache
        for (int output = 0, first = 0; first < steps; output = (output + 1) % kPanel, first += output ? 0 : kSteps) {
            const int vector = output / kLanes, lane = output % kLanes;
            const int row = source_row(panel, output, n_rows, gate_rows);
            if (row >= n_rows) continue;
            const typename W::Stored* numbers_of_row = from + long(row) * k;
            for (int i = first * numbers, end = std::min(k, (first + kSteps) * numbers); i < end; i++)
                W::put(start + (2L * (i / numbers) + vector) * W::kBytes, lane, i % numbers, numbers_of_row[i]);
        }
    });
}

}  // namespace ink
