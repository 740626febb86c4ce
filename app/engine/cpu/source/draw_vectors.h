// Vector helpers of the sampler: loads, maxima, exp, and sums whose order is the same at every vector width.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace sampling {

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

#define INK_INLINE inline __attribute__((always_inline))

INK_INLINE Floats load(const float* from) {
    Floats value;
    memcpy(&value, from, sizeof value);
    return value;
}

INK_INLINE void store(float* to, Floats value) { memcpy(to, &value, sizeof value); }

INK_INLINE Floats elementwise_max(Floats a, Floats b) { return a > b ? a : b; }

template <class To, class From>
INK_INLINE To bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To same;
    memcpy(&same, &value, sizeof same);
    return same;
}

// The largest of N numbers.
template <int N>
INK_INLINE float horizontal_max(typename Vector<float, N>::type value) {
    if constexpr (N == 1) {
        return value[0];
    } else {
        typename Vector<float, N / 2>::type low, high;
        memcpy(&low, &value, sizeof low);
        memcpy(&high, reinterpret_cast<const char*>(&value) + sizeof low, sizeof high);
        return horizontal_max<N / 2>(low > high ? low : high);
    }
}

// exp(x) for x <= 0: within 2 ulp of float32, 1 at 0, 0 below EXP_CUTOFF, near which float32 loses precision.
constexpr float EXP_CUTOFF = -86.0f;

// x = n ln 2 + r with |r| <= ln 2 / 2. ln 2 is split in two parts, so that n times the first part is exact. exp(r) is a
// Taylor series that ends where the remainder is below a tenth of an ulp.
constexpr float LOG2_E = 1.44269504088896341f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;

// a * b + c, rounded once where the CPU has the instruction.
INK_INLINE Floats fused_multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

INK_INLINE Floats exp_taylor(Floats r) {
    const Floats one = Floats{} + 1.0f;
    Floats e = fused_multiply_add(r, one / 5040, one / 720);
    e = fused_multiply_add(e, r, one / 120);
    e = fused_multiply_add(e, r, one / 24);
    e = fused_multiply_add(e, r, one / 6);
    e = fused_multiply_add(e, r, one / 2);
    e = fused_multiply_add(e, r, one);
    return fused_multiply_add(e, r, one);
}

INK_INLINE Floats exp_nonpositive(Floats x) {
    const Floats clamped = x < EXP_CUTOFF ? Floats{} + EXP_CUTOFF : x;
#if defined(__AVX512F__)
    const __mmask16 all = 0xFFFF, kept = _mm512_cmp_ps_mask(x, Floats{} + EXP_CUTOFF, _CMP_GE_OQ);
    const Floats n = _mm512_maskz_roundscale_ps(all, clamped * LOG2_E, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Floats r = fused_multiply_add(n, Floats{} - LN2_LOW, fused_multiply_add(n, Floats{} - LN2_HIGH, clamped));
    return _mm512_maskz_scalef_ps(kept, exp_taylor(r), n);
#else
    constexpr float ROUNDING = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
    const Floats shifted = clamped * LOG2_E + ROUNDING;
    const Floats n = shifted - ROUNDING;
    const Floats r = fused_multiply_add(n, Floats{} - LN2_LOW, fused_multiply_add(n, Floats{} - LN2_HIGH, clamped));
    const Ints power = (bits<Ints>(shifted) - bits<int32_t>(ROUNDING)) << 23;
    return x < EXP_CUTOFF ? Floats{} : bits<Floats>(bits<Ints>(exp_taylor(r)) + power);
#endif
}

// Stores the values that are at least `least`, and their `numbers`, contiguously, and returns how many there are. It
// always writes LANES entries. The output may overlap the input.
INK_INLINE int compress(const float* values, Ints numbers, float least, float* to, uint32_t* to_numbers) {
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

// A sum of floats in float64, in sixteen lanes at every vector width, so that its bits are the same.
struct Sum16 {
    Doubles part[2 * 16 / LANES] = {};

    // The lower or the upper half of a vector. GCC 12 compiles the portable form to a detour through memory.
    template <int UPPER>
    INK_INLINE static Doubles half(Floats value) {
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
    INK_INLINE void add(int k, Floats value) {
        part[2 * k] += half<0>(value);
        part[2 * k + 1] += half<1>(value);
    }

    INK_INLINE void add_product(int k, Floats a, Floats b) {
        part[2 * k] += half<0>(a) * half<0>(b);
        part[2 * k + 1] += half<1>(a) * half<1>(b);
    }

    INK_INLINE double total() const {
        double lane[16];
        memcpy(lane, part, sizeof lane);
        for (int width = 8; width; width /= 2)
            for (int i = 0; i < width; i++) lane[i] += lane[i + width];
        return lane[0];
    }
};

}  // namespace sampling
