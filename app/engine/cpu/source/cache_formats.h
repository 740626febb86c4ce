// How a cache stores the keys and values of one kv head in a block of 16 tokens.
//
// As numbers: keys [C / step][16][step], so that 16 scores are one vector; values [16 / step][C][step], where step is 2
// (pairs) in bfloat16 and 1 in float32. As codes of 8 bits: the same vectors, each packed as a vector of weights
// (formats.h), then a scale for each of the 16 tokens, in bfloat16. model/nn/int8_cache.py defines codes and scales.
//
// Codes are exact in both number formats. The scale of a key multiplies its scores, the scale of a value its weights,
// so that products read codes: code * scale is never rounded.
#pragma once

#include "formats.h"
#include "int8.h"
#include "interface.h"

namespace ink {

constexpr int kBlock = 16, kSpan = 256, kSpanBlocks = kSpan / kBlock;

// The format of codes by the number format W of products, F32 or BF16.
template <class W>
using CodesOf = std::conditional_t<std::is_same_v<W, F32>, Int8Floats, Int8Pairs>;

// Whether a cache of format C has codes and scales.
template <class C>
constexpr bool kIsCoded = requires { C::kLargest; };

// Bytes of the keys, or of the values, without scales.
template <class C>
long numbers_bytes(const InkShape& h) {
    return long(h.padded_head) / C::kStep * C::kBytes;
}

template <class C>
long block_bytes(const InkShape& h) {
    return numbers_bytes<C>(h) + (kIsCoded<C> ? kBlock * sizeof(bf16) : 0);
}

// The blocks of one sequence in one layer, for one kv head. The table begins with block `start`.
template <class C>
struct Blocks {
    const char *keys, *values;
    const int32_t* table;
    long stride;  // bytes from block to block
    int start = 0;
    const char* key(int block) const { return keys + table[block - start] * stride; }
    const char* value(int block) const { return values + table[block - start] * stride; }
};

INK_INLINE void convert_store(const Floats& x, float* to) { store(to, x); }
INK_INLINE void convert_store(const Floats& x, bf16* to) { store(&to->bits, to_bf16(x)); }

// Stores one token's key and value of one head in its slot, both padded with zeros to whole vectors.
template <class W>
void store_numbers(const InkShape& h, const float* k, const float* v, char* keys, char* values, int slot) {
    using Number = typename W::Number;
    Number converted[kLanes];
    for (int c = 0; c < h.padded_head; c += kLanes) {
        convert_store(load(k + c), converted);
        for (int i = 0; i < kLanes; i += W::kStep)
            std::memcpy(reinterpret_cast<Number*>(keys) + ((c + i) / W::kStep * kBlock + slot) * W::kStep,
                        converted + i, W::kStep * sizeof *converted);
        convert_store(load(v + c), converted);
        Number* column = reinterpret_cast<Number*>(values) + (slot / W::kStep * h.padded_head + c) * W::kStep;
        for (int i = 0; i < kLanes; i++) column[slot % W::kStep + i * W::kStep] = converted[i];
    }
}

// 16 numbers, rounded to the number format of the step.
template <class Number>
INK_INLINE Floats rounded(const float* x) {
    if constexpr (std::is_same_v<Number, float>) return load(x);
    else return from_bf16(to_bf16(load(x)));
}

// The scale of a head's numbers: the largest of them / 127, rounded to bfloat16; 0 if that is below the smallest normal
// number, NaN if a number is not finite.
template <class C>
bf16 cache_scale(const float* x, int count) {
    Ints most = 0;  // the bits of magnitudes are in their order, and above them are infinity and NaN
    for (int c = 0; c < count; c += kLanes)
        most = by_parts(kLarger, most, bits<int32_t>(rounded<typename C::Number>(x + c)) & 0x7fffffff);
    const int32_t largest = fold(most.part, kLarger);
    if (largest >= 0x7f800000) return {0x7fc0};
    const uint32_t quotient = bits<uint32_t>(bits<float>(largest) / C::kLargest);
    const auto scale = uint16_t((quotient + 0x7fff + (quotient >> 16 & 1)) >> 16);
    return {scale < 0x0080 ? uint16_t(0) : scale};
}

// Calls put(c, 16 codes) for every 16 of a head's numbers, and returns their scale. Codes are number / scale, rounded
// to the nearest integer, ties to even; all are 0 where the scale is 0 or NaN.
template <class C, class F>
INK_INLINE bf16 encode(const float* x, int count, F&& put) {
    constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
    const bf16 scale = cache_scale<C>(x, count);
    const bool has_codes = scale.bits != 0 && scale.bits != 0x7fc0;
    int32_t wide[kLanes] = {};
    for (int c = 0; c < count; c += kLanes) {
        if (has_codes)
            store(wide, bits<int32_t>(rounded<typename C::Number>(x + c) / to_float(scale) + kRounding) -
                            bits<int32_t>(kRounding));
        int8_t codes[kLanes];
        std::copy_n(wide, kLanes, codes);
        put(c, codes);
    }
    return scale;
}

// As store_numbers(), as codes.
template <class C>
void store_codes(const InkShape& h, const float* k, const float* v, char* keys, char* values, int slot) {
    // Slots of blocks that were in use before are overwritten, by several threads.
    static_assert(C::kBytes % (kLanes * C::kStep) == 0, "codes of a cache must fill whole bytes");
    const long vectors = h.padded_head / kLanes;
    const bf16 key = encode<C>(k, h.padded_head, [&](int c, const int8_t* codes) {
        for (int i = 0; i < kLanes; i++)
            C::put(keys + (c + i) / C::kStep * C::kBytes, slot, i % C::kStep, codes[i]);
    });
    const bf16 value = encode<C>(v, h.padded_head, [&](int c, const int8_t* codes) {
        char* vector = values + (slot / C::kStep * vectors + c / kLanes) * C::kBytes;
        for (int i = 0; i < kLanes; i++) C::put(vector, i, slot % C::kStep, codes[i]);
    });
    reinterpret_cast<bf16*>(keys + numbers_bytes<C>(h))[slot] = key;
    reinterpret_cast<bf16*>(values + numbers_bytes<C>(h))[slot] = value;
}

template <class C>
void store_kv(const InkShape& h, const float* k, const float* v, char* keys, char* values, int slot) {
    if constexpr (kIsCoded<C>) store_codes<C>(h, k, v, keys, values, slot);
    else store_numbers<C>(h, k, v, keys, values, slot);
}

// The scales of a span's keys and values. A cache of numbers has none.
template <bool IS_CODED>
struct Scales {
    template <class B>
    Scales(const InkShape&, const B&, int, int) {}
    void multiply_scores(float*, int, int) const {}
    INK_INLINE Floats weigh(const Floats& weight, int) const { return weight; }
};

template <>
struct Scales<true> {
    // Of the blocks [first, end).
    template <class C>
    Scales(const InkShape& h, const Blocks<C>& blocks, int first, int end) : start_(first * kBlock) {
        const auto read = [&](const char* block) {
            return from_bf16(load(reinterpret_cast<const uint16_t*>(block + numbers_bytes<C>(h))));
        };
        for (int b = first; b < end; b++) {
            store(keys_ + b * kBlock - start_, read(blocks.key(b)));
            store(values_ + b * kBlock - start_, read(blocks.value(b)));
        }
    }
    // The scores of the keys [start, start + length).
    void multiply_scores(float* scores, int start, int length) const {
        for (int i = 0; i < length; i += kLanes) store(scores + i, load(scores + i) * load(keys_ + start - start_ + i));
    }
    // The weights of 16 values, from number `start` on.
    INK_INLINE Floats weigh(const Floats& weight, int start) const { return weight * load(values_ + start - start_); }

  private:
    int start_;
    alignas(64) float keys_[kSpan], values_[kSpan];
};

// The blocks [first, end) of a span as numbers, in memory for 2 * kSpan * padded head of them.
template <class W>
struct DecodedSpan {
    template <class C>
    DecodedSpan(const InkShape& h, const Blocks<C>& coded, int first, int end, char* memory)
        : blocks{memory, memory + kSpanBlocks * block_bytes<W>(h), table_, block_bytes<W>(h), first} {
        const int vectors = int(block_bytes<W>(h) / W::kBytes);
        const auto decode = [&](const char* from, const char* to, const char* next) {
            using Lane = std::remove_cvref_t<decltype(C::weights(from)[0])>;
            for (int i = 0; i < vectors; i++) {
                if (i % (64 / C::kBytes) == 0) __builtin_prefetch(next + i * C::kBytes);
                store(reinterpret_cast<Lane*>(const_cast<char*>(to)) + i * kLanes, C::weights(from + i * C::kBytes));
            }
        };
        for (int b = first; b < end; b++) {
            table_[b - first] = b - first;
            const int next = std::min(b + 1, end - 1);
            decode(coded.key(b), blocks.key(b), coded.key(next));
            decode(coded.value(b), blocks.value(b), coded.value(next));
        }
    }
    DecodedSpan(const DecodedSpan&) = delete;  // the blocks point to the table

  private:
    int32_t table_[kSpanBlocks];

  public:
    const Blocks<W> blocks;
};

}  // namespace ink
