// Thread pool that runs the tasks of one operation after another.
//
// On a busy machine a thread may lose its core to another process at any time. So threads claim tasks one by one, an
// operation waits only for threads that have joined it, and no thread joins once all tasks are claimed: a sleeping
// thread delays no operation, and a descheduled one delays the others by at most one task. Between operations threads
// spin briefly, then sleep.
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
            for (int i = 1; i < threads_; i++) workers_.emplace_back([this, i] { work(i); });
        } catch (...) {  // no more threads available: stop those that were started
            shut_down();
            throw;
        }
    }

    ~Pool() { shut_down(); }

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
        active_.store(0, std::memory_order_release);
        wake();
        run_tasks(0);
        active_.fetch_add(kClosed, std::memory_order_acq_rel);
        for (int i = 0; active_.load(std::memory_order_acquire) != kClosed; i++)
            if (i < kWaitSpins) pause();
            else return wait_for_workers();
    }

  private:
    static constexpr int kWaitSpins = 800, kClosed = -(1 << 20);

    struct alignas(64) Share {
        std::atomic<int> next{0};
    };

    void shut_down() {
        stop_ = true;
        wake();
        for (auto& worker : workers_) worker.join();
    }

    void wake() {
        round_.fetch_add(1, std::memory_order_seq_cst);
        if (sleeping_.load(std::memory_order_seq_cst)) round_.notify_all();
    }

    int share(int thread) const { return int(long(n_tasks_) * thread / threads_); }

    // Runs the thread's own share first, whose cache line is uncontended; then the remaining tasks of other threads.
    void run_tasks(int thread) {
        for (int i = 0; i < threads_; i++) {
            const int owner = (thread + i) % threads_, end = share(owner + 1);
            std::atomic<int>& next = shares_[owner].next;
            while (next.load(std::memory_order_relaxed) < end)
                if (const int task = next.fetch_add(1, std::memory_order_relaxed); task < end) call_(argument_, task, thread);
        }
    }

    void work(int thread) {
        uint32_t last_round = 0;
        for (;;) {
            for (int i = 0; round_.load(std::memory_order_acquire) == last_round && i < spins_; i++) pause();
            if (round_.load(std::memory_order_acquire) == last_round) {
                sleeping_.fetch_add(1, std::memory_order_seq_cst);
                round_.wait(last_round, std::memory_order_seq_cst);
                sleeping_.fetch_sub(1, std::memory_order_relaxed);
            }
            if (stop_) return;
            const uint32_t missed_round = round_.load(std::memory_order_acquire);
            if (!try_join()) {
                last_round = missed_round;  // not a round that started in the meantime
                continue;
            }
            last_round = round_.load(std::memory_order_acquire);  // unchanged until all threads have left
            run_tasks(thread);
            active_.fetch_sub(1, std::memory_order_seq_cst);
            if (is_waiting_.load(std::memory_order_seq_cst)) active_.notify_all();
        }
    }

    // A worker is late, most likely because another process has its core. Sleeping instead of spinning frees this core.
    void wait_for_workers() {
        is_waiting_.store(true, std::memory_order_seq_cst);
        for (int count; (count = active_.load(std::memory_order_seq_cst)) != kClosed;) active_.wait(count);
        is_waiting_.store(false, std::memory_order_relaxed);
    }

    bool try_join() {
        int count = active_.load(std::memory_order_acquire);
        while (count >= 0)
            if (active_.compare_exchange_weak(count, count + 1, std::memory_order_acq_rel)) return true;
        return false;
    }

    const int spins_, threads_;
    std::vector<std::thread> workers_;
    std::unique_ptr<Share[]> shares_;
    void (*call_)(void*, int, int) = nullptr;
    void* argument_ = nullptr;
    int n_tasks_ = 0;
    std::atomic<bool> stop_{false}, is_waiting_{false};
    alignas(64) std::atomic<uint32_t> round_{0};
    alignas(64) std::atomic<int> active_{kClosed};  // threads that joined the round; far below 0 while it is closed
    alignas(64) std::atomic<int> sleeping_{0};
};

}  // namespace ink
