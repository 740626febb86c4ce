// Inverse-CDF sampling: weights of logits, their sums in float64, and the sampled index.
#pragma once

#include "scratch.h"

namespace draw {

// A sum of weights, and of weight times logarithm of weight.
struct Mass {
    double total = 0, moment = 0;
};

struct Scale {
    float best, inverse;
    // Subtract the maximum first: a tiny temperature must not turn finite logits into infinities.
    DRAW_INLINE Floats of(Floats logits) const { return (logits - best) * inverse; }
};

// The mass of a piece, vector by vector: weigh(place, logarithm) gives the weights, and tells their logarithms.
template <bool MOMENT, class Weigh>
DRAW_INLINE Mass mass_of_piece(int64_t start, Weigh weigh) {
    Sum16 sum, product;
    for (int64_t i = start; i < start + PIECE; i += 16)
        for (int k = 0; k < 16 / LANES; k++) {
            Floats logarithm{};
            const Floats weight = weigh(i + k * LANES, logarithm);
            sum.add(k, weight);
            // What has no weight may be infinitely far away.
            if constexpr (MOMENT) product.add_product(k, logarithm < CUT ? Floats{} : logarithm, weight);
        }
    return {sum.total(), MOMENT ? product.total() : 0.0};
}

// The mass of so many places, and the sums up to and with each piece of them.
template <bool MOMENT, class Weigh>
DRAW_INLINE Mass mass_of(Room& room, int64_t places, Weigh weigh) {
    Mass mass;
    for (int64_t piece = 0; piece * PIECE < places; piece++) {
        const Mass more = mass_of_piece<MOMENT>(piece * PIECE, weigh);
        mass.total += more.total;
        mass.moment += more.moment;
        room.sums[piece] = mass.total;
    }
    return mass;
}

// Weighs all logits of the row.
template <bool MOMENT>
inline Mass weigh_row(Room& room, Scale scale) {
    return mass_of<MOMENT>(room, room.vocab, [&](int64_t place, Floats& logarithm) {
        logarithm = scale.of(load(room.x + place));
        const Floats weight = exp_of(logarithm);
        store(room.w + place, weight);
        return weight;
    });
}

// Ends the list's weights with zeros, so that it consists of whole pieces.
inline void fill_up(const List& list) {
    std::fill(list.w + list.n, list.w + (list.n + PIECE - 1) / PIECE * PIECE, 0.0f);
}

template <bool MOMENT>
inline Mass mass_of_list(Room& room) {
    const List& list = room.list;
    return mass_of<MOMENT>(room, list.n, [&](int64_t place, Floats& logarithm) {
        if constexpr (MOMENT) logarithm = load(list.x + place);
        return load(list.w + place);
    });
}

// Weighs the logits of the list.
inline void weigh_list(const List& list, Scale scale) {
    std::fill(list.x + list.n, list.x + list.n + LANES, NOTHING);  // what lay there before may be above the best
    for (int64_t i = 0; i < list.n; i += LANES) {
        const Floats logarithm = scale.of(load(list.x + i));
        store(list.x + i, logarithm);
        store(list.w + i, exp_of(logarithm));
    }
    fill_up(list);
}

// The first place where the sum of the weights exceeds number * total, by the sums that mass_of() left behind.
// Rounding may reach the last sum; then the last place that adds to it.
inline int64_t place_of(const Room& room, const float* w, int64_t places, double number) {
    double* const end = room.sums + (places + PIECE - 1) / PIECE;
    const double total = end[-1], target = number * total;
    const int64_t above = std::upper_bound(room.sums, end, target) - room.sums;
    const int64_t piece = std::min<int64_t>(above, std::lower_bound(room.sums, end, total) - room.sums);
    const double rest = target - (piece ? room.sums[piece - 1] : 0.0);
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

}  // namespace draw
