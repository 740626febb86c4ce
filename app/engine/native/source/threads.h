// A stand-in for the thread pool: one thread, the same interface.
#pragma once

struct Pool {
    int size() const { return 1; }

    template <class F>
    void run(int n_tasks, F&& f) {
        for (int task = 0; task < n_tasks; task++) f(task, 0);
    }
};
