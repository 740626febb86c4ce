// A thread's scratch buffer for sampling, carved from memory that the caller owns, and the row stored in it.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "draw_vectors.h"

namespace draw {

constexpr int64_t BLOCK = 64;   // tokens that share a maximum
constexpr int64_t PIECE = 256;  // tokens that share a sum; rows are padded to whole pieces with -inf
constexpr int64_t BUCKETS = 1024;
constexpr int SMALL = 48;  // so few are sorted
constexpr float NOTHING = -std::numeric_limits<float>::infinity();
constexpr float LARGEST = std::numeric_limits<float>::max();

// Tokens that may still be drawn, in the order of the vocabulary.
struct List {
    uint32_t* id;
    float* x;  // logits; once weighed, (logit - best) / temperature
    float* w;  // weights; 0 for what is filtered out, and up to the end of the last piece
    int64_t n;
};

struct Room {
    int64_t vocab, blocks, pieces;
    float* x;           // the row's logits
    float* w;           // their weights
    float* block_best;  // the largest logit of each block
    double* sums;       // weights up to and with each piece
    uint32_t* counts;   // for each token; zero between rows
    uint8_t* dirty;     // for each block; zero between rows
    List list;
    uint64_t* key;  // of each token in the list
    uint64_t* narrowed_key;
    float* narrowed_w;
    double* bucket;

    // The room that begins at `base`; `end` is where it ends.
    static Room at(uintptr_t base, int64_t vocab, uintptr_t& end) {
        Room room{};
        room.vocab = vocab;
        room.pieces = (vocab + PIECE - 1) / PIECE;
        const int64_t padded = room.pieces * PIECE;
        room.blocks = padded / BLOCK;
        end = (base + 63) / 64 * 64;
        const auto take = [&end]<class T>(T*& pointer, int64_t count) {
            pointer = reinterpret_cast<T*>(end);
            end += (static_cast<uintptr_t>(count) * sizeof(T) + 63) / 64 * 64;
        };
        take(room.x, padded);
        take(room.w, padded);
        take(room.block_best, (room.blocks + 15) / 16 * 16);
        take(room.sums, room.pieces + 1);
        take(room.counts, vocab);
        take(room.dirty, room.blocks);
        // More than there are tokens: places are written before it is known whether they count.
        take(room.list.id, padded + PIECE);
        take(room.list.x, padded + PIECE);
        take(room.list.w, padded + PIECE);
        take(room.key, padded + 1);
        take(room.narrowed_key, padded + 1);
        take(room.narrowed_w, padded + 1);
        take(room.bucket, BUCKETS);
        return room;
    }

    DRAW_INLINE void look_at_block(int64_t block) {
        const float* from = x + block * BLOCK;
        Floats best = load(from);
        for (int64_t i = LANES; i < BLOCK; i += LANES) best = larger(load(from + i), best);
        block_best[block] = best_of<LANES>(best);
    }

    float best() const {
        Floats found = load(block_best);
        for (int64_t i = LANES; i < (blocks + 15) / 16 * 16; i += LANES) found = larger(load(block_best + i), found);
        return best_of<LANES>(found);
    }

    // Takes in a row of logits, and says whether all of them are finite.
    bool take_in(const float* raw) {
        const int64_t whole = vocab / BLOCK;
        Ints largest[4] = {};
        for (int64_t block = 0; block < whole; block++) {
            const float* from = raw + block * BLOCK;
            Floats found[4];
            for (int64_t i = 0; i < BLOCK; i += LANES) {
                const int k = i / LANES % 4;
                const Floats value = load(from + i);
                store(x + block * BLOCK + i, value);
                found[k] = i < 4 * LANES ? value : larger(value, found[k]);
                const Ints magnitude = bits<Ints>(value) & 0x7FFFFFFF;
                largest[k] = magnitude > largest[k] ? magnitude : largest[k];
            }
            block_best[block] = best_of<LANES>(larger(larger(found[0], found[1]), larger(found[2], found[3])));
        }
        std::fill(x + whole * BLOCK, x + pieces * PIECE, NOTHING);
        std::fill(block_best + whole, block_best + (blocks + 15) / 16 * 16, NOTHING);
        bool finite = true;
        for (int64_t i = whole * BLOCK; i < vocab; i++) {
            x[i] = raw[i];
            finite = finite && std::isfinite(raw[i]);
        }
        for (int64_t block = whole; block < blocks; block++) look_at_block(block);
        for (const Ints& each : largest)
            for (int i = 0; i < LANES; i++) finite = finite && each[i] < 0x7F800000;
        return finite;
    }
};

// Keys are larger for larger numbers; 0.0 and -0.0 are one.
DRAW_INLINE uint64_t key_of(float value) {
    const uint32_t raw = bits<uint32_t>(value + 0.0f);
    return raw & 0x80000000u ? ~raw : raw | 0x80000000u;
}

}  // namespace draw
