#include "bindings.hpp"
#include "uring_engine.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <system_error>
#include <tuple>

namespace nb = nanobind;
using namespace nb::literals;
using SegmentTuple = std::tuple<int, uint64_t, uint64_t, uint64_t>;
using Clock = std::chrono::steady_clock;

namespace {

// Long enough to cost nothing, short enough that Ctrl-C feels immediate.
constexpr std::chrono::nanoseconds signal_check_interval = std::chrono::milliseconds(50);

bool wait_for_operation(const Operation &operation, std::optional<double> seconds) {
    const auto start = Clock::now();
    while (!operation.done()) {
        auto slice = signal_check_interval;
        if (seconds) {
            const auto left = std::chrono::duration<double>(*seconds) - (Clock::now() - start);
            if (left.count() <= 0) return false;
            // Compared first: infinity has no number of nanoseconds.
            if (left < slice) slice = std::chrono::duration_cast<std::chrono::nanoseconds>(left) + std::chrono::nanoseconds(1);
        }
        {
            nb::gil_scoped_release released;
            operation.wait_for(slice);
        }
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
    return true;
}

std::shared_ptr<Operation> submit(UringEngine &engine, int op, const std::vector<SegmentTuple> &tuples) {
    std::vector<Segment> segments;
    segments.reserve(tuples.size());
    for (const auto &[fd, offset, address, size] : tuples) segments.push_back({fd, offset, address, size});
    return engine.submit(static_cast<Op>(op), std::move(segments));
}

nb::object failure_of(const Operation &operation) {
    const Failure failure = operation.failure();
    if (!failure.error) return nb::none();
    return nb::make_tuple(failure.error, failure.fd, failure.offset, failure.size, failure.engine_lost);
}

std::tuple<int, int> register_resources(UringEngine &engine, const std::vector<std::tuple<uint64_t, uint64_t>> &regions,
                                        const std::vector<int> &fds) {
    std::vector<iovec> buffers;
    for (const auto &[address, size] : regions) buffers.push_back({reinterpret_cast<void *>(address), size});
    const RegistrationResult result = engine.register_resources(buffers, fds);
    return {result.buffers_error, result.files_error};
}

std::unique_ptr<UringEngine> open_engine(unsigned queue_depth, uint64_t block_size, uint64_t alignment, unsigned rings,
                                         uint64_t max_operations, bool no_io, const FaultSpec *faults) {
    RingOptions options{queue_depth, block_size, alignment, no_io, {}};
    if (faults) options.faults = *faults;
    try {
        return std::make_unique<UringEngine>(options, rings, max_operations);
    } catch (const std::system_error &error) {
        errno = error.code().value();
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }
}

}  // namespace

void bind_uring(nb::module_ &m) {
    nb::class_<FaultSpec>(m, "FaultSpec")
        .def(
            "__init__",
            [](FaultSpec *self, uint64_t seed, double short_transfer, double eintr, double eagain, double eio, double enospc,
               double delay, double reorder, uint32_t max_delay_us) {
                new (self) FaultSpec{seed, short_transfer, eintr, eagain, eio, enospc, delay, reorder, max_delay_us, true};
            },
            nb::kw_only(), "seed"_a, "short_transfer"_a, "eintr"_a, "eagain"_a, "eio"_a, "enospc"_a, "delay"_a, "reorder"_a,
            "max_delay_us"_a);

    nb::class_<Operation>(m, "Operation")
        .def_prop_ro("size_bytes", [](const Operation &self) { return self.size_bytes; })
        .def_prop_ro("submitted_ns", [](const Operation &self) { return self.submitted_ns; })
        .def_prop_ro("completed_ns", &Operation::completed_ns)
        .def_prop_ro("failure", failure_of)
        .def("done", &Operation::done)
        .def("wait", wait_for_operation, "timeout"_a = nb::none())
        .def("add_waker", &Operation::add_waker, "eventfd"_a, nb::call_guard<nb::gil_scoped_release>());

    nb::class_<RingStats>(m, "RingStats")
        .def_ro("requests", &RingStats::requests)
        .def_ro("retries", &RingStats::retries)
        .def_ro("bytes_read", &RingStats::bytes_read)
        .def_ro("bytes_written", &RingStats::bytes_written)
        .def_ro("depth_ns", &RingStats::depth_ns)
        .def_ro("busy_ns", &RingStats::busy_ns)
        .def_ro("cpu_ns", &RingStats::cpu_ns);

    nb::class_<UringEngine>(m, "UringEngine")
        .def(nb::new_(&open_engine), nb::kw_only(), "queue_depth"_a, "block_size"_a, "alignment"_a, "rings"_a, "max_operations"_a,
             "no_io"_a, "faults"_a.none())
        .def("submit", submit, "op"_a, "segments"_a)
        .def("register", register_resources, "buffers"_a, "fds"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("under_way", &UringEngine::under_way)
        .def("breakdown",
             [](const UringEngine &self) {
                 const Breakdown breakdown = self.breakdown();
                 return std::make_tuple(breakdown.error, breakdown.ended);
             })
        .def("stats", &UringEngine::stats)
        .def("close", &UringEngine::close, nb::call_guard<nb::gil_scoped_release>());
}
