// Changes to single logits before sampling: biases, penalties, grammar masks, banned tokens (docs/sampling.md).
#pragma once

#include "scratch.h"

namespace ink {

// Parameters that stay the same in every step of a request. `biases` token ids and then as many bias values follow it.
struct InkParams {
    double temperature, typical_p, top_p, min_p, repetition, presence, frequency;
    int64_t top_k, seed, choice, min_tokens;
    int64_t logprobs;  // most likely tokens to report; -1: no log-probabilities at all
    int64_t biases;
};

// Inputs of a row in one step.
struct InkRow {
    const InkParams* params;
    const int64_t* tokens;  // prompt and output; read only if there are penalties
    int64_t length;         // number of tokens; also the position of the new token
    int64_t prompt;         // number of prompt tokens
    const int64_t* stops;   // stop tokens; read only before min_tokens
    int64_t stops_length;
    const uint32_t* allowed;  // the grammar's mask, a bit for each token; null allows all
};

INK_INLINE bool is_penalized(const InkParams& p) { return p.repetition != 1 || p.presence != 0 || p.frequency != 0; }

INK_INLINE bool is_too_early(const InkRow& row) { return row.length - row.prompt < row.params->min_tokens; }

INK_INLINE bool needs_adjustment(const InkRow& row) {
    return row.params->biases || is_penalized(*row.params) || row.allowed || (is_too_early(row) && row.stops_length);
}

INK_INLINE float clamp_to_float(double value) {
    return static_cast<float>(std::clamp(value, static_cast<double>(-FLOAT_MAX), static_cast<double>(FLOAT_MAX)));
}

INK_INLINE void set_logit(Scratch& scratch, int64_t token, double value) {
    scratch.x[token] = clamp_to_float(value);
    scratch.dirty[token / BLOCK] = 1;
}

inline void add_biases(Scratch& scratch, const InkParams& p) {
    const int64_t* token = reinterpret_cast<const int64_t*>(&p + 1);
    const double* bias = reinterpret_cast<const double*>(token + p.biases);
    for (int64_t i = 0; i < p.biases; i++)
        if (token[i] >= 0 && token[i] < scratch.vocab) set_logit(scratch, token[i], scratch.x[token[i]] + bias[i]);
}

// CTRL's repetition penalty: applied once to each token of prompt and output.
inline void penalize_repetition(Scratch& scratch, const InkRow& row) {
    const double r = row.params->repetition;
    for (int64_t i = 0; i < row.length; i++) {
        const int64_t token = row.tokens[i];
        if (token < 0 || token >= scratch.vocab || scratch.counts[token]++) continue;
        const double logit = scratch.x[token];
        set_logit(scratch, token, logit > 0 ? logit / r : logit * r);
    }
    for (int64_t i = 0; i < row.length; i++)
        if (row.tokens[i] >= 0 && row.tokens[i] < scratch.vocab) scratch.counts[row.tokens[i]] = 0;
}

// OpenAI's presence and frequency penalties, by how often a token was generated.
inline void penalize_presence(Scratch& scratch, const InkRow& row) {
    const auto is_token = [&](int64_t token) { return token >= 0 && token < scratch.vocab; };
    for (int64_t i = row.prompt; i < row.length; i++)
        if (is_token(row.tokens[i])) scratch.counts[row.tokens[i]]++;
    for (int64_t i = row.prompt; i < row.length; i++) {
        const int64_t token = row.tokens[i];
        if (!is_token(token) || !scratch.counts[token]) continue;
        const double penalty = row.params->frequency * scratch.counts[token] + row.params->presence;
        set_logit(scratch, token, scratch.x[token] - penalty);
        scratch.counts[token] = 0;
    }
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

// Bans stop tokens before min_tokens, unless no other token is allowed.
inline void ban_stop_tokens(Scratch& scratch, const InkRow& row) {
    const auto each = [&](auto change) {
        for (int64_t i = 0; i < row.stops_length; i++)
            if (row.stops[i] >= 0 && row.stops[i] < scratch.vocab) {
                change(row.stops[i]);
                scratch.dirty[row.stops[i] / BLOCK] = 1;
            }
        update_dirty_blocks(scratch);
    };
    // The weights are not computed yet, so scratch.w can save the logits.
    each([&](int64_t token) { scratch.w[token] = scratch.x[token]; });
    each([&](int64_t token) { scratch.x[token] = NEG_INF; });
    if (scratch.best() == NEG_INF) each([&](int64_t token) { scratch.x[token] = scratch.w[token]; });
}

inline void adjust_logits(Scratch& scratch, const InkRow& row) {
    const InkParams& p = *row.params;
    add_biases(scratch, p);
    if (p.repetition != 1) penalize_repetition(scratch, row);
    if (p.presence != 0 || p.frequency != 0) penalize_presence(scratch, row);
    if (row.allowed) apply_mask(scratch, row.allowed);
    update_dirty_blocks(scratch);
    if (is_too_early(row)) ban_stop_tokens(scratch, row);
}

}  // namespace ink
