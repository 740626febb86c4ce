// A decoder as a list of operations over one step's rows, run in one call.
//
// The rows of a step are concatenated, chunk by chunk: a chunk is a piece of one sequence. Registers hold one row of
// numbers for each of them: the residual stream and projections in float32, the inputs of products in the number format
// of the weights. app/engine/cpu/packed_decoder.py writes the list.
#pragma once

#include <chrono>
#include <tuple>

#include "attend.h"
#include "elementwise.h"
#include "experts.h"
#include "interface.h"
#include "threads.h"

namespace ink {

// kResidual, kQkv and kBranch hold float32; the others hold the number format of products.
enum Register : int32_t { kResidual, kQkv, kNormed, kHidden, kQueries, kParallelNormed, kBranch };
inline bool is_float(int32_t id) { return id == kResidual || id == kQkv || id == kBranch; }

class Executor {
  public:
    virtual ~Executor() = default;
    virtual void run(const InkStep& step) = 0;
    virtual void head(const int32_t* rows, int n_rows, float* logits, long stride) = 0;
};

struct alignas(64) Line {
    char bytes[64];  // a row of a register has whole lines
};

struct Row {
    int position;
    const int32_t* const* tables;  // of each cache group
};

// W: the number format of products, F32 or BF16. Each matrix has a format of its own.
template <class W>
class Decoder : public Executor {
    using Number = typename W::Number;
    static constexpr int kRowsPerTask = 8;
    static constexpr int kRowsPerPass = 512;  // of experts; more would need more memory for what each of them computes
    static constexpr int kTasksPerThread = 4;

  public:
    Decoder(const InkShape& shape, Pool& pool) : shape_(shape), pool_(pool) {
        registers_.resize(shape.n_registers);
        scratch_.assign(pool.size(), std::vector<Line>(attention_scratch<W>(shape) * sizeof(float) / sizeof(Line)));
        padded_.assign(pool.size(), std::vector<float>(2 * shape.padded_head, 0.0f));
        for (const InkOperation* op = shape.operations; op < shape.operations + shape.n_operations; op++) {
            if (op->kind == kRoute) {
                experts_ = std::max(experts_, int(op->matrix->outputs));
                chosen_ = std::max(chosen_, op->chosen);
            }
            if (op->kind == kExperts) expert_width_ = std::max(expert_width_, hidden_columns(*op));
        }
        keys_.assign(pool.size(), std::vector<uint64_t>(experts_));
    }

    void run(const InkStep& step) override {
        index_rows(step);
        reserve(step.n_rows);
        for_each_row([&](int row, int) { embed(step.tokens[row], row); });
        for (int i = 0; i < shape_.n_operations; i++) {
            const auto start = std::chrono::steady_clock::now();
            run_operation(shape_.operations[i], step);
            const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
            if (step.seconds) step.seconds[i] += elapsed.count();
        }
        if (step.finite) for_each_row([&](int row, int) { step.finite[row] = has_finite_values(row); });
    }

    void head(const int32_t* rows, int n_rows, float* logits, long stride) override {
        const int columns = shape_.register_columns[kNormed];
        head_.resize(std::max(head_.size(), size_t(n_rows) * columns * sizeof(Number) / sizeof(Line)));
        Number* normed = reinterpret_cast<Number*>(head_.data());
        for (int i = 0; i < n_rows; i++)
            norm(shape_.final_norm, floats(kResidual, rows[i]), shape_.width, shape_.final_weight, shape_.final_bias,
                 shape_.eps, [&](int c, Floats y) { convert_store(y, normed + long(i) * columns + c); });
        multiply(*shape_.head, normed, columns, n_rows, [&](int row, int output, const Floats& a, const Floats& b) {
            float* to = logits + row * stride + output;
            store_logits(to, a), store_logits(to + kLanes, b);
        });
    }

  private:
    // Of the last layer, which wrote the register last: a row attends to itself, so it hands on what is not finite.
    bool has_finite_values(int row) {
        const float* k = floats(kQkv, row) + shape_.query_heads * shape_.head_width;
        const int count = 2 * shape_.kv_heads * shape_.head_width, whole = count / kLanes * kLanes;
        Floats zeros = {};  // NaN if a number is not finite
        for (int i = 0; i < whole; i += kLanes) zeros = fma(load(k + i), Floats{}, zeros);
        float zero = sum(zeros);
        for (int i = whole; i < count; i++) zero += k[i] * 0.0f;
        return zero == 0;
    }

    template <class T>
    static T* as(std::vector<Line>& memory) {
        return reinterpret_cast<T*>(memory.data());
    }

    float* floats(int id, int row) { return reinterpret_cast<float*>(at(id, row)); }
    Number* numbers(int id, int row) { return reinterpret_cast<Number*>(at(id, row)); }
    char* at(int id, int row) {
        return registers_[id].data()->bytes + row * row_bytes(id);
    }

    InkChunk chunk(const InkStep& step, int index) const {
        const int64_t* numbers = step.chunks + index * (2L + shape_.n_groups);
        return {numbers[0], numbers[1], reinterpret_cast<const int32_t* const*>(numbers + 2)};
    }

    long row_bytes(int id) const { return shape_.register_columns[id] * (is_float(id) ? 4 : sizeof(Number)); }

    void index_rows(const InkStep& step) {
        rows_.clear();
        for (int c = 0; c < step.n_chunks; c++) {
            const auto [n_rows, position, blocks] = chunk(step, c);
            for (int i = 0; i < n_rows; i++) rows_.push_back({int(position) + i, blocks});
        }
    }

    void reserve(int n_rows) {
        for (int id = 0; id < shape_.n_registers; id++) reserve_bytes(registers_[id], n_rows * row_bytes(id));
        if (!chosen_) return;
        const long places = long(std::min(n_rows, kRowsPerPass)) * chosen_;
        reserve_bytes(route_logits_, long(n_rows) * experts_ * sizeof(float));
        reserve_bytes(route_weights_, long(n_rows) * whole_vectors(chosen_) * sizeof(float));
        reserve_bytes(route_ids_, long(n_rows) * chosen_ * sizeof(int32_t));
        reserve_bytes(expert_rows_, places * shape_.register_columns[kResidual] * sizeof(float));
        reserve_bytes(expert_hidden_, places * expert_width_ * sizeof(Number));
    }

    static void reserve_bytes(std::vector<Line>& memory, long bytes) {
        const size_t size = bytes / sizeof(Line) + 1;
        if (memory.size() < size) memory.assign(size, {});
    }

    template <class F>
    void for_each_row(F&& f) {
        for_rows(0, int(rows_.size()), f);
    }

    template <class F>
    void for_rows(int first, int last, F&& f) {
        pool_.run((last - first + kRowsPerTask - 1) / kRowsPerTask, [&](int task, int thread) {
            const int from = first + task * kRowsPerTask;
            for (int row = from; row < std::min(last, from + kRowsPerTask); row++) f(row, thread);
        });
    }

    void run_operation(const InkOperation& op, const InkStep& step) {
        switch (op.kind) {
            case kNorm: return for_each_row([&](int row, int) { normalize(op, row); });
            case kLinear: return linear(op);
            case kRopeCache: return for_each_row([&](int row, int thread) { rotate_and_cache_row(op, row, thread); });
            case kAttention: return run_attention(op, step);
            case kAdd: return for_each_row([&](int row, int) { add(op, row); });
            case kRoute: return route(op);
            case kExperts: return run_experts(op);
        }
    }

    // Reads rows of the embedding from the packed panels, so that a tied LM head needs no second copy.
    void embed(int64_t token, int row) {
        const InkMatrix* m = shape_.embedding;
        for (; token >= m->outputs; m = m->next) token -= m->outputs;
        with_format<W>(m->format, [&]<class P>(P) {
            const char* panel = static_cast<const char*>(m->packed) + token / kPanel * panel_bytes<P>(*m);
            const float scale = shape_.embedding_scale * (m->scale ? m->scale[token] : 1.0f);
            const int output = token % kPanel;
            if constexpr (IsGrouped<P>) {
                const GroupLayout layout(*m, P::kBits);
                with_codes<P>(*m, [&]<class Of>(Of) {
                    embed_from(scale, row, [&](int i) { return grouped_number<Of>(*m, layout, panel, i, output); });
                });
            } else {
                const char* column = panel + output / kLanes * P::kBytes;
                embed_from(scale, row, [&](int i) {
                    return P::floats(column + 2L * (i / P::kStep) * P::kBytes, i % P::kStep)[output % kLanes];
                });
            }
        });
    }

    // number(i): the i-th number of a token's embedding.
    template <class F>
    void embed_from(float scale, int row, F number) {
        const float* table = shape_.position_embeddings;
        const float* position_embedding = table ? table + long(rows_[row].position) * shape_.width : nullptr;
        float* to = floats(kResidual, row);
        for (int i = 0; i < shape_.width; i++) {
            to[i] = number(i) * scale + (position_embedding ? position_embedding[i] : 0.0f);
        }
        // Products also read the padding, where an earlier step may have left NaN (0 * inf).
        std::fill(to + shape_.width, to + shape_.register_columns[kResidual], 0.0f);
    }

    void normalize(const InkOperation& op, int row) {
        const float* x = floats(op.in, row);
        norm(op.flag, x, op.columns, op.weight, op.bias, op.eps, [&](int c, Floats y) {
            if (!is_float(op.out)) return convert_store(y, numbers(op.out, row) + c);
            float* to = floats(op.out, row) + c;
            store(to, op.accumulates ? load(to) + y : y);
        });
    }

    // Calls finish(row, output, 16 numbers, the next 16) for every row and every 32 outputs.
    template <class F>
    void multiply(const InkMatrix& m, const Number* x, long stride, int n_rows, F&& finish) {
        pool_.run(product_tasks(m, n_rows),
                  [&](int task, int) { multiply_task(m, x, stride, 0, n_rows, task, finish); });
    }

    // As multiply(), of every place by the matrix of its expert. Only matrices of experts with rows are read.
    template <class F>
    void multiply_places(const InkMatrix* matrices, const Number* x, long stride, F&& finish) {
        int n_tasks = 0;
        ends_.clear();
        for (const auto& group : groups_.groups)
            ends_.push_back(n_tasks += product_tasks(matrices[group.expert], group.end - group.first));
        pool_.run(n_tasks, [&](int task, int) {
            const size_t index = std::upper_bound(ends_.begin(), ends_.end(), task) - ends_.begin();
            const auto [expert, first, end] = groups_.groups[index];
            multiply_task(matrices[expert], x, stride, first, end, index ? task - ends_[index - 1] : task, finish);
        });
    }

    // A task is a pair of panels, and with many rows a block of rows that fits the L2 cache.
    static int row_blocks(int n_rows) { return (n_rows + kMostProductRows - 1) / kMostProductRows; }
    static int all_outputs(const InkMatrix& m) { return m.outputs + (m.next ? all_outputs(*m.next) : 0); }
    static int panel_pairs(const InkMatrix& m) { return (all_outputs(m) / kPanel + 1) / 2; }
    static int product_tasks(const InkMatrix& m, int n_rows) { return row_blocks(n_rows) * panel_pairs(m); }

    template <class F>
    void multiply_task(const InkMatrix& m, const Number* x, long stride, int first, int end, int task, F& finish) {
        const int pairs = panel_pairs(m), block = task / pairs, blocks = row_blocks(end - first), panel = task % pairs * 2;
        const int from = first + (end - first) * block / blocks, to = first + (end - first) * (block + 1) / blocks;
        // The panels of a pair may be in two parts of the matrix.
        int before = 0;
        for (const InkMatrix* part = &m; part; before += part->outputs / kPanel, part = part->next) {
            const int begin = std::max(panel - before, 0), stop = std::min(panel + 2 - before, part->outputs / kPanel);
            if (begin < stop) multiply_panels(*part, x, stride, from, to, begin, stop, before * kPanel, finish);
        }
    }

    // Rows [first, end) by panels [panel, stop) of a part, in front of which the matrix has `outputs_before` outputs.
    template <class F>
    void multiply_panels(const InkMatrix& m, const Number* x, long stride, int first, int end, int panel, int stop,
                         int outputs_before, F& finish) {
        const auto epilogue = [&](int row, int rows, int panel, int panels, const Floats* sums) {
            const auto [scale, bias, to] = std::tuple(m.scale, m.bias, finish);  // no store below changes a copy
            for (int r = 0; r < rows; r++)
                for (int output = panel * kPanel; output < (panel + panels) * kPanel; output += kPanel) {
                    Floats a = *sums++, b = *sums++;
                    if (scale) a *= load(scale + output), b *= load(scale + output + kLanes);
                    if (bias) a += load(bias + output), b += load(bias + output + kLanes);
                    to(row + r, outputs_before + output, a, b);
                }
        };
        with_format<W>(m.format, [&]<class P>(P) {
            product<P>(x, stride, first, end, m, panel, stop, std::ref(epilogue));
        });
    }

    void linear(const InkOperation& op) {
        const long columns = shape_.register_columns[op.out];
        const auto product = [&](auto finish) {
            multiply(*op.matrix, numbers(op.in, 0), shape_.register_columns[op.in], int(rows_.size()), finish);
        };
        if (!is_float(op.out)) return with_activation(op, numbers(op.out, 0), columns, product);
        float* to = floats(op.out, 0);
        const bool accumulates = op.accumulates;
        product([=](int row, int output, const Floats& a, const Floats& b) {
            float* at = to + row * columns + output;
            store(at, accumulates ? load(at) + a : a), store(at + kLanes, accumulates ? load(at + kLanes) + b : b);
        });
    }

    // f(what stores a product's results as input of the next one), with the operation's activation.
    template <class F>
    static void with_activation(const InkOperation& op, Number* to, long columns, F&& f) {
        const int flag = op.flag;
        const float* of = op.weight;
        if (op.gated)
            return f([=](int row, int output, const Floats& gate, const Floats& up) {
                convert_store(activate_gated(flag, gate, up, of), to + row * columns + output / 2);
            });
        f([=](int row, int output, const Floats& a, const Floats& b) {
            Number* at = to + row * columns + output;
            convert_store(activate(flag, a, of), at), convert_store(activate(flag, b, of), at + kLanes);
        });
    }

    void route(const InkOperation& op) {
        float *logits = as<float>(route_logits_), *weights = as<float>(route_weights_);
        int32_t* ids = as<int32_t>(route_ids_);
        const long outputs = op.matrix->outputs;
        multiply(*op.matrix, numbers(op.in, 0), shape_.register_columns[op.in], int(rows_.size()),
                 [=](int row, int output, const Floats& a, const Floats& b) {
                     store(logits + row * outputs + output, a), store(logits + row * outputs + output + kLanes, b);
                 });
        for_each_row([&](int row, int thread) {
            choose_experts(op, logits + row * outputs, keys_[thread].data(), ids + long(row) * op.chosen,
                           weights + long(row) * whole_vectors(op.chosen));
        });
    }

    void run_experts(const InkOperation& op) {
        const int n_rows = int(rows_.size());
        for (int first = 0; first < n_rows; first += kRowsPerPass)
            run_experts(op, first, std::min(n_rows, first + kRowsPerPass));
    }

    // Gathers the rows of each expert, computes its feed-forward, and adds to each row what its experts computed.
    void run_experts(const InkOperation& op, int first, int last) {
        const int chosen = op.chosen;
        groups_.assign(as<int32_t>(route_ids_) + long(first) * chosen, last - first, chosen, op.experts);
        const long columns = shape_.register_columns[kResidual], hidden_width = hidden_columns(op);
        Number *gathered = as<Number>(expert_rows_), *hidden = as<Number>(expert_hidden_);
        for_rows(first, last, [&](int row, int) {
            for (int i = 0; i < chosen; i++)
                std::copy_n(numbers(op.in, row), columns, gathered + places(row - first, chosen)[i] * columns);
        });
        with_activation(op, hidden, hidden_width, [&](auto finish) {
            multiply_places(op.matrix, gathered, columns, finish);
        });
        float* results = as<float>(expert_rows_);  // in the place of what was gathered, which is no longer needed
        multiply_places(op.down, hidden, hidden_width, [=](int place, int output, const Floats& a, const Floats& b) {
            float* at = results + place * columns + output;
            store(at, a), store(at + kLanes, b);
        });
        for_rows(first, last, [&](int row, int) {
            const float* weights = as<float>(route_weights_) + long(row) * whole_vectors(chosen);
            for (long c = 0; c < columns; c += kLanes) {
                Floats total = {};
                for (int i = 0; i < chosen; i++)
                    total = fma(load(results + places(row - first, chosen)[i] * columns + c), weights[i], total);
                float* to = floats(op.out, row) + c;
                store(to, op.accumulates ? load(to) + total : total);
            }
        });
    }

    const int32_t* places(int row, int chosen) const { return groups_.places.data() + long(row) * chosen; }

    // Numbers of a row of an expert's hidden layer.
    static int hidden_columns(const InkOperation& op) {
        const int outputs = op.gated ? op.matrix->outputs / 2 : op.matrix->outputs;
        return (outputs + kPanel - 1) / kPanel * kPanel;
    }

    // f(the format of the caches).
    template <class F>
    void with_cache_format(F&& f) {
        if (shape_.has_coded_cache) f(CodesOf<W>());
        else f(W());
    }

    template <class C>
    char* cache(const InkOperation& op, int kind, int block, int head) {
        const InkCache& group = shape_.caches[op.group];
        const long index = ((long(op.layer) * 2 + kind) * group.n_blocks + block) * shape_.kv_heads + head;
        return static_cast<char*>(group.numbers) + index * block_bytes<C>(shape_);
    }

    // Norms and rotates queries and keys; writes queries to their register, keys and values to the cache.
    void rotate_and_cache_row(const InkOperation& op, int row, int thread) {
        float* q = floats(op.in, row);
        const int width = shape_.head_width, n_rotated = shape_.query_heads + shape_.kv_heads;
        const auto [position, tables] = rows_[row];
        if (op.weight && !op.norms_after) norm_heads(op, q);
        if (const int half = op.rotary_half)
            for (int head = 0; head < n_rotated; head++)
                rotate(q + head * width, op.rope_table + 2L * position * half, half);
        if (op.weight && op.norms_after) norm_heads(op, q);
        if (op.query_scale)
            for (int i = 0; i < shape_.query_heads * width; i++) q[i] *= op.query_scale[position];
        std::vector<float>& buffer = padded_[thread];
        for (int head = 0; head < shape_.query_heads; head++)
            for (int c = 0; c < shape_.padded_head; c += kLanes)
                convert_store(load(padded(q + head * width, buffer, 0) + c),
                              numbers(kQueries, row) + head * shape_.padded_head + c);
        const float* k = q + shape_.query_heads * width;
        const int block = tables[op.group][position / kBlock];
        with_cache_format([&]<class C>(C) {
            for (int head = 0; head < shape_.kv_heads; head++)
                store_kv<C>(shape_, padded(k + head * width, buffer, 0),
                            padded(k + (shape_.kv_heads + head) * width, buffer, 1), cache<C>(op, 0, block, head),
                            cache<C>(op, 1, block, head), position % kBlock);
        });
    }

    void norm_heads(const InkOperation& op, float* q) {
        const int width = shape_.head_width, heads = shape_.query_heads, kv_heads = shape_.kv_heads;
        if (op.norms_width) {
            norm_heads_together(q, heads * width, op.weight, op.eps);
            return norm_heads_together(q + heads * width, kv_heads * width, op.bias, op.eps);
        }
        for (int head = 0; head < heads + kv_heads; head++)
            norm_head(q + head * width, width, head < heads ? op.weight : op.bias, op.eps);
    }

    // The numbers of one head, padded with zeros to whole vectors.
    const float* padded(const float* head, std::vector<float>& buffer, int index) {
        if (shape_.padded_head == shape_.head_width) return head;
        float* to = buffer.data() + index * shape_.padded_head;
        return std::copy(head, head + shape_.head_width, to), to;
    }

    // Tasks: rows (queries of one kv head) of one chunk. Many rows share the keys and values that they read, but every
    // thread must have work. The bits do not depend on it.
    void run_attention(const InkOperation& op, const InkStep& step) {
        const int group = shape_.query_heads / shape_.kv_heads;
        const long share = long(rows_.size()) * shape_.query_heads / (kTasksPerThread * pool_.size());
        const int most = int(std::clamp<long>(share / kQueryRows<W>, 1, kMostQueries / kQueryRows<W>)) * kQueryRows<W>;
        tasks_.clear();
        for (int c = 0, row = 0; c < step.n_chunks; row += int(chunk(step, c++).n_rows))
            for (int first = 0, n_queries = int(chunk(step, c).n_rows) * group; first < n_queries; first += most)
                tasks_.push_back({row, first, std::min(most, n_queries - first)});
        pool_.run(int(tasks_.size()) * shape_.kv_heads, [&](int task, int thread) {
            attend_task(op, tasks_[task / shape_.kv_heads], task % shape_.kv_heads, group,
                        reinterpret_cast<float*>(scratch_[thread].data()));
        });
    }

    struct Task {
        int row, first, count;
    };

    void attend_task(const InkOperation& op, const Task& task, int head, int group, float* scratch) {
        Queries<Number> queries;
        queries.count = task.count;
        for (int i = 0; i < task.count; i++) {
            const int row = task.row + (task.first + i) / group, query = head * group + (task.first + i) % group;
            queries.rows[i] = numbers(kQueries, row) + long(query) * shape_.padded_head;
            queries.outputs[i] = numbers(op.out, row) + long(query) * shape_.head_width;
            queries.positions[i] = rows_[row].position;
            if (op.weight) queries.sinks[i] = op.weight[query];
        }
        const int32_t* table = rows_[task.row].tables[op.group];
        with_cache_format([&]<class C>(C) {
            const long stride = shape_.kv_heads * block_bytes<C>(shape_);
            const Blocks<C> blocks = {cache<C>(op, 0, 0, head), cache<C>(op, 1, 0, head), table, stride};
            attend<W>(shape_, op, blocks, queries, scratch);
        });
    }

    void add(const InkOperation& op, int row) {
        float* to = floats(op.out, row);
        const Number* from = numbers(op.in, row);
        for (int c = 0; c < op.columns; c++) to[c] += to_float(from[c]);
    }

    void store_logits(float* to, const Floats& x) {
        const Floats scaled = shape_.logit_scale == 1 ? x : x * shape_.logit_scale;
        store(to, shape_.soft_cap > 0 ? tanh(scaled / shape_.soft_cap) * shape_.soft_cap : scaled);
    }

    const InkShape shape_;
    Pool& pool_;
    std::vector<std::vector<Line>> registers_;
    std::vector<Line> head_;
    std::vector<std::vector<Line>> scratch_;  // of each thread
    std::vector<std::vector<float>> padded_;  // of each thread
    std::vector<Row> rows_;
    std::vector<Task> tasks_;
    int experts_ = 0, chosen_ = 0, expert_width_ = 0;  // most of any layer; experts_ in whole panels
    std::vector<Line> route_logits_;   // [rows, experts]
    std::vector<Line> route_weights_;  // float32 [rows, chosen in whole vectors]
    std::vector<Line> route_ids_;      // int32 [rows, chosen], ascending
    std::vector<std::vector<uint64_t>> keys_;  // of each thread, one for each expert
    ExpertGroups groups_;
    std::vector<int> ends_;            // of each group's tasks
    std::vector<Line> expert_rows_;    // [places, width]: inputs of experts, then their float32 results
    std::vector<Line> expert_hidden_;  // [places, hidden width]
};

}  // namespace ink
