// Inverse-CDF sampling: weights of logits, their sums in float64, and the sampled index.
#pragma once

#include "scratch.h"

namespace ink {

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

}  // namespace ink
