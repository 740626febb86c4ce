// One token of a row of logits: temperature -> top_k -> typical_p -> top_p -> min_p -> draw (docs/sampling.md).
// Knows no bias, mask or history.
#pragma once

#include "draw_adjust.h"
#include "draw_select.h"

namespace draw {

// Temperatures below count as this one, which float32 can still tell from 0.
constexpr double COLDEST = 1e-30;

// A sum of weights, and of weight times logarithm of weight.
struct Mass {
    double total = 0, moment = 0;
};

struct Scale {
    float best, inverse;
    // The best goes out first: a tiny temperature must not make infinities of finite logits.
    DRAW_INLINE Floats of(Floats logits) const { return (logits - best) * inverse; }
};

// The weights of a piece, stored; their sum.
template <bool MOMENT>
DRAW_INLINE Mass weigh_piece(const float* x, float* w, Scale scale) {
    Sum16 sum, product;
    for (int64_t i = 0; i < PIECE; i += 16)
        for (int k = 0; k < 16 / LANES; k++) {
            const Floats logarithm = scale.of(load(x + i + k * LANES));
            const Floats weight = exp_of(logarithm);
            store(w + i + k * LANES, weight);
            sum.add(k, weight);
            // What has no weight may be infinitely far away.
            if constexpr (MOMENT) product.add_product(k, logarithm < CUT ? Floats{} : logarithm, weight);
        }
    return {sum.total(), MOMENT ? product.total() : 0.0};
}

// The weights of the row, and their sums up to and with each piece.
template <bool MOMENT>
inline Mass weigh(Room& room, Scale scale) {
    Mass mass;
    for (int64_t piece = 0; piece < room.pieces; piece++) {
        const Mass more = weigh_piece<MOMENT>(room.x + piece * PIECE, room.w + piece * PIECE, scale);
        mass.total += more.total;
        mass.moment += more.moment;
        room.sums[piece] = mass.total;
    }
    return mass;
}

inline int64_t best_token(const Room& room, float best) {
    int64_t block = 0;
    while (room.block_best[block] != best) block++;
    int64_t token = block * BLOCK;
    while (room.x[token] != best) token++;
    return token;
}

// The first place where the sum of the weights exceeds the target. Rounding may reach the last sum; then the last
// place that adds to it.
inline int64_t place_above(const float* w, int64_t n, double target) {
    double sum = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < n; i++) {
        const double more = sum + w[i];
        if (more > target) return i;
        if (more > sum) last = i;
        sum = more;
    }
    return last;
}

// A token of the whole vocabulary.
inline int64_t draw_from_all(Room& room, Scale scale, double number) {
    const double total = weigh<false>(room, scale).total, target = number * total;
    double* const end = room.sums + room.pieces;
    const int64_t above = std::upper_bound(room.sums, end, target) - room.sums;
    const int64_t last = std::lower_bound(room.sums, end, total) - room.sums;
    const int64_t piece = std::min(above, last);
    const double before = piece ? room.sums[piece - 1] : 0.0;
    return piece * PIECE + place_above(room.w + piece * PIECE, PIECE, target - before);
}

inline double total_of(const List& list) {
    double total = 0;
    for (int64_t i = 0; i < list.n; i++) total += list.w[i];
    return total;
}

// Lists the k best tokens, and all that tie with the last of them.
inline void keep_top_k(Room& room, int64_t k) {
    // Each block's best is a logit, so the k-th best of those is at most the k-th best of all.
    List& list = room.list;
    collect(room, room.x, room.block_best, kth_best(room, room.block_best, room.blocks, k));
    for (int64_t i = 0; i < list.n; i++) list.x[i] = room.x[list.id[i]];
    if (list.n <= k) return;
    for (int64_t i = 0; i < list.n; i++) room.key[i] = key_of(list.x[i]);
    const uint64_t least = edge(room, room.key, nullptr, list.n, static_cast<double>(k));
    retain(list, [&](int64_t i) { return room.key[i] >= least; });
}

// Weighs the logits of the list; tokens without weight leave it.
inline void weigh_list(List& list, Scale scale) {
    for (int64_t i = 0; i < list.n; i += LANES) {
        const Floats logarithm = scale.of(load(list.x + i));
        store(list.x + i, logarithm);
        store(list.w + i, exp_of(logarithm));
    }
    retain(list, [&](int64_t i) { return list.w[i] > 0; });
}

// The fewest tokens that together reach this share of the mass, those first whose surprise is nearest to the entropy.
// The surprise is ln total - ln w and the entropy its mean, so that ln total cancels out.
inline void keep_typical(Room& room, double share, const Mass& mass) {
    List& list = room.list;
    const double mean = mass.moment / mass.total;
    for (int64_t i = 0; i < list.n; i++) room.key[i] = ~bits<uint64_t>(std::fabs(mean - list.x[i]));
    const uint64_t least = edge(room, room.key, list.w, list.n, mass.total * share);
    retain(list, [&](int64_t i) { return room.key[i] >= least; });
}

// The fewest most likely tokens that together reach this share of the total.
inline void keep_nucleus(Room& room, double share, double total) {
    List& list = room.list;
    for (int64_t i = 0; i < list.n; i++) room.key[i] = bits<uint32_t>(list.w[i]);
    const uint64_t least = edge(room, room.key, list.w, list.n, total * share);
    retain(list, [&](int64_t i) { return room.key[i] >= least; });
}

inline void keep_likely(List& list, double min_p) {
    float best = 0;
    for (int64_t i = 0; i < list.n; i++) best = std::max(best, list.w[i]);
    const float least = static_cast<float>(min_p) * best;
    retain(list, [&](int64_t i) { return list.w[i] >= least; });
}

// The weight below which no token of the vocabulary can come through the filters: all such tokens together weigh less
// than what the first of the filters leaves out.
inline float least_weight(const InkParams& p, const Mass& mass, int64_t vocab) {
    const double share = p.typical_p < 1 ? p.typical_p : p.top_p;
    const double least = 0.5 * (1 - share) * mass.total / static_cast<double>(vocab);
    if (p.typical_p < 1) {
        // Unlikely tokens are the last in the order of typical_p only where the best ones are no farther from the mean.
        const double mean = mass.moment / mass.total;
        return least > 0 && mean - std::log(least) > -mean * 1.001 ? static_cast<float>(least) : 0;
    }
    return std::max(static_cast<float>(least), static_cast<float>(p.min_p));
}

// Lists the tokens of the whole vocabulary that may come through the filters; their mass is that of all.
inline Mass list_all(Room& room, const InkParams& p, Scale scale) {
    const Mass mass = p.typical_p < 1 ? weigh<true>(room, scale) : weigh<false>(room, scale);
    const float least = std::max(least_weight(p, mass, room.vocab), std::numeric_limits<float>::denorm_min());
    // A block is passed by where its best logit has too little weight; exp may be off by a little.
    for (int64_t i = 0; i < room.blocks; i += LANES)
        store(room.block_best + i, exp_of(scale.of(load(room.block_best + i))) * 1.0001f);
    collect(room, room.w, room.block_best, least);
    List& list = room.list;
    for (int64_t i = 0; i < list.n; i++) {
        list.x[i] = (room.x[list.id[i]] - scale.best) * scale.inverse;
        list.w[i] = room.w[list.id[i]];
    }
    return mass;
}

inline Mass mass_of(const List& list, bool with_moment) {
    Mass mass{total_of(list), 0};
    for (int64_t i = 0; with_moment && i < list.n; i++) mass.moment += static_cast<double>(list.x[i]) * list.w[i];
    return mass;
}

// A token of those that the filters leave.
inline int64_t draw_from_few(Room& room, const InkParams& p, Scale scale, double number) {
    List& list = room.list;
    Mass mass;
    if (p.top_k && p.top_k < room.vocab) {
        keep_top_k(room, p.top_k);
        weigh_list(list, scale);
        mass = mass_of(list, p.typical_p < 1);
    } else {
        mass = list_all(room, p, scale);
    }
    if (p.typical_p < 1) {
        keep_typical(room, p.typical_p, mass);
        mass.total = total_of(list);
    }
    if (p.top_p < 1) keep_nucleus(room, p.top_p, mass.total);
    if (p.min_p > 0) keep_likely(list, p.min_p);
    return list.id[place_above(list.w, list.n, number * total_of(list))];
}

// best: the largest logit, finite. number: in [0, 1).
inline int64_t choose(Room& room, const InkParams& p, float best, double number) {
    if (p.temperature == 0 || p.top_k == 1 || (p.top_p == 0 && p.typical_p == 1)) return best_token(room, best);
    const Scale scale{best, static_cast<float>(1 / std::max(p.temperature, COLDEST))};
    // top_p 0 is the best token alone, the lowest id among equals.
    if (p.top_p == 0) number = 0;
    const bool filtered = (p.top_k && p.top_k < room.vocab) || p.typical_p < 1 || p.top_p < 1 || p.min_p > 0;
    return filtered ? draw_from_few(room, p, scale, number) : draw_from_all(room, scale, number);
}

}  // namespace draw
