// Products of bfloat16 in tiles (AMX) of up to 16 rows of 64 bytes:
//
//   sums [rows][16 outputs] += x [rows][16 pairs] * weights [16 pairs][16 outputs]
//
// One instruction adds the even and the odd products of an output separately, from zero on, then both to its sum; it
// treats subnormal numbers as zeros. These are other bits than dot_pairs() gives. Rows do not affect each other, so
// a row has the same bits however many there are: batch invariance. A row that is alone gets them without tiles.
#pragma once

#include <algorithm>
#include <atomic>

#include "interface.h"
#include "vectors.h"

namespace ink {

#if defined(__AMX_BF16__)
#if !defined(INK_CONFIGURE_TILES)  // tests/support/engine/emulated_tiles.h has another
#define INK_CONFIGURE_TILES(shapes) asm volatile("ldtilecfg %0" ::"m"(shapes))  // GCC's intrinsic names only 8 bytes
#endif
constexpr int kTileRows = 16, kTileSteps = 16;

// Tiles 0 and 1 (sums) and 4 (x) get `rows` rows; 2 and 3 (sums) and 5 (x) get `others`; 6 and 7 hold weights. x and
// weights have `steps` pairs.
inline void configure_tiles(int rows, int others, int steps = kTileSteps) {
    const auto x_bytes = uint16_t(4 * steps);
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t row_bytes[16];
        uint8_t rows[16] = {};
    } shapes = {.row_bytes = {64, 64, 64, 64, x_bytes, x_bytes, 64, 64}};
    const int counts[] = {rows, rows, others, others, rows, others, steps, steps};
    std::copy(counts, counts + 8, shapes.rows);
    INK_CONFIGURE_TILES(shapes);
}

INK_INLINE void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// Stores the sums side by side.
INK_INLINE void store_sums(void* to, long row_bytes) {
    char* at = static_cast<char*>(to);
    _tile_stored(0, at, row_bytes);
    _tile_stored(1, at + 64, row_bytes);
    _tile_stored(2, at + 128, row_bytes);
    _tile_stored(3, at + 192, row_bytes);
}

// Up to 32 rows by one panel, or up to 16 rows by two. sums: [rows][panels][2] vectors; with `accumulates`, the
// products are added to them.
template <class W>
void multiply_tiles(const bf16* x, long stride, int rows, const char* panel, long panel_bytes, int panels, int steps,
                    Floats* sums, bool accumulates = false) {
    constexpr long kBytes = 2 * kTileSteps * W::kBytes;
    alignas(64) bf16 padded[2 * kTileRows][2 * kTileSteps];
    // Half of the next tile's weights: all of them at once delay the loads (15.2 instead of 14.6 ms for 200 MB).
    const auto prefetch_half = [](const char* weights) {
        for (int i = 0; i < kBytes / 2; i += 64) __builtin_prefetch(weights + kBytes + i);
    };
    Floats* others = sums + (rows > kTileRows ? 2 * kTileRows : 2);
    const bool has_others = rows > kTileRows || panels > 1;
    zero_sums();
    if (accumulates) {
        std::atomic_signal_fence(std::memory_order_seq_cst);
        _tile_loadd(0, sums, panels * 128);
        _tile_loadd(1, sums + 1, panels * 128);
        if (has_others) {
            _tile_loadd(2, others, panels * 128);
            _tile_loadd(3, others + 1, panels * 128);
        }
    }
    for (int s = 0; s < steps; s += kTileSteps, panel += kBytes) {
        const bf16* from = x + 2 * s;
        long row_numbers = stride;
        if (const int left = 2 * (steps - s); left < 2 * kTileSteps) {  // what follows a row may not be finite
            std::memset(padded, 0, sizeof padded);
            for (int row = 0; row < rows; row++) std::copy_n(from + row * stride, left, padded[row]);
            from = padded[0], row_numbers = 2 * kTileSteps;
        }
        std::atomic_signal_fence(std::memory_order_seq_cst);  // GCC's intrinsics do not say that they read memory
        _tile_loadd(4, from, row_numbers * 2);
        _tile_loadd(6, panel, 128);
        prefetch_half(panel);
        _tile_loadd(7, panel + 64, 128);
        prefetch_half(panel + kBytes / 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (rows > kTileRows) {
            _tile_loadd(5, from + kTileRows * row_numbers, row_numbers * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        } else if (panels == 2) {
            const char* other = panel + panel_bytes;
            _tile_loadd(6, other, 128);
            prefetch_half(other);
            _tile_loadd(7, other + 64, 128);
            prefetch_half(other + kBytes / 2);
            _tile_dpbf16ps(2, 4, 6);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, sums, panels * 128);
    _tile_stored(1, sums + 1, panels * 128);
    if (!has_others) return;
    _tile_stored(2, others, panels * 128);
    _tile_stored(3, others + 1, panels * 128);
}

// Adds the products of one row by P panels to sums. See multiply_alone().
template <class W, int P>
__attribute__((noinline)) void multiply_row(const bf16* x, const char* panel, long panel_bytes, int steps,
                                            Floats* sums) {
    for (int s = 0; s < steps; s += kTileSteps) {
        alignas(64) uint32_t pairs[kLanes] = {};
        if (s + kTileSteps <= steps) std::memcpy(pairs, x + 2 * s, sizeof pairs);
        else std::memcpy(pairs, x + 2 * s, (steps - s) * sizeof *pairs);
        alignas(64) float even_x[kLanes], odd_x[kLanes];
        store(even_x, bits<float>(load(pairs) << 16)), store(odd_x, bits<float>(load(pairs) & 0xffff0000u));
        Floats even[2 * P] = {}, odd[2 * P] = {};
        for (int i = 0; i < kTileSteps; i++)
#pragma GCC unroll 4
            for (int v = 0; v < 2 * P; v++) {
                const char* at = panel + (v / 2) * panel_bytes + (2L * (s + i) + v % 2) * W::kBytes;
                if (v % 2 == 0 || W::kBytes == 64) __builtin_prefetch(at + 4096);
                even[v] = fma(W::floats(at, 0), even_x[i], even[v]), odd[v] = fma(W::floats(at, 1), odd_x[i], odd[v]);
            }
        for (int v = 0; v < 2 * P; v++) sums[v] += even[v] + odd[v];
    }
}

// Adds the products of one row by up to two panels to sums, with the bits of multiply_tiles(). It reads weights faster,
// in the order of memory.
template <class W>
void multiply_alone(const bf16* x, const char* panel, long panel_bytes, int panels, int steps, Floats* sums) {
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | _MM_FLUSH_ZERO_ON | 0x40);  // and subnormal inputs are zeros
    const auto multiply = panels == 2 ? multiply_row<W, 2> : multiply_row<W, 1>;
    multiply(x, panel, panel_bytes, steps, sums);
    _mm_setcsr(mode);
}

// Tiles for multiply_tiles() with so many rows.
inline void configure_for(int rows) {
    configure_tiles(std::min(rows, kTileRows), rows > kTileRows ? rows - kTileRows : rows);
}

// Adds the products of rows by a block of a panel to sums [rows][2]. The block has whole tiles: zeros follow its steps.
template <class W>
void add_in_tiles(const bf16* x, long stride, int rows, const char* block, int steps, Floats* sums) {
    if (rows == 1) return multiply_alone<W>(x, block, 0, 1, steps, sums);
    for (int row = 0, count = 0; row < rows; row += count) {
        if (const int left = std::min(2 * kTileRows, rows - row); left != count) configure_for(count = left);
        multiply_tiles<W>(x + row * stride, stride, count, block, 0, 1, steps, sums + 2 * row, true);
    }
    _tile_release();
}

// See product() in product.h.
template <class W, class Epilogue>
void product_in_tiles(const bf16* x, long stride, int first, int last, const InkMatrix& m, long panel_bytes, int panel,
                      int end, const Epilogue& epilogue) {
    Floats sums[4 * kTileRows];
    for (int row = first, rows; row < last; row += rows) {
        rows = std::min(2 * kTileRows, last - row);
        if (rows > 1) configure_for(rows);
        for (int p = panel, n; p < end; p += n) {
            n = rows > kTileRows ? 1 : std::min(2, end - p);
            const char* packed = static_cast<const char*>(m.packed) + p * panel_bytes;
            if (rows > 1) {
                multiply_tiles<W>(x + row * stride, stride, rows, packed, panel_bytes, n, m.steps, sums);
            } else {
                std::fill_n(sums, 2 * n, Floats{});
                multiply_alone<W>(x + row * stride, packed, panel_bytes, n, m.steps, sums);
            }
            epilogue(row, rows, p, n, sums);
        }
    }
    if (last - first > 1) _tile_release();
}
#else
constexpr int kTileSteps = 1;
#endif

}  // namespace ink
