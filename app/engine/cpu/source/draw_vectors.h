// Vector helpers of the sampler: loads, maxima, exp, and sums whose order is the same at every vector width.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace draw {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

template <class T, int N>
struct Vector {
    typedef T type __attribute__((vector_size(N * sizeof(T))));
};

using Floats = Vector<float, LANES>::type;
using Ints = Vector<int32_t, LANES>::type;
using Doubles = Vector<double, LANES / 2>::type;
using HalfFloats = Vector<float, LANES / 2>::type;

#define DRAW_INLINE inline __attribute__((always_inline))

DRAW_INLINE Floats load(const float* from) {
    Floats value;
    memcpy(&value, from, sizeof value);
    return value;
}

DRAW_INLINE void store(float* to, Floats value) { memcpy(to, &value, sizeof value); }

DRAW_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

template <class To, class From>
DRAW_INLINE To bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To same;
    memcpy(&same, &value, sizeof same);
    return same;
}

// The largest of N numbers.
template <int N>
DRAW_INLINE float best_of(typename Vector<float, N>::type value) {
    if constexpr (N == 1) {
        return value[0];
    } else {
        typename Vector<float, N / 2>::type low, high;
        memcpy(&low, &value, sizeof low);
        memcpy(&high, reinterpret_cast<const char*>(&value) + sizeof low, sizeof high);
        return best_of<N / 2>(low > high ? low : high);
    }
}

// exp(x) for x <= 0: within 2 ulp of float32, 1 at 0, 0 below CUT, where float32 would soon lose its digits.
constexpr float CUT = -86.0f;

// x = n ln 2 + r with |r| <= ln 2 / 2, ln 2 in two parts, the first with room for n; exp(r) by its Taylor series, which
// ends where its rest is below a tenth of an ulp.
constexpr float LOG2_E = 1.44269504088896341f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;

// a b + c, rounded once where the processor can.
DRAW_INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

DRAW_INLINE Floats exp_of_rest(Floats r) {
    const Floats one = Floats{} + 1.0f;
    Floats e = fused(r, one / 5040, one / 720);
    e = fused(e, r, one / 120);
    e = fused(e, r, one / 24);
    e = fused(e, r, one / 6);
    e = fused(e, r, one / 2);
    e = fused(e, r, one);
    return fused(e, r, one);
}

DRAW_INLINE Floats exp_of(Floats x) {
    const Floats held = x < CUT ? Floats{} + CUT : x;
#if defined(__AVX512F__)
    const __mmask16 all = 0xFFFF, kept = _mm512_cmp_ps_mask(x, Floats{} + CUT, _CMP_GE_OQ);
    const Floats n = _mm512_maskz_roundscale_ps(all, held * LOG2_E, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Floats r = fused(n, Floats{} - LN2_LOW, fused(n, Floats{} - LN2_HIGH, held));
    return _mm512_maskz_scalef_ps(kept, exp_of_rest(r), n);
#else
    constexpr float ROUNDING = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
    const Floats shifted = held * LOG2_E + ROUNDING;
    const Floats n = shifted - ROUNDING;
    const Floats r = fused(n, Floats{} - LN2_LOW, fused(n, Floats{} - LN2_HIGH, held));
    const Ints power = (bits<Ints>(shifted) - bits<int32_t>(ROUNDING)) << 23;
    return x < CUT ? Floats{} : bits<Floats>(bits<Ints>(exp_of_rest(r)) + power);
#endif
}

// Writes the values that are at least `least`, and the numbers that belong to them, one after the other; how many there
// are. Room for LANES is written over. The places may be those that are read.
DRAW_INLINE int pick(const float* values, Ints numbers, float least, float* to, uint32_t* to_numbers) {
#if defined(__AVX512F__)
    const Floats value = load(values);
    const __mmask16 kept = _mm512_cmp_ps_mask(value, Floats{} + least, _CMP_GE_OQ);
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps(kept, value));
    _mm512_storeu_si512(to_numbers, _mm512_maskz_compress_epi32(kept, bits<__m512i>(numbers)));
    return __builtin_popcount(kept);
#else
    int n = 0;
    for (int i = 0; i < LANES; i++) {
        const float value = values[i];
        to[n] = value;
        to_numbers[n] = static_cast<uint32_t>(numbers[i]);
        n += value >= least;
    }
    return n;
#endif
}

// A sum of floats in float64, in sixteen lanes at every width of the vectors, so that its bits are the same.
struct Sum16 {
    Doubles part[2 * 16 / LANES] = {};

    // The lower or the upper half of a vector. GCC 12 makes a detour through memory of the portable form.
    template <int UPPER>
    DRAW_INLINE static Doubles half(Floats value) {
#if defined(__AVX512DQ__)
        return _mm512_maskz_cvtps_pd(0xFF, _mm512_maskz_extractf32x8_ps(0xFF, value, UPPER));
#elif defined(__AVX2__) && !defined(__AVX512F__)
        return _mm256_cvtps_pd(_mm256_extractf128_ps(value, UPPER));
#else
        HalfFloats some;
        memcpy(&some, reinterpret_cast<const char*>(&value) + UPPER * sizeof some, sizeof some);
        return __builtin_convertvector(some, Doubles);
#endif
    }

    // value: the k-th vector of sixteen numbers.
    DRAW_INLINE void add(int k, Floats value) {
        part[2 * k] += half<0>(value);
        part[2 * k + 1] += half<1>(value);
    }

    DRAW_INLINE void add_product(int k, Floats a, Floats b) {
        part[2 * k] += half<0>(a) * half<0>(b);
        part[2 * k + 1] += half<1>(a) * half<1>(b);
    }

    DRAW_INLINE double total() const {
        double lane[16];
        memcpy(lane, part, sizeof lane);
        for (int width = 8; width; width /= 2)
            for (int i = 0; i < width; i++) lane[i] += lane[i + width];
        return lane[0];
    }
};

}  // namespace draw
