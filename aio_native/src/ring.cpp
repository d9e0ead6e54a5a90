#include "ring.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <system_error>
#include <unistd.h>

namespace {

constexpr uint64_t bell_tag = ~uint64_t{0};
// Completions without progress that are believed to be temporary before they are reported.
constexpr unsigned max_stalls = 64;
constexpr int64_t reorder_hold_ns = 1'000'000;
constexpr int bell_patience_ms = 100;
// How long a ring that broke may take to end its last requests: drives answer, or are reset, within half a minute.
constexpr auto patience_with_last_requests = std::chrono::seconds(40);

void block_all_signals() {
    // Signals belong to the program's own threads: Python runs its handlers in the main one.
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

uint64_t nanoseconds(const timespec &time) {
    return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

Ring::Ring(const RingOptions &options)
    : options_(options), slots_(options.queue_depth), fault_source_(options.faults.seed) {
    for (unsigned index = options.queue_depth; index-- > 0;) free_slots_.push_back(index);
    bell_ = eventfd(0, EFD_CLOEXEC);
    if (bell_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    std::promise<int> started;
    auto outcome = started.get_future();
    owner_ = std::thread([this, started = std::move(started)]() mutable { run(std::move(started)); });
    if (const int error = outcome.get()) {
        owner_.join();
        close(bell_);
        throw std::system_error(error, std::generic_category(), "io_uring_setup");
    }
}

Ring::~Ring() {
    stop();
    close(bell_);
}

void Ring::stop() {
    const std::lock_guard stopping(stop_mutex_);
    if (!owner_.joinable()) return;
    {
        const std::lock_guard lock(inbox_mutex_);
        stopping_ = true;
    }
    eventfd_write(bell_, 1);
    owner_.join();
}

void Ring::submit(std::shared_ptr<Operation> operation) {
    outstanding_bytes_ += operation->size_bytes;
    ++outstanding_operations_;
    {
        const std::lock_guard lock(inbox_mutex_);
        inbox_.push_back(std::move(operation));
    }
    eventfd_write(bell_, 1);
}

RegistrationResult Ring::register_resources(std::vector<iovec> buffers, std::vector<int> fds) {
    std::promise<RegistrationResult> promise;
    auto future = promise.get_future();
    {
        const std::lock_guard lock(inbox_mutex_);
        commands_.push_back([&] {
            RegistrationResult result;
            if (broken_) return promise.set_value({broken_, broken_});
            if (!buffers_.empty()) io_uring_unregister_buffers(&ring_);
            if (!buffers.empty())
                result.buffers_error = -io_uring_register_buffers(&ring_, buffers.data(), buffers.size());
            buffers_ = result.buffers_error ? std::vector<iovec>{} : std::move(buffers);
            result.files_error = register_files(std::move(fds));
            promise.set_value(result);
        });
    }
    eventfd_write(bell_, 1);
    return future.get();
}

RingStats Ring::stats() {
    const std::lock_guard lock(stats_mutex_);
    RingStats copy = stats_;
    timespec used{};
    // Fails once the thread has ended; it left its last reading behind.
    if (clock_gettime(owner_clock_, &used) == 0) copy.cpu_ns = nanoseconds(used);
    return copy;
}

void Ring::run(std::promise<int> started) {
    block_all_signals();
    clockid_t clock{};
    pthread_getcpuclockid(pthread_self(), &clock);
    owner_clock_ = clock;
    const int error = set_up();
    started.set_value(error);
    if (error) return;
    serve();
    timespec used{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    {
        const std::lock_guard lock(stats_mutex_);
        stats_.cpu_ns = nanoseconds(used);
    }
    witness_.forget_ring();
    if (!broken_) io_uring_queue_exit(&ring_);
}

int Ring::set_up() {
    // From the best set of flags to none: SINGLE_ISSUER needs Linux 6.0, DEFER_TASKRUN 6.1, COOP_TASKRUN 5.19. An older
    // kernel answers EINVAL to a flag that it does not know.
    const unsigned attempts[] = {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_COOP_TASKRUN,
                                 IORING_SETUP_COOP_TASKRUN, 0};
    for (const unsigned flags : attempts) {
        io_uring_params params{};
        params.flags = flags;
        const int result = io_uring_queue_init_params(options_.queue_depth + 1, &ring_, &params);
        if (result == 0) {
            // A child that forked must not share the rings' memory with us.
            io_uring_ring_dontfork(&ring_);
            return try_out();
        }
        if (result != -EINVAL) return -result;
    }
    return EINVAL;
}

// A ring may be had and its use forbidden all the same: a seccomp filter can allow setup and refuse enter.
int Ring::try_out() {
    io_uring_prep_nop(io_uring_get_sqe(&ring_));
    io_uring_cqe *cqe = nullptr;
    int result = io_uring_submit_and_wait(&ring_, 1);
    if (result >= 0) result = io_uring_peek_cqe(&ring_, &cqe);
    if (result < 0) {
        io_uring_queue_exit(&ring_);
        return -result;
    }
    io_uring_cqe_seen(&ring_, cqe);
    register_files({});
    return 0;
}

// Replaces the files that are registered, the witness's always among them. The errno where `fds` were refused.
int Ring::register_files(std::vector<int> fds) {
    const bool asked = !fds.empty();
    io_uring_unregister_files(&ring_);
    files_.clear();
    const int witness = witness_.renew(ring_.ring_fd);
    std::vector<int> all = fds;
    if (witness >= 0) all.push_back(witness);
    const int error = all.empty() ? 0 : -io_uring_register_files(&ring_, all.data(), all.size());
    const bool alone = error && witness >= 0 && io_uring_register_files(&ring_, &witness, 1) == 0;
    witness_.handed_over(witness >= 0 && (!error || alone));
    if (!error) files_ = std::move(fds);
    return asked ? error : 0;
}

void Ring::serve() {
    accounted_ns_ = monotonic_ns();
    while (take_inbox()) {
        if (broken_) {
            fail_queued();
            await_bell();
            continue;
        }
        arm_bell();
        issue_requests();
        const int result = submit_and_wait();
        account();
        // EINTR: a signal; EAGAIN, EBUSY: the kernel is short of memory or completions wait to be reaped; ETIME: ours.
        if (result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY && result != -ETIME) {
            break_down(-result);
            continue;
        }
        reap();
        release_held();
    }
}

// Whether there is, or can still come, something to do.
bool Ring::take_inbox() {
    std::deque<std::function<void()>> commands;
    bool stop;
    {
        const std::lock_guard lock(inbox_mutex_);
        for (auto &operation : inbox_) {
            auto &queue = operation->op == Op::read ? reads_ : writes_;
            queue.push_back(std::move(operation));
        }
        inbox_.clear();
        commands.swap(commands_);
        stop = stopping_;
    }
    for (const auto &command : commands) command();
    // An operation that is fully issued has nothing left to do here. If it stayed, a ring told to stop while the last
    // requests were in flight would see work and then wait for a bell that never rings again.
    for (Queue *queue : {&reads_, &writes_})
        while (!queue->empty() && queue->front()->fully_issued()) queue->pop_front();
    return !(stop && reads_.empty() && writes_.empty() && free_slots_.size() == slots_.size());
}

// Without a ring. Not for ever: what the broken ring had pending on the bell may have taken a count with it.
void Ring::await_bell() {
    pollfd rung{bell_, POLLIN, 0};
    if (poll(&rung, 1, bell_patience_ms) > 0) eventfd_read(bell_, &bell_value_);
}

void Ring::arm_bell() {
    if (bell_armed_) return;
    io_uring_sqe *sqe = io_uring_get_sqe(&ring_);
    io_uring_prep_read(sqe, bell_, &bell_value_, sizeof bell_value_, 0);
    io_uring_sqe_set_data64(sqe, bell_tag);
    bell_armed_ = true;
}

// Reads and writes take turns, so that a drive that is asked for both sees the mixed load it is good at.
void Ring::issue_requests() {
    while (!free_slots_.empty() && !(reads_.empty() && writes_.empty())) {
        if (!issue_next_of(writes_turn_ ? writes_ : reads_)) issue_next_of(writes_turn_ ? reads_ : writes_);
        writes_turn_ = !writes_turn_;
    }
}

bool Ring::issue_next_of(Queue &queue) {
    while (!queue.empty() && queue.front()->fully_issued()) queue.pop_front();
    if (queue.empty()) return false;
    const auto &operation = queue.front();
    const unsigned index = free_slots_.back();
    free_slots_.pop_back();
    ++operation->in_flight;
    slots_[index] = {operation, operation->take_next(options_.block_size)};
    prepare(index);
    return true;
}

void Ring::prepare(unsigned index) {
    Slot &slot = slots_[index];
    uint64_t size = slot.rest.size;
    slot.injected_error = 0;
    if (const FaultSpec &faults = options_.faults; faults.enabled) {
        if (fault_source_.strikes(faults.short_transfer) && size > options_.alignment)
            size = options_.alignment * (1 + fault_source_.below((size - 1) / options_.alignment));
        if (fault_source_.strikes(faults.eintr)) slot.injected_error = EINTR;
        if (fault_source_.strikes(faults.eagain)) slot.injected_error = EAGAIN;
        if (fault_source_.strikes(faults.eio)) slot.injected_error = EIO;
        if (slot.operation->op == Op::write && fault_source_.strikes(faults.enospc)) slot.injected_error = ENOSPC;
    }
    io_uring_sqe *sqe = io_uring_get_sqe(&ring_);  // never null: the ring has an entry for every slot and the bell
    if (options_.no_io)
        io_uring_prep_nop(sqe);
    else
        prepare_transfer(sqe, slot, size);
    io_uring_sqe_set_data64(sqe, index);
}

void Ring::prepare_transfer(io_uring_sqe *sqe, const Slot &slot, uint64_t size) {
    const Segment &rest = slot.rest;
    void *address = reinterpret_cast<void *>(rest.address);
    const auto holds = [&](const iovec &buffer) {
        const auto base = reinterpret_cast<uint64_t>(buffer.iov_base);
        return base <= rest.address && rest.address + size <= base + buffer.iov_len;
    };
    const auto buffer = std::find_if(buffers_.begin(), buffers_.end(), holds);
    const auto file = std::find(files_.begin(), files_.end(), rest.fd);
    const int fd = file == files_.end() ? rest.fd : static_cast<int>(file - files_.begin());
    const bool reading = slot.operation->op == Op::read;
    if (buffer != buffers_.end()) {
        const int number = static_cast<int>(buffer - buffers_.begin());
        (reading ? io_uring_prep_read_fixed(sqe, fd, address, size, rest.offset, number)
                 : io_uring_prep_write_fixed(sqe, fd, address, size, rest.offset, number));
    } else {
        (reading ? io_uring_prep_read(sqe, fd, address, size, rest.offset)
                 : io_uring_prep_write(sqe, fd, address, size, rest.offset));
    }
    if (file != files_.end()) sqe->flags |= IOSQE_FIXED_FILE;
}

int Ring::submit_and_wait() {
    if (held_.empty()) return io_uring_submit_and_wait(&ring_, 1);
    const auto first = std::min_element(held_.begin(), held_.end(),
                                        [](const Held &a, const Held &b) { return a.due_ns < b.due_ns; });
    __kernel_timespec time{};
    time.tv_nsec = std::max<int64_t>(first->due_ns - monotonic_ns(), 1000);
    io_uring_cqe *cqe = nullptr;
    return io_uring_submit_and_wait_timeout(&ring_, &cqe, 1, &time, nullptr);
}

void Ring::reap() {
    io_uring_cqe *cqe = nullptr;
    unsigned head = 0, count = 0;
    io_uring_for_each_cqe(&ring_, head, cqe) {
        ++count;
        if (cqe->user_data == bell_tag) {
            bell_armed_ = false;
            continue;
        }
        const auto index = static_cast<unsigned>(cqe->user_data);
        const int result = options_.no_io && cqe->res == 0 ? static_cast<int>(slots_[index].rest.size) : cqe->res;
        receive(index, result);
    }
    io_uring_cq_advance(&ring_, count);
}

// The completion source: injected faults change what the rest of the engine sees from here on.
void Ring::receive(unsigned index, int result) {
    const FaultSpec &faults = options_.faults;
    if (faults.enabled) {
        if (slots_[index].injected_error) result = -slots_[index].injected_error;
        if (fault_source_.strikes(faults.delay)) {
            const int64_t wait_ns = 1000 * static_cast<int64_t>(fault_source_.below(faults.max_delay_us) + 1);
            held_.push_back({index, result, monotonic_ns() + wait_ns});
            return;
        }
        if (fault_source_.strikes(faults.reorder)) {
            held_.push_back({index, result, monotonic_ns() + reorder_hold_ns});
            return;
        }
    }
    complete(index, result);
}

void Ring::release_held() {
    const int64_t now = held_.empty() ? 0 : monotonic_ns();
    for (size_t at = 0; at < held_.size();) {
        const Held held = held_[at];
        if (held.due_ns > now) {
            ++at;
            continue;
        }
        held_[at] = held_.back();
        held_.pop_back();
        complete(held.slot, held.result);
    }
}

void Ring::complete(unsigned index, int result) {
    {
        const std::lock_guard lock(stats_mutex_);
        ++stats_.requests;
    }
    Slot &slot = slots_[index];
    if (result > 0) return advance_or_stall(index, result);
    if (result == 0) return end_request(index, slot.operation->op == Op::read ? ENODATA : EIO);
    // EINTR: the transfer was interrupted before it began; EAGAIN: the kernel was short of something for a moment.
    if (result == -EINTR || result == -EAGAIN) return stall(index, -result);
    end_request(index, -result);
}

void Ring::advance_or_stall(unsigned index, uint64_t moved) {
    Slot &slot = slots_[index];
    if (moved >= slot.rest.size) {
        moved = slot.rest.size;
    } else {
        // Direct I/O must go on at an aligned place. The bytes after it are moved once more: both directions may.
        moved -= moved % options_.alignment;
        if (moved == 0) return stall(index, slot.operation->op == Op::read ? ENODATA : EIO);
    }
    {
        const std::lock_guard lock(stats_mutex_);
        (slot.operation->op == Op::read ? stats_.bytes_read : stats_.bytes_written) += moved;
        if (moved < slot.rest.size) ++stats_.retries;
    }
    slot.rest.offset += moved;
    slot.rest.address += moved;
    slot.rest.size -= moved;
    if (slot.rest.size == 0) return end_request(index, 0);
    slot.stalls = 0;
    prepare(index);
}

void Ring::stall(unsigned index, int error) {
    Slot &slot = slots_[index];
    if (++slot.stalls >= max_stalls) return end_request(index, error);
    {
        const std::lock_guard lock(stats_mutex_);
        ++stats_.retries;
    }
    prepare(index);
}

void Ring::end_request(unsigned index, int error) {
    Slot &slot = slots_[index];
    const auto operation = std::move(slot.operation);
    if (error && !operation->first_failure.error)
        operation->first_failure = {error, slot.rest.fd, slot.rest.offset, slot.rest.size, broken_ != 0};
    free_slots_.push_back(index);
    --operation->in_flight;
    if (operation->in_flight == 0 && operation->fully_issued()) end_operation(*operation);
}

void Ring::end_operation(Operation &operation) {
    outstanding_bytes_ -= operation.size_bytes;
    --outstanding_operations_;
    operation.finish();
}

// The ring itself is broken, as when a filter forbids io_uring_enter after the start: nothing can be issued any more, so
// everybody is told and nobody left waiting.
void Ring::fail_queued() {
    for (Queue *queue : {&reads_, &writes_}) {
        for (const auto &operation : *queue) {
            if (operation->fully_issued()) continue;
            operation->first_failure = {broken_, operation->segments[0].fd, operation->segments[0].offset, operation->size_bytes, true};
            if (operation->in_flight == 0) end_operation(*operation);
        }
        queue->clear();
    }
}

void Ring::break_down(int error) {
    let_go();
    broken_ = error;  // before anybody can see a failure that comes of it
    held_.clear();
    fail_queued();
    for (unsigned index = 0; index < slots_.size(); ++index)
        if (slots_[index].operation) end_request(index, error);
}

// Gives the ring up, and waits until no request touches memory any more: it may be used for something else then.
void Ring::let_go() {
    const bool had_requests = free_slots_.size() != slots_.size();
    witness_.forget_ring();
    io_uring_queue_exit(&ring_);
    ended_ = !had_requests || witness_.wait_until_released(patience_with_last_requests);
}

void Ring::account() {
    const int64_t now = monotonic_ns();
    const uint64_t elapsed = now - accounted_ns_;
    const uint64_t in_flight = slots_.size() - free_slots_.size();
    accounted_ns_ = now;
    if (!in_flight) return;
    const std::lock_guard lock(stats_mutex_);
    stats_.depth_ns += elapsed * in_flight;
    stats_.busy_ns += elapsed;
}
