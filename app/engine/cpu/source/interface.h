// Structures of plain numbers and addresses that Python passes in. app/engine/cpu/library.py mirrors them.
//
// A decoder is a list of operations over registers, written by app/engine/cpu/packed_decoder.py.
#pragma once

#include <cstdint>

extern "C" {

// A packed matrix. The matrices of a layer's experts are consecutive. bias and scale have one number for each output,
// or are null. format: see ink_format(). What follows it is for the formats of grouped.h, and 0 in others.
struct InkMatrix {
    const void* packed;
    const float *bias, *scale;
    const InkMatrix* next;   // the outputs that follow these, which are whole panels, in another format; or null
    const float* have_sign;  // 1 or 0: whether multiples are int8 or uint8, of scales and of offsets
    int32_t outputs, steps;  // outputs in whole panels
    int32_t format, group;   // group: columns that share a scale: 16, 32, 64 or 128
    int32_t scales, has_offsets;  // scales: see ScaleKind in grouped.h
    int8_t table[16];        // the integers of codes of 4 bits
};

// The arrays of a PackedMatrix (model/packed_matrix.py), row by row: what ink_pack_groups() reads.
struct InkGroups {
    const uint8_t* codes;
    const void *scales, *offsets;  // float16, float32, or bytes that multiply the units; offsets may be null
    const uint16_t *scale_units, *offset_units;  // float16; null where nothing is multiplied
};

// As Kind in model/decoder_program.py.
enum InkKind : int32_t { kNorm, kLinear, kRopeCache, kAttention, kAdd, kRoute = 8, kExperts };

// in, out: registers. flag: the kind of a norm, or an activation.
struct InkOperation {
    int32_t kind, in, out, flag;
    int32_t layer, columns;  // layer: of its cache group
    int32_t gated, window, rotary_half;  // rotary_half: half of the numbers of a head that are rotated, 0 for none
    float eps, attention_scale, attention_cap;  // attention_cap: soft cap of scores, 0 for none
    int32_t accumulates;  // whether the result is added to `out`
    int32_t group;        // of caches
    const InkMatrix* matrix;     // of experts: the first product of each
    const float *weight, *bias;  // of a norm; of the norms of queries and keys; weight: parameters of an activation,
                                 // sinks of attention [query heads] or null, addends of scores that choose [experts] or null
    const float* rope_table;     // [context, 2 * rotary_half]
    const float* query_scale;    // [context] or null
    int32_t norms_width;         // whether the norms of queries and keys are over all heads of a row together
    int32_t norms_after;         // whether they follow the rotation
    const InkMatrix* down;       // second product of each expert
    int32_t experts, chosen;     // of a layer; of a row
    int32_t score, normalized;   // score: see experts.h; normalized: whether the chosen weights are divided by their sum
    float expert_factor;         // of the weights, after that
    int32_t unused;
};

// The cache of the layers that share a window: [layer of the group, 2, block, kv head], each as cache_formats.h says.
struct InkCache {
    void* numbers;
    int64_t n_blocks;
};

struct InkShape {
    int32_t is_bf16, n_registers;
    int32_t query_heads, kv_heads, head_width, width;
    int32_t n_operations, n_groups;
    int32_t final_norm, padded_head;  // padded_head: head_width in whole vectors
    float embedding_scale, logit_scale, soft_cap, eps;
    int32_t has_coded_cache;           // whether the caches have codes of 8 bits with scales
    const float* position_embeddings;  // [context, width] or null
    const InkMatrix *embedding, *head;
    const float *final_weight, *final_bias;
    const InkCache* caches;           // of each group
    const int32_t *register_columns;  // of each register
    const InkOperation* operations;
};

// A piece of one sequence: its rows, the position of the first one, and the sequence's blocks in each cache group, which
// are as many numbers as there are groups.
struct InkChunk {
    int64_t n_rows, position;
    const int32_t* const* blocks;
};

// One step.
struct InkStep {
    int32_t n_rows, n_chunks;
    const int64_t* tokens;
    const int64_t* chunks;  // [n_chunks, 2 + n_groups]: the numbers of each InkChunk, with the blocks in place
    double* seconds;  // null, or one entry for each operation, which adds its duration
    uint8_t* finite;  // null, or for each row whether its keys and values of the last layer are finite: so are all others
};
}
