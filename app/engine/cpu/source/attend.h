// Paged attention over blocks of 16 keys and values.
//
// A block of one kv head: keys [C / step][16][step], so that 16 scores are one vector; values [16 / step][C][step],
// where step is 2 (pairs) in bfloat16 and 1 in float32. A row adds up its own keys in order, in 16 parallel sums, from
// its window's first block on; masked keys get a weight of exactly 0, so a tile may include them: batch invariance.
#pragma once

#include "elementwise.h"
#include "product.h"

namespace ink {

constexpr int kBlock = 16;
#if defined(__AVX512F__)
constexpr int kVectorRows = 6, kBlocksAtOnce = 4;
#else
constexpr int kVectorRows = 2, kBlocksAtOnce = 2;
#endif
// Query rows at once.
template <class W>
constexpr int kQueryRows = W::kUnit > 1 ? 16 : kVectorRows;

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
                store(scores + r * stride + (b + i) * kBlock, sums[r][i]);
    }
}

// Scales the scores of one row, turns them into softmax weights without the division, and returns their sum. The first
// key is `start`.
template <class Number>
float softmax(float* scores, const InkOperation& op, int length, int start, int position, Number* weights) {
    const float scale = op.attention_scale, cap = op.attention_cap;
    const int oldest = op.window ? position - op.window + 1 : 0;
    const Floats neg_inf = -__builtin_inff();
    Floats best = neg_inf;
    for (int i = 0; i < length; i += kLanes) {
        const int key = start + i;
        Floats s = load(scores + i) * scale;
        if (cap > 0) s = tanh(s / cap) * cap;
        if (key + kLanes > position + 1 || key < oldest)
            s = first_lanes(oldest - key, neg_inf, first_lanes(position + 1 - key, s, neg_inf));
        store(scores + i, s);
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

// Stores the numbers of one head from `column` on, without its padding.
template <class Number>
INK_INLINE void store_output(const InkShape& h, const Floats& x, int column, Number* output) {
    Number numbers[kLanes];
    convert_store(x, numbers);
    if (const int left = std::min(kLanes, h.head_width - column); left > 0)
        std::memcpy(output + column, numbers, left * sizeof *numbers);
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
        for (int i = 0; i < P; i++) store_output(h, sums[r][i] / totals[r], column + i * kLanes, outputs[r]);
}

// R query rows of one kv head at `positions`. scratch: 2 * R * (keys in whole blocks) floats.
template <class W, int R>
void attend(const InkShape& h, const InkOperation& op, const Blocks<W>& blocks,
            const typename W::Number* const* queries, const int* positions, typename W::Number* const* outputs,
            float* scratch) {
    using Number = typename W::Number;
    const int last = *std::max_element(positions, positions + R), least = *std::min_element(positions, positions + R);
    const int first = op.window ? std::max(0, least - op.window + 1) / kBlock : 0;
    const int n_blocks = last / kBlock + 1 - first, length = n_blocks * kBlock;
    float totals[R];
    Number* weights = reinterpret_cast<Number*>(scratch + long(R) * length);
    compute_scores<W, R>(h, blocks, queries, first, n_blocks, scratch, length);
    for (int r = 0; r < R; r++)
        totals[r] = softmax(scratch + long(r) * length, op, length, first * kBlock, positions[r],
                            weights + long(r) * length);
    int column = 0;
    for (; column + 4 * kLanes <= h.padded_head; column += 4 * kLanes)
        accumulate_values<W, R, 4>(h, blocks, weights, length, first, n_blocks, column, totals, outputs);
    for (; column < h.padded_head; column += kLanes)
        accumulate_values<W, R, 1>(h, blocks, weights, length, first, n_blocks, column, totals, outputs);
}

#if defined(__AMX_BF16__)
// Pairs of a tile: the keys of a block, so that a row's sums do not depend on where its first block is.
constexpr int kAttentionSteps = kBlock / 2;

// scores [rows][stride] of queries [rows][padded head], from block `first` on, in groups of 4 blocks.
inline void compute_scores_in_tiles(const InkShape& h, const Blocks<BF16>& blocks, const bf16* queries, int first,
                                    int n_blocks, float* scores, long stride) {
    for (int b = 0; b < n_blocks; b += 4) {
        const bf16 *keys[4], *next[4];
        for (int i = 0; i < 4; i++) {
            keys[i] = blocks.key(first + std::min(b + i, n_blocks - 1));
            next[i] = blocks.key(first + std::min(b + i + 4, n_blocks - 1));
        }
        zero_sums();
        for (int c = 0; c < h.padded_head; c += 2 * kAttentionSteps) {
            _tile_loadd(4, queries + c, h.padded_head * 2);
            _tile_loadd(6, keys[0] + c * kBlock, 64);
            _tile_loadd(7, keys[1] + c * kBlock, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(6, keys[2] + c * kBlock, 64);
            _tile_loadd(7, keys[3] + c * kBlock, 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_dpbf16ps(3, 4, 7);
            for (const bf16* each : next)
                for (int i = 0; i < kAttentionSteps; i++) __builtin_prefetch(each + c * kBlock + i * 32);
        }
        store_sums(scores + b * kBlock, stride * 4);
    }
}

// sums [rows][4] vectors: weights [rows][stride] times up to 4 vectors of the values from `column` on.
inline void add_values_in_tiles(const InkShape& h, const Blocks<BF16>& blocks, const bf16* weights, long stride,
                                int first, int n_blocks, int column, Floats* sums) {
    const int vectors = (h.padded_head - column) / kLanes;
    const long row_bytes = h.padded_head * 4;
    zero_sums();
    for (int b = 0; b < n_blocks; b++) {
        const auto at = [&](int block) {
            return reinterpret_cast<const char*>(blocks.value(first + block) + column * 2);
        };
        const char *values = at(b), *next = at(std::min(b + 4, n_blocks - 1));
        _tile_loadd(4, weights + b * kBlock, stride * 2);
        _tile_loadd(6, values, row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (vectors > 1) {
            _tile_loadd(7, values + 64, row_bytes);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (vectors > 2) {
            _tile_loadd(6, values + 128, row_bytes);
            _tile_dpbf16ps(2, 4, 6);
        }
        if (vectors > 3) {
            _tile_loadd(7, values + 192, row_bytes);
            _tile_dpbf16ps(3, 4, 7);
        }
        for (int i = 0; i < kAttentionSteps; i++)
            for (int v = 0; v < std::min(vectors, 4); v++) __builtin_prefetch(next + i * row_bytes + v * 64);
    }
    store_sums(sums, 256);
}

// As attend(), up to 16 rows. scratch: 16 * (the padded head + 2 * (keys in groups of 4 blocks)) floats.
inline void attend_in_tiles(const InkShape& h, const InkOperation& op, const Blocks<BF16>& blocks,
                            const bf16* const* queries, int rows, const int* positions, bf16* const* outputs,
                            float* scratch) {
    const auto [least, last] = std::minmax_element(positions, positions + rows);
    const int first = op.window ? std::max(0, *least - op.window + 1) / kBlock : 0;
    const int n_blocks = *last / kBlock + 1 - first, length = n_blocks * kBlock;
    const long stride = (n_blocks + 3) / 4 * 4 * kBlock;
    bf16* gathered = reinterpret_cast<bf16*>(scratch);
    float* scores = scratch + long(kTileRows) * h.padded_head / 2;
    bf16* weights = reinterpret_cast<bf16*>(scores + rows * stride);
    float totals[kTileRows];
    Floats sums[4 * kTileRows];
    for (int r = 0; r < rows; r++) std::copy_n(queries[r], h.padded_head, gathered + r * h.padded_head);
    configure_tiles(rows, rows, kAttentionSteps);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    compute_scores_in_tiles(h, blocks, gathered, first, n_blocks, scores, stride);
    for (int r = 0; r < rows; r++)
        totals[r] = softmax(scores + r * stride, op, length, first * kBlock, positions[r], weights + r * stride);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    for (int column = 0; column < h.padded_head; column += 4 * kLanes) {
        add_values_in_tiles(h, blocks, weights, stride, first, n_blocks, column, sums);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < std::min(4, (h.padded_head - column) / kLanes); v++)  // + 0: a zero has no sign
                store_output(h, (sums[4 * r + v] + 0.0f) / totals[r], column + v * kLanes, outputs[r]);
    }
    _tile_release();
}
#endif

}  // namespace ink
