// Mixture of experts: which experts compute a row, with which weights, and which rows an expert computes.
//
// A router gives each row a score for each expert; the experts with the largest scores compute the row. All of that
// depends on the row alone. The rows of a pass are grouped by expert, so that an expert's weights are read once.
#pragma once

#include <algorithm>
#include <vector>

#include "elementwise.h"
#include "interface.h"

namespace ink {

// In the order of ExpertScore in model/config.py.
enum Score : int32_t { kSoftmax, kSigmoid, kSoftmaxOfChosen };

constexpr float kLeastTotal = 1e-12f;  // that weights are divided by

inline int whole_vectors(int n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Sum of n numbers; those behind them, in whole vectors, do not count.
inline float sum_of(const float* x, int n) {
    Floats total = {};
    for (int i = 0; i < n; i += kLanes) total += first_lanes(n - i, load(x + i), Floats{});
    return sum(total);
}

// Replaces n numbers, in whole vectors.
inline void softmax_in_place(float* x, int n) {
    Floats best = -__builtin_inff();
    for (int i = 0; i < n; i += kLanes) best = larger(best, first_lanes(n - i, load(x + i), best));
    const float most = largest(best);
    for (int i = 0; i < n; i += kLanes) store(x + i, exp(load(x + i) - most));
    const float total = sum_of(x, n);
    for (int i = 0; i < n; i += kLanes) store(x + i, load(x + i) / total);
}

inline void sigmoid_in_place(float* x, int n) {
    for (int i = 0; i < n; i += kLanes) store(x + i, 1.0f / (1.0f + exp(-1.0f * load(x + i))));
}

// Chooses the experts of a row by its logits, which it replaces: ids in ascending order, and their weights. Of equal
// scores the lower id is chosen. logits and weights are in whole vectors. keys: one for each expert. NaN is a score as
// any other, so that ids are valid.
inline void choose_experts(const InkOperation& op, float* logits, uint64_t* keys, int32_t* ids, float* weights) {
    const int count = op.experts, chosen = op.chosen;
    if (op.score == kSoftmax) softmax_in_place(logits, count);
    if (op.score == kSigmoid) sigmoid_in_place(logits, count);
    for (int id = 0; id < count; id++)
        keys[id] = key_of(op.weight ? logits[id] + op.weight[id] : logits[id]) << 32 | uint32_t(~id);
    std::nth_element(keys, keys + chosen - 1, keys + count, std::greater<>());
    for (int i = 0; i < chosen; i++) ids[i] = int32_t(~uint32_t(keys[i]));
    std::sort(ids, ids + chosen);
    for (int i = 0; i < chosen; i++) weights[i] = logits[ids[i]];
    if (op.score == kSoftmaxOfChosen) softmax_in_place(weights, chosen);
    const float total = op.normalized ? std::max(sum_of(weights, chosen), kLeastTotal) : 1.0f;
    for (int i = 0; i < chosen; i++) weights[i] = weights[i] / total * op.expert_factor;
}

// Rows by expert. A place is a row of one expert: the places of an expert are consecutive, in the order of its rows.
struct ExpertGroups {
    struct Group {
        int expert, first, end;  // places [first, end)
    };
    std::vector<Group> groups;    // experts with rows, in ascending order
    std::vector<int32_t> places;  // [rows, chosen]: where each row is, in the order of its experts

    // ids: [rows, chosen].
    void assign(const int32_t* ids, int n_rows, int chosen, int count) {
        groups.clear();
        ends_.assign(count, 0);
        for (int i = 0; i < n_rows * chosen; i++) ends_[ids[i]]++;
        for (int id = 0, first = 0; id < count; id++) {
            const int end = first + ends_[id];
            if (end > first) groups.push_back({id, first, end});
            ends_[id] = first, first = end;
        }
        places.resize(size_t(n_rows) * chosen);
        for (int i = 0; i < n_rows * chosen; i++) places[i] = ends_[ids[i]]++;
    }

  private:
    std::vector<int32_t> ends_;  // of the places of each expert that are taken
};

}  // namespace ink
