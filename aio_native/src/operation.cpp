#include "operation.hpp"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <numeric>
#include <system_error>
#include <unistd.h>

namespace {

uint64_t sum_of_sizes(const std::vector<Segment> &segments) {
    return std::accumulate(segments.begin(), segments.end(), uint64_t{0},
                           [](uint64_t sum, const Segment &segment) { return sum + segment.size; });
}

constexpr size_t max_stripes = 16;

void wake(int eventfd) {
    const uint64_t one = 1;
    // Fails only if the counter is full (then a wake-up is pending anyway) or its owner closed it.
    [[maybe_unused]] const ssize_t written = write(eventfd, &one, sizeof one);
}

}  // namespace

Operation::Operation(Op op, std::vector<Segment> segments)
    : op(op), segments(std::move(segments)), size_bytes(sum_of_sizes(this->segments)), submitted_ns(monotonic_ns()),
      issued_bytes_(this->segments.size()), unissued_bytes_(size_bytes) {}

Segment Operation::take_next(uint64_t max_size) {
    const size_t number = due_segment();
    const Segment &segment = segments[number];
    uint64_t &issued = issued_bytes_[number];
    const uint64_t size = std::min(max_size, segment.size - issued);
    const Segment request{segment.fd, segment.offset + issued, segment.address + issued, size};
    issued += size;
    unissued_bytes_ -= size;
    return request;
}

size_t Operation::due_segment() {
    while (issued_bytes_[first_unissued_] == segments[first_unissued_].size) ++first_unissued_;
    if (segments.size() > max_stripes) return first_unissued_;
    const auto part = [this](size_t number) {
        return static_cast<double>(issued_bytes_[number]) / static_cast<double>(segments[number].size);
    };
    size_t due = first_unissued_;
    for (size_t number = due + 1; number < segments.size(); ++number)
        if (part(number) < part(due)) due = number;
    return due;
}

void Operation::finish() {
    const std::lock_guard lock(mutex_);
    completed_ns_ = monotonic_ns();
    done_.store(true, std::memory_order_release);
    for (const int eventfd : wakers_) {
        wake(eventfd);
        close(eventfd);
    }
    wakers_.clear();
    finished_.notify_all();
}

bool Operation::wait_for(std::chrono::nanoseconds time) const {
    std::unique_lock lock(mutex_);
    return finished_.wait_for(lock, time, [this] { return done(); });
}

void Operation::add_waker(int eventfd) {
    const std::lock_guard lock(mutex_);
    if (done()) {
        wake(eventfd);
        return;
    }
    // A descriptor of our own: the caller may close his before we write, and the number may then mean another file.
    const int own = fcntl(eventfd, F_DUPFD_CLOEXEC, 0);
    if (own < 0) throw std::system_error(errno, std::generic_category(), "cannot duplicate the eventfd of a waker");
    wakers_.push_back(own);
}
