// Log-probabilities of the raw logits: the sampled token's, and the most likely tokens.
#pragma once

#include "threshold_search.h"
#include "inverse_cdf.h"

namespace ink {

struct TokenLogprob {
    float logprob;
    uint32_t id;
};

// Converts a logit of the row to its log-probability.
struct LogSoftmax {
    double best, log_total;

    // Clamped above -inf, which rounding may give a finite logit far below the others. Monotonic in the logit.
    INK_INLINE float of(float logit) const { return clamp_to_float((logit - best) - log_total); }

    // A lower bound for the logits whose log-probability is this one.
    float lowest_logit(float logprob) const {
        const double slack = 1e-6 * std::fabs(logprob) + 1e-12 * (std::fabs(best) + log_total) + 1e-40;
        const float logit = clamp_to_float(best + log_total + logprob - slack);
        return std::max(-FLOAT_MAX, std::nextafter(logit, -FLOAT_MAX));
    }
};

inline LogSoftmax log_softmax_of_row(Scratch& scratch) {
    const float best = scratch.best();
    return {best, std::log(compute_row_weights<false>(scratch, Scale{best, 1}).total)};
}

// Writes the `count` most likely tokens, the lower id among equals; count is at most the vocabulary.
inline void write_top_logprobs(Scratch& scratch, const LogSoftmax& softmax, int64_t count, int64_t* ids,
                               double* logprobs) {
    if (!count) return;
    const float kth = kth_largest(scratch, scratch.block_max, scratch.blocks, count);
    // Tokens whose log-probability rounds to the same number may have a lower logit and a lower id.
    const float least = softmax.lowest_logit(softmax.of(kth));
    collect_candidates(scratch, scratch.x, scratch.block_max, least, scratch.candidates.x);
    TokenLogprob* found = reinterpret_cast<TokenLogprob*>(scratch.key);
    static_assert(sizeof(TokenLogprob) == sizeof(uint64_t));
    const Candidates& candidates = scratch.candidates;
    for (int64_t i = 0; i < candidates.n; i++) found[i] = {softmax.of(candidates.x[i]), candidates.id[i]};
    std::partial_sort(found, found + count, found + candidates.n, [](const TokenLogprob& a, const TokenLogprob& b) {
        return a.logprob > b.logprob || (a.logprob == b.logprob && a.id < b.id);
    });
    for (int64_t i = 0; i < count; i++) {
        ids[i] = found[i].id;
        logprobs[i] = found[i].logprob;
    }
}

}  // namespace ink
