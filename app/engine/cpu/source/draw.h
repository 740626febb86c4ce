// Samples a token for each row of logits: app/engine/sampling/sampler.py in C++, in the order of docs/sampling.md.
//
// One thread samples a row, and the order of its sums depends on that row alone. The caller owns all memory.
#pragma once

#include "sample.h"
#include "philox.h"
#include "logprobs.h"
#include "threads.h"

extern "C" {

// Room for the most likely tokens of each row.
constexpr int64_t INK_TOP = 20;

// Where the answers go, one after the other; INK_TOP places for each row in the last two.
struct InkDrawn {
    int64_t* tokens;   // -1: the logits are not finite, or the guide allows nothing
    double* logprobs;  // the chosen token's, by the raw logits; written where asked for, as are these:
    int64_t* top_ids;
    double* top_logprobs;
};
}

namespace draw {

inline void draw_row(Room& room, const float* raw, const InkRow& row, const InkDrawn& out, int64_t place) {
    const InkParams& p = *row.params;
    out.tokens[place] = -1;
    if (!room.take_in(raw)) return;
    LogSoftmax softmax{};
    if (p.logprobs >= 0) {
        softmax = log_softmax(room);
        const int64_t count = std::min({p.logprobs, INK_TOP, room.vocab});
        most_likely(room, softmax, count, out.top_ids + place * INK_TOP, out.top_logprobs + place * INK_TOP);
    }
    if (is_adjusted(row)) adjust(room, row);
    const float best = room.best();
    if (best == NOTHING) return;
    const int64_t token = choose(room, p, best, uniform(p.seed, p.choice, row.length));
    out.tokens[place] = token;
    if (p.logprobs >= 0) out.logprobs[place] = softmax.of(raw[token]);
}

inline int64_t room_bytes(int64_t vocab) {
    uintptr_t end = 0;
    Room::at(0, vocab, end);
    return static_cast<int64_t>(end) + 64;
}

// Runs work(row, room) for each row, with a room for each thread. A few rows are not worth waking threads.
template <class Work>
inline void each_row(ink::Pool* pool, char* rooms, int64_t rows, int64_t vocab, const Work& work) {
    const int64_t size = room_bytes(vocab);
    const auto one = [&](int row, int thread) {
        uintptr_t end;
        Room room = Room::at(reinterpret_cast<uintptr_t>(rooms) + static_cast<uintptr_t>(thread * size), vocab, end);
        work(row, room);
    };
    constexpr int64_t WORTH_WAKING = 16384;
    if (pool && rows > 1 && rows * vocab >= WORTH_WAKING) {
        pool->run(static_cast<int>(rows), one);
    } else {
        for (int row = 0; row < rows; row++) one(row, 0);
    }
}

}  // namespace draw

extern "C" {

// Sizes of the structures above, for callers that fill them from another language.
int64_t ink_params_bytes() { return sizeof(InkParams); }
int64_t ink_row_bytes() { return sizeof(InkRow); }

// Memory that ink_draw() needs for as many threads, all zero at first, and then left alone between calls.
int64_t ink_draw_room(int64_t threads, int64_t vocab) { return threads * draw::room_bytes(vocab); }

// One token for each row of float32 logits, `stride` numbers apart. pool: null draws in this thread.
void ink_draw(void* pool, void* rooms, const float* logits, int64_t stride, int64_t vocab, int64_t n_rows,
              const InkRow* rows, int64_t* tokens, double* logprobs, int64_t* top_ids, double* top_logprobs) {
    const InkDrawn out{tokens, logprobs, top_ids, top_logprobs};
    draw::each_row(static_cast<ink::Pool*>(pool), static_cast<char*>(rooms), n_rows, vocab,
                   [&](int row, draw::Room& room) { draw::draw_row(room, logits + row * stride, rows[row], out, row); });
}

// Log-probabilities of given tokens, a row of logits each, and of the `count` (at most INK_TOP and the vocabulary) most
// likely in their places. A row that is not finite gets none, and token -1.
void ink_score(void* pool, void* rooms, const float* logits, int64_t stride, int64_t vocab, int64_t n_rows,
               int64_t count, int64_t* tokens, double* logprobs, int64_t* top_ids, double* top_logprobs) {
    draw::each_row(static_cast<ink::Pool*>(pool), static_cast<char*>(rooms), n_rows, vocab, [&](int row, draw::Room& room) {
        const float* raw = logits + row * stride;
        const bool is_token = tokens[row] >= 0 && tokens[row] < vocab;
        if (!room.take_in(raw) || !is_token) {
            tokens[row] = -1;
            return;
        }
        const draw::LogSoftmax softmax = draw::log_softmax(room);
        logprobs[row] = softmax.of(raw[tokens[row]]);
        draw::most_likely(room, softmax, count, top_ids + row * INK_TOP, top_logprobs + row * INK_TOP);
    });
}
}
