// Products for CPUs whose vectors have 32 bytes or fewer: AVX2, NEON.
//
// These CPUs compute in float32 only, so every number is converted. A tile is up to 3 rows by both vectors of a panel, or
// up to 6 rows by one of them: its accumulators fit into 16 registers. Steps are taken in blocks, whose weights stay in
// the L1 cache; between blocks the accumulators are in memory, which rounds nothing. With many rows, the weights of a
// block are converted once for all of them.
#pragma once

#include <algorithm>

#include "formats.h"
#include "interface.h"

namespace ink {

constexpr int kMostProductRows = 192;  // of a product at once
constexpr int kRowsOfTile = 6;
constexpr int kTilesThatConvert = 2;  // the same weights, each for itself: faster than writing them once
constexpr int kBlockNumbers = 128;   // of each output: 16 KB of a panel in float32

// Weights of format W that are converted: a step has the same numbers, one vector of 16 outputs after the other.
template <class W>
struct Widened {
    static constexpr int kStep = W::kStep, kBytes = 64 * kStep;
    static constexpr bool kLastFirst = W::kLastFirst;
    INK_INLINE static Floats floats(const char* at, int i) { return load(reinterpret_cast<const float*>(at) + i * kLanes); }
};
template <class W>
constexpr bool kIsFloat32 = W::kBytes == 64 * W::kStep;

// Rows of a tile that takes both vectors of a panel. Numbers that are converted need registers, too.
template <class W>
constexpr int kRowsOfPanel = kIsFloat32<W> ? 3 : 2;

// Lines of memory that a tile prefetches while it computes: its share of the next block. A tile that is alone and takes
// both vectors reads in the order of memory, and prefetches as it reads.
struct Ahead {
    const char* from;
    int lines;
    bool follows_reading = false;
    Ahead part(int i, int of) const {
        const int first = lines * i / of;
        return {from + 64L * first, lines * (i + 1) / of - first};
    }
};

// Adds the products of R rows by V vectors of a panel to sums[row][vector].
template <class W, int R, int V>
INK_INLINE void add_block(const float* x, long stride, const char* packed, int steps, Ahead ahead, Floats (*sums)[2]) {
    Floats totals[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) totals[r][v] = sums[r][v];
    for (int s = 0; s < steps; s++, packed += 2 * W::kBytes, x += W::kStep) {
        if (V > 1 && ahead.follows_reading) {
            for (int line = 0; line < 2 * W::kBytes; line += 64) __builtin_prefetch(packed + line + 4096);
        } else if (V * s < ahead.lines) {
            for (int v = 0; v < V; v++) __builtin_prefetch(ahead.from + 64L * (V * s + v), 0, 2);
        }
#pragma GCC unroll 2
        for (int n = 0; n < W::kStep; n++) {
            const int i = W::kLastFirst ? W::kStep - 1 - n : n;
            if constexpr (V == 1) {
                const Floats w = W::floats(packed, i);
#pragma GCC unroll 6
                for (int r = 0; r < R; r++) totals[r][0] = fma(w, x[r * stride + i], totals[r][0]);
            } else {  // one part of the weights after the other: registers for all of them are lacking
                Part numbers[R];
#pragma GCC unroll 3
                for (int r = 0; r < R; r++) numbers[r] = x[r * stride + i] - Part{};
#pragma GCC unroll 2
                for (int v = 0; v < V; v++) {
                    const Floats w = W::floats(packed + v * W::kBytes, i);
                    for_each_part([&](int part) {
#pragma GCC unroll 3
                        for (int r = 0; r < R; r++)
                            totals[r][v].part[part] = fma(w.part[part], numbers[r], totals[r][v].part[part]);
                    });
                }
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sums[r][v] = totals[r][v];
}

// As add_block(), of up to kRowsOfTile rows by a panel.
template <class W>
void add_tile(int rows, const float* x, long stride, const char* packed, int steps, Ahead ahead, Floats (*sums)[2]) {
    with_constant<kRowsOfTile>(rows, [&](auto r) {
        if constexpr (r <= kRowsOfPanel<W>) {
            add_block<W, r, 2>(x, stride, packed, steps, ahead, sums);
        } else {
            for (int v = 0; v < 2; v++)
                add_block<W, r, 1>(x, stride, packed + v * W::kBytes, steps, ahead.part(v, 2),
                                   reinterpret_cast<Floats(*)[2]>(&sums[0][v]));
        }
    });
}

// Converts the weights of a block.
template <class W>
void widen(const char* packed, int steps, Floats* to) {
    for (int s = 0; s < steps; s++, packed += 2 * W::kBytes)
        for (int v = 0; v < 2; v++)
            for (int i = 0; i < W::kStep; i++) *to++ = W::floats(packed + v * W::kBytes, i);
}

// Converts x of a block: rows of kBlockNumbers numbers.
inline void widen(const bf16* x, long stride, int rows, int count, float* to) {
    for (int row = 0; row < rows; row++, x += stride, to += kBlockNumbers)
        for (int i = 0; i < count; i++) to[i] = to_float(x[i]);
}

// Adds the products of rows by a block of a panel, whose rows of x are in float32, to sums[row][vector]. next: of the
// block that follows.
template <class W>
void add_tiles(int rows, const float* x, long stride, const char* block, int steps, Ahead next, Floats (*sums)[2]) {
    const int tiles = (rows + kRowsOfTile - 1) / kRowsOfTile;
    for (int t = 0; t < tiles; t++) {
        const int row = rows * t / tiles, count = rows * (t + 1) / tiles - row;
        add_tile<W>(count, x + row * stride, stride, block, steps, tiles > 1 ? next.part(t, tiles) : next, sums + row);
    }
}

// As add_tiles(), of weights of F32, or of Widened<BF16> and x in bfloat16.
template <class W, class Number>
void add_float_block(const Number* x, long stride, int rows, const char* block, int steps, Floats* sums) {
    const auto add = [&](const float* wide, long wide_stride) {
        add_tiles<W>(rows, wide, wide_stride, block, steps, {}, reinterpret_cast<Floats(*)[2]>(sums));
    };
    if constexpr (std::is_same_v<Number, float>) return add(x, stride);
    else {
        float wide[kMostProductRows * kBlockNumbers];
        widen(x, stride, rows, steps * W::kStep, wide);
        add(wide, kBlockNumbers);
    }
}

// See product() in product.h.
template <class W, class Epilogue>
void product_in_float_blocks(const typename W::Number* x, long stride, int first, int last, const InkMatrix& m,
                             long panel_bytes, int panel, int end, const Epilogue& epilogue) {
    constexpr int kSteps = kBlockNumbers / W::kStep;
    constexpr bool kIsWide = std::is_same_v<typename W::Number, float>;
    Floats sums[kMostProductRows][2], weights[kIsFloat32<W> ? 1 : 2 * kBlockNumbers];
    float wide_x[kIsWide ? 1 : kMostProductRows * kBlockNumbers];
    const int rows = last - first, tiles = (rows + kRowsOfTile - 1) / kRowsOfTile;
    for (; panel < end; panel++) {
        std::fill_n(sums[0], 2 * rows, Floats{});
        const char* packed = static_cast<const char*>(m.packed) + panel * panel_bytes;
        for (int step = 0; step < m.steps; step += kSteps, packed += 2L * kSteps * W::kBytes) {
            const int steps = std::min(kSteps, m.steps - step);
            const typename W::Number* block_x = x + first * stride + step * W::kStep;
            if constexpr (!kIsWide) widen(block_x, stride, rows, steps * W::kStep, wide_x);
            const auto add = [&]<class B>(B, const char* block) {
                const Ahead next = {packed + 2L * kSteps * W::kBytes, 2 * kSteps * W::kBytes / 64, tiles == 1};
                if constexpr (kIsWide) add_tiles<B>(rows, block_x, stride, block, steps, next, sums);
                else add_tiles<B>(rows, wide_x, kBlockNumbers, block, steps, next, sums);
            };
            if (kIsFloat32<W> || tiles <= kTilesThatConvert) {
                add(W(), packed);
            } else {
                widen<W>(packed, steps, weights);
                add(Widened<W>(), reinterpret_cast<const char*>(weights));
            }
        }
        epilogue(first, rows, panel, 1, sums[0]);
    }
}

}  // namespace ink
