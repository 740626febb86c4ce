// C++ implementation of app/engine/sampling/sampler.py: samples a token for each row of logits (docs/sampling.md).
//
// One thread samples a row, and the order of its sums depends on that row alone. The caller owns all memory.
#pragma once

#include <array>

#include "sample.h"
#include "threads.h"

namespace ink {

// Counter-based random numbers: Philox 4x32-10 (Salmon et al., SC 2011). No state.
using Words4 = std::array<uint32_t, 4>;

inline Words4 philox(Words4 c, uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = uint64_t{c[0]} * 0xD2511F53u, p1 = uint64_t{c[2]} * 0xCD9E8D57u;
        c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
             static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

// In [0, 1), 53 bits: the upper 27 of one word, the upper 26 of the next.
inline double uniform(int64_t seed, int64_t choice, int64_t position) {
    const auto low = [](int64_t value) { return static_cast<uint32_t>(static_cast<uint64_t>(value)); };
    const auto high = [](int64_t value) { return static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32); };
    const Words4 words = philox({low(position), high(position), low(choice), 0}, low(seed), high(seed));
    return (static_cast<double>(words[0] >> 5) * 67108864.0 + static_cast<double>(words[1] >> 6)) * 0x1p-53;
}

// Log-probabilities of the raw logits: the sampled token's, and the most likely tokens.
struct TokenLogprob {
    float logprob;
    uint32_t id;
};

// Converts a logit of the row to its log-probability.
struct LogSoftmax {
    double best, log_total;

    // Clamped above -inf, which rounding may give a finite logit far below the others. Monotonic in the logit.
    INK_INLINE float of(float logit) const { return clamp_to_float((logit - best) - log_total); }

    // A lower bound for the logits whose log-probability is this one.
    float lowest_logit(float logprob) const {
        const double slack = 1e-6 * std::fabs(logprob) + 1e-12 * (std::fabs(best) + log_total) + 1e-40;
        const float logit = clamp_to_float(best + log_total + logprob - slack);
        return std::max(-FLOAT_MAX, std::nextafter(logit, -FLOAT_MAX));
    }
};

inline LogSoftmax log_softmax_of_row(Scratch& scratch) {
    const float best = scratch.best();
    return {best, std::log(compute_row_weights<false>(scratch, Scale{best, 1}).total)};
}

// Writes the `count` most likely tokens, the lower id among equals; count is at most the vocabulary.
inline void write_top_logprobs(Scratch& scratch, const LogSoftmax& softmax, int64_t count, int64_t* ids,
                               double* logprobs) {
    if (!count) return;
    const float kth = kth_largest(scratch, scratch.block_max, scratch.blocks, count);
    // Tokens whose log-probability rounds to the same number may have a lower logit and a lower id.
    const float least = softmax.lowest_logit(softmax.of(kth));
    collect_candidates(scratch, scratch.x, scratch.block_max, least, scratch.candidates.x);
    TokenLogprob* found = reinterpret_cast<TokenLogprob*>(scratch.key);
    static_assert(sizeof(TokenLogprob) == sizeof(uint64_t));
    const Candidates& candidates = scratch.candidates;
    for (int64_t i = 0; i < candidates.n; i++) found[i] = {softmax.of(candidates.x[i]), candidates.id[i]};
    std::partial_sort(found, found + count, found + candidates.n, [](const TokenLogprob& a, const TokenLogprob& b) {
        return a.logprob > b.logprob || (a.logprob == b.logprob && a.id < b.id);
    });
    for (int64_t i = 0; i < count; i++) {
        ids[i] = found[i].id;
        logprobs[i] = found[i].logprob;
    }
}

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
