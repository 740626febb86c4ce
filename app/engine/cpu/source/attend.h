// Paged attention over blocks of 16 keys and values.
//
// A block of one kv head: keys [C / step][16][step], so that 16 scores are one vector; values [16 / step][C][step],
// where step is 2 (pairs) in bfloat16 and 1 in float32. A row adds up its own keys in order, in 16 parallel sums, from
// its window's first block on; masked keys get a weight of exactly 0, so a tile may include them: batch invariance.
#pragma once

#include "product.h"

namespace ink {

constexpr int kBlock = 16;
#if defined(__AVX512F__)
constexpr int kQueryRows = 6, kBlocksAtOnce = 4;
#else
constexpr int kQueryRows = 2, kBlocksAtOnce = 2;
#endif

// The blocks of one sequence in one layer, for one kv head.
template <class W>
struct Blocks {
    const typename W::Number *keys, *values;
    const int32_t* table;
    long stride;  // numbers from block to block
    const typename W::Number* key(int block) const { return keys + table[block] * stride; }
    const typename W::Number* value(int block) const { return values + table[block] * stride; }
};

INK_INLINE void convert_store(const Floats& x, float* to) { store(to, x); }
INK_INLINE void convert_store(const Floats& x, bf16* to) { store(&to->bits, to_bf16(x)); }

// Stores one token's key and value of one head in its slot, both padded with zeros to whole vectors.
template <class W>
void store_kv(const InkShape& h, const float* k, const float* v, typename W::Number* keys, typename W::Number* values,
              int slot) {
    typename W::Number converted[kLanes];
    for (int c = 0; c < h.padded_head; c += kLanes) {
        convert_store(load(k + c), converted);
        for (int i = 0; i < kLanes; i += W::kStep)
            std::memcpy(keys + ((c + i) / W::kStep * kBlock + slot) * W::kStep, converted + i,
                        W::kStep * sizeof *converted);
        convert_store(load(v + c), converted);
        typename W::Number* column = values + (slot / W::kStep * h.padded_head + c) * W::kStep + slot % W::kStep;
        for (int i = 0; i < kLanes; i++) column[i * W::kStep] = converted[i];
    }
}

// scores [R][n_blocks * 16] of R query rows, from block `first` on.
template <class W, int R>
void compute_scores(const InkShape& h, const Blocks<W>& blocks, const typename W::Number* const* queries, int first,
                    int n_blocks, float* scores, long stride) {
    for (int b = 0; b < n_blocks; b += kBlocksAtOnce) {
        const char *keys[kBlocksAtOnce], *next[kBlocksAtOnce];
        for (int i = 0; i < kBlocksAtOnce; i++) {
            keys[i] = reinterpret_cast<const char*>(blocks.key(first + std::min(b + i, n_blocks - 1)));
            next[i] = reinterpret_cast<const char*>(blocks.key(first + std::min(b + i + kBlocksAtOnce, n_blocks - 1)));
        }
        Floats sums[R][kBlocksAtOnce] = {};
        for (int s = 0; s < h.padded_head / W::kStep; s++) {
            typename W::Operand k[kBlocksAtOnce];
            for (int i = 0; i < kBlocksAtOnce; i++) {
                k[i] = W::weights(keys[i] + s * W::kBytes);
                __builtin_prefetch(next[i] + s * W::kBytes);
            }
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const typename W::Operand q = W::broadcast(queries[r] + s * W::kStep);
#pragma GCC unroll 4
                for (int i = 0; i < kBlocksAtOnce; i++) sums[r][i] = W::add(k[i], q, sums[r][i]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int i = 0; i < kBlocksAtOnce && b + i < n_blocks; i++)
                store(scores + r * stride + (b + i) * kBlock, sums[r][i] * h.attention_scale);
    }
}

// Turns the scores of one row into softmax weights without the division, and returns their sum. The first key is
// `start`.
template <class Number>
float softmax(float* scores, int length, int start, int position, int window, Number* weights) {
    const int oldest = window ? position - window + 1 : 0;
    const Floats neg_inf = -__builtin_inff();
    Floats best = neg_inf;
    for (int i = 0; i < length; i += kLanes) {
        const int key = start + i;
        Floats s = load(scores + i);
        if (key + kLanes > position + 1 || key < oldest) {
            s = first_lanes(oldest - key, neg_inf, first_lanes(position + 1 - key, s, neg_inf));
            store(scores + i, s);
        }
        best = larger(best, s);
    }
    const float row_max = largest(best);
    Floats total = {};
    for (int i = 0; i < length; i += kLanes) {
        const Floats weight = exp(load(scores + i) - row_max);
        total += weight;
        convert_store(weight, weights + i);
    }
    return sum(total);
}

// outputs += weights [R][length] times values, P vectors of the head from `column` on.
template <class W, int R, int P>
void accumulate_values(const InkShape& h, const Blocks<W>& blocks, const typename W::Number* weights, long stride,
                       int first, int n_blocks, int column, const float* totals,
                       typename W::Number* const* outputs) {
    Floats sums[R][P] = {};
    for (int b = 0; b < n_blocks; b++) {
        const auto at = [&](int block) {
            return reinterpret_cast<const char*>(blocks.value(first + block) + long(column) * W::kStep);
        };
        const char *values = at(b), *next = at(std::min(b + 4, n_blocks - 1));
        for (int s = 0; s < kBlock / W::kStep; s++) {
            typename W::Operand v[P];
            for (int i = 0; i < P; i++) {
                const long offset = (long(s) * h.padded_head + i * kLanes) * (W::kBytes / kLanes);
                v[i] = W::weights(values + offset);
                __builtin_prefetch(next + offset);
            }
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const typename W::Operand p = W::broadcast(weights + r * stride + b * kBlock + s * W::kStep);
#pragma GCC unroll 4
                for (int i = 0; i < P; i++) sums[r][i] = W::add(v[i], p, sums[r][i]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < P; i++) {
            const int at = column + i * kLanes, left = std::min(kLanes, h.head_width - at);
            typename W::Number out[kLanes];
            convert_store(sums[r][i] / totals[r], out);
            if (left > 0) std::memcpy(outputs[r] + at, out, left * sizeof *out);
        }
}

// R query rows of one kv head at `positions`. scratch: 2 * R * (keys in whole blocks) floats.
template <class W, int R>
void attend(const InkShape& h, const Blocks<W>& blocks, const typename W::Number* const* queries, const int* positions,
            typename W::Number* const* outputs, float* scratch) {
    using Number = typename W::Number;
    const int last = *std::max_element(positions, positions + R), least = *std::min_element(positions, positions + R);
    const int first = h.window ? std::max(0, least - h.window + 1) / kBlock : 0;
    const int n_blocks = last / kBlock + 1 - first, length = n_blocks * kBlock;
    float totals[R];
    Number* weights = reinterpret_cast<Number*>(scratch + long(R) * length);
    compute_scores<W, R>(h, blocks, queries, first, n_blocks, scratch, length);
    for (int r = 0; r < R; r++)
        totals[r] = softmax(scratch + long(r) * length, length, first * kBlock, positions[r], h.window,
                           weights + long(r) * length);
    int column = 0;
    for (; column + 4 * kLanes <= h.padded_head; column += 4 * kLanes)
        accumulate_values<W, R, 4>(h, blocks, weights, length, first, n_blocks, column, totals, outputs);
    for (; column < h.padded_head; column += kLanes)
        accumulate_values<W, R, 1>(h, blocks, weights, length, first, n_blocks, column, totals, outputs);
}

}  // namespace ink
