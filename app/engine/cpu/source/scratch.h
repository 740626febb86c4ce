// A thread's scratch buffer for sampling, carved from memory that the caller owns, and the row stored in it.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "vectors.h"

namespace ink {

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
        for (int64_t i = kLanes; i < BLOCK; i += kLanes) best = larger(load(from + i), best);
        block_max[block] = largest(best);
    }

    float best() const {
        Floats found = load(block_max);
        for (int64_t i = kLanes; i < (blocks + 15) / 16 * 16; i += kLanes)
            found = larger(load(block_max + i), found);
        return largest(found);
    }

    // Copies a row of logits, and returns whether all of them are finite.
    bool load_row(const float* raw) {
        const int64_t whole = vocab / BLOCK;
        Floats zeros[BLOCK / kLanes] = {};  // NaN if a logit is not finite
        for (int64_t block = 0; block < whole; block++) {
            for (int64_t i = 0; i < BLOCK; i += kLanes) {
                const Floats value = load(raw + block * BLOCK + i);
                store(x + block * BLOCK + i, value);
                zeros[i / kLanes] = fma(value, Floats{}, zeros[i / kLanes]);
            }
            update_block_max(block);
        }
        float zero = sum(zeros[0] + zeros[1] + zeros[2] + zeros[3]);
        std::fill(x + whole * BLOCK, x + pieces * PIECE, NEG_INF);
        std::fill(block_max + whole, block_max + (blocks + 15) / 16 * 16, NEG_INF);
        for (int64_t i = whole * BLOCK; i < vocab; i++) {
            x[i] = raw[i];
            zero += raw[i] * 0.0f;
        }
        for (int64_t block = whole; block < blocks; block++) update_block_max(block);
        return zero == 0;
    }
};

}  // namespace ink
