// The C interface that Python calls through ctypes. An exception (out of memory, no thread) ends the process, since
// Python could not recover from half a step.
#include "draw.h"
#include "steps.h"

using namespace ink;

namespace {

// f(the struct of this format), in products of float32 or bfloat16.
template <class F>
auto with_format_in(int is_bf16, int format, F&& f) {
    return is_bf16 ? with_format<BF16>(format, f) : with_format<F32>(format, f);
}

}  // namespace

extern "C" {

// Lets Python check that its structures have the same layout.
int ink_sizes() { return int(sizeof(InkMatrix) + sizeof(InkOperation) * 1000 + sizeof(InkShape) * 1000000); }

// Null if the system has no more threads.
void* ink_open_pool(int threads, int spins) try { return new Pool(threads, spins); } catch (...) { return nullptr; }
void ink_close_pool(void* pool) { delete static_cast<Pool*>(pool); }

// The number of the format of this name, -1 if products of these numbers have none.
int ink_format(const char* name, int is_bf16) {
    for (int format = 0; format < kFormats; format++)
        if (with_format_in(is_bf16, format, [&]<class W>(W) { return !std::strcmp(W::kName, name); })) return format;
    return -1;
}

// Steps of a row of k numbers.
int ink_steps(int k, int is_bf16, int format) {
    return with_format_in(is_bf16, format, [&]<class W>(W) { return (k + W::kStep - 1) / W::kStep; });
}

// 0 for a format of grouped.h.
long ink_packed_bytes(int panels, int k, int is_bf16, int format) {
    return with_format_in(is_bf16, format, [&]<class W>(W) {
        if constexpr (IsGrouped<W>) return 0L;
        else return panels * panel_bytes<W>(ink_steps(k, is_bf16, format));
    });
}

// Bytes of a matrix whose format is one of grouped.h; its address is not needed.
long ink_grouped_bytes(const InkMatrix* matrix, int is_bf16) {
    return with_format_in(is_bf16, matrix->format, [&]<class W>(W) {
        if constexpr (IsGrouped<W>) return matrix->outputs / kPanel * grouped_panel_bytes<W>(*matrix);
        else return 0L;
    });
}

void ink_pack(void* pool, const void* from, int n_rows, int k, int gate_rows, int panels, int is_bf16, int format, void* to) {
    with_format_in(is_bf16, format, [&]<class W>(W) {
        if constexpr (!IsGrouped<W>) {
            const auto* stored = static_cast<const typename W::Stored*>(from);
            pack<W>(*static_cast<Pool*>(pool), stored, n_rows, k, gate_rows, panels, static_cast<char*>(to));
        }
    });
}

// Packs a matrix whose format is one of grouped.h to its address. gate_rows: see pack().
void ink_pack_groups(void* pool, const InkGroups* from, int n_rows, int gate_rows, int is_bf16, const InkMatrix* to) {
    with_format_in(is_bf16, to->format, [&]<class W>(W) {
        if constexpr (IsGrouped<W>)
            with_codes<W>(*to, [&]<class Of>(Of) {
                pack_groups<Of>(*static_cast<Pool*>(pool), *from, n_rows, *to,
                                [=](int panel, int output) { return source_row(panel, output, n_rows, gate_rows); });
            });
    });
}

void* ink_open(const InkShape* shape, void* pool) {
    Pool& threads = *static_cast<Pool*>(pool);
    if (shape->is_bf16) return static_cast<Executor*>(new ink::Decoder<BF16>(*shape, threads));
    return static_cast<Executor*>(new ink::Decoder<F32>(*shape, threads));
}
void ink_close(void* executor) { delete static_cast<Executor*>(executor); }

void ink_run(void* executor, const InkStep* step) { static_cast<Executor*>(executor)->run(*step); }

// Writes the logits [n_rows, stride] of rows of the last step.
void ink_head(void* executor, const int32_t* rows, int n_rows, float* logits, long stride) {
    static_cast<Executor*>(executor)->head(rows, n_rows, logits, stride);
}
}
