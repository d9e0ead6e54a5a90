#include <atomic>
#include <thread>
#include <vector>

#include "check.hpp"
#include "thread_pool.hpp"

void test_thread_pool() {
    for (const int num_threads : {1, 2, 5}) {
        optim::ThreadPool pool(num_threads);
        std::vector<std::thread> callers;
        std::atomic<size_t> calls{0};
        for (int number = 0; number < 3; ++number)
            callers.emplace_back([&] {
                for (size_t num_tiles = 0; num_tiles < 60; ++num_tiles) {
                    std::vector<int> visits(num_tiles);
                    pool.parallel_for(num_tiles, [&](size_t tile) { ++visits[tile]; });
                    for (const int count : visits) CHECK(count == 1);
                    ++calls;
                }
            });
        for (auto &caller : callers) caller.join();
        CHECK(calls == 180);
    }
}
