// Samples one token from a row of logits: temperature -> top_k -> typical_p -> top_p -> min_p -> inverse CDF
// (docs/sampling.md).
#pragma once

#include "penalties.h"

namespace ink {

// A quantile without a sort, and the tokens at or above a threshold.

struct Keyed {
    uint64_t key;
    float w;
};

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
            std::sort(entries, entries + n, [](const Keyed& a, const Keyed& b) { return a.key > b.key; });
            int64_t i = 0;
            while (i < n - 1 && (reached += entries[i].w) < target) i++;
            return entries[i].key;
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

// Inverse-CDF sampling: weights of logits, their sums in float64, and the sampled index.

// Sum of weights, and sum of weight times logarithm of weight.
struct Mass {
    double total = 0, moment = 0;
};

struct Scale {
    float best, inverse;
    // Subtract the maximum first: a tiny temperature must not turn finite logits into infinities.
    INK_INLINE Floats of(Floats logits) const { return (logits - best) * inverse; }
};

// Mass of the first `count` entries: weight_of(index, logarithm) returns the weights of a vector and sets their
// logarithms. Also writes the cumulative sum after each piece to scratch.sums.
template <bool MOMENT, class Weigh>
INK_INLINE Mass mass_of(Scratch& scratch, int64_t count, Weigh weight_of) {
    Mass mass;
    for (int64_t start = 0; start < count; start += PIECE) {
        DoubleSum weights, products;
        for (int64_t i = start; i < start + PIECE; i += kLanes) {
            Floats logarithm{};
            const Floats weight = weight_of(i, logarithm);
            weights.add(weight);
            // The logarithm of a zero weight may be -inf.
            if constexpr (MOMENT) products.add(larger(logarithm, kExpCutoff), weight);
        }
        mass.total += weights.total();
        if constexpr (MOMENT) mass.moment += products.total();
        scratch.sums[start / PIECE] = mass.total;
    }
    return mass;
}

// Computes the weights of all logits of the row.
template <bool MOMENT>
inline Mass compute_row_weights(Scratch& scratch, Scale scale) {
    return mass_of<MOMENT>(scratch, scratch.vocab, [&](int64_t index, Floats& logarithm) {
        logarithm = scale.of(load(scratch.x + index));
        const Floats weight = exp(logarithm);
        store(scratch.w + index, weight);
        return weight;
    });
}

// Pads the candidates' weights with zeros to whole pieces.
inline void pad_weights(const Candidates& candidates) {
    std::fill(candidates.w + candidates.n, candidates.w + (candidates.n + PIECE - 1) / PIECE * PIECE, 0.0f);
}

template <bool MOMENT>
inline Mass mass_of_candidates(Scratch& scratch) {
    const Candidates& candidates = scratch.candidates;
    return mass_of<MOMENT>(scratch, candidates.n, [&](int64_t index, Floats& logarithm) {
        if constexpr (MOMENT) logarithm = load(candidates.x + index);
        return load(candidates.w + index);
    });
}

// Computes the candidates' weights from their logits.
inline void compute_candidate_weights(const Candidates& candidates, Scale scale) {
    // Stale values there may be above the largest logit.
    std::fill(candidates.x + candidates.n, candidates.x + candidates.n + kLanes, NEG_INF);
    for (int64_t i = 0; i < candidates.n; i += kLanes) {
        const Floats logarithm = scale.of(load(candidates.x + i));
        store(candidates.x + i, logarithm);
        store(candidates.w + i, exp(logarithm));
    }
    pad_weights(candidates);
}

// First index at which the cumulative weight exceeds number * total, from the sums that mass_of() wrote. If rounding
// puts the target at the total, the last index with a weight.
inline int64_t inverse_cdf(const Scratch& scratch, const float* w, int64_t count, double number) {
    double* const end = scratch.sums + (count + PIECE - 1) / PIECE;
    const double total = end[-1], target = number * total;
    const int64_t above = std::upper_bound(scratch.sums, end, target) - scratch.sums;
    const int64_t piece = std::min<int64_t>(above, std::lower_bound(scratch.sums, end, total) - scratch.sums);
    const double rest = target - (piece ? scratch.sums[piece - 1] : 0.0);
    double sum = 0;
    int64_t last = piece * PIECE;
    for (int64_t i = piece * PIECE; i < (piece + 1) * PIECE; i++) {
        const double more = sum + w[i];
        if (more > rest) return i;
        if (more > sum) last = i;
        sum = more;
    }
    return last;
}

inline int64_t argmax_token(const Scratch& scratch, float best) {
    int64_t block = 0;
    while (scratch.block_max[block] != best) block++;
    int64_t token = block * BLOCK;
    while (scratch.x[token] != best) token++;
    return token;
}

// Collects the k most likely tokens, and all that tie with the last of them.
inline void collect_top_k(Scratch& scratch, int64_t k) {
    // The block maxima are logits too, so the k-th largest of them is at most the k-th largest logit.
    Candidates& candidates = scratch.candidates;
    const float bound = kth_largest(scratch, scratch.block_max, scratch.blocks, k);
    collect_candidates(scratch, scratch.x, scratch.block_max, bound, candidates.x);
    if (candidates.n > k) filter_candidates(candidates, kth_largest(scratch, candidates.x, candidates.n, k));
}

// Keeps the fewest tokens that together reach this probability, those first whose surprisal is nearest to the entropy.
// The surprisal is ln total - ln w and the entropy its mean. Both include ln total: it cancels, but its rounding
// decides which tokens tie.
inline void apply_typical_p(Scratch& scratch, double probability, const Mass& mass) {
    const Candidates& candidates = scratch.candidates;
    const double log_total = std::log(mass.total), entropy = log_total - mass.moment / mass.total;
    for (int64_t i = 0; i < candidates.n; i++)
        scratch.key[i] = candidates.w[i] > 0 ? ~bits<uint64_t>(std::fabs(log_total - candidates.x[i] - entropy)) : 0;
    const uint64_t least = find_threshold(scratch, scratch.key, candidates.w, candidates.n, mass.total * probability);
    for (int64_t i = 0; i < candidates.n; i++) candidates.w[i] = scratch.key[i] >= least ? candidates.w[i] : 0;
}

INK_INLINE void zero_below(const Candidates& candidates, float least) {
    for (int64_t i = 0; i < candidates.n; i++) candidates.w[i] = candidates.w[i] >= least ? candidates.w[i] : 0;
}

// Keeps the fewest most likely tokens that together reach this share of the total.
inline void apply_top_p(Scratch& scratch, double probability, double total) {
    const Candidates& candidates = scratch.candidates;
    for (int64_t i = 0; i < candidates.n; i++) scratch.key[i] = bits<uint32_t>(candidates.w[i]);
    const uint64_t least = find_threshold(scratch, scratch.key, candidates.w, candidates.n, total * probability);
    zero_below(candidates, bits<float>(static_cast<uint32_t>(least)));
}

inline void apply_min_p(const Candidates& candidates, double min_p) {
    Floats best{};
    for (int64_t i = 0; i < candidates.n; i += kLanes) best = larger(load(candidates.w + i), best);
    zero_below(candidates, static_cast<float>(min_p) * largest(best));
}

// The weight below which no token of the vocabulary can pass the filters: the total weight of all such tokens is less
// than what the first filter removes.
inline float lowest_sampled_weight(const InkParams& p, const Mass& mass, int64_t vocab) {
    const double probability = p.typical_p < 1 ? p.typical_p : p.top_p;
    const double least = 0.5 * (1 - probability) * mass.total / static_cast<double>(vocab);
    if (p.typical_p < 1) {
        // Unlikely tokens come last in the order of typical_p only if the likeliest ones are no farther from the mean.
        const double mean = mass.moment / mass.total;
        return least > 0 && mean - std::log(least) > -mean * 1.001 ? static_cast<float>(least) : 0;
    }
    return std::max(static_cast<float>(least), static_cast<float>(p.min_p));
}

// Collects the tokens of the vocabulary that may pass the filters, with weights; returns the mass of the whole row.
inline Mass collect_likely(Scratch& scratch, const InkParams& p, Scale scale) {
    const bool typical = p.typical_p < 1;
    const Mass mass = typical ? compute_row_weights<true>(scratch, scale) : compute_row_weights<false>(scratch, scale);
    const float smallest = std::numeric_limits<float>::denorm_min();
    const float least = std::max(lowest_sampled_weight(p, mass, scratch.vocab), smallest);
    // A block is skipped if its largest logit has too little weight; the factor allows for the error of exp.
    for (int64_t i = 0; i < scratch.blocks; i += kLanes)
        store(scratch.block_max + i, exp(scale.of(load(scratch.block_max + i))) * 1.0001f);
    const Candidates& candidates = scratch.candidates;
    collect_candidates(scratch, scratch.w, scratch.block_max, least, candidates.w);
    for (int64_t i = 0; typical && i < candidates.n; i++)
        candidates.x[i] = (scratch.x[candidates.id[i]] - scale.best) * scale.inverse;
    pad_weights(candidates);
    return mass;
}

// Samples a token of those that pass the filters.
inline int64_t sample_filtered(Scratch& scratch, const InkParams& p, Scale scale, double number) {
    const Candidates& candidates = scratch.candidates;
    Mass mass;
    if (p.top_k && p.top_k < scratch.vocab) {
        collect_top_k(scratch, p.top_k);
        compute_candidate_weights(scratch.candidates, scale);
        mass = mass_of_candidates<true>(scratch);
    } else {
        mass = collect_likely(scratch, p, scale);
    }
    if (p.typical_p < 1) {
        apply_typical_p(scratch, p.typical_p, mass);
        mass = mass_of_candidates<false>(scratch);
    }
    if (p.top_p < 1) apply_top_p(scratch, p.top_p, mass.total);
    if (p.min_p > 0) apply_min_p(candidates, p.min_p);
    mass_of_candidates<false>(scratch);
    return candidates.id[inverse_cdf(scratch, candidates.w, candidates.n, number)];
}

// best: the largest logit, finite. number: in [0, 1).
inline int64_t sample_token(Scratch& scratch, const InkParams& p, float best, double number) {
    if (p.flags & GREEDY) return argmax_token(scratch, best);
    const Scale scale{best, static_cast<float>(1 / p.temperature)};
    // With top_p 0 only the most likely token is left: the one with the lowest id if several tie.
    if (p.top_p == 0) number = 0;
    if ((p.top_k && p.top_k < scratch.vocab) || p.typical_p < 1 || p.top_p < 1 || p.min_p > 0)
        return sample_filtered(scratch, p, scale, number);
    compute_row_weights<false>(scratch, scale);
    return inverse_cdf(scratch, scratch.w, scratch.vocab, number);
}

}  // namespace ink
