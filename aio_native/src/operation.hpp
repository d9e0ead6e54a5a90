#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <ctime>
#include <mutex>
#include <vector>

inline int64_t monotonic_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

struct Segment {
    int fd;
    uint64_t offset;
    uint64_t address;
    uint64_t size;
};

struct Failure {
    int error = 0;  // positive errno; 0: none
    int fd = -1;
    uint64_t offset = 0;
    uint64_t size = 0;
    bool engine_lost = false;  // the ring broke: the drive did not answer
};

enum class Op : uint8_t { read, write };

// A group of requests handed in together. The members of the first part are written by the submitter before the ring's
// owner thread sees the operation, those of the second by the owner thread alone, and the rest under the mutex.
class Operation {
public:
    Operation(Op op, std::vector<Segment> segments);
    Operation(const Operation &) = delete;
    Operation &operator=(const Operation &) = delete;

    const Op op;
    const std::vector<Segment> segments;
    const uint64_t size_bytes;
    const int64_t submitted_ns;

    // Owner thread only: how far the requests have been issued, and how many of them have not come back.
    unsigned in_flight = 0;
    Failure first_failure;

    bool fully_issued() const { return first_failure.error != 0 || unissued_bytes_ == 0; }
    // The next request, of at most max_size bytes. Stripes (a few segments in different files) advance in step, so that
    // every drive has work from the first request to the last; more segments than that go one after the other.
    Segment take_next(uint64_t max_size);

    // Called once by the owner thread, when every issued request has come back.
    void finish();

    bool done() const { return done_.load(std::memory_order_acquire); }
    Failure failure() const { return done() ? first_failure : Failure{}; }
    int64_t completed_ns() const { return done() ? completed_ns_ : 0; }

    // False when the time passed first.
    bool wait_for(std::chrono::nanoseconds time) const;
    // Writes 1 to the eventfd when done, at once if that is already so.
    void add_waker(int eventfd);

private:
    size_t due_segment();

    std::vector<uint64_t> issued_bytes_;  // by segment; owner thread only
    uint64_t unissued_bytes_;
    size_t first_unissued_ = 0;

    mutable std::mutex mutex_;
    mutable std::condition_variable finished_;
    std::vector<int> wakers_;
    int64_t completed_ns_ = 0;
    std::atomic<bool> done_{false};
};
