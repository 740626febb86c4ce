// Threshold search of the sampling filters: a quantile without a sort, and the tokens at or above a threshold.
#pragma once

#include "scratch.h"

namespace ink {

struct Keyed {
    uint64_t key;
    float w;
};

// find_threshold() for a few keys; reorders them.
inline uint64_t threshold_by_sorting(Keyed* entries, int64_t n, double reached, double target) {
    std::sort(entries, entries + n, [](const Keyed& a, const Keyed& b) { return a.key > b.key; });
    int64_t i = 0;
    for (; i < n - 1; i++) {
        reached += entries[i].w;
        if (reached >= target) break;
    }
    return entries[i].key;
}

// The highest key at which the weights of all tokens with that key or a higher one reach `target`; the lowest key if
// all weights together do not. w: the weight of each key, above 0; null counts each key as 1.
//
// A radix search: it adds up weights in buckets of keys, and repeats with the keys of the bucket that holds the
// threshold. It needs no sort, and few branches that are hard to predict.
inline uint64_t find_threshold(const Scratch& scratch, const uint64_t* key, const float* w, int64_t n, double target) {
    double reached = 0;
    for (;;) {
        if (n <= SORT_LIMIT) {
            Keyed entries[SORT_LIMIT];
            for (int64_t i = 0; i < n; i++) entries[i] = {key[i], w ? w[i] : 1.0f};
            return threshold_by_sorting(entries, n, reached, target);
        }
        uint64_t low = key[0], high = key[0];
        for (int64_t i = 1; i < n; i++) low = std::min(low, key[i]), high = std::max(high, key[i]);
        const uint64_t range = high - low;
        if (range == 0) return low;
        const int64_t buckets = n < 512 ? 128 : BUCKETS;
        const int width = 64 - __builtin_clzll(range), bits_kept = __builtin_ctzll(static_cast<uint64_t>(buckets));
        const int shift = width > bits_kept ? width - bits_kept : 0;
        double* bucket = scratch.bucket;
        std::fill(bucket, bucket + buckets, 0.0);
        for (int64_t i = 0; i < n; i++) bucket[(key[i] - low) >> shift] += w ? w[i] : 1.0f;
        int64_t at = static_cast<int64_t>(range >> shift);
        for (; at > 0 && reached + bucket[at] < target; at--) reached += bucket[at];
        // If rounding keeps the sum below the target, this is the lowest bucket, which holds the lowest key.
        const uint64_t target_bucket = static_cast<uint64_t>(at);
        int64_t left = 0;
        for (int64_t i = 0; i < n; i++) {
            const uint64_t each = key[i];
            const float weight = w ? w[i] : 1.0f;
            scratch.narrowed_key[left] = each;
            scratch.narrowed_w[left] = weight;
            left += (each - low) >> shift == target_bucket;
        }
        key = scratch.narrowed_key, w = scratch.narrowed_w, n = left;
    }
}

INK_INLINE float value_of(uint64_t key) {
    const uint32_t raw = static_cast<uint32_t>(key);
    return bits<float>(raw & 0x80000000u ? raw & 0x7FFFFFFFu : ~raw);
}

// The k-th largest of `count` values, clamped above -inf; if there are fewer values, the lowest finite number.
inline float kth_largest(const Scratch& scratch, const float* values, int64_t count, int64_t k) {
    if (k > count) return -FLOAT_MAX;
    for (int64_t i = 0; i < count; i++) scratch.key[i] = key_of(values[i]);
    return std::max(-FLOAT_MAX, value_of(find_threshold(scratch, scratch.key, nullptr, count, static_cast<double>(k))));
}

// Collects the tokens whose value is at least `least`, which is above -inf, and writes their values to `to`, an array
// of the candidates; skips blocks whose maximum is below.
inline void collect_candidates(Scratch& scratch, const float* values, const float* block_max, float least, float* to) {
    Candidates& candidates = scratch.candidates;
    candidates.n = 0;
    for (int64_t block = 0; block < scratch.blocks; block++) {
        if (!(block_max[block] >= least)) continue;
        for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK; i += kLanes)
            candidates.n +=
                compress(values + i, bits<uint32_t>(consecutive(static_cast<int32_t>(i))), least, to + candidates.n, candidates.id + candidates.n);
    }
}

// Keeps the candidates whose logit is at least `least`, which is above -inf.
inline void filter_candidates(Candidates& candidates, float least) {
    std::fill(candidates.x + candidates.n, candidates.x + candidates.n + kLanes, NEG_INF);
    int64_t n = 0;
    for (int64_t i = 0; i < candidates.n; i += kLanes) {
        n += compress(candidates.x + i, load(candidates.id + i), least, candidates.x + n, candidates.id + n);
    }
    candidates.n = n;
}

}  // namespace ink
