// Products of bfloat16 in tiles (AMX) of up to 16 rows of 64 bytes:
//
//   sums [rows][16 outputs] += x [rows][16 pairs] * weights [16 pairs][16 outputs]
//
// One instruction adds the even and the odd products of an output separately, from zero on, then both to its sum; it
// treats subnormal numbers as zeros. These are other bits than those of dot_pairs(). Rows do not affect each other, so
// a row has the same bits however many there are: batch invariance.
#pragma once

#include <algorithm>
#include <atomic>

#include "vectors.h"

namespace ink {

#if defined(__AMX_BF16__)
constexpr int kTileRows = 16, kTileSteps = 16;
constexpr long kTileBytes = 128 * kTileSteps;  // of packed weights: 16 steps of a panel

// Tiles 0 and 1 (sums) and 4 (x) get `rows` rows; 2 and 3 (sums) and 5 (x) get `others`; 6 and 7 hold weights.
inline void configure_tiles(int rows, int others) {
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {};
    } shapes;
    const int counts[] = {rows, rows, others, others, rows, others, kTileRows, kTileRows};
    std::copy(counts, counts + 8, shapes.rows);
    asm volatile("ldtilecfg %0" ::"m"(shapes));  // GCC's intrinsic names only 8 bytes of it
}

// Up to 32 rows by one panel, or up to 16 rows by two. sums: [rows][panels][2] vectors.
inline void multiply_tiles(const bf16* x, long stride, int rows, const char* panel, long panel_bytes, int panels,
                           int steps, Floats* sums) {
    alignas(64) bf16 padded[2 * kTileRows][2 * kTileSteps];
    // Half of the next tile's weights. All of them at once delay the loads: 14.6 instead of 15.2 ms for 200 MB, one row.
    const auto prefetch_half = [](const char* weights) {
        for (int i = 0; i < kTileBytes / 2; i += 64) __builtin_prefetch(weights + kTileBytes + i);
    };
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int s = 0; s < steps; s += kTileSteps, panel += kTileBytes) {
        const bf16* from = x + 2 * s;
        long row_numbers = stride;
        if (const int left = 2 * (steps - s); left < 2 * kTileSteps) {  // what follows a row may not be finite
            std::memset(padded, 0, sizeof padded);
            for (int row = 0; row < rows; row++) std::copy_n(from + row * stride, left, padded[row]);
            from = padded[0], row_numbers = 2 * kTileSteps;
            std::atomic_signal_fence(std::memory_order_seq_cst);  // GCC's intrinsics do not say that they read memory
        }
        _tile_loadd(4, from, row_numbers * 2);
        _tile_loadd(6, panel, 128);
        prefetch_half(panel);
        _tile_loadd(7, panel + 64, 128);
        prefetch_half(panel + kTileBytes / 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (rows > kTileRows) {
            _tile_loadd(5, from + kTileRows * row_numbers, row_numbers * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        } else if (panels == 2) {
            const char* second = panel + panel_bytes;
            _tile_loadd(6, second, 128);
            prefetch_half(second);
            _tile_loadd(7, second + 64, 128);
            prefetch_half(second + kTileBytes / 2);
            _tile_dpbf16ps(2, 4, 6);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    Floats* others = sums + (rows > kTileRows ? 2 * kTileRows : 2);
    _tile_stored(0, sums, panels * 128);
    _tile_stored(1, sums + 1, panels * 128);
    if (rows <= kTileRows && panels == 1) return;
    _tile_stored(2, others, panels * 128);
    _tile_stored(3, others + 1, panels * 128);
}
#else
constexpr int kTileSteps = 1;
#endif

}  // namespace ink
