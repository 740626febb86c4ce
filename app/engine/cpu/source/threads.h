// Thread pool that runs the tasks of one operation after another.
//
// On a busy machine a thread may lose its core to another process at any time. So threads take tasks one by one, an
// operation waits only for threads that have joined it, and no thread joins once all tasks are taken: a sleeping thread
// delays no operation, and a descheduled one delays the others by at most one task. Between operations threads spin
// briefly, then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace ink {

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
  public:
    explicit Pool(int threads, int spins) : spins_(spins), threads_(threads > 1 ? threads : 1), shares_(new Share[threads_]) {
        try {
            for (int i = 1; i < threads_; i++) helpers_.emplace_back([this, i] { help(i); });
        } catch (...) {  // the system gives no more threads: those there are must not outlive us
            end();
            throw;
        }
    }

    ~Pool() { end(); }

    int size() const { return threads_; }

    // Calls f(task, thread) for every task from 0 to n_tasks - 1, on all threads, and returns when all are done.
    template <class F>
    void run(int n_tasks, F&& f) {
        if (n_tasks <= 1 || threads_ == 1) {
            for (int task = 0; task < n_tasks; task++) f(task, 0);
            return;
        }
        call_ = [](void* f, int task, int thread) { (*static_cast<std::remove_reference_t<F>*>(f))(task, thread); };
        argument_ = const_cast<void*>(static_cast<const void*>(&f));
        n_tasks_ = n_tasks;
        for (int i = 0; i < threads_; i++) shares_[i].next.store(share(i), std::memory_order_relaxed);
        inside_.store(0, std::memory_order_release);
        wake();
        take(0);
        inside_.fetch_add(kClosed, std::memory_order_acq_rel);
        for (int i = 0; inside_.load(std::memory_order_acquire) != kClosed; i++)
            if (i < kPatience) pause();
            else return wait_for_the_last();
    }

  private:
    static constexpr int kPatience = 800, kClosed = -(1 << 20);

    struct alignas(64) Share {
        std::atomic<int> next{0};
    };

    void end() {
        stop_ = true;
        wake();
        for (auto& helper : helpers_) helper.join();
    }

    void wake() {
        round_.fetch_add(1, std::memory_order_seq_cst);
        if (sleeping_.load(std::memory_order_seq_cst)) round_.notify_all();
    }

    int share(int thread) const { return int(long(n_tasks_) * thread / threads_); }

    // First the thread's own share, whose cache line is uncontended; then what other threads have left.
    void take(int thread) {
        for (int i = 0; i < threads_; i++) {
            const int whose = (thread + i) % threads_, end = share(whose + 1);
            std::atomic<int>& next = shares_[whose].next;
            while (next.load(std::memory_order_relaxed) < end)
                if (const int task = next.fetch_add(1, std::memory_order_relaxed); task < end) call_(argument_, task, thread);
        }
    }

    void help(int thread) {
        uint32_t seen = 0;
        for (;;) {
            for (int i = 0; round_.load(std::memory_order_acquire) == seen && i < spins_; i++) pause();
            if (round_.load(std::memory_order_acquire) == seen) {
                sleeping_.fetch_add(1, std::memory_order_seq_cst);
                round_.wait(seen, std::memory_order_seq_cst);
                sleeping_.fetch_sub(1, std::memory_order_relaxed);
            }
            if (stop_) return;
            const uint32_t refused = round_.load(std::memory_order_acquire);
            if (!come_in()) {
                seen = refused;  // and not a round that has begun since
                continue;
            }
            seen = round_.load(std::memory_order_acquire);  // unchanged until all threads have left
            take(thread);
            inside_.fetch_sub(1, std::memory_order_seq_cst);
            if (is_waiting_.load(std::memory_order_seq_cst)) inside_.notify_all();
        }
    }

    // A thread is late, most likely because another process has its core. Sleeping instead of spinning frees this core.
    void wait_for_the_last() {
        is_waiting_.store(true, std::memory_order_seq_cst);
        for (int count; (count = inside_.load(std::memory_order_seq_cst)) != kClosed;) inside_.wait(count);
        is_waiting_.store(false, std::memory_order_relaxed);
    }

    bool come_in() {
        int count = inside_.load(std::memory_order_acquire);
        while (count >= 0)
            if (inside_.compare_exchange_weak(count, count + 1, std::memory_order_acq_rel)) return true;
        return false;
    }

    const int spins_, threads_;
    std::vector<std::thread> helpers_;
    std::unique_ptr<Share[]> shares_;
    void (*call_)(void*, int, int) = nullptr;
    void* argument_ = nullptr;
    int n_tasks_ = 0;
    std::atomic<bool> stop_{false}, is_waiting_{false};
    alignas(64) std::atomic<uint32_t> round_{0};
    alignas(64) std::atomic<int> inside_{kClosed};  // threads at work; far below 0 while closed
    alignas(64) std::atomic<int> sleeping_{0};
};

}  // namespace ink
