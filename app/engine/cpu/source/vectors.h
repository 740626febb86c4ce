// Vector types: sixteen float32 lanes, and pairs of bfloat16 in each lane.
//
// Uses the vector extensions of GCC and Clang, which every machine has, and intrinsics where one instruction does it.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ink {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

struct bf16 {
    uint16_t bits;
};

template <class V>
inline V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class V>
inline void store(void* to, V v) {
    std::memcpy(to, &v, sizeof v);
}

inline Floats splat(float x) { return Floats{} + x; }

inline Words bits(Floats x) { return (Words)x; }

inline Floats floats(Words x) { return (Floats)x; }

// a * b + c, rounded once if the CPU has the instruction: every path of one library does the same.
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    std::memcpy(x, &a, 64), std::memcpy(y, &b, 64), std::memcpy(z, &c, 64);
    for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
    std::memcpy(&c, z, 64);
    return c;
#else
    return a * b + c;
#endif
}

// c + a.even * b.even + a.odd * b.odd for the pairs of bfloat16 in each lane, in one fixed order.
inline Floats dot_pairs(Words a, Words b, Floats c) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#else
    const Words high = Words{} + 0xffff0000u;
    c = fma(floats(a << 16), floats(b << 16), c);
    return fma(floats(a & high), floats(b & high), c);
#endif
}

inline float to_float(bf16 x) {
    const uint32_t u = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

// Rounded to the nearest, ties to even; NaN stays NaN.
inline Halves to_bf16(Floats x) {
#if defined(__AVX512BF16__)
    return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
    const Words u = bits(x);
    const Words rounded = (u + 0x7fffu + (u >> 16 & 1)) >> 16;
    const Words nan = u >> 16 | 0x40;
    const Words kept = (u & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
#if defined(__AVX512F__)
    return (Halves)_mm512_cvtepi32_epi16((__m512i)kept);
#else
    return __builtin_convertvector(kept, Halves);
#endif
#endif
}

// Converts sixteen int8 numbers to float32. (GCC 12 compiles the last form number by number.)
inline Floats widen(const char* at) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(at)));
#elif defined(__AVX2__)
    const __m256 halves[2] = {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at))),
                              _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(at + 8))))};
    return load<Floats>(halves);
#else
    return __builtin_convertvector(__builtin_convertvector(load<Bytes>(at), Ints), Floats);
#endif
}

// Lanes 0 + 8, 1 + 9, ..., then in halves: one order for every sum.
inline float sum(Floats x) {
    x += __builtin_shuffle(x, Ints{8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15});
    x += __builtin_shuffle(x, Ints{4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7});
    return x[0] + x[2] + (x[1] + x[3]);
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline float largest(Floats x) {
    x = larger(x, __builtin_shuffle(x, Ints{8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15}));
    x = larger(x, __builtin_shuffle(x, Ints{4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7}));
    const float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
    return a > b ? a : b;
}

// e^x to 2 units in the last place: 2^n times a polynomial over [-ln 2 / 2, ln 2 / 2]; 0 below -87.
inline Floats exp(Floats x) {
    const Floats magic = splat(12582912.0f);  // adding it rounds to an integer
    const Floats high = splat(88.0f), low = splat(-87.0f);
    Floats clamped = x > high ? high : x;
    clamped = clamped < low ? low : clamped;
    const Floats n = fma(clamped, splat(1.44269504f), magic) - magic;
    Floats r = fma(n, splat(-0.693145752f), clamped);
    r = fma(n, splat(-1.42860677e-6f), r);
    Floats p = splat(1.0f / 720);
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, splat(c));
    const Floats power = (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
    const Floats y = p * power;
    const Floats kept = x < low ? Floats{} : y;
    return x == x ? kept : x;
}

}  // namespace ink
