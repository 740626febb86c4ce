// Prints a digest of what the kernels compute from fixed inputs, for each number format and each sampling stage. The
// digests of all CPUs must agree; tests/engine/cpu/test_arm.py compares them.
#include <cstdio>
#include <deque>
#include <string>

#include "inkstream.cpp"

namespace {

constexpr int kHeads = 4, kKvHeads = 2, kHeadWidth = 20, kPaddedHead = 32, kVocab = 300;
constexpr int kExpertCount = 11, kChosen = 3;
constexpr int kLayers = 2, kCacheBlocks = 24, kContext = 288, kQkvWidth = (kHeads + 2 * kKvHeads) * kHeadWidth;

// Philox, so that inputs do not depend on a standard library.
double next_number() {
    static int64_t count = 0;
    return uniform(7, 0, count++);
}

std::vector<float> numbers(size_t n, float scale) {
    std::vector<float> made(n);
    for (float& x : made) x = static_cast<float>(next_number() - 0.5) * scale;
    return made;
}

int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

class Digest {
  public:
    template <class T>
    void add(const T* values, size_t n) {
        const auto* bytes = reinterpret_cast<const unsigned char*>(values);
        for (size_t i = 0; i < n * sizeof(T); i++) state_ = (state_ ^ bytes[i]) * 0x100000001b3;  // FNV-1a
    }
    void print(const char* name) const { std::printf("%s %016llx\n", name, static_cast<unsigned long long>(state_)); }

  private:
    unsigned long long state_ = 0xcbf29ce484222325;
};

bool stores(bool is_bf16, int format, const char* kind) {
    return with_format_in(is_bf16, format, [=]<class W>(W) { return !std::strcmp(W::kName, kind); });
}

// The bits of some float16 near a small float32.
uint16_t float16(uint32_t word) {
    const uint32_t size = word >> 13 & 0x3ffff, bias = 112 << 10;
    return uint16_t(word >> 16 & 0x8000u) | uint16_t(size > bias ? size - bias : 0);
}

bool is_grouped(bool is_bf16, int format) {
    return with_format_in(is_bf16, format, []<class W>(W) { return IsGrouped<W>; });
}

// A small decoder with odd sizes, or in formats of grouped.h with whole groups, and its cache. Variants: 0 is like Qwen3, 1 like GPT-2, 2 has parallel residuals, 3 has
// sinks, and experts like those of gpt-oss and others in turn.
class Model {
  public:
    Model(bool is_bf16, int format, int variant, bool has_coded_cache, Pool& pool)
        : is_bf16_(is_bf16), format_(format), pool_(pool) {
        if (is_grouped(is_bf16, format)) width_ = 96, mlp_ = 384, expert_width_ = 64;
        const bool is_gpt = variant == 1 || variant == 2;
        const int activation = variant == 1 ? kGeluTanh : variant == 2 ? kGelu : kSilu;
        const int columns[] = {width_, kQkvWidth, kHeads * kHeadWidth, mlp_, kHeads * kPaddedHead, width_};
        for (int i = 0; i < 6; i++) columns_[i] = round_up(columns[i], kPanel);
        embedding_ = matrix(kVocab, width_, 0, false);
        for (int layer = 0; layer < kLayers; layer++) {
            add({.kind = kNorm, .in = kResidual, .out = kNormed, .flag = is_gpt ? kLayer : kRms, .columns = width_,
                 .eps = 1e-5f, .weight = floats(width_), .bias = is_gpt ? floats(width_) : nullptr});
            add({.kind = kLinear, .in = kNormed, .out = kQkv, .matrix = matrix(kQkvWidth, width_, 0, is_gpt)});
            add({.kind = kRopeCache, .in = kQkv, .layer = layer, .eps = 1e-6f,
                 .weight = is_gpt ? nullptr : floats(kHeadWidth), .bias = is_gpt ? nullptr : floats(kHeadWidth)});
            add({.kind = kAttention, .in = kQueries, .out = kNormed, .layer = layer,
                 .weight = variant == 3 ? floats(kHeads) : nullptr});
            add({.kind = kLinear, .in = kNormed, .out = kResidual, .accumulates = true,
                 .matrix = matrix(width_, kHeads * kHeadWidth, 0, is_gpt)});
            if (variant == 2) add({.kind = kNorm, .in = kResidual, .out = kParallelNormed, .flag = kCopy, .columns = width_});
            add({.kind = kNorm, .in = kResidual, .out = kNormed, .flag = is_gpt ? kLayer : kRms, .columns = width_,
                 .eps = 1e-5f, .weight = floats(width_)});
            if (variant == 3) {
                add_experts(layer);
                continue;
            }
            add({.kind = kLinear, .in = kNormed, .out = kHidden, .flag = activation, .gated = !is_gpt,
                 .matrix = matrix(is_gpt ? mlp_ : 2 * mlp_, width_, is_gpt ? 0 : mlp_, is_gpt)});
            add({.kind = kLinear, .in = kHidden, .out = kResidual, .accumulates = true,
                 .matrix = matrix(width_, mlp_, 0, is_gpt)});
            if (variant == 2) add({.kind = kAdd, .in = kParallelNormed, .out = kResidual, .columns = width_,
                                   .accumulates = true});
        }
        const float* rope_table = floats(kContext * 16);
        for (InkOperation& operation : operations_) {
            if (operation.kind == kRopeCache) operation.rotary_half = variant == 1 ? 0 : 8, operation.rope_table = rope_table;
            if (operation.kind == kAttention) operation.window = is_gpt ? 0 : 24, operation.attention_scale = 0.22f;
        }
        const size_t head_bytes = has_coded_cache ? kPaddedHead + 2 : kPaddedHead * (is_bf16 ? 2 : 4);
        cache_.resize(size_t(kLayers) * 2 * kCacheBlocks * kKvHeads * kBlock * head_bytes);
        InkShape shape = {.is_bf16 = is_bf16, .n_registers = 6, .query_heads = kHeads, .kv_heads = kKvHeads,
                          .head_width = kHeadWidth, .width = width_, .n_operations = int(operations_.size()),
                          .n_groups = 1, .final_norm = kRms, .padded_head = kPaddedHead,
                          .embedding_scale = 1.5f, .soft_cap = is_gpt ? 0.0f : 20.0f, .eps = 1e-5f,
                          .has_coded_cache = has_coded_cache};
        shape.final_weight = floats(width_);
        shape.position_embeddings = variant == 1 ? floats(kContext * width_) : nullptr;
        shape.embedding = shape.head = embedding_;
        group_ = {cache_.data(), kCacheBlocks};
        shape.caches = &group_, shape.register_columns = columns_, shape.operations = operations_.data();
        executor_ = static_cast<Executor*>(ink_open(&shape, &pool));
    }
    ~Model() { ink_close(executor_); }

    // A prompt over two spans of attention; then its next token beside the prompt of a second sequence.
    void run(Digest& digest) {
        const int32_t first[] = {4, 1, 7, 5, 6, 8, 10, 11, 12, 20, 14, 15, 16, 17, 18, 19, 13}, second[] = {0, 3, 9, 2};
        const int64_t one = reinterpret_cast<int64_t>(first), other = reinterpret_cast<int64_t>(second);
        const std::vector<std::vector<int64_t>> steps = {{267, 0, one}, {1, 267, one, 53, 0, other}};
        for (const auto& chunks : steps) {
            int rows = 0;
            for (size_t i = 0; i < chunks.size(); i += 3) rows += int(chunks[i]);
            std::vector<int64_t> tokens(rows);
            std::vector<int32_t> indices(rows);
            for (int i = 0; i < rows; i++) tokens[i] = (i * 89 + 5) % kVocab, indices[i] = i;
            const InkStep work = {rows, int(chunks.size()) / 3, tokens.data(), chunks.data(), nullptr};
            ink_run(executor_, &work);
            const int stride = round_up(kVocab, kPanel);
            std::vector<float> logits(size_t(rows) * stride);
            ink_head(executor_, indices.data(), rows, logits.data(), stride);
            for (const float x : logits)
                if (!std::isfinite(x)) std::abort();
            digest.add(logits.data(), logits.size());
        }
    }

  private:
    void add(const InkOperation& operation) { operations_.push_back(operation); }
    // The router has the number format of products.
    void add_experts(int layer) {
        const int score = layer ? kSigmoid : kSoftmaxOfChosen, activation = layer ? kSilu : kSwigluClamped;
        const InkMatrix* router = matrix(kExpertCount, width_, 0, true, true);
        add({.kind = kRoute, .in = kNormed, .matrix = router, .weight = layer ? floats(kExpertCount) : nullptr,
             .experts = kExpertCount, .chosen = kChosen, .score = score, .normalized = layer, .expert_factor = 1.5f});
        std::vector<InkMatrix> up, down;
        for (int i = 0; i < kExpertCount; i++) {
            up.push_back(*matrix(2 * expert_width_, width_, expert_width_, !layer));
            down.push_back(*matrix(width_, expert_width_, 0, !layer));
        }
        experts_.push_back(up), experts_.push_back(down);
        add({.kind = kExperts, .in = kNormed, .out = kResidual, .flag = activation, .gated = 1, .accumulates = true,
             .matrix = experts_[experts_.size() - 2].data(), .down = experts_.back().data(),
             .experts = kExpertCount, .chosen = kChosen});
    }
    const float* floats(int n) {
        floats_.push_back(numbers(round_up(n, kPanel), 2.0f));
        return floats_.back().data();
    }
    const InkMatrix* matrix(int n_rows, int k, int gate_rows, bool has_bias, bool is_router = false) {
        if (!is_router && is_grouped(is_bf16_, format_)) return grouped_matrix(n_rows, k, gate_rows, has_bias);
        const int format = is_router ? 0 : format_;
        const int panels = gate_rows ? (gate_rows + kLanes - 1) / kLanes : (n_rows + kPanel - 1) / kPanel;
        std::vector<char> raw;
        for (const float x : numbers(size_t(n_rows) * k, 0.5f)) {
            const uint32_t word = bits<uint32_t>(x);
            const char* number = reinterpret_cast<const char*>(&word);
            const uint16_t half = float16(word);
            if (stores(is_bf16_, format, "float16")) raw.insert(raw.end(), 2, 0), std::memcpy(&raw.back() - 1, &half, 2);
            else raw.insert(raw.end(), number + (stores(is_bf16_, format, "bfloat16") ? 2 : 0), number + 4);
        }
        packed_.emplace_back(ink_packed_bytes(panels, k, is_bf16_, format) + 64);
        char* at = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(packed_.back().data()) + 63) / 64 * 64);
        ink_pack(&pool_, raw.data(), n_rows, k, gate_rows, panels, is_bf16_, format, at);
        const float* bias = has_bias ? floats(panels * kPanel) : nullptr;
        const float* scale = has_bias ? floats(panels * kPanel) : nullptr;  // as matrices with a factor have
        matrices_.push_back({.packed = at, .bias = bias, .scale = scale, .outputs = panels * kPanel,
                             .steps = ink_steps(k, is_bf16_, format), .format = format});
        return &matrices_.back();
    }

    // The largest group that divides a row; each kind of scales in turn, with tables of both kinds.
    const InkMatrix* grouped_matrix(int n_rows, int k, int gate_rows, bool has_bias) {
        const int panels = gate_rows ? (gate_rows + kLanes - 1) / kLanes : (n_rows + kPanel - 1) / kPanel;
        const int turn = int(matrices_.size() % 4), kind = std::min(turn, 2);
        InkMatrix m = {.bias = has_bias ? floats(panels * kPanel) : nullptr, .outputs = panels * kPanel,
                       .steps = ink_steps(k, is_bf16_, format_), .format = format_, .group = std::min(k & -k, 128),
                       .scales = kind, .has_offsets = turn % 2};
        const bool is_consecutive = matrices_.size() / 4 % 2;
        for (int code = 0; code < 16; code++)
            m.table[code] = int8_t(is_consecutive ? code - 8 * !m.has_offsets : code * code / 2 - 5 * code);
        floats_.push_back({0.0f, 1.0f});
        m.have_sign = floats_.back().data();
        const size_t count = size_t(n_rows) * (k / m.group), units = size_t(n_rows) * ((k + 255) / 256);
        const auto halves = [](size_t n) {
            std::vector<uint16_t> made;
            for (const float x : numbers(n, 0.02f)) made.push_back(float16(bits<uint32_t>(x)));
            return made;
        };
        const auto bytes = [](size_t n) {
            std::vector<uint8_t> made;
            for (const float x : numbers(n, 255.0f)) made.push_back(uint8_t(int(x)));
            return made;
        };
        const auto codes = bytes(size_t(n_rows) * k), scale_bytes = bytes(count), offset_bytes = bytes(count);
        const auto scale_halves = halves(count), scale_units = halves(units), offset_units = halves(units);
        const auto scale_floats = numbers(count, 0.02f), offset_floats = numbers(count, 0.4f);
        const void* scales[] = {scale_halves.data(), scale_floats.data(), scale_bytes.data()};
        const void* offsets[] = {nullptr, offset_floats.data(), offset_bytes.data()};
        const InkGroups groups = {codes.data(), scales[kind], offsets[kind], scale_units.data(), offset_units.data()};
        packed_.emplace_back(ink_grouped_bytes(&m, is_bf16_) + 64);
        m.packed = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(packed_.back().data()) + 63) / 64 * 64);
        ink_pack_groups(&pool_, &groups, n_rows, gate_rows, is_bf16_, &m);
        matrices_.push_back(m);
        return &matrices_.back();
    }

    bool is_bf16_;
    int format_, width_ = 70, mlp_ = 90, expert_width_ = 37;
    Pool& pool_;
    const InkMatrix* embedding_;
    int32_t columns_[6];
    InkCache group_;
    std::vector<InkOperation> operations_;
    std::deque<InkMatrix> matrices_;
    std::deque<std::vector<InkMatrix>> experts_;
    std::deque<std::vector<float>> floats_;
    std::deque<std::vector<char>> packed_;
    std::vector<char> cache_;
    Executor* executor_;
};

// 32 rows of one request, at consecutive positions.
void sample_rows(const char* name, InkParams params) {
    constexpr int64_t kRows = 32, kLength = 12, kTokens = 1000;
    const std::vector<float> logits = numbers(kRows * kTokens, 24.0f);
    std::vector<char> memory(ink_scratch_bytes(1, kTokens));
    int64_t tokens[kRows], history[kLength + kRows], top_ids[kRows * INK_TOP] = {};
    double logprobs[kRows] = {}, top_logprobs[kRows * INK_TOP] = {};
    for (int i = 0; i < kLength + kRows; i++) history[i] = i * 31 % 200;
    InkRow rows[kRows];
    params.seed = 11, params.prompt = kLength, params.logprobs = 5;
    for (int i = 0; i < kRows; i++) rows[i] = {&params, history, kLength + i, nullptr};
    const InkSamples out = {tokens, logprobs, top_ids, top_logprobs};
    ink_sample(nullptr, memory.data(), logits.data(), kTokens, kTokens, kRows, rows, &out);
    Digest digest;
    digest.add(tokens, kRows), digest.add(logprobs, kRows);
    digest.add(top_ids, kRows * INK_TOP), digest.add(top_logprobs, kRows * INK_TOP);
    digest.print(name);
}

}  // namespace

int main() {
    Pool pool(2, 10);
    const auto print_models = [&](bool is_bf16, int format, bool has_coded_cache, const std::string& name) {
        Digest digest;
        for (int variant = 0; variant < 4; variant++)
            Model(is_bf16, format, variant, has_coded_cache, pool).run(digest);
        digest.print(name.c_str());
    };
    for (const bool is_bf16 : {false, true}) {
        const std::string numbers = is_bf16 ? "bfloat16" : "float32";
        for (int format = 0; format < kFormats; format++) {
            const char* name = with_format_in(is_bf16, format, []<class W>(W) { return W::kName; });
            if (ink_format(name, is_bf16) != format) continue;  // the same as another
            print_models(is_bf16, format, false, format ? std::string(name) + " of " + numbers : numbers);
        }
        print_models(is_bf16, 0, true, numbers + " with a coded cache");
    }
    const InkParams plain = {.temperature = 0.9, .top_p = 1, .typical_p = 1, .repetition = 1};
    const auto with = [&](auto change) { InkParams p = plain; change(p); return p; };
    sample_rows("greedy", with([](InkParams& p) { p.flags = GREEDY; }));
    sample_rows("temperature", plain);
    sample_rows("top_k", with([](InkParams& p) { p.top_k = 40; }));
    sample_rows("typical_p", with([](InkParams& p) { p.typical_p = 0.7; }));
    sample_rows("top_p", with([](InkParams& p) { p.top_p = 0.9; }));
    sample_rows("min_p", with([](InkParams& p) { p.min_p = 0.05; }));
    sample_rows("penalties", with([](InkParams& p) {
        p.flags = COUNTED, p.repetition = 1.3, p.presence = 0.4, p.frequency = 0.2;
    }));
}
