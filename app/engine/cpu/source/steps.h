// A decoder as a list of operations over one step's rows, run in one call.
//
// Rows of a step stand behind one another, chunk by chunk: a chunk is a piece of one sequence. Registers hold one row of
// numbers for each of them: the residual stream and projections in float32, what goes into a product in the numbers of
// the weights. app/engine/cpu/program.py writes the list.
#pragma once

#include <chrono>

#include "attend.h"
#include "elementwise.h"
#include "interface.h"
#include "threads.h"

namespace ink {

// Registers that hold float32; the others hold the numbers of products.
enum Register : int32_t { kStream, kWide, kNormed, kHidden, kQueries, kBeside };
inline bool is_float(int32_t id) { return id == kStream || id == kWide; }

class Machine {
  public:
    virtual ~Machine() = default;
    virtual void run(const InkStep& step) = 0;
    virtual void head(const int32_t* rows, int n_rows, float* logits, long stride) = 0;
};

struct Row {
    int position;
    const int32_t* table;
};

// W: float32 or bfloat16; Q: its weight-only int8.
template <class W, class Q>
class Decoder : public Machine {
    using Number = typename W::Number;
    static constexpr int kRowsPerTask = 8;
    static constexpr int kRowsPerBlock = 192;

  public:
    Decoder(const InkShape& shape, Pool& pool) : s_(shape), pool_(pool), scratch_(pool.size()) {
        heads_ = {shape.query_heads, shape.kv_heads, shape.head_width, 0, shape.window, shape.attention_scale};
        heads_.padded = (shape.head_width + kLanes - 1) / kLanes * kLanes;
        registers_.resize(shape.n_registers);
        padded_.assign(pool.size(), std::vector<float>(2 * heads_.padded, 0.0f));
    }

    void run(const InkStep& step) override {
        number_rows(step);
        reserve(step.n_rows);
        each_row([&](int row, int) { embed(step.tokens[row], row); });
        for (int i = 0; i < s_.n_operations; i++) {
            const auto began = std::chrono::steady_clock::now();
            operate(s_.operations[i], step);
            if (step.seconds) step.seconds[i] += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
        }
    }

    void head(const int32_t* rows, int n_rows, float* logits, long stride) override {
        const int columns = s_.register_columns[kNormed];
        head_.resize(std::max(head_.size(), size_t(n_rows) * columns));
        for (int i = 0; i < n_rows; i++)
            norm(s_.final_norm, floats(kStream, rows[i]), s_.width, s_.final_weight, s_.final_bias, s_.eps,
                 [&](int c, Floats y) { keep(y, head_.data() + long(i) * columns + c); });
        multiply(*s_.head, head_.data(), columns, n_rows, [&](int row, int output, Floats a, Floats b) {
            float* to = logits + row * stride;
            keep_logits(to, output, a), keep_logits(to, output + kLanes, b);
        });
    }

  private:
    float* floats(int id, int row) { return reinterpret_cast<float*>(at(id, row)); }
    Number* numbers(int id, int row) { return reinterpret_cast<Number*>(at(id, row)); }
    char* at(int id, int row) {
        return registers_[id].data() + long(row) * s_.register_columns[id] * (is_float(id) ? 4 : sizeof(Number));
    }

    void number_rows(const InkStep& step) {
        rows_.clear();
        longest_ = 0;
        for (int c = 0; c < step.n_chunks; c++) {
            const int32_t* chunk = step.chunks + 3 * c;
            for (int i = 0; i < chunk[0]; i++) rows_.push_back({chunk[1] + i, step.tables + chunk[2]});
            longest_ = std::max(longest_, chunk[1] + chunk[0]);
        }
    }

    void reserve(int n_rows) {
        for (int id = 0; id < s_.n_registers; id++) {
            const size_t size = size_t(n_rows) * s_.register_columns[id] * (is_float(id) ? 4 : sizeof(Number)) + 64;
            if (registers_[id].size() < size) registers_[id].assign(size, 0);
        }
        const size_t most = 2L * kQueryRows * (longest_ / kBlock + 1) * kBlock;
        for (auto& part : scratch_)
            if (part.size() < most) part.resize(most);
    }

    template <class F>
    void each_row(F&& f) {
        const int n_rows = int(rows_.size());
        pool_.run((n_rows + kRowsPerTask - 1) / kRowsPerTask, [&](int task, int thread) {
            for (int row = task * kRowsPerTask; row < std::min(n_rows, (task + 1) * kRowsPerTask); row++) f(row, thread);
        });
    }

    void operate(const InkOperation& op, const InkStep& step) {
        switch (op.kind) {
            case kNorm: return each_row([&](int row, int) { normalise(op, row); });
            case kLinear: return linear(op);
            case kRemember: return each_row([&](int row, int thread) { remember_row(op, row, thread); });
            case kAttend: return attend_all(op, step);
            case kAdd: return each_row([&](int row, int) { add(op, row); });
        }
    }

    // Rows of the embedding are read out of its panels: no second copy of a tied head.
    void embed(int token, int row) {
        const InkMatrix& m = *s_.embedding;
        if (m.is_int8) return embed_from<Q>(m, token, row);
        embed_from<W>(m, token, row);
    }

    template <class P>
    void embed_from(const InkMatrix& m, int token, int row) {
        const int lane = token % kLanes;
        const char* column = static_cast<const char*>(m.packed) +
                             (2L * (token / kPanel) * m.steps + token % kPanel / kLanes) * P::kBytes;
        const float scale = s_.embedding_scale * (m.scale ? m.scale[token] : 1.0f);
        const float* places = s_.places ? s_.places + long(rows_[row].position) * s_.width : nullptr;
        float* to = floats(kStream, row);
        for (int i = 0; i < s_.width; i++) {
            float parts[P::kStep];
            unpack<P>(column + 2L * (i / P::kStep) * P::kBytes, lane, parts);
            to[i] = parts[i % P::kStep] * scale + (places ? places[i] : 0.0f);
        }
        // What lies behind the numbers is read with them, and the row before may have left NaN there: 0 * inf.
        std::fill(to + s_.width, to + s_.register_columns[kStream], 0.0f);
    }

    template <class P>
    static void unpack(const char* at, int lane, float* parts) {
        const typename P::Vector w = P::weights(at);
        if constexpr (P::kStep == 1) {
            parts[0] = w[lane];
        } else {
            parts[0] = to_float(bf16{uint16_t(w[lane])}), parts[1] = to_float(bf16{uint16_t(w[lane] >> 16)});
        }
    }

    void normalise(const InkOperation& op, int row) {
        const float* x = floats(op.in, row);
        norm(op.flag, x, op.columns, op.weight, op.bias, op.eps, [&](int c, Floats y) {
            if (is_float(op.out)) keep(y, floats(op.out, row) + c);
            else keep(y, numbers(op.out, row) + c);
        });
    }

    template <class Done>
    void multiply(const InkMatrix& m, const Number* x, long stride, int n_rows, Done&& done) {
        if (m.is_int8) multiply_as<Q>(m, x, stride, n_rows, done);
        else multiply_as<W>(m, x, stride, n_rows, done);
    }

    // Few rows: tasks are pairs of panels. Many: also blocks of rows, which stay in the second-level cache.
    template <class P, class Done>
    void multiply_as(const InkMatrix& m, const Number* x, long stride, int n_rows, Done&& done) {
        const Matrix matrix = {static_cast<const char*>(m.packed), m.outputs, m.steps};
        const int panels = m.outputs / kPanel, pairs = (panels + 1) / 2;
        const int blocks = (n_rows + kRowsPerBlock - 1) / kRowsPerBlock;
        const auto finish = [&](int row, int output, Floats a, Floats b) {
            if (m.scale) a *= load<Floats>(m.scale + output), b *= load<Floats>(m.scale + output + kLanes);
            if (m.bias) a += load<Floats>(m.bias + output), b += load<Floats>(m.bias + output + kLanes);
            done(row, output, a, b);
        };
        pool_.run(blocks * pairs, [&](int task, int) {
            const int block = task / pairs, panel = task % pairs * 2;
            product<P>(x, stride, n_rows * block / blocks, n_rows * (block + 1) / blocks, matrix, panel,
                       std::min(panel + 2, panels), finish);
        });
    }

    void linear(const InkOperation& op) {
        const Number* x = numbers(op.in, 0);
        const long stride = s_.register_columns[op.in];
        const int n_rows = int(rows_.size());
        if (op.gated)
            return multiply(*op.matrix, x, stride, n_rows, [&](int row, int output, Floats gate, Floats up) {
                keep(activate(op.flag, gate) * up, numbers(op.out, row) + output / 2);
            });
        if (op.out == kStream)
            return multiply(*op.matrix, x, stride, n_rows, [&](int row, int output, Floats a, Floats b) {
                float* to = floats(kStream, row) + output;
                store(to, load<Floats>(to) + a), store(to + kLanes, load<Floats>(to + kLanes) + b);
            });
        multiply(*op.matrix, x, stride, n_rows, [&](int row, int output, Floats a, Floats b) {
            if (is_float(op.out)) {
                float* to = floats(op.out, row) + output;
                store(to, a), store(to + kLanes, b);
            } else {
                Number* to = numbers(op.out, row) + output;
                keep(activate(op.flag, a), to), keep(activate(op.flag, b), to + kLanes);
            }
        });
    }

    Number* cache(int layer, int kind, int block, int head) {
        const long place = ((long(layer) * 2 + kind) * s_.n_blocks + block) * s_.kv_heads + head;
        return static_cast<Number*>(s_.cache) + place * heads_.block_numbers();
    }

    // Queries to their register, keys and values to the cache.
    void remember_row(const InkOperation& op, int row, int thread) {
        float* q = floats(op.in, row);
        const int width = s_.head_width, n_turned = s_.query_heads + s_.kv_heads;
        const auto [position, table] = rows_[row];
        for (int head = 0; head < n_turned; head++) {
            float* x = q + head * width;
            const bool is_query = head < s_.query_heads;
            if (op.weight) norm_head(x, width, is_query ? op.weight : op.bias, op.eps);
            if (s_.turned) rotate(x, s_.angles + 2L * position * s_.turned, s_.turned);
        }
        std::vector<float>& room = padded_[thread];
        for (int head = 0; head < s_.query_heads; head++)
            for (int c = 0; c < heads_.padded; c += kLanes)
                keep(load<Floats>(padded(q + head * width, room, 0) + c), numbers(kQueries, row) + head * heads_.padded + c);
        const float* k = q + s_.query_heads * width;
        const int block = table[position / kBlock];
        for (int head = 0; head < s_.kv_heads; head++)
            remember<W>(heads_, padded(k + head * width, room, 0), padded(k + (s_.kv_heads + head) * width, room, 1),
                        cache(op.layer, 0, block, head), cache(op.layer, 1, block, head), position % kBlock);
    }

    // The numbers of one head with zeros behind them up to whole vectors.
    const float* padded(const float* head, std::vector<float>& room, int place) {
        if (heads_.padded == s_.head_width) return head;
        float* to = room.data() + place * heads_.padded;
        return std::copy(head, head + s_.head_width, to), to;
    }

    // Tasks: up to 6 rows (queries of one kv head) of one chunk.
    void attend_all(const InkOperation& op, const InkStep& step) {
        const int group = s_.query_heads / s_.kv_heads;
        tasks_.clear();
        for (int c = 0, row = 0; c < step.n_chunks; row += step.chunks[3 * c++])
            for (int first = 0, all = step.chunks[3 * c] * group; first < all; first += kQueryRows)
                tasks_.push_back({row, first, std::min(kQueryRows, all - first)});
        pool_.run(int(tasks_.size()) * s_.kv_heads, [&](int task, int thread) {
            attend_task(op, tasks_[task / s_.kv_heads], task % s_.kv_heads, group, scratch_[thread].data());
        });
    }

    struct Task {
        int row, first, count;
    };

    void attend_task(const InkOperation& op, const Task& task, int head, int group, float* scratch) {
        const Number* queries[kQueryRows];
        Number* outputs[kQueryRows];
        int positions[kQueryRows];
        for (int i = 0; i < task.count; i++) {
            const int row = task.row + (task.first + i) / group, query = head * group + (task.first + i) % group;
            queries[i] = numbers(kQueries, row) + long(query) * heads_.padded;
            outputs[i] = numbers(op.out, row) + long(query) * s_.head_width;
            positions[i] = rows_[row].position;
        }
        const long stride = s_.kv_heads * heads_.block_numbers();
        const Blocks<W> blocks = {cache(op.layer, 0, 0, head), cache(op.layer, 1, 0, head), rows_[task.row].table, stride};
        attend_rows<W>(task.count, heads_, blocks, queries, positions, outputs, scratch);
    }

    void add(const InkOperation& op, int row) {
        float* to = floats(op.out, row);
        const Number* from = numbers(op.in, row);
        for (int c = 0; c < op.columns; c++) to[c] += as_float(from[c]);
    }

    static float as_float(float x) { return x; }
    static float as_float(bf16 x) { return to_float(x); }

    void keep_logits(float* to, int output, Floats x) {
        if (s_.soft_cap > 0)
            for (int i = 0; i < kLanes; i++) x[i] = s_.soft_cap * std::tanh(x[i] / s_.soft_cap);
        store(to + output, x);
    }

    const InkShape s_;
    Pool& pool_;
    Heads heads_;
    int longest_ = 0;
    std::vector<std::vector<char>> registers_;
    std::vector<std::vector<float>> scratch_, padded_;  // of each thread
    std::vector<Number> head_;
    std::vector<Row> rows_;
    std::vector<Task> tasks_;
};

}  // namespace ink
