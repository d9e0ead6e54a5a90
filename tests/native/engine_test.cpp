// What tests/support/engine_conformance.py asks of every engine, asked of the C++ one where sanitizers can see it.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "uring_engine.hpp"

namespace {

using namespace std::chrono_literals;
constexpr uint64_t block = 16384;

// A file of its own, gone when closed.
struct File {
    int fd;
    explicit File(uint64_t size) {
        std::string path = "engine_test.XXXXXX";
        fd = mkstemp(path.data());
        CHECK(fd >= 0);
        unlink(path.c_str());
        CHECK(ftruncate(fd, static_cast<off_t>(size)) == 0);
    }
    ~File() { close(fd); }
};

RingOptions options(FaultSpec faults = {}) {
    return {8, block, 1, false, faults};
}

std::vector<unsigned char> pattern(uint64_t size, unsigned seed) {
    std::vector<unsigned char> bytes(size);
    for (uint64_t at = 0; at < size; ++at) bytes[at] = static_cast<unsigned char>(at * 31 + at / 251 + seed);
    return bytes;
}

uint64_t address(const std::vector<unsigned char> &bytes) {
    return reinterpret_cast<uint64_t>(bytes.data());
}

std::shared_ptr<Operation> run(UringEngine &engine, Op op, std::vector<Segment> segments) {
    auto operation = engine.submit(op, std::move(segments));
    CHECK(operation);
    CHECK(operation->wait_for(30s));
    return operation;
}

void moves_the_right_bytes() {
    UringEngine engine(options(), 2, 64);
    File a(40 * block), b(40 * block);
    for (const uint64_t size : {uint64_t{1}, uint64_t{4097}, block, 7 * block + 13}) {
        const auto first = pattern(size, 1), second = pattern(size, 2);
        run(engine, Op::write, {{a.fd, 5, address(first), size}, {b.fd, 77, address(second), size}});
        std::vector<unsigned char> back(2 * size);
        const auto operation =
            run(engine, Op::read, {{a.fd, 5, address(back), size}, {b.fd, 77, address(back) + size, size}});
        CHECK(operation->failure().error == 0);
        CHECK(std::memcmp(back.data(), first.data(), size) == 0);
        CHECK(std::memcmp(back.data() + size, second.data(), size) == 0);
    }
}

void reports_the_end_of_a_file_and_goes_on() {
    UringEngine engine(options(), 1, 64);
    File file(2 * block);
    std::vector<unsigned char> memory(4 * block);
    const auto failed = run(engine, Op::read, {{file.fd, 0, address(memory), 4 * block}});
    CHECK(failed->failure().error == ENODATA);
    CHECK(failed->failure().offset == 2 * block);
    CHECK(run(engine, Op::read, {{file.fd, 0, address(memory), block}})->failure().error == 0);
}

void survives_faults(uint64_t seed) {
    FaultSpec faults{seed, 0.3, 0.2, 0.2, 0.01, 0.01, 0.1, 0.2, 300, true};
    UringEngine engine(options(faults), 2, 64);
    File file(64 * block);
    std::vector<std::vector<unsigned char>> sources;
    for (unsigned number = 0; number < 16; ++number) sources.push_back(pattern(3 * block + number, number));
    std::vector<std::shared_ptr<Operation>> writes;
    for (unsigned number = 0; number < 16; ++number) {
        const auto &source = sources[number];
        writes.push_back(engine.submit(Op::write, {{file.fd, number * 4 * block, address(source), source.size()}}));
    }
    for (unsigned number = 0; number < 16; ++number) {
        CHECK(writes[number]->wait_for(30s));
        const int error = writes[number]->failure().error;
        CHECK(error == 0 || error == EIO || error == ENOSPC);
        if (error) continue;
        std::vector<unsigned char> back(sources[number].size());
        const auto read = run(engine, Op::read, {{file.fd, number * 4 * block, address(back), back.size()}});
        CHECK(read->failure().error == 0 || read->failure().error == EIO);
        if (!read->failure().error) CHECK(back == sources[number]);
    }
}

void serves_many_threads_while_it_is_closed() {
    UringEngine engine(options(), 2, 8);
    File file(64 * block);
    std::vector<std::thread> threads;
    for (unsigned number = 0; number < 4; ++number)
        threads.emplace_back([&engine, &file, number] {
            auto memory = pattern(2 * block, number);
            try {
                for (unsigned turn = 0; turn < 500; ++turn) {
                    const Op op = turn % 2 ? Op::read : Op::write;
                    const auto operation = engine.submit(op, {{file.fd, number * 4 * block, address(memory), 2 * block}});
                    if (operation) CHECK(operation->wait_for(30s));
                }
            } catch (const std::logic_error &) {  // closed meanwhile
            }
        });
    std::this_thread::sleep_for(30ms);
    for (unsigned number = 0; number < 3; ++number) threads.emplace_back([&engine] { engine.close(); });
    engine.close();
    for (auto &thread : threads) thread.join();
    CHECK(engine.stats().bytes_written > 0);
}

void wakes_through_a_descriptor_that_its_owner_closed() {
    UringEngine engine(options({1, 0, 0, 0, 0, 0, 1.0, 0, 20000, true}), 1, 8);
    File file(block);
    auto memory = pattern(block, 1);
    const int bell = eventfd(0, EFD_NONBLOCK), kept = dup(bell);
    const auto operation = engine.submit(Op::write, {{file.fd, 0, address(memory), block}});
    operation->add_waker(bell);
    close(bell);
    CHECK(operation->wait_for(30s));
    uint64_t count = 0;
    CHECK(eventfd_read(kept, &count) == 0 && count == 1);
    operation->add_waker(kept);
    CHECK(eventfd_read(kept, &count) == 0 && count == 1);
    close(kept);
}

void uses_registered_memory_and_files() {
    UringEngine engine(options(), 2, 8);
    File file(8 * block);
    std::vector<unsigned char> memory(8 * block + 4096);
    const iovec region{memory.data(), memory.size()};
    const RegistrationResult result = engine.register_resources({region}, {file.fd});
    CHECK(result.files_error == 0);
    const auto content = pattern(8 * block, 9);
    std::memcpy(memory.data(), content.data(), content.size());
    CHECK(run(engine, Op::write, {{file.fd, 0, address(memory), 8 * block}})->failure().error == 0);
    std::memset(memory.data(), 0, memory.size());
    CHECK(run(engine, Op::read, {{file.fd, 0, address(memory), 8 * block}})->failure().error == 0);
    CHECK(std::memcmp(memory.data(), content.data(), content.size()) == 0);
    engine.register_resources({}, {});
    CHECK(run(engine, Op::read, {{file.fd, 0, address(memory), 8 * block}})->failure().error == 0);
}

void leaves_a_forked_child_alone() {
    UringEngine engine(options(), 1, 8);
    File file(block);
    auto memory = pattern(block, 3);
    const pid_t child = fork();
    if (child == 0) {
        int outcome = 1;
        try {
            engine.submit(Op::read, {{file.fd, 0, address(memory), block}});
        } catch (const std::logic_error &) {
            outcome = 0;
        }
        engine.close();
        _exit(outcome);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(run(engine, Op::write, {{file.fd, 0, address(memory), block}})->failure().error == 0);
}

// As a ring that breaks finds out when the kernel has finished its requests: also while a forked child lives.
void knows_when_a_ring_is_gone() {
    io_uring ring{};
    CHECK(io_uring_queue_init(4, &ring, 0) == 0);
    io_uring_ring_dontfork(&ring);
    Witness witness;
    CHECK(!witness.wait_until_released(0ms));  // nothing was registered: nobody knows
    for (int turn = 0; turn < 2; ++turn) {
        if (turn) CHECK(io_uring_unregister_files(&ring) == 0);
        const int end = witness.renew(ring.ring_fd);
        CHECK(io_uring_register_files(&ring, &end, 1) == 0);
        witness.handed_over(true);
    }
    int stay[2];
    CHECK(pipe(stay) == 0);
    const pid_t child = fork();
    if (child == 0) {
        close(stay[1]);
        char nothing = 0;
        _exit(static_cast<int>(read(stay[0], &nothing, 1)));
    }
    CHECK(!witness.wait_until_released(20ms));
    witness.forget_ring();
    io_uring_queue_exit(&ring);
    CHECK(witness.wait_until_released(30s));
    close(stay[1]);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close(stay[0]);
}

}  // namespace

void test_engine() {
    moves_the_right_bytes();
    reports_the_end_of_a_file_and_goes_on();
    for (uint64_t seed = 0; seed < 50; ++seed) survives_faults(seed);
    serves_many_threads_while_it_is_closed();
    wakes_through_a_descriptor_that_its_owner_closed();
    uses_registered_memory_and_files();
    leaves_a_forked_child_alone();
    knows_when_a_ring_is_gone();
}
