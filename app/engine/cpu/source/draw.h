// C++ implementation of app/engine/sampling/sampler.py: samples a token for each row of logits (docs/sampling.md).
//
// One thread samples a row, and the order of its sums depends on that row alone. The caller owns all memory.
#pragma once

#include "sample.h"
#include "philox.h"
#include "logprobs.h"
#include "threads.h"

namespace ink {

// Most likely tokens reported for a row, at most.
constexpr int64_t INK_TOP = 20;

// Output arrays, one entry for each row; the last two have INK_TOP entries for each row.
struct InkSamples {
    int64_t* tokens;   // -1: the logits are not finite, or the grammar allows no token
    double* logprobs;  // of the sampled token, from the raw logits; these three are written only if requested
    int64_t* top_ids;
    double* top_logprobs;
};

inline void sample_row(Scratch& scratch, const float* raw, const InkRow& row, const InkSamples& out, int64_t index) {
    const InkParams& p = *row.params;
    out.tokens[index] = -1;
    if (!scratch.load_row(raw)) return;
    LogSoftmax softmax{};
    if (p.logprobs >= 0) {
        softmax = log_softmax_of_row(scratch);
        const int64_t count = std::min({int64_t(p.logprobs), INK_TOP, scratch.vocab});
        write_top_logprobs(scratch, softmax, count, out.top_ids + index * INK_TOP, out.top_logprobs + index * INK_TOP);
    }
    if (needs_adjustment(row)) adjust_logits(scratch, row);
    const float best = scratch.best();
    if (best == NEG_INF) return;
    const int64_t token = sample_token(scratch, p, best, uniform(p.seed, p.choice, row.length));
    out.tokens[index] = token;
    if (p.logprobs >= 0) out.logprobs[index] = softmax.of(raw[token]);
}

inline int64_t scratch_bytes(int64_t vocab) {
    uintptr_t end = 0;
    Scratch::at(0, vocab, end);
    return static_cast<int64_t>(end) + 64;
}

// Runs work(row, scratch) for each row, with a scratch buffer for each thread. Few logits are not worth waking threads.
template <class Work>
inline void for_each_row(Pool* pool, char* memory, int64_t rows, int64_t vocab, const Work& work) {
    const int64_t size = scratch_bytes(vocab);
    const auto run_row = [&](int row, int thread) {
        uintptr_t end;
        const uintptr_t base = reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(thread * size);
        Scratch scratch = Scratch::at(base, vocab, end);
        work(row, scratch);
    };
    constexpr int64_t MIN_PARALLEL_LOGITS = 16384;
    if (pool && rows > 1 && rows * vocab >= MIN_PARALLEL_LOGITS) {
        pool->run(static_cast<int>(rows), run_row);
    } else {
        for (int row = 0; row < rows; row++) run_row(row, 0);
    }
}

extern "C" {

// Bytes of memory that ink_sample() needs for so many threads: all zero at first, not written by the caller afterwards.
int64_t ink_scratch_bytes(int64_t threads, int64_t vocab) { return threads * scratch_bytes(vocab); }

// Samples one token for each row of float32 logits, `stride` numbers apart. pool: null samples in the calling thread.
void ink_sample(void* pool, void* memory, const float* logits, int64_t stride, int64_t vocab, int64_t n_rows,
                const InkRow* rows, const InkSamples* out) {
    const auto sample = [&](int row, Scratch& scratch) {
        sample_row(scratch, logits + row * stride, rows[row], *out, row);
    };
    for_each_row(static_cast<Pool*>(pool), static_cast<char*>(memory), n_rows, vocab, sample);
}

// Log-probabilities of the given out.tokens, one for each row of logits, and of the `count` most likely tokens of the
// row (at most INK_TOP and the vocabulary size). A row with logits that are not finite gets only token -1.
void ink_logprobs(void* pool, void* memory, const float* logits, int64_t stride, int64_t vocab, int64_t n_rows,
                  int64_t count, const InkSamples* out) {
    const auto score = [&](int row, Scratch& scratch) {
        const float* raw = logits + row * stride;
        if (!scratch.load_row(raw)) {
            out->tokens[row] = -1;
            return;
        }
        const LogSoftmax softmax = log_softmax_of_row(scratch);
        out->logprobs[row] = softmax.of(raw[out->tokens[row]]);
        write_top_logprobs(scratch, softmax, count, out->top_ids + row * INK_TOP, out->top_logprobs + row * INK_TOP);
    };
    for_each_row(static_cast<Pool*>(pool), static_cast<char*>(memory), n_rows, vocab, score);
}
}

}  // namespace ink
