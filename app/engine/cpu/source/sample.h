// Samples one token from a row of logits: temperature -> top_k -> typical_p -> top_p -> min_p -> inverse CDF
// (docs/sampling.md).
#pragma once

#include "penalties.h"
#include "threshold_search.h"
#include "inverse_cdf.h"

namespace ink {

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
