#include "uring_engine.hpp"

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <unistd.h>

namespace {

void add(RingStats &sum, const RingStats &other) {
    sum.requests += other.requests;
    sum.retries += other.retries;
    sum.bytes_read += other.bytes_read;
    sum.bytes_written += other.bytes_written;
    sum.depth_ns += other.depth_ns;
    sum.busy_ns += other.busy_ns;
    sum.cpu_ns += other.cpu_ns;
}

}  // namespace

UringEngine::UringEngine(const RingOptions &options, unsigned num_rings, uint64_t max_operations)
    : owner_(getpid()), max_operations_(max_operations) {
    for (unsigned number = 0; number < num_rings; ++number) {
        RingOptions own = options;
        own.faults.seed += number;
        rings_.push_back(std::make_unique<Ring>(own));
    }
}

UringEngine::~UringEngine() {
    close();
}

void UringEngine::check_process() const {
    if (getpid() != owner_)
        throw std::logic_error("this io_uring engine belongs to process " + std::to_string(owner_) +
                               "; a forked child cannot use it: open another in the child");
}

void UringEngine::check_open() const {
    if (closed_) throw std::logic_error("this io_uring engine is closed");
}

std::shared_ptr<Operation> UringEngine::submit(Op op, std::vector<Segment> segments) {
    check_process();
    const std::shared_lock lock(mutex_);
    check_open();
    if (outstanding_operations() >= max_operations_) return nullptr;
    const auto least = std::min_element(rings_.begin(), rings_.end(), [](const auto &a, const auto &b) {
        return a->outstanding_bytes() < b->outstanding_bytes();
    });
    auto operation = std::make_shared<Operation>(op, std::move(segments));
    (*least)->submit(operation);
    return operation;
}

uint64_t UringEngine::under_way() const {
    check_process();
    const std::shared_lock lock(mutex_);
    return outstanding_operations();
}

uint64_t UringEngine::outstanding_operations() const {
    uint64_t sum = 0;
    for (const auto &ring : rings_) sum += ring->outstanding_operations();
    return sum;
}

RegistrationResult UringEngine::register_resources(const std::vector<iovec> &buffers, const std::vector<int> &fds) {
    check_process();
    const std::shared_lock lock(mutex_);
    check_open();
    RegistrationResult refused;
    for (const auto &ring : rings_) {
        const RegistrationResult result = ring->register_resources(buffers, fds);
        if (!refused.buffers_error) refused.buffers_error = result.buffers_error;
        if (!refused.files_error) refused.files_error = result.files_error;
    }
    const bool undo_buffers = refused.buffers_error && !buffers.empty();
    const bool undo_files = refused.files_error && !fds.empty();
    if (rings_.size() > 1 && (undo_buffers || undo_files))
        for (const auto &ring : rings_)
            ring->register_resources(undo_buffers ? std::vector<iovec>{} : buffers, undo_files ? std::vector<int>{} : fds);
    return refused;
}

Breakdown UringEngine::breakdown() const {
    check_process();
    const std::shared_lock lock(mutex_);
    Breakdown of_all;
    for (const auto &ring : rings_) {
        const Breakdown own = ring->breakdown();
        if (!own.error) continue;
        if (!of_all.error) of_all.error = own.error;
        of_all.ended = of_all.ended && own.ended;
    }
    return of_all;
}

RingStats UringEngine::stats() const {
    check_process();
    const std::shared_lock lock(mutex_);
    RingStats sum = final_stats_;
    for (const auto &ring : rings_) add(sum, ring->stats());
    return sum;
}

void UringEngine::close() {
    if (getpid() != owner_) {
        // The threads did not survive the fork: waiting for one would never end, and detaching it could detach another
        // that was started here since and was given its handle. The memory is left to exit.
        for (auto &ring : rings_) [[maybe_unused]] const Ring *leaked = ring.release();
        rings_.clear();
        return;
    }
    {
        const std::unique_lock lock(mutex_);
        closed_ = true;
    }
    // Whoever else closes at the same time waits here, and then finds no rings.
    const std::lock_guard closing(close_mutex_);
    // Nothing new can come in. Users of stats() need not wait while what is under way comes to its end.
    for (const auto &ring : rings_) ring->stop();
    const std::unique_lock lock(mutex_);
    for (const auto &ring : rings_) add(final_stats_, ring->stats());
    rings_.clear();
}
