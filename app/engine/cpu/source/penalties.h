// Changes to single logits before sampling: biases, penalties, grammar masks, banned tokens (docs/sampling.md).
#pragma once

#include "scratch.h"

namespace ink {

// Parameters of a request: the first words of app/engine/sampling/parameters.py, then all of its biases and ids.
struct InkParams {
    double temperature, top_p, min_p, typical_p, repetition, presence, frequency;
    int64_t seed;
    int32_t choice, top_k, prompt, min_tokens;  // prompt: number of its tokens
    int32_t logprobs;                           // most likely tokens to report; -1: no log-probabilities at all
    int32_t flags, n_biases, n_stops;

    const double* biases() const { return reinterpret_cast<const double*>(this + 1); }
    const int32_t* bias_ids() const { return reinterpret_cast<const int32_t*>(biases() + n_biases); }
    const int32_t* stops() const { return bias_ids() + n_biases; }
};

static_assert(sizeof(InkParams) == 24 * 4, "HEADER_WORDS");
enum Flag : int32_t { GREEDY = 1, COUNTED = 2 };

// Inputs of a row in one step. All token ids are of the vocabulary.
struct InkRow {
    const InkParams* params;
    const int64_t* tokens;    // prompt and output; read only if there are penalties
    int64_t length;           // number of tokens; also the position of the new token
    const uint32_t* allowed;  // the grammar's mask, a bit for each token; null allows all
};

INK_INLINE bool bans_stop_tokens(const InkRow& row) {
    return row.params->n_stops && row.length - row.params->prompt < row.params->min_tokens;
}

INK_INLINE bool needs_adjustment(const InkRow& row) {
    return row.params->n_biases || row.params->flags & COUNTED || row.allowed || bans_stop_tokens(row);
}

INK_INLINE float clamp_to_float(double value) {
    return static_cast<float>(std::clamp(value, static_cast<double>(-FLOAT_MAX), static_cast<double>(FLOAT_MAX)));
}

INK_INLINE void set_logit(Scratch& scratch, int64_t token, double value) {
    scratch.x[token] = clamp_to_float(value);
    scratch.dirty[token / BLOCK] = 1;
}

// CTRL's repetition penalty: applied once to each token of prompt and output. The weights are not computed yet, so
// scratch.w can save the logits: a token that comes again gets the same result again, without a branch.
inline void penalize_repetition(Scratch& scratch, const InkRow& row) {
    const double r = row.params->repetition;
    for (int64_t i = 0; i < row.length; i++) scratch.w[row.tokens[i]] = scratch.x[row.tokens[i]];
    for (int64_t i = 0; i < row.length; i++) {
        const double logit = scratch.w[row.tokens[i]], divided = logit / r, multiplied = logit * r;
        set_logit(scratch, row.tokens[i], logit > 0 ? divided : multiplied);
    }
}

// OpenAI's presence and frequency penalties, by how often a token was generated.
inline void penalize_presence(Scratch& scratch, const InkRow& row) {
    const double presence = row.params->presence, frequency = row.params->frequency;
    const int64_t first = row.params->prompt;
    for (int64_t i = first; i < row.length; i++) {
        scratch.counts[row.tokens[i]]++;
        scratch.w[row.tokens[i]] = scratch.x[row.tokens[i]];
    }
    for (int64_t i = first; i < row.length; i++) {
        const int64_t token = row.tokens[i];
        set_logit(scratch, token, scratch.w[token] - (frequency * scratch.counts[token] + presence));
    }
    for (int64_t i = first; i < row.length; i++) scratch.counts[row.tokens[i]] = 0;
}

inline void update_dirty_blocks(Scratch& scratch) {
    for (int64_t block = 0; block < scratch.blocks; block++)
        if (scratch.dirty[block]) {
            scratch.update_block_max(block);
            scratch.dirty[block] = 0;
        }
}

inline void apply_mask(Scratch& scratch, const uint32_t* allowed) {
    const Ints lane_bit = Ints(1) << consecutive(0);
    const auto ban = [](auto bit, Part logit) { return bit != 0 ? logit : NEG_INF - Part{}; };
    for (int64_t i = 0; i < scratch.vocab; i += kLanes) {
        const Ints bits = static_cast<int32_t>(allowed[i / 32] >> i % 32);
        store(scratch.x + i, by_parts(ban, bits & lane_bit, load(scratch.x + i)));
    }
    std::fill(scratch.dirty, scratch.dirty + scratch.blocks, 1);
}

// Bans stop tokens, unless no other token is allowed.
inline void ban_stop_tokens(Scratch& scratch, const InkParams& p) {
    const auto each = [&](auto change) {
        for (int i = 0; i < p.n_stops; i++) {
            change(p.stops()[i]);
            scratch.dirty[p.stops()[i] / BLOCK] = 1;
        }
        update_dirty_blocks(scratch);
    };
    // The weights are not computed yet, so scratch.w can save the logits.
    each([&](int32_t token) { scratch.w[token] = scratch.x[token]; });
    each([&](int32_t token) { scratch.x[token] = NEG_INF; });
    if (scratch.best() == NEG_INF) each([&](int32_t token) { scratch.x[token] = scratch.w[token]; });
}

inline void adjust_logits(Scratch& scratch, const InkRow& row) {
    const InkParams& p = *row.params;
    for (int i = 0; i < p.n_biases; i++) set_logit(scratch, p.bias_ids()[i], scratch.x[p.bias_ids()[i]] + p.biases()[i]);
    if (p.repetition != 1) penalize_repetition(scratch, row);
    if (p.presence != 0 || p.frequency != 0) penalize_presence(scratch, row);
    if (row.allowed) apply_mask(scratch, row.allowed);
    update_dirty_blocks(scratch);
    if (bans_stop_tokens(row)) ban_stop_tokens(scratch, p);
}

}  // namespace ink
