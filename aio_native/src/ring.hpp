#pragma once

#include <liburing.h>

#include <atomic>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "faults.hpp"
#include "operation.hpp"
#include "witness.hpp"

struct RingOptions {
    unsigned queue_depth;
    uint64_t block_size;
    uint64_t alignment;
    bool no_io;  // submit no-ops in place of transfers: measures everything except the drive
    FaultSpec faults;
};

struct RingStats {
    uint64_t requests = 0, retries = 0, bytes_read = 0, bytes_written = 0, depth_ns = 0, busy_ns = 0, cpu_ns = 0;
};

// errno of each kind of registration, 0 when it was granted.
struct RegistrationResult {
    int buffers_error = 0;
    int files_error = 0;
};

// How a ring broke.
struct Breakdown {
    int error = 0;     // errno that made it unusable; 0: it works
    bool ended = true; // nothing that it had is under way any more
};

// One io_uring and the thread that owns it. IORING_SETUP_SINGLE_ISSUER and DEFER_TASKRUN make the kernel run completions
// in the thread that submitted, without interrupts or locks, and in return allow no other thread near the ring: every
// other thread hands its work to the inbox and rings the bell.
class Ring {
public:
    // Throws std::system_error when the kernel refuses a ring.
    explicit Ring(const RingOptions &options);
    ~Ring();
    Ring(const Ring &) = delete;
    Ring &operator=(const Ring &) = delete;

    void submit(std::shared_ptr<Operation> operation);
    uint64_t outstanding_bytes() const { return outstanding_bytes_.load(std::memory_order_relaxed); }
    uint64_t outstanding_operations() const { return outstanding_operations_.load(std::memory_order_acquire); }
    // Replaces everything registered before. Waits for the owner thread.
    RegistrationResult register_resources(std::vector<iovec> buffers, std::vector<int> fds);
    RingStats stats();
    Breakdown breakdown() const { return {broken_, ended_}; }

    // Finishes what was handed in, then stops the thread. Idempotent, and several threads may ask for it.
    void stop();

private:
    // A request in flight, and after a short transfer the part of it that is still to be done.
    struct Slot {
        std::shared_ptr<Operation> operation;
        Segment rest{};
        unsigned stalls = 0;  // completions without progress, in a row
        int injected_error = 0;
    };
    struct Held {
        unsigned slot;
        int result;
        int64_t due_ns;
    };
    using Queue = std::deque<std::shared_ptr<Operation>>;

    void run(std::promise<int> started);
    int set_up();
    int try_out();
    int register_files(std::vector<int> fds);
    void serve();
    bool take_inbox();
    void await_bell();
    void arm_bell();
    void issue_requests();
    bool issue_next_of(Queue &queue);
    void prepare(unsigned index);
    void prepare_transfer(io_uring_sqe *sqe, const Slot &slot, uint64_t size);
    int submit_and_wait();
    void reap();
    void receive(unsigned index, int result);
    void release_held();
    void complete(unsigned index, int result);
    void advance_or_stall(unsigned index, uint64_t moved);
    void stall(unsigned index, int error);
    void end_request(unsigned index, int error);
    void end_operation(Operation &operation);
    void break_down(int error);
    void let_go();
    void fail_queued();
    void account();

    const RingOptions options_;
    io_uring ring_{};
    int bell_ = -1;
    uint64_t bell_value_ = 0;
    bool bell_armed_ = false;
    Witness witness_;
    std::atomic<bool> ended_ = true;  // written before broken_
    std::atomic<int> broken_ = 0;     // errno that made the ring unusable
    std::thread owner_;
    std::mutex stop_mutex_;
    std::atomic<clockid_t> owner_clock_{0};

    std::mutex inbox_mutex_;
    Queue inbox_;
    std::deque<std::function<void()>> commands_;
    bool stopping_ = false;

    Queue reads_, writes_;
    bool writes_turn_ = false;
    std::vector<Slot> slots_;
    std::vector<unsigned> free_slots_;
    std::vector<Held> held_;
    FaultSource fault_source_;
    std::vector<iovec> buffers_;  // registered, by index
    std::vector<int> files_;      // registered, by index

    std::atomic<uint64_t> outstanding_bytes_{0}, outstanding_operations_{0};
    int64_t accounted_ns_ = 0;
    std::mutex stats_mutex_;
    RingStats stats_;
};
