// The C interface that Python calls through ctypes. An exception (out of memory, no thread) ends the process, since
// Python could not recover from half a step.
#include "draw.h"
#include "steps.h"

using namespace ink;

namespace {

template <class W>
long packed_bytes(int panels, int k) {
    return 2L * panels * ((k + W::kStep - 1) / W::kStep) * W::kBytes;
}

template <class W, class Source>
void pack_as(const void* from, int n_rows, int k, int gate_rows, int panels, void* to) {
    const int steps = (k + W::kStep - 1) / W::kStep;
    pack<W>(static_cast<const Source*>(from), n_rows, k, gate_rows, panels, steps, static_cast<char*>(to));
}

}  // namespace

extern "C" {

int ink_abi() { return 3; }

// Lets Python check that its structures have the same layout.
int ink_sizes() { return int(sizeof(InkMatrix) + sizeof(InkOperation) * 1000 + sizeof(InkShape) * 1000000); }

// Null if the system has no more threads.
void* ink_open_pool(int threads, int spins) try { return new Pool(threads, spins); } catch (...) { return nullptr; }
void ink_close_pool(void* pool) { delete static_cast<Pool*>(pool); }

long ink_packed_bytes(int panels, int k, int is_bf16, int is_int8) {
    if (is_int8) return is_bf16 ? packed_bytes<I8>(panels, k) : packed_bytes<I8F32>(panels, k);
    return is_bf16 ? packed_bytes<BF16>(panels, k) : packed_bytes<F32>(panels, k);
}

void ink_pack(const void* from, int n_rows, int k, int gate_rows, int panels, int is_bf16, int is_int8, void* to) {
    if (is_int8 && is_bf16) pack_as<I8, int8_t>(from, n_rows, k, gate_rows, panels, to);
    else if (is_int8) pack_as<I8F32, int8_t>(from, n_rows, k, gate_rows, panels, to);
    else if (is_bf16) pack_as<BF16, uint16_t>(from, n_rows, k, gate_rows, panels, to);
    else pack_as<F32, float>(from, n_rows, k, gate_rows, panels, to);
}

void* ink_open(const InkShape* shape, void* pool) {
    Pool& threads = *static_cast<Pool*>(pool);
    Executor* executor = shape->is_bf16 ? static_cast<Executor*>(new ink::Decoder<BF16, I8>(*shape, threads))
                                      : new ink::Decoder<F32, I8F32>(*shape, threads);
    return executor;
}
void ink_close(void* executor) { delete static_cast<Executor*>(executor); }

void ink_run(void* executor, const InkStep* step) { static_cast<Executor*>(executor)->run(*step); }

// Writes the logits [n_rows, stride] of rows of the last step.
void ink_head(void* executor, const int32_t* rows, int n_rows, float* logits, long stride) {
    static_cast<Executor*>(executor)->head(rows, n_rows, logits, stride);
}
}
