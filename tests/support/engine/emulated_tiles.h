// The tiles of AMX in software, for a machine that has AVX-512 with bfloat16 but no tiles: included before the kernels.
//
// Numbers are multiplied and rounded as the instructions do it (Intel's manual, TDPBF16PS): the even and the odd numbers
// of all pairs are added up apart, from 0 on, with subnormal numbers as zeros; then both are added to the sums. What the
// hardware would refuse, tiles without a configuration or with sizes that do not fit, ends the process.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace emulated {

struct Tile {
    int rows = 0, row_bytes = 0;
    alignas(64) unsigned char bytes[16][64] = {};
};

inline thread_local Tile tiles[8];
inline thread_local bool is_configured = false;

inline void expect(bool condition) {
    if (!condition) __builtin_trap();
}

inline Tile& tile(int index) {
    expect(is_configured && tiles[index].rows > 0);
    return tiles[index];
}

// shapes: 64 bytes, with the bytes of a row from 16 on, two of each tile, and its rows from 48 on.
inline void configure(const void* shapes) {
    const unsigned char* at = static_cast<const unsigned char*>(shapes);
    expect(at[0] == 1);
    for (int i = 0; i < 8; i++) {
        std::uint16_t row_bytes;
        std::memcpy(&row_bytes, at + 16 + 2 * i, 2);
        expect(row_bytes <= 64 && row_bytes % 4 == 0 && at[48 + i] <= 16);
        tiles[i] = Tile{.rows = at[48 + i], .row_bytes = row_bytes};
    }
    is_configured = true;
}

inline void zero(int index) { std::memset(tile(index).bytes, 0, sizeof tile(index).bytes); }

inline void load(int index, const void* from, long stride) {
    zero(index);
    for (int r = 0; r < tile(index).rows; r++)
        std::memcpy(tile(index).bytes[r], static_cast<const char*>(from) + r * stride, tile(index).row_bytes);
}

inline void store(int index, void* to, long stride) {
    for (int r = 0; r < tile(index).rows; r++)
        std::memcpy(static_cast<char*>(to) + r * stride, tile(index).bytes[r], tile(index).row_bytes);
}

inline __m512 even(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 odd(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000u))));
}

inline void multiply(int sums_index, int left_index, int right_index) {
    Tile &sums = tile(sums_index), &left = tile(left_index), &right = tile(right_index);
    expect(left.rows == sums.rows && left.row_bytes / 4 == right.rows && right.row_bytes == sums.row_bytes);
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040);
    for (int row = 0; row < sums.rows; row++) {
        __m512 evens = _mm512_setzero_ps(), odds = _mm512_setzero_ps();
        for (int k = 0; k < right.rows; k++) {
            std::int32_t pair;
            std::memcpy(&pair, left.bytes[row] + 4 * k, 4);
            const __m512i x = _mm512_set1_epi32(pair), weights = _mm512_load_si512(right.bytes[k]);
            evens = _mm512_fmadd_ps(even(weights), even(x), evens);
            odds = _mm512_fmadd_ps(odd(weights), odd(x), odds);
        }
        float* to = reinterpret_cast<float*>(sums.bytes[row]);
        _mm512_store_ps(to, _mm512_add_ps(_mm512_load_ps(to), _mm512_add_ps(evens, odds)));
    }
    _mm_setcsr(mode);
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_release
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_zero(tile) emulated::zero(tile)
#define _tile_dpbf16ps(sums, left, right) emulated::multiply(sums, left, right)
#define _tile_release() (emulated::is_configured = false)
#define INK_CONFIGURE_TILES(shapes) emulated::configure(&(shapes))
