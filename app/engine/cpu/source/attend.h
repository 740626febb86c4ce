// Paged attention over blocks of 16 keys and values (cache_formats.h).
//
// Keys are processed in spans of 256 positions, from position 0 on. A row has a largest score, a sum of weights and a
// weighted sum of values for each span, over its own keys in order; they are merged span by span. Masked keys get a
// weight of exactly 0, and a span of masked keys changes nothing, so a tile may include them: batch invariance. Scratch
// memory does not depend on the length, and the rows of a task share a span while it is in the L2 cache.
#pragma once

#include "cache_formats.h"
#include "elementwise.h"
#include "product.h"

namespace ink {

constexpr int kSpanStride = kSpan + kLanes;  // of scores: rows in the same lines of the L1 cache would evict each other
constexpr int kMostQueries = 192;            // of a task

// Vectors of keys, and of the head, at once: as many sums of R rows as the registers hold.
#if defined(__AVX512F__)
template <class W>
constexpr int kVectorRows = 12;
template <int R>
constexpr int kVectorsAtOnce = R > 6 ? 2 : 4;
#else
template <class W>
constexpr int kVectorRows = W::kStep > 1 ? 4 : 6;  // pairs also need registers for their halves
template <int R>
constexpr int kVectorsAtOnce = R > 3 ? 1 : R > 1 ? 2 : 4;
#endif

#if defined(__AMX_BF16__)
template <class W>
constexpr bool kInTiles = std::is_same_v<typename W::Number, bf16>;
#else
template <class W>
constexpr bool kInTiles = false;
#endif
// Query rows at once.
template <class W>
constexpr int kQueryRows = kInTiles<W> ? 32 : kVectorRows<W>;
// Most query rows that take a shorter path if their keys are in one span; 0 for none. Tiles need decoded keys.
template <class W, class C>
constexpr int kOnlySpanRows = kInTiles<W> ? (kIsCoded<C> ? 0 : 16) : kVectorRows<W>;

// Stores the numbers of one head from `column` on, without its padding.
template <class Number>
INK_INLINE void store_output(const InkShape& h, const Floats& x, int column, Number* output) {
    Number numbers[kLanes];
    convert_store(x, numbers);
    if (const int left = std::min(kLanes, h.head_width - column); left > 0)
        std::memcpy(output + column, numbers, left * sizeof *numbers);
}

constexpr float kLog2E = 1.44269504088896341f;

// Query rows of one kv head and one chunk, in order of their positions.
template <class Number>
struct Queries {
    int count;
    int positions[kMostQueries];
    const Number* rows[kMostQueries];
    Number* outputs[kMostQueries];
    float sinks[kMostQueries];  // only if the layer has them
};

// What the rows of a task have over some keys: largest score (to the base 2) and sum of weights. Lanes beyond the rows
// of a tile may belong to other tiles.
template <int N>
struct Statistics {
    float best[N + kLanes], total[N + kLanes];
    explicit Statistics(int rows) {
        std::fill_n(best, rows + kLanes, -__builtin_inff());
        std::fill_n(total, rows + kLanes, 0.0f);
    }
};

// A sink is a score that each row of a head has before its keys, without a value.
template <int N>
void start_with_sinks(const float* sinks, int rows, Statistics<N>& statistics) {
    for (int r = 0; r < rows; r++) statistics.best[r] = sinks[r] * kLog2E, statistics.total[r] = 1.0f;
}

// Factors of the values so far and of a span's values.
struct Factors {
    float old[kLanes], added[kLanes];
};

// Merges the statistics of 16 rows over a span. Masked spans leave them as they are, and their factors are 1 and 0.
INK_INLINE Factors merge(float* best, float* total, const float* span_best, const float* span_total) {
    const Floats most = larger(load(best), load(span_best)), finite = larger(most, -__FLT_MAX__);
    const Floats old = exp2(load(best) - finite), added = exp2(load(span_best) - finite);
    store(best, most);
    store(total, load(total) * old + load(span_total) * added);
    Factors factors;
    store(factors.old, old), store(factors.added, added);
    return factors;
}

// scores [R][n_blocks * 16] of R query rows, from block `first` on, without the scales of codes. C: format of the
// blocks. Prefetches the first values, for which a step of few rows would wait.
template <class W, class C, int R>
void compute_scores(const InkShape& h, const Blocks<C>& blocks, const typename W::Number* const* queries, int first,
                    int n_blocks, float* scores) {
    constexpr int N = kVectorsAtOnce<R>;
    for (int b = 0; b < n_blocks; b += N) {
        const char *keys[N], *next[N];
        for (int i = 0; i < N; i++) {
            keys[i] = blocks.key(first + std::min(b + i, n_blocks - 1));
            next[i] = b + N < n_blocks ? blocks.key(first + std::min(b + i + N, n_blocks - 1))
                                       : blocks.value(first + std::min(i, n_blocks - 1));
        }
        Floats sums[R][N] = {};
        for (int s = 0; s < h.padded_head / W::kStep; s++) {
            typename W::Operand k[N];
            for (int i = 0; i < N; i++) {
                k[i] = C::weights(keys[i] + s * C::kBytes);
                if (s % (64 / C::kBytes) == 0) __builtin_prefetch(next[i] + s * C::kBytes);
            }
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                const typename W::Operand q = W::broadcast(queries[r] + s * W::kStep);
#pragma GCC unroll 4
                for (int i = 0; i < N; i++) sums[r][i] = W::add(k[i], q, sums[r][i]);
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int i = 0; i < N; i++) store(scores + r * kSpanStride + (b + i) * kBlock, sums[r][i]);
    }
}

// Replaces the scores of one row by softmax weights without the division, times the scales of values. The first key is
// `start`. Stores the largest score to the base 2, and the sum of the weights.
template <class Number, class S>
void softmax(float* scores, const InkOperation& op, const S& scales, int length, int start, int position,
             float& row_best, float& row_total) {
    const Floats neg_inf = -__builtin_inff();
    scales.multiply_scores(scores, start, length);
    float scale = op.attention_scale * kLog2E;
    if (const float cap = op.attention_cap; cap > 0) {
        for (int i = 0; i < length; i += kLanes)
            store(scores + i, tanh(load(scores + i) * op.attention_scale / cap) * cap);
        scale = kLog2E;
    }
    const int oldest = op.window ? position - op.window + 1 : 0;
    Floats best = neg_inf;
    if (start >= oldest && start + length <= position + 1) {
        for (int i = 0; i < length; i += kLanes) best = larger(best, load(scores + i));
    } else {
        for (int i = 0; i < length; i += kLanes) {
            Floats score = load(scores + i);
            if (const int key = start + i; key + kLanes > position + 1 || key < oldest) {
                score = first_lanes(oldest - key, neg_inf, first_lanes(position + 1 - key, score, neg_inf));
                store(scores + i, score);
            }
            best = larger(best, score);
        }
    }
    row_best = largest(best) * scale;
    const Floats shift = row_best > -__FLT_MAX__ ? -row_best : __FLT_MAX__;
    Number* weights = reinterpret_cast<Number*>(scores);
    Floats total = {};
    for (int i = 0; i < length; i += kLanes) {
        const Floats weight = exp2(fma(load(scores + i), scale, shift));
        total += weight;
        convert_store(scales.weigh(weight, start + i), weights + i);
    }
    row_total = sum(total);
}

// Calls finish(row, column, 16 numbers) with weights [R][n_blocks * 16] times values of the span, for P vectors of the
// head from `column` on.
template <class W, class C, int R, int P, class F>
INK_INLINE void multiply_values(const InkShape& h, const Blocks<C>& blocks, const float* scores, int first,
                                int n_blocks, int column, F&& finish) {
    constexpr long kStride = kSpanStride * sizeof(float) / sizeof(typename W::Number);
    const typename W::Number* weights = reinterpret_cast<const typename W::Number*>(scores);
    Floats sums[R][P] = {};
    for (int b = 0; b < n_blocks; b++) {
        const auto at = [&](int block) { return blocks.value(first + block) + long(column) * (C::kBytes / kLanes); };
        const char *from = at(b), *next = at(std::min(b + (R > 3 ? 2 : 4), n_blocks - 1));
        for (int s = 0; s < kBlock / W::kStep; s++) {
            typename W::Operand v[P];
            for (int i = 0; i < P; i++) {
                const long offset = (long(s) * h.padded_head + i * kLanes) * (C::kBytes / kLanes);
                v[i] = C::weights(from + offset);
                if (i % (64 / C::kBytes) == 0) __builtin_prefetch(next + offset);
            }
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                const typename W::Operand p = W::broadcast(weights + r * kStride + b * kBlock + s * W::kStep);
#pragma GCC unroll 4
                for (int i = 0; i < P; i++) sums[r][i] = W::add(v[i], p, sums[r][i]);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int i = 0; i < P; i++) finish(r, column + i * kLanes, sums[r][i]);
}

// f(number of vectors as a constant, column) for all vectors of the head, as many at once as R rows allow.
template <int R, class F>
INK_INLINE void for_vectors_of_head(const InkShape& h, F&& f) {
    constexpr int P = kVectorsAtOnce<R>;
    int column = 0;
    for (; column + P * kLanes <= h.padded_head; column += P * kLanes) f(std::integral_constant<int, P>(), column);
    for (; column < h.padded_head; column += kLanes) f(std::integral_constant<int, 1>(), column);
}

// Adds the keys and values of n_blocks blocks of a span to the first R rows of `queries`.
template <class W, int R, class C, class S>
void attend_to_span(const InkShape& h, const InkOperation& op, const Blocks<C>& blocks, const S& scales,
                    const typename W::Number* const* queries, const int* positions, int first, int n_blocks,
                    float* best, float* total, float* values, float* scores) {
    compute_scores<W, C, R>(h, blocks, queries, first, n_blocks, scores);
    Statistics<0> span(0);
    for (int r = 0; r < R; r++)
        softmax<typename W::Number>(scores + r * kSpanStride, op, scales, n_blocks * kBlock, first * kBlock,
                                    positions[r], span.best[r], span.total[r]);
    const Factors factors = merge(best, total, span.best, span.total);
    for_vectors_of_head<R>(h, [&](auto p, int column) {
        const auto add = [&](int r, int c, const Floats& sum) {
            float* to = values + r * h.padded_head + c;
            store(to, fma(load(to), factors.old[r], sum * factors.added[r]));
        };
        multiply_values<W, C, R, p.value>(h, blocks, scores, first, n_blocks, column, add);
    });
}

// attend() for R rows with keys in one span only, without sinks: nothing to merge. The bits are the same, since a first
// span's factor is 1. Most steps that only decode take this path.
template <class W, int R, class C, class S>
void attend_to_only_span(const InkShape& h, const InkOperation& op, const Blocks<C>& blocks, const S& scales,
                         const Queries<typename W::Number>& queries, int first, int n_blocks, float* scores) {
    float best[R], total[R];
    compute_scores<W, C, R>(h, blocks, queries.rows, first, n_blocks, scores);
    for (int r = 0; r < R; r++)
        softmax<typename W::Number>(scores + r * kSpanStride, op, scales, n_blocks * kBlock, first * kBlock,
                                    queries.positions[r], best[r], total[r]);
    for_vectors_of_head<R>(h, [&](auto p, int column) {
        const auto finish = [&](int r, int c, const Floats& sum) {
            store_output(h, (sum + 0.0f) / total[r], c, queries.outputs[r]);
        };
        multiply_values<W, C, R, p.value>(h, blocks, scores, first, n_blocks, column, finish);
    });
}

#if defined(__AMX_BF16__)
// Pairs of a tile: the keys of a block, so that a row's sums do not depend on where its first block is.
constexpr int kAttentionSteps = kBlock / 2;

// scores [rows][n_blocks * 16] of queries [rows][padded head], from block `first` on. 17 to 32 rows (IS_PAIR) take two
// blocks at once, fewer take four.
template <bool IS_PAIR>
void compute_scores_in_tiles(const InkShape& h, const Blocks<BF16>& blocks, const bf16* queries, int first,
                             int n_blocks, float* scores) {
    constexpr int N = IS_PAIR ? 2 : 4;
    for (int b = 0; b < n_blocks; b += N) {
        const bf16 *keys[N], *next[N];
        for (int i = 0; i < N; i++) {
            keys[i] = reinterpret_cast<const bf16*>(blocks.key(first + std::min(b + i, n_blocks - 1)));
            next[i] = reinterpret_cast<const bf16*>(blocks.key(first + std::min(b + i + N, n_blocks - 1)));
        }
        zero_sums();
        for (int c = 0; c < h.padded_head; c += 2 * kAttentionSteps) {
            _tile_loadd(4, queries + c, h.padded_head * 2);
            _tile_loadd(6, keys[0] + c * kBlock, 64);
            _tile_loadd(7, keys[1] + c * kBlock, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if constexpr (IS_PAIR) {
                _tile_loadd(5, queries + kTileRows * h.padded_head + c, h.padded_head * 2);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            } else {
                _tile_loadd(6, keys[2] + c * kBlock, 64);
                _tile_loadd(7, keys[3] + c * kBlock, 64);
                _tile_dpbf16ps(2, 4, 6);
                _tile_dpbf16ps(3, 4, 7);
            }
            for (const bf16* each : next)
                for (int i = 0; i < kAttentionSteps; i++) __builtin_prefetch(each + c * kBlock + i * 32);
        }
        float* to = scores + b * kBlock;
        if constexpr (IS_PAIR) {
            float* others = to + kTileRows * kSpanStride;
            _tile_stored(0, to, kSpanStride * 4);
            _tile_stored(1, to + kBlock, kSpanStride * 4);
            _tile_stored(2, others, kSpanStride * 4);
            _tile_stored(3, others + kBlock, kSpanStride * 4);
        } else {
            store_sums(to, kSpanStride * 4);
        }
    }
}

// sums: weights [rows][n_blocks * 16] times the values from `column` on: [rows][4] vectors, of which some may be
// missing; for 17 to 32 rows (IS_PAIR) [rows][2].
template <bool IS_PAIR>
void multiply_values_in_tiles(const InkShape& h, const Blocks<BF16>& blocks, const float* scores, int first,
                              int n_blocks, int column, Floats* sums) {
    constexpr int N = IS_PAIR ? 2 : 4;
    constexpr long kRowBytes = kSpanStride * sizeof(float);
    const char* weights = reinterpret_cast<const char*>(scores);
    const int vectors = std::min(N, (h.padded_head - column) / kLanes);
    const long row_bytes = h.padded_head * 4;
    zero_sums();
    for (int b = 0; b < n_blocks; b++, weights += kBlock * 2) {
        const auto at = [&](int block) { return blocks.value(first + block) + column * 2 * sizeof(bf16); };
        const char *values = at(b), *next = at(std::min(b + N, n_blocks - 1));
        _tile_loadd(4, weights, kRowBytes);
        _tile_loadd(6, values, row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (vectors > 1) {
            _tile_loadd(7, values + 64, row_bytes);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (IS_PAIR) {
            _tile_loadd(5, weights + kTileRows * kRowBytes, kRowBytes);
            _tile_dpbf16ps(2, 5, 6);
            if (vectors > 1) _tile_dpbf16ps(3, 5, 7);
        } else {
            if (vectors > 2) {
                _tile_loadd(6, values + 128, row_bytes);
                _tile_dpbf16ps(2, 4, 6);
            }
            if (vectors > 3) {
                _tile_loadd(7, values + 192, row_bytes);
                _tile_dpbf16ps(3, 4, 7);
            }
        }
        for (int i = 0; i < kAttentionSteps; i++)
            for (int v = 0; v < vectors; v++) __builtin_prefetch(next + i * row_bytes + v * 64);
    }
    if constexpr (IS_PAIR) {
        Floats* others = sums + 2 * kTileRows;
        _tile_stored(0, sums, 128);
        _tile_stored(1, sums + 1, 128);
        _tile_stored(2, others, 128);
        _tile_stored(3, others + 1, 128);
    } else {
        store_sums(sums, 256);
    }
}

// As attend_to_span(), up to 32 rows. queries: [rows][padded head].
template <bool IS_PAIR, class S>
void attend_to_span_in_tiles(const InkShape& h, const InkOperation& op, const Blocks<BF16>& blocks, const S& scales,
                             const bf16* queries, int rows, const int* positions, int first, int n_blocks,
                             float* best, float* total, float* values, float* scores) {
    constexpr int N = IS_PAIR ? 2 : 4;
    Floats sums[4 * kTileRows];
    std::atomic_signal_fence(std::memory_order_seq_cst);
    compute_scores_in_tiles<IS_PAIR>(h, blocks, queries, first, n_blocks, scores);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    Statistics<kTileRows> span(kTileRows);
    for (int r = 0; r < rows; r++)
        softmax<bf16>(scores + r * kSpanStride, op, scales, n_blocks * kBlock, first * kBlock, positions[r],
                      span.best[r], span.total[r]);
    Factors factors[2];
    for (int i = 0; i <= IS_PAIR; i++)
        factors[i] = merge(best + i * kLanes, total + i * kLanes, span.best + i * kLanes, span.total + i * kLanes);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    for (int column = 0; column < h.padded_head; column += N * kLanes) {
        multiply_values_in_tiles<IS_PAIR>(h, blocks, scores, first, n_blocks, column, sums);
        std::atomic_signal_fence(std::memory_order_seq_cst);
        for (int r = 0; r < rows; r++) {
            const float old = factors[r / kLanes].old[r % kLanes], added = factors[r / kLanes].added[r % kLanes];
            for (int v = 0; v < std::min(N, (h.padded_head - column) / kLanes); v++) {
                float* to = values + r * h.padded_head + column + v * kLanes;
                store(to, fma(load(to), old, sums[N * r + v] * added));
            }
        }
    }
}

// As attend_to_only_span(), up to 16 rows.
inline void attend_to_only_span_in_tiles(const InkShape& h, const InkOperation& op, const Blocks<BF16>& blocks,
                                         const Queries<bf16>& queries, int first, int n_blocks, float* scores) {
    bf16* gathered = reinterpret_cast<bf16*>(scores + kTileRows * kSpanStride);
    float best[kTileRows], total[kTileRows];
    Floats sums[4 * kTileRows];
    for (int r = 0; r < queries.count; r++)
        std::copy_n(queries.rows[r], h.padded_head, gathered + long(r) * h.padded_head);
    configure_tiles(queries.count, queries.count, kAttentionSteps);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    compute_scores_in_tiles<false>(h, blocks, gathered, first, n_blocks, scores);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    const Scales<false> none(h, blocks, first, first + n_blocks);
    for (int r = 0; r < queries.count; r++)
        softmax<bf16>(scores + r * kSpanStride, op, none, n_blocks * kBlock, first * kBlock, queries.positions[r],
                      best[r], total[r]);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    for (int column = 0; column < h.padded_head; column += 4 * kLanes) {
        multiply_values_in_tiles<false>(h, blocks, scores, first, n_blocks, column, sums);
        std::atomic_signal_fence(std::memory_order_seq_cst);
        for (int r = 0; r < queries.count; r++)
            for (int v = 0; v < std::min(4, (h.padded_head - column) / kLanes); v++)
                store_output(h, (sums[4 * r + v] + 0.0f) / total[r], column + v * kLanes, queries.outputs[r]);
    }
    _tile_release();
}
#endif

// Floats of scratch memory that attend() needs without decoded codes, in whole cache lines.
template <class W>
long rows_scratch(const InkShape& h) {
    return long(kQueryRows<W>) * kSpanStride + 2L * kMostQueries * h.padded_head;
}

// Floats of scratch memory that attend() needs.
template <class W>
long attention_scratch(const InkShape& h) {
    const long decoded = 2L * kSpanBlocks * block_bytes<W>(h) / long(sizeof(float));
    return rows_scratch<W>(h) + (h.has_coded_cache ? decoded : 0);
}

// Whether codes are decoded once for all rows of a task, rather than for each tile of rows: the bits are the same.
template <class W, class C>
bool decodes_first(int rows) {
    return kIsCoded<C> && (kInTiles<W> || rows > kQueryRows<W>);
}

// softmax(scores) times values, for every row. C: the cache's format.
template <class W, class C>
void attend(const InkShape& h, const InkOperation& op, const Blocks<C>& blocks,
            const Queries<typename W::Number>& queries, float* scratch) {
    const auto oldest = [&](int row) { return op.window ? std::max(0, queries.positions[row] - op.window + 1) : 0; };
    const auto first_block = [&](int span, int row) { return std::max(span * kSpanBlocks, oldest(row) / kBlock); };
    const auto end_block = [&](int span, int row) {
        return std::min((span + 1) * kSpanBlocks, queries.positions[row] / kBlock + 1);
    };
    const int last = queries.count - 1, last_span = queries.positions[last] / kSpan;
    if constexpr (kOnlySpanRows<W, C> > 0)
        if (queries.count <= kOnlySpanRows<W, C> && oldest(0) / kSpan == last_span && !op.weight) {
            const int first = first_block(last_span, 0), n_blocks = end_block(last_span, last) - first;
#if defined(__AMX_BF16__)
            if constexpr (kInTiles<W>)
                return attend_to_only_span_in_tiles(h, op, blocks, queries, first, n_blocks, scratch);
#endif
            const Scales<kIsCoded<C>> scales(h, blocks, first, first + n_blocks);
            return with_constant<kVectorRows<W>>(queries.count, [&](auto r) {
                attend_to_only_span<W, r.value>(h, op, blocks, scales, queries, first, n_blocks, scratch);
            });
        }
    float* values = scratch;
    float* scores = values + long(queries.count) * h.padded_head;
    std::fill(values, scores, 0.0f);
    Statistics<kMostQueries> all(queries.count);
    if (op.weight) start_with_sinks(queries.sinks, queries.count, all);
#if defined(__AMX_BF16__)
    bf16* gathered = reinterpret_cast<bf16*>(scores + kQueryRows<W> * kSpanStride);
    int configured = 0;
    if constexpr (kInTiles<W>)
        for (int r = 0; r < queries.count; r++)
            std::copy_n(queries.rows[r], h.padded_head, gathered + long(r) * h.padded_head);
#endif
    const auto attend_rows = [&](int span, const auto& blocks, const auto& scales) {
        for (int row = 0; row < queries.count; row += kQueryRows<W>) {
            const int rows = std::min(kQueryRows<W>, queries.count - row);
            const int first = first_block(span, row), end = end_block(span, row + rows - 1);
            if (first >= end) continue;
            const int* positions = queries.positions + row;
            float *best = all.best + row, *total = all.total + row, *to = values + long(row) * h.padded_head;
#if defined(__AMX_BF16__)
            if constexpr (kInTiles<W>) {
                using S = std::remove_cvref_t<decltype(scales)>;
                if (configured != rows)
                    configure_tiles(std::min(rows, kTileRows), rows > kTileRows ? rows - kTileRows : rows,
                                    kAttentionSteps);
                configured = rows;
                const auto attend =
                    rows > kTileRows ? attend_to_span_in_tiles<true, S> : attend_to_span_in_tiles<false, S>;
                attend(h, op, blocks, scales, gathered + long(row) * h.padded_head, rows, positions, first,
                       end - first, best, total, to, scores);
                continue;
            }
#endif
            with_constant<kVectorRows<W>>(rows, [&](auto r) {
                attend_to_span<W, r.value>(h, op, blocks, scales, queries.rows + row, positions, first, end - first,
                                           best, total, to, scores);
            });
        }
    };
    for (int span = oldest(0) / kSpan; span <= last_span; span++) {
        const int first = first_block(span, 0), end = end_block(span, last);
        const Scales<kIsCoded<C>> scales(h, blocks, first, end);
        if constexpr (kIsCoded<C>)
            if (decodes_first<W, C>(queries.count)) {
                char* memory = reinterpret_cast<char*>(scratch + rows_scratch<W>(h));
                const DecodedSpan<W> decoded(h, blocks, first, end, memory);
                attend_rows(span, decoded.blocks, scales);
                continue;
            }
        if constexpr (!(kIsCoded<C> && kInTiles<W>)) attend_rows(span, blocks, scales);
    }
#if defined(__AMX_BF16__)
    if (configured) _tile_release();
#endif
    for (int r = 0; r < queries.count; r++)
        for (int c = 0; c < h.padded_head; c += kLanes)  // + 0: a zero has no sign
            store_output(h, (load(values + long(r) * h.padded_head + c) + 0.0f) / all.total[r], c, queries.outputs[r]);
}

}  // namespace ink
