// Threshold search of the sampling filters: a quantile without a sort, and the tokens at or above a threshold.
#pragma once

#include "scratch.h"

namespace draw {

struct Keyed {
    uint64_t key;
    float w;
};

// The same as edge() for few; reorders them.
inline uint64_t edge_of_few(Keyed* few, int64_t n, double reached, double wanted) {
    std::sort(few, few + n, [](const Keyed& a, const Keyed& b) { return a.key > b.key; });
    int64_t i = 0;
    for (; i < n - 1; i++) {
        reached += few[i].w;
        if (reached >= wanted) break;
    }
    return few[i].key;
}

// The key of the last token needed, highest keys first, until the weights reach `wanted`; the lowest key where all of
// them do not. w: above 0, for each key; none counts each as 1.
//
// Weights are added up in buckets of keys, and what lies in the bucket where the edge is once more: no sort, and few
// branches that cannot be foretold.
inline uint64_t edge(const Room& room, const uint64_t* key, const float* w, int64_t n, double wanted) {
    double reached = 0;
    for (;;) {
        if (n <= SMALL) {
            Keyed few[SMALL];
            for (int64_t i = 0; i < n; i++) few[i] = {key[i], w ? w[i] : 1.0f};
            return edge_of_few(few, n, reached, wanted);
        }
        uint64_t low = key[0], high = key[0];
        for (int64_t i = 1; i < n; i++) low = std::min(low, key[i]), high = std::max(high, key[i]);
        const uint64_t range = high - low;
        if (range == 0) return low;
        const int64_t buckets = n < 512 ? 128 : BUCKETS;
        const int width = 64 - __builtin_clzll(range), bits_kept = __builtin_ctzll(static_cast<uint64_t>(buckets));
        const int shift = width > bits_kept ? width - bits_kept : 0;
        double* bucket = room.bucket;
        std::fill(bucket, bucket + buckets, 0.0);
        for (int64_t i = 0; i < n; i++) bucket[(key[i] - low) >> shift] += w ? w[i] : 1.0f;
        int64_t at = static_cast<int64_t>(range >> shift);
        for (; at > 0 && reached + bucket[at] < wanted; at--) reached += bucket[at];
        // Where rounding leaves the share out of reach, this is the lowest bucket, which holds the lowest key.
        const uint64_t wanted_bucket = static_cast<uint64_t>(at);
        int64_t left = 0;
        for (int64_t i = 0; i < n; i++) {
            const uint64_t each = key[i];
            const float weight = w ? w[i] : 1.0f;
            room.narrowed_key[left] = each;
            room.narrowed_w[left] = weight;
            left += (each - low) >> shift == wanted_bucket;
        }
        key = room.narrowed_key, w = room.narrowed_w, n = left;
    }
}

DRAW_INLINE float value_of(uint64_t key) {
    const uint32_t raw = static_cast<uint32_t>(key);
    return bits<float>(raw & 0x80000000u ? raw & 0x7FFFFFFFu : ~raw);
}

// The k-th largest of `count` values, held above -inf; whatever is above -inf where there are fewer.
inline float kth_best(const Room& room, const float* values, int64_t count, int64_t k) {
    if (k > count) return -LARGEST;
    for (int64_t i = 0; i < count; i++) room.key[i] = key_of(values[i]);
    return std::max(-LARGEST, value_of(edge(room, room.key, nullptr, count, static_cast<double>(k))));
}

DRAW_INLINE Ints ids_from(int64_t first) {
    Ints ids;
    for (int i = 0; i < LANES; i++) ids[i] = i;
    return ids + static_cast<int32_t>(first);
}

// Lists the tokens whose value is at least `least`, which is above -inf, and writes their values to `to`, a part of the
// list; blocks whose best is below are passed by.
inline void collect(Room& room, const float* values, const float* block_best, float least, float* to) {
    List& list = room.list;
    list.n = 0;
    for (int64_t block = 0; block < room.blocks; block++) {
        if (!(block_best[block] >= least)) continue;
        for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK; i += LANES)
            list.n += pick(values + i, ids_from(i), least, to + list.n, list.id + list.n);
    }
}

// Keeps the tokens of the list whose logit is at least `least`, which is above -inf.
inline void retain(List& list, float least) {
    std::fill(list.x + list.n, list.x + list.n + LANES, NOTHING);
    int64_t n = 0;
    for (int64_t i = 0; i < list.n; i += LANES) {
        Ints ids;
        memcpy(&ids, list.id + i, sizeof ids);
        n += pick(list.x + i, ids, least, list.x + n, list.id + n);
    }
    list.n = n;
}

}  // namespace draw
