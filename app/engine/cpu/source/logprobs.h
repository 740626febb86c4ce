// Log-probabilities of the raw logits: the sampled token's, and the most likely tokens.
#pragma once

#include "threshold_search.h"
#include "inverse_cdf.h"

namespace draw {

struct Scored {
    float logprob;
    uint32_t id;
};

// What turns a logit of the row into its log-probability.
struct LogSoftmax {
    double best, log_total;

    // Held above -inf, which a finite logit far below the others may come to. Never falls where the logit rises.
    DRAW_INLINE float of(float logit) const { return within_float((logit - best) - log_total); }

    // A logit that is at most the least whose log-probability is this one.
    float least_logit(float logprob) const {
        const double slack = 1e-6 * std::fabs(logprob) + 1e-12 * (std::fabs(best) + log_total) + 1e-40;
        const float logit = within_float(best + log_total + logprob - slack);
        return std::max(-LARGEST, std::nextafter(logit, -LARGEST));
    }
};

inline LogSoftmax log_softmax(Room& room) {
    const float best = room.best();
    return {best, std::log(weigh_row<false>(room, Scale{best, 1}).total)};
}

// Writes the `count` most likely tokens, the lower id among equals; count is at most the vocabulary.
inline void most_likely(Room& room, const LogSoftmax& softmax, int64_t count, int64_t* ids, double* logprobs) {
    if (!count) return;
    const float edge = kth_best(room, room.block_best, room.blocks, count);
    // What is as likely to the last digit may have a lower logit, and a lower id.
    collect(room, room.x, room.block_best, softmax.least_logit(softmax.of(edge)), room.list.x);
    Scored* found = reinterpret_cast<Scored*>(room.key);
    static_assert(sizeof(Scored) == sizeof(uint64_t));
    const List& list = room.list;
    for (int64_t i = 0; i < list.n; i++) found[i] = {softmax.of(list.x[i]), list.id[i]};
    std::partial_sort(found, found + count, found + list.n, [](const Scored& a, const Scored& b) {
        return a.logprob > b.logprob || (a.logprob == b.logprob && a.id < b.id);
    });
    for (int64_t i = 0; i < count; i++) {
        ids[i] = found[i].id;
        logprobs[i] = found[i].logprob;
    }
}

}  // namespace draw
