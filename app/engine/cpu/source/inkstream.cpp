// The C interface that Python calls through ctypes. An exception (out of memory, no thread) ends the process, since
// Python could not recover from half a step.
#include "draw.h"
#include "steps.h"

using namespace ink;

namespace {

// f of the number format of a product.
template <class F>
auto with_format(int is_bf16, int is_int8, F&& f) {
    if (is_int8) return is_bf16 ? f(I8()) : f(I8F32());
    return is_bf16 ? f(BF16()) : f(F32());
}

}  // namespace

extern "C" {

// Lets Python check that its structures have the same layout.
int ink_sizes() { return int(sizeof(InkMatrix) + sizeof(InkOperation) * 1000 + sizeof(InkShape) * 1000000); }

// Null if the system has no more threads.
void* ink_open_pool(int threads, int spins) try { return new Pool(threads, spins); } catch (...) { return nullptr; }
void ink_close_pool(void* pool) { delete static_cast<Pool*>(pool); }

long ink_packed_bytes(int panels, int k, int is_bf16, int is_int8) {
    return with_format(is_bf16, is_int8, [&]<class W>(W) {
        return panels * panel_bytes<W>((k + W::kStep - 1) / W::kStep);
    });
}

void ink_pack(void* pool, const void* from, int n_rows, int k, int gate_rows, int panels, int is_bf16, int is_int8, void* to) {
    with_format(is_bf16, is_int8, [&]<class W>(W) {
        pack<W>(*static_cast<Pool*>(pool), static_cast<const char*>(from), n_rows, k, gate_rows, panels, static_cast<char*>(to));
    });
}

// Rounds a matrix for ink_pack() with is_int8.
void ink_quantize(void* pool, const void* from, int n_rows, int k, int is_bf16, int8_t* numbers, float* scales) {
    with_format(is_bf16, false, [&]<class W>(W) {
        quantize(*static_cast<Pool*>(pool), static_cast<const typename W::Number*>(from), n_rows, k, numbers, scales);
    });
}

void* ink_open(const InkShape* shape, void* pool) {
    Pool& threads = *static_cast<Pool*>(pool);
    if (shape->is_bf16) return static_cast<Executor*>(new ink::Decoder<BF16, I8>(*shape, threads));
    return static_cast<Executor*>(new ink::Decoder<F32, I8F32>(*shape, threads));
}
void ink_close(void* executor) { delete static_cast<Executor*>(executor); }

void ink_run(void* executor, const InkStep* step) { static_cast<Executor*>(executor)->run(*step); }

// Writes the logits [n_rows, stride] of rows of the last step.
void ink_head(void* executor, const int32_t* rows, int n_rows, float* logits, long stride) {
    static_cast<Executor*>(executor)->head(rows, n_rows, logits, stride);
}
}
