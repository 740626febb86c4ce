// A thread's scratch buffer for sampling, carved from memory that the caller owns, and the row stored in it.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "draw_vectors.h"

namespace sampling {

constexpr int64_t BLOCK = 64;   // tokens that share a maximum
constexpr int64_t PIECE = 256;  // tokens that share a sum; rows are padded to whole pieces with -inf
constexpr int64_t BUCKETS = 1024;
constexpr int SORT_LIMIT = 48;  // find_threshold() sorts up to so many keys
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();
constexpr float FLOAT_MAX = std::numeric_limits<float>::max();

// Tokens that may still be sampled, in the order of the vocabulary.
struct Candidates {
    uint32_t* id;
    float* x;  // logits; once weights are computed, (logit - best) / temperature
    float* w;  // weights; 0 for tokens that are filtered out, and in the rest of the last piece
    int64_t n;
};

struct Scratch {
    int64_t vocab, blocks, pieces;
    float* x;           // the row's logits
    float* w;           // their weights
    float* block_max;   // the largest logit of each block
    double* sums;       // cumulative weight after each piece
    uint32_t* counts;   // for each token; zero between rows
    uint8_t* dirty;     // for each block; zero between rows
    Candidates candidates;
    uint64_t* key;  // of each candidate
    uint64_t* narrowed_key;
    float* narrowed_w;
    double* bucket;

    // Scratch memory that starts at `base`; sets `end` to its end.
    static Scratch at(uintptr_t base, int64_t vocab, uintptr_t& end) {
        Scratch scratch{};
        scratch.vocab = vocab;
        scratch.pieces = (vocab + PIECE - 1) / PIECE;
        const int64_t padded = scratch.pieces * PIECE;
        scratch.blocks = padded / BLOCK;
        end = (base + 63) / 64 * 64;
        const auto reserve = [&end]<class T>(T*& pointer, int64_t count) {
            pointer = reinterpret_cast<T*>(end);
            end += (static_cast<uintptr_t>(count) * sizeof(T) + 63) / 64 * 64;
        };
        reserve(scratch.x, padded);
        reserve(scratch.w, padded);
        reserve(scratch.block_max, (scratch.blocks + 15) / 16 * 16);
        reserve(scratch.sums, scratch.pieces + 1);
        reserve(scratch.counts, vocab);
        reserve(scratch.dirty, scratch.blocks);
        // Larger than the vocabulary: entries are written before it is known whether they are kept.
        reserve(scratch.candidates.id, padded + PIECE);
        reserve(scratch.candidates.x, padded + PIECE);
        reserve(scratch.candidates.w, padded + PIECE);
        reserve(scratch.key, padded + 1);
        reserve(scratch.narrowed_key, padded + 1);
        reserve(scratch.narrowed_w, padded + 1);
        reserve(scratch.bucket, BUCKETS);
        return scratch;
    }

    INK_INLINE void update_block_max(int64_t block) {
        const float* from = x + block * BLOCK;
        Floats best = load(from);
        for (int64_t i = LANES; i < BLOCK; i += LANES) best = elementwise_max(load(from + i), best);
        block_max[block] = horizontal_max<LANES>(best);
    }

    float best() const {
        Floats found = load(block_max);
        for (int64_t i = LANES; i < (blocks + 15) / 16 * 16; i += LANES)
            found = elementwise_max(load(block_max + i), found);
        return horizontal_max<LANES>(found);
    }

    // Copies a row of logits, and returns whether all of them are finite.
    bool load_row(const float* raw) {
        const int64_t whole = vocab / BLOCK;
        Ints largest[4] = {};
        for (int64_t block = 0; block < whole; block++) {
            const float* from = raw + block * BLOCK;
            Floats found[4];
            for (int64_t i = 0; i < BLOCK; i += LANES) {
                const int k = i / LANES % 4;
                const Floats value = load(from + i);
                store(x + block * BLOCK + i, value);
                found[k] = i < 4 * LANES ? value : elementwise_max(value, found[k]);
                const Ints magnitude = bits<Ints>(value) & 0x7FFFFFFF;
                largest[k] = magnitude > largest[k] ? magnitude : largest[k];
            }
            const Floats first = elementwise_max(found[0], found[1]), second = elementwise_max(found[2], found[3]);
            block_max[block] = horizontal_max<LANES>(elementwise_max(first, second));
        }
        std::fill(x + whole * BLOCK, x + pieces * PIECE, NEG_INF);
        std::fill(block_max + whole, block_max + (blocks + 15) / 16 * 16, NEG_INF);
        bool finite = true;
        for (int64_t i = whole * BLOCK; i < vocab; i++) {
            x[i] = raw[i];
            finite = finite && std::isfinite(raw[i]);
        }
        for (int64_t block = whole; block < blocks; block++) update_block_max(block);
        for (const Ints& each : largest)
            for (int i = 0; i < LANES; i++) finite = finite && each[i] < 0x7F800000;
        return finite;
    }
};

// Integer keys in the order of the floats; 0.0 and -0.0 have the same key.
INK_INLINE uint64_t key_of(float value) {
    const uint32_t raw = bits<uint32_t>(value + 0.0f);
    return raw & 0x80000000u ? ~raw : raw | 0x80000000u;
}

}  // namespace sampling
