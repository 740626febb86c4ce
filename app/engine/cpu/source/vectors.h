// The vector layer of products, attention and sampling: sixteen lanes on every CPU.
//
// A vector has one part for each register that sixteen lanes need: one with AVX-512, two with AVX2, four elsewhere.
// (GCC 12 keeps vectors that are larger than a register in memory.) Every function rounds alike on every CPU, and every
// sum has one order, so all levels give the same bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INK_INLINE inline __attribute__((always_inline))

namespace ink {

constexpr int kLanes = 16;

// Lanes of a part.
#if defined(__AVX512F__)
constexpr int kPart = 16;
#elif defined(__AVX2__)
constexpr int kPart = 8;
#else
constexpr int kPart = 4;
#endif
constexpr int kParts = kLanes / kPart;

// N numbers in a register, or in a piece of one, with the operators of the compiler's vector extension.
template <class T, int N>
struct PartType {
    typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <class T, int N = kPart>
using PartOf = typename PartType<T, N>::type;
using Part = PartOf<float>;

template <class P>
using Element = std::remove_cvref_t<decltype(P{}[0])>;

// f(0), f(1), ..., for each part.
template <class F>
INK_INLINE void for_each_part(F f) {
    f(0);
    if constexpr (kParts > 1) f(1);
    if constexpr (kParts > 2) f(2), f(3);
}

// f(n) for n from 1 to MOST, with n as a constant.
template <int MOST, class F>
void with_constant(int n, F&& f) {
    if constexpr (MOST > 1)
        if (n < MOST) return with_constant<MOST - 1>(n, f);
    f(std::integral_constant<int, MOST>());
}

// Sixteen numbers. A number converts to the vector that has it in every lane.
template <class T>
struct Vector {
    PartOf<T> part[kParts];

    Vector() = default;
    INK_INLINE Vector(T x) {
        for_each_part([&](int i) { part[i] = x - PartOf<T>{}; });  // x + 0 would turn -0 into 0
    }
    INK_INLINE T operator[](int lane) const { return part[lane / kPart][lane % kPart]; }

#define INK_OPERATOR(op)                                                       \
    friend INK_INLINE Vector operator op(const Vector& a, const Vector& b) {   \
        return by_parts([](auto x, auto y) { return x op y; }, a, b);          \
    }
    INK_OPERATOR(+) INK_OPERATOR(-) INK_OPERATOR(*) INK_OPERATOR(/)
    INK_OPERATOR(&) INK_OPERATOR(|) INK_OPERATOR(<<) INK_OPERATOR(>>)
#undef INK_OPERATOR
    INK_INLINE void operator+=(const Vector& b) { *this = *this + b; }
    INK_INLINE void operator*=(const Vector& b) { *this = *this * b; }
};

using Floats = Vector<float>;
using Ints = Vector<int32_t>;
using Words = Vector<uint32_t>;

// f of vectors, part by part.
template <class F, class... T>
INK_INLINE auto by_parts(F f, const Vector<T>&... v) {
    Vector<Element<decltype(f(v.part[0]...))>> result;
    for_each_part([&](int i) { result.part[i] = f(v.part[i]...); });
    return result;
}

template <class T>
INK_INLINE Vector<T> load(const T* from) {
    Vector<T> v;
    for_each_part([&](int i) { std::memcpy(&v.part[i], from + i * kPart, sizeof v.part[i]); });
    return v;
}

template <class T>
INK_INLINE void store(T* to, const Vector<T>& v) {
    for_each_part([&](int i) { std::memcpy(to + i * kPart, &v.part[i], sizeof v.part[i]); });
}

// The same bits as another type: of a number, and of each number of a vector.
template <class To, class From>
INK_INLINE To bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To same;
    std::memcpy(&same, &value, sizeof same);
    return same;
}
template <class To, class From>
INK_INLINE Vector<To> bits(const Vector<From>& v) {
    return by_parts([](auto part) { return (PartOf<To>)part; }, v);
}

// a * b + c, rounded once.
INK_INLINE Part fma(Part a, Part b, Part c) {
#if defined(__AVX512F__)
    return (Part)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Part)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (Part)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    for (int i = 0; i < kPart; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

INK_INLINE Floats fma(const Floats& a, const Floats& b, const Floats& c) {
    return by_parts([](Part x, Part y, Part z) { return fma(x, y, z); }, a, b, c);
}

// A polynomial, with the coefficient of the highest power first.
template <class... C>
INK_INLINE Part polynomial(Part x, float first, C... others) {
    Part p = first - Part{};
    ((p = fma(p, x, others - Part{})), ...);
    return p;
}

// e^x to 1.5 units in the last place; 0 below kExpCutoff, near which float32 loses precision. NaN stays NaN.
//
// x = n ln 2 + r with |r| <= ln 2 / 2. ln 2 is split in two parts, so that n times the first part is exact. e^r is a
// Taylor series that ends where the remainder is below a tenth of a unit in the last place.
constexpr float kExpCutoff = -86.0f;

INK_INLINE Part exp(Part x) {
    constexpr float kLog2E = 1.44269504088896341f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
    constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
    const Part clamped = x > 88.0f ? 88.0f - Part{} : x;
    const Part shifted = clamped * kLog2E + kRounding, n = shifted - kRounding;
    const Part r = fma(n, -kLn2Low - Part{}, fma(n, -kLn2High - Part{}, clamped));
    const Part e = polynomial(r, 1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f);
    const auto power = ((PartOf<int32_t>)shifted - bits<int32_t>(kRounding) + 127) << 23;
    return x < kExpCutoff ? Part{} : e * (Part)power;
}

INK_INLINE Floats exp(const Floats& x) {
    return by_parts([](Part part) { return exp(part); }, x);
}

// 2^x to 2.5 units in the last place, and 2^0 is 1; 0 below -126. x is at most 127. NaN stays NaN.
//
// x = n + r with |r| <= 1/2. 2^r is the polynomial of degree 5 with the least relative error whose constant is 1.
INK_INLINE Part exp2(Part x) {
    constexpr float kRounding = 12582912.0f + 127;  // adding it leaves the nearest whole number + 127 in the low bits
    const Part shifted = x + kRounding, r = x - (shifted - kRounding);
    const Part e = polynomial(r, 0.00132647273f, 0.00967151299f, 0.0555073358f, 0.240222424f, 0.693147004f, 1.0f);
    const auto power = (PartOf<int32_t>)shifted << 23;
    return x < -126.0f ? Part{} : e * (Part)power;
}

INK_INLINE Floats exp2(const Floats& x) {
    return by_parts([](Part part) { return exp2(part); }, x);
}

// The larger of two numbers, or of two parts lane by lane.
constexpr auto kLarger = [](auto a, auto b) { return a > b ? a : b; };
constexpr auto kPlus = [](auto a, auto b) { return a + b; };

INK_INLINE Floats larger(const Floats& a, const Floats& b) { return by_parts(kLarger, a, b); }

// Combines lanes 0 and 8, 1 and 9, ..., then the halves of what is left: one order on every CPU.
template <class P, class F>
INK_INLINE auto fold(P x, F f) {
    constexpr int n = sizeof(P) / sizeof(Element<P>);
    PartOf<Element<P>, n / 2> half[2];
    std::memcpy(half, &x, sizeof x);
    if constexpr (n == 2) return f(half[0][0], half[1][0]);
    else return fold(f(half[0], half[1]), f);
}
template <class P, int N, class F>
INK_INLINE auto fold(const P (&parts)[N], F f) {
    if constexpr (N == 1) {
        return fold(parts[0], f);
    } else {
        P half[N / 2];
        for (int i = 0; i < N / 2; i++) half[i] = f(parts[i], parts[i + N / 2]);
        return fold(half, f);
    }
}

INK_INLINE float sum(const Floats& x) { return fold(x.part, kPlus); }
INK_INLINE float largest(const Floats& x) { return fold(x.part, kLarger); }

INK_INLINE Ints consecutive(int32_t first) {
    constexpr int32_t lanes[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(lanes) + first;
}

// The first n lanes of a, the others of b.
INK_INLINE Floats first_lanes(int n, const Floats& a, const Floats& b) {
    return by_parts([n](auto lane, Part x, Part y) { return lane < n ? x : y; }, consecutive(0), a, b);
}

// Integer keys in the order of the floats; 0.0 and -0.0 have the same key.
INK_INLINE uint64_t key_of(float value) {
    const uint32_t raw = bits<uint32_t>(value + 0.0f);
    return raw & 0x80000000u ? ~raw : raw | 0x80000000u;
}

struct bf16 {
    uint16_t bits;
};

INK_INLINE float to_float(float x) { return x; }
INK_INLINE float to_float(bf16 x) { return bits<float>(uint32_t(x.bits) << 16); }

// Rounded to the nearest, ties to even; NaN stays NaN.
INK_INLINE Vector<uint16_t> to_bf16(const Floats& x) {
    return by_parts([](Part part) {
#if defined(__AVX512BF16__)
        return (PartOf<uint16_t>)_mm512_cvtneps_pbh((__m512)part);
#else
        const auto u = (PartOf<uint32_t>)part;
        const auto rounded = (u + 0x7fffu + (u >> 16 & 1)) >> 16, nan = u >> 16 | 0x40;
        return __builtin_convertvector(part == part ? rounded : nan, PartOf<uint16_t>);
#endif
    }, x);
}

// The same numbers in float32. (GCC 12 compiles the last form number by number.)
INK_INLINE Floats from_bf16(const Vector<uint16_t>& x) {
    return by_parts([](auto part) {
#if defined(__AVX512F__)
        return (Part)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)part), 16);
#elif defined(__AVX2__)
        return (Part)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)part), 16);
#else
        return (Part)(__builtin_convertvector(part, PartOf<uint32_t>) << 16);
#endif
    }, x);
}

// The first or second bfloat16 of the pair in each lane.
INK_INLINE Floats half_of(const Words& pairs, int i) { return bits<float>(i ? pairs & 0xffff0000u : pairs << 16); }

struct f16 {
    uint16_t bits;
};

// float16 in float32. The last form is for finite numbers.
INK_INLINE Floats from_f16(const Vector<uint16_t>& x) {
    return by_parts([](auto part) {
#if defined(__AVX512F__)
        return (Part)_mm512_cvtph_ps((__m256i)part);
#elif defined(__F16C__)
        return (Part)_mm256_cvtph_ps((__m128i)part);
#elif defined(__ARM_NEON)
        return (Part)vcvt_f32_f16(vreinterpret_f16_u16((uint16x4_t)part));
#else
        const auto wide = __builtin_convertvector(part, PartOf<uint32_t>);
        const Part size = (Part)((wide & 0x7fffu) << 13) * 0x1p112f;
        return (Part)((PartOf<uint32_t>)size | (wide & 0x8000u) << 16);
#endif
    }, x);
}

// c + a.odd * b.odd + a.even * b.even for the pairs of bfloat16 in each lane, rounded as AVX512_BF16 does.
INK_INLINE Floats dot_pairs(const Words& a, const Words& b, const Floats& c) {
#if defined(__AVX512BF16__)
    return by_parts([](auto x, auto y, Part z) {
        return (Part)_mm512_dpbf16_ps((__m512)z, (__m512bh)x, (__m512bh)y);
    }, a, b, c);
#else
    const Floats odd = fma(bits<float>(a & 0xffff0000u), bits<float>(b & 0xffff0000u), c);
    return fma(bits<float>(a << 16), bits<float>(b << 16), odd);
#endif
}

// Converts int8 or uint8 numbers to float32. (GCC 12 compiles the last form number by number.)
template <class T>
    requires(sizeof(T) == 1)
INK_INLINE Floats widen(const Vector<T>& x) {
    return by_parts([](auto part) {
#if defined(__AVX512F__)
        const __m128i bytes = (__m128i)part;
        const __m512i ints = std::is_signed_v<T> ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
        return (Part)_mm512_cvtepi32_ps(ints);
#elif defined(__AVX2__)
        const __m128i bytes = _mm_loadl_epi64((const __m128i*)&part);
        const __m256i ints = std::is_signed_v<T> ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
        return (Part)_mm256_cvtepi32_ps(ints);
#else
        return __builtin_convertvector(part, Part);
#endif
    }, x);
}

// A sum in float64, lane by lane.
struct DoubleSum {
    using Half = PartOf<double, kPart / 2>;
    Half halves[2 * kParts] = {};

    INK_INLINE void add(const Floats& x, const Floats& factor = 1.0f) {
        for_each_part([&](int i) {
            using Doubles = PartOf<double>;
            const Doubles product =
                __builtin_convertvector(x.part[i], Doubles) * __builtin_convertvector(factor.part[i], Doubles);
            Half half[2];
            std::memcpy(half, &product, sizeof product);
            halves[2 * i] += half[0], halves[2 * i + 1] += half[1];
        });
    }

    INK_INLINE double total() const { return fold(halves, kPlus); }
};

// Stores the values that are at least `least`, and their `numbers`, contiguously, and returns how many there are. It
// always writes kLanes entries. The output may overlap the input.
INK_INLINE int compress(const float* values, const Words& numbers, float least, float* to, uint32_t* to_numbers) {
#if defined(__AVX512F__)
    const __m512 value = (__m512)load(values).part[0];
    const __mmask16 kept = _mm512_cmp_ps_mask(value, (__m512)Floats(least).part[0], _CMP_GE_OQ);
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps(kept, value));
    _mm512_storeu_si512(to_numbers, _mm512_maskz_compress_epi32(kept, (__m512i)numbers.part[0]));
    return __builtin_popcount(kept);
#else
    int n = 0;
    for (int i = 0; i < kLanes; i++) {
        const float value = values[i];
        to[n] = value;
        to_numbers[n] = numbers[i];
        n += value >= least;
    }
    return n;
#endif
}

}  // namespace ink
