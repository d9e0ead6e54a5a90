#pragma once

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "ring.hpp"

// Several rings behind one door. An operation goes, whole, to the ring with the fewest bytes to do.
class UringEngine {
public:
    UringEngine(const RingOptions &options, unsigned num_rings, uint64_t max_operations);
    ~UringEngine();
    UringEngine(const UringEngine &) = delete;
    UringEngine &operator=(const UringEngine &) = delete;

    // Null when max_operations are under way (busy). Throws std::logic_error after close and in a forked child.
    std::shared_ptr<Operation> submit(Op op, std::vector<Segment> segments);
    // The first refusal of any ring, if there is one; then that kind of registration is undone in all of them.
    RegistrationResult register_resources(const std::vector<iovec> &buffers, const std::vector<int> &fds);
    // Operations handed in and not finished, whoever still has a handle of them. 0 after close.
    uint64_t under_way() const;
    // Of the first ring that is broken; `ended` holds for all that are.
    Breakdown breakdown() const;
    RingStats stats() const;
    void close();

private:
    // In a forked child no lock may be touched: the thread that held it is not there to release it.
    void check_process() const;
    void check_open() const;
    uint64_t outstanding_operations() const;

    const pid_t owner_;
    const uint64_t max_operations_;
    // Shared by users of the rings, exclusive for ending them.
    mutable std::shared_mutex mutex_;
    std::mutex close_mutex_;
    bool closed_ = false;
    std::vector<std::unique_ptr<Ring>> rings_;
    RingStats final_stats_;
};
