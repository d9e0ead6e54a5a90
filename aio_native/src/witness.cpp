#include "witness.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <fcntl.h>
#include <mutex>
#include <poll.h>
#include <pthread.h>
#include <set>
#include <unistd.h>

namespace {

// Descriptors that a forked child closes before it runs.
class NotForChildren {
public:
    static NotForChildren &instance() {
        static auto &only = *new NotForChildren;  // never destroyed: a fork may come while the process ends
        return only;
    }

    void insert(int fd) {
        const std::lock_guard lock(mutex_);
        fds_.insert(fd);
    }

    void erase(int fd) {
        const std::lock_guard lock(mutex_);
        fds_.erase(fd);
    }

private:
    NotForChildren() {
        pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                       [] { instance().close_all(); });
    }

    void close_all() {
        for (const int fd : fds_) close(fd);
        fds_.clear();
        mutex_.unlock();
    }

    std::mutex mutex_;
    std::set<int> fds_;
};

void close_if_open(int &fd) {
    if (fd >= 0) close(fd);
    fd = -1;
}

}  // namespace

Witness::~Witness() {
    handed_over(false);
    forget_ring();
}

int Witness::renew(int ring_fd) {
    handed_over(false);
    if (ring_fd_ < 0) NotForChildren::instance().insert(ring_fd_ = ring_fd);
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) < 0) return -1;
    watched_ = ends[0];
    given_ = ends[1];
    NotForChildren::instance().insert(given_);
    return given_;
}

void Witness::handed_over(bool registered) {
    if (given_ >= 0) NotForChildren::instance().erase(given_);
    close_if_open(given_);
    if (!registered) close_if_open(watched_);
}

void Witness::forget_ring() {
    if (ring_fd_ >= 0) NotForChildren::instance().erase(ring_fd_);
    ring_fd_ = -1;
}

bool Witness::wait_until_released(std::chrono::milliseconds time) {
    if (watched_ < 0) return false;
    const auto end = std::chrono::steady_clock::now() + time;
    pollfd hang_up{watched_, 0, 0};
    while (true) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
        const int answer = poll(&hang_up, 1, static_cast<int>(std::max<int64_t>(left.count(), 0)));
        if (answer > 0) return true;
        if (answer == 0 || errno != EINTR) return false;
    }
}
