// Changes to single logits before sampling: biases, penalties, grammar masks, banned tokens (docs/sampling.md).
#pragma once

#include "scratch.h"

extern "C" {

// What does not change from step to step of a request; `tokens` ids, then as many numbers, follow it in memory.
struct InkParams {
    double temperature, typical_p, top_p, min_p, repetition, presence, frequency;
    int64_t top_k, seed, choice, min_tokens;
    int64_t logprobs;  // how many of the most likely to report; -1: no log-probability at all
    int64_t biases;
};

// What a step adds.
struct InkRow {
    const InkParams* params;
    const int64_t* tokens;  // prompt and output; read where there are penalties
    int64_t length;         // of them; the position of the new token
    int64_t prompt;         // how many of them are the prompt
    const int64_t* stops;   // tokens that end the text; read where they are too early
    int64_t stops_length;
    const uint32_t* allowed;  // the guide's mask, a bit for each token; null allows all
};
}

namespace draw {

DRAW_INLINE bool is_penalised(const InkParams& p) { return p.repetition != 1 || p.presence != 0 || p.frequency != 0; }

DRAW_INLINE bool is_too_early(const InkRow& row) { return row.length - row.prompt < row.params->min_tokens; }

DRAW_INLINE bool is_adjusted(const InkRow& row) {
    return row.params->biases || is_penalised(*row.params) || row.allowed || (is_too_early(row) && row.stops_length);
}

DRAW_INLINE float within_float(double value) {
    return static_cast<float>(std::clamp(value, static_cast<double>(-LARGEST), static_cast<double>(LARGEST)));
}

DRAW_INLINE void put(Room& room, int64_t token, double value) {
    room.x[token] = within_float(value);
    room.dirty[token / BLOCK] = 1;
}

inline void add_biases(Room& room, const InkParams& p) {
    const int64_t* token = reinterpret_cast<const int64_t*>(&p + 1);
    const double* bias = reinterpret_cast<const double*>(token + p.biases);
    for (int64_t i = 0; i < p.biases; i++)
        if (token[i] >= 0 && token[i] < room.vocab) put(room, token[i], room.x[token[i]] + bias[i]);
}

// CTRL's penalty: once for each token of prompt and output.
inline void penalise_repetition(Room& room, const InkRow& row) {
    const double r = row.params->repetition;
    for (int64_t i = 0; i < row.length; i++) {
        const int64_t token = row.tokens[i];
        if (token < 0 || token >= room.vocab || room.counts[token]++) continue;
        const double logit = room.x[token];
        put(room, token, logit > 0 ? logit / r : logit * r);
    }
    for (int64_t i = 0; i < row.length; i++)
        if (row.tokens[i] >= 0 && row.tokens[i] < room.vocab) room.counts[row.tokens[i]] = 0;
}

// OpenAI's penalties: by how often a token was generated.
inline void penalise_presence(Room& room, const InkRow& row) {
    const auto is_token = [&](int64_t token) { return token >= 0 && token < room.vocab; };
    for (int64_t i = row.prompt; i < row.length; i++)
        if (is_token(row.tokens[i])) room.counts[row.tokens[i]]++;
    for (int64_t i = row.prompt; i < row.length; i++) {
        const int64_t token = row.tokens[i];
        if (!is_token(token) || !room.counts[token]) continue;
        put(room, token, room.x[token] - (row.params->frequency * room.counts[token] + row.params->presence));
        room.counts[token] = 0;
    }
}

inline void look_again(Room& room) {
    for (int64_t block = 0; block < room.blocks; block++)
        if (room.dirty[block]) {
            room.look_at_block(block);
            room.dirty[block] = 0;
        }
}

inline void mask(Room& room, const uint32_t* allowed) {
    Ints lane_bit;
    for (int i = 0; i < LANES; i++) lane_bit[i] = 1 << i;
    const int64_t whole = room.vocab / 32;
    for (int64_t word = 0; word <= whole; word++) {
        if (word * 32 >= room.vocab) break;
        for (int i = 0; i < 32; i += LANES) {
            float* at = room.x + word * 32 + i;
            const Ints chosen = (Ints{} + static_cast<int32_t>(allowed[word] >> i)) & lane_bit;
            store(at, chosen != 0 ? load(at) : Floats{} + NOTHING);
        }
    }
    std::fill(room.dirty, room.dirty + room.blocks, 1);
}

// Where nothing but the end is left to a row, it may end.
inline void ban(Room& room, const InkRow& row) {
    const auto each = [&](auto change) {
        for (int64_t i = 0; i < row.stops_length; i++)
            if (row.stops[i] >= 0 && row.stops[i] < room.vocab) {
                change(row.stops[i]);
                room.dirty[row.stops[i] / BLOCK] = 1;
            }
        look_again(room);
    };
    // The weights are not needed yet: there is room for what stood there.
    each([&](int64_t token) { room.w[token] = room.x[token]; });
    each([&](int64_t token) { room.x[token] = NOTHING; });
    if (room.best() == NOTHING) each([&](int64_t token) { room.x[token] = room.w[token]; });
}

inline void adjust(Room& room, const InkRow& row) {
    const InkParams& p = *row.params;
    add_biases(room, p);
    if (p.repetition != 1) penalise_repetition(room, row);
    if (p.presence != 0 || p.frequency != 0) penalise_presence(room, row);
    if (row.allowed) mask(room, row.allowed);
    look_again(room);
    if (is_too_early(row)) ban(room, row);
}

}  // namespace draw
