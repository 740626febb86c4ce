// Vectors for drawing: loads, maxima, exp, and sums whose order is the same at every width. Knows no row and no parameter.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

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

DRAW_INLINE Floats exp_of(Floats x) {
    // x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 in two parts, the first with room for n. The Taylor series ends where
    // its rest is below a tenth of an ulp.
    constexpr float ROUNDING = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
    const Floats held = x < CUT ? Floats{} + CUT : x;
    const Floats shifted = held * 1.44269504088896341f + ROUNDING;
    const Floats n = shifted - ROUNDING;
    const Floats r = (held - n * 0.693359375f) + n * 2.12194440e-4f;
    const Floats r2 = r * r;
    const Floats high = (r * (1.0f / 5040) + 1.0f / 720) * r2 + (r * (1.0f / 120) + 1.0f / 24);
    const Floats e = (high * r2 + (r * (1.0f / 6) + 0.5f)) * r2 + r + 1.0f;
    const Ints power = (bits<Ints>(shifted) - bits<int32_t>(ROUNDING)) << 23;
    return x < CUT ? Floats{} : bits<Floats>(bits<Ints>(e) + power);
}

// A sum of floats in float64, in sixteen lanes at every width of the vectors, so that its bits are the same.
struct Sum16 {
    Doubles part[2 * 16 / LANES] = {};

    DRAW_INLINE static Doubles half(const Floats& value, int which) {
        HalfFloats some;
        memcpy(&some, reinterpret_cast<const char*>(&value) + which * sizeof some, sizeof some);
        return __builtin_convertvector(some, Doubles);
    }

    // value: the k-th vector of sixteen numbers.
    DRAW_INLINE void add(int k, Floats value) {
        part[2 * k] += half(value, 0);
        part[2 * k + 1] += half(value, 1);
    }

    DRAW_INLINE void add_product(int k, Floats a, Floats b) {
        part[2 * k] += half(a, 0) * half(b, 0);
        part[2 * k + 1] += half(a, 1) * half(b, 1);
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
