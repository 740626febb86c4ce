// Samples one token of a row of logits: temperature -> top_k -> typical_p -> top_p -> min_p -> draw (docs/sampling.md).
#pragma once

#include "penalties.h"
#include "threshold_search.h"
#include "inverse_cdf.h"

namespace draw {

// Temperatures below count as this one, which float32 can still tell from 0.
constexpr double COLDEST = 1e-30;

inline int64_t best_token(const Room& room, float best) {
    int64_t block = 0;
    while (room.block_best[block] != best) block++;
    int64_t token = block * BLOCK;
    while (room.x[token] != best) token++;
    return token;
}

// Lists the k best tokens, and all that tie with the last of them.
inline void list_top_k(Room& room, int64_t k) {
    // Each block's best is a logit, so the k-th best of those is at most the k-th best of all.
    List& list = room.list;
    collect(room, room.x, room.block_best, kth_best(room, room.block_best, room.blocks, k), list.x);
    if (list.n > k) retain(list, kth_best(room, list.x, list.n, k));
}

// The fewest tokens that together reach this share of the mass, those first whose surprise is nearest to the entropy.
// The surprise is ln total - ln w and the entropy its mean; ln total is in both, and rounds to one what it makes equal.
inline void keep_typical(Room& room, double share, const Mass& mass) {
    const List& list = room.list;
    const double log_total = std::log(mass.total), entropy = log_total - mass.moment / mass.total;
    for (int64_t i = 0; i < list.n; i++)
        room.key[i] = list.w[i] > 0 ? ~bits<uint64_t>(std::fabs(log_total - list.x[i] - entropy)) : 0;
    const uint64_t least = edge(room, room.key, list.w, list.n, mass.total * share);
    for (int64_t i = 0; i < list.n; i++) list.w[i] = room.key[i] >= least ? list.w[i] : 0;
}

DRAW_INLINE void keep_above(const List& list, float least) {
    for (int64_t i = 0; i < list.n; i++) list.w[i] = list.w[i] >= least ? list.w[i] : 0;
}

// The fewest most likely tokens that together reach this share of the total.
inline void keep_nucleus(Room& room, double share, double total) {
    const List& list = room.list;
    for (int64_t i = 0; i < list.n; i++) room.key[i] = bits<uint32_t>(list.w[i]);
    keep_above(list, bits<float>(static_cast<uint32_t>(edge(room, room.key, list.w, list.n, total * share))));
}

inline void keep_likely(const List& list, double min_p) {
    Floats best{};
    for (int64_t i = 0; i < list.n; i += LANES) best = larger(load(list.w + i), best);
    keep_above(list, static_cast<float>(min_p) * best_of<LANES>(best));
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

// Lists the tokens of the whole vocabulary that may come through the filters, weighed; their mass is that of all.
inline Mass list_likely(Room& room, const InkParams& p, Scale scale) {
    const bool typical = p.typical_p < 1;
    const Mass mass = typical ? weigh_row<true>(room, scale) : weigh_row<false>(room, scale);
    const float least = std::max(least_weight(p, mass, room.vocab), std::numeric_limits<float>::denorm_min());
    // A block is passed by where its best logit has too little weight; exp may be off by a little.
    for (int64_t i = 0; i < room.blocks; i += LANES)
        store(room.block_best + i, exp_of(scale.of(load(room.block_best + i))) * 1.0001f);
    const List& list = room.list;
    collect(room, room.w, room.block_best, least, list.w);
    for (int64_t i = 0; typical && i < list.n; i++) list.x[i] = (room.x[list.id[i]] - scale.best) * scale.inverse;
    fill_up(list);
    return mass;
}

// A token of those that the filters leave.
inline int64_t draw_from_few(Room& room, const InkParams& p, Scale scale, double number) {
    const List& list = room.list;
    Mass mass;
    if (p.top_k && p.top_k < room.vocab) {
        list_top_k(room, p.top_k);
        weigh_list(room.list, scale);
        mass = mass_of_list<true>(room);
    } else {
        mass = list_likely(room, p, scale);
    }
    if (p.typical_p < 1) {
        keep_typical(room, p.typical_p, mass);
        mass = mass_of_list<false>(room);
    }
    if (p.top_p < 1) keep_nucleus(room, p.top_p, mass.total);
    if (p.min_p > 0) keep_likely(list, p.min_p);
    mass_of_list<false>(room);
    return list.id[place_of(room, list.w, list.n, number)];
}

// best: the largest logit, finite. number: in [0, 1).
inline int64_t choose(Room& room, const InkParams& p, float best, double number) {
    if (p.temperature == 0 || p.top_k == 1 || (p.top_p == 0 && p.typical_p == 1)) return best_token(room, best);
    const Scale scale{best, static_cast<float>(1 / std::max(p.temperature, COLDEST))};
    // top_p 0 is the best token alone, the lowest id among equals.
    if (p.top_p == 0) number = 0;
    if ((p.top_k && p.top_k < room.vocab) || p.typical_p < 1 || p.top_p < 1 || p.min_p > 0)
        return draw_from_few(room, p, scale, number);
    weigh_row<false>(room, scale);
    return place_of(room, room.w, room.vocab, number);
}

}  // namespace draw
