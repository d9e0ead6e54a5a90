// Thin bindings: docstrings, defaults and checks of tensors live in optim/kernels.py, types in optim/_kernels.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "isa.hpp"
#include "kernels.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace optim;
using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

namespace {

void bind_types(nb::module_& m) {
  nb::class_<ThreadPool>(m, "ThreadPool")
      .def(nb::init<int>(), "num_threads"_a)
      .def_prop_ro("num_threads", &ThreadPool::num_threads)
      .def_prop_ro("num_workers", &ThreadPool::num_workers, ReleaseGil())
      .def("end_workers", &ThreadPool::end_workers, ReleaseGil());

  nb::class_<LoggedStep>(m, "LoggedStep")
      .def(
          "__init__",
          [](LoggedStep* self, Address entry, std::int64_t entry_bytes, Address offsets, int grad_dtype, float grad_scale,
             std::vector<float> scalars) {
            new (self) LoggedStep{entry, entry_bytes, offsets, grad_dtype, grad_scale, std::move(scalars)};
          },
          nb::kw_only(), "entry"_a, "entry_bytes"_a, "offsets"_a, "grad_dtype"_a, "grad_scale"_a, "scalars"_a)
      .def_rw("entry", &LoggedStep::entry)
      .def_rw("entry_bytes", &LoggedStep::entry_bytes)
      .def_rw("offsets", &LoggedStep::offsets)
      .def_rw("grad_dtype", &LoggedStep::grad_dtype)
      .def_rw("grad_scale", &LoggedStep::grad_scale)
      .def_rw("scalars", &LoggedStep::scalars);

  nb::class_<Origin>(m, "Origin")
      .def(nb::init<std::uint32_t, std::int64_t, std::int64_t, std::vector<std::int64_t>, std::vector<std::int64_t>,
                    std::uint32_t>(),
           "param"_a, "start"_a, "offset"_a, "sizes"_a, "strides"_a, "block"_a);

  nb::class_<Segment>(m, "Segment")
      .def(
          "__init__",
          [](Segment* self, Address param, Address grad, Address master, std::vector<Address> states,
             Address checksums, std::int64_t numel, int form, int grad_dtype, int rule, float grad_scale,
             std::vector<float> scalars, std::vector<LoggedStep> log, Address base, Address offsets, Address tail,
             Address marks, Origin origin) {
            new (self) Segment{param,
                               grad,
                               master,
                               std::move(states),
                               checksums,
                               numel,
                               form,
                               grad_dtype,
                               rule,
                               grad_scale,
                               std::move(scalars),
                               std::move(log),
                               base,
                               offsets,
                               tail,
                               marks,
                               std::move(origin)};
          },
          nb::kw_only(), "param"_a, "grad"_a, "master"_a, "states"_a, "checksums"_a, "numel"_a, "form"_a,
          "grad_dtype"_a, "rule"_a, "grad_scale"_a, "scalars"_a, "log"_a, "base"_a, "offsets"_a,
          "tail"_a, "marks"_a, "origin"_a)
      .def_rw("param", &Segment::param)
      .def_rw("grad", &Segment::grad)
      .def_rw("master", &Segment::master)
      .def_rw("states", &Segment::states)
      .def_rw("checksums", &Segment::checksums)
      .def_rw("numel", &Segment::numel)
      .def_rw("form", &Segment::form)
      .def_rw("grad_dtype", &Segment::grad_dtype)
      .def_rw("rule", &Segment::rule)
      .def_rw("grad_scale", &Segment::grad_scale)
      .def_rw("scalars", &Segment::scalars)
      .def_rw("log", &Segment::log)
      .def_rw("base", &Segment::base)
      .def_rw("offsets", &Segment::offsets)
      .def_rw("tail", &Segment::tail)
      .def_rw("marks", &Segment::marks);

  nb::class_<SummedMemory>(m, "SummedMemory")
      .def(nb::init<Address, std::int64_t, Address>(), nb::kw_only(), "address"_a, "size_bytes"_a, "sums"_a);
}

// Says what is new in a step. Neighbours that have the same scalars, the very object, have them read once.
void renew(const std::vector<Segment*>& segments, const std::vector<Address>& params, const std::vector<Address>& grads,
           const std::vector<int>& grad_dtypes, const std::vector<nb::handle>& scalars) {
  const std::size_t count = segments.size();
  if (params.size() != count || grads.size() != count || grad_dtypes.size() != count || scalars.size() != count) {
    throw std::invalid_argument("as many of each are needed as segments");
  }
  float grad_scale = 0.0f;
  std::vector<float> of_kernel;
  for (std::size_t i = 0; i < count; ++i) {
    if (i == 0 || !scalars[i].is(scalars[i - 1])) {
      grad_scale = nb::cast<float>(scalars[i].attr("grad_scale"));
      of_kernel = nb::cast<std::vector<float>>(scalars[i].attr("of_kernel"));
    }
    if (segments[i] == nullptr) throw std::invalid_argument("a segment is None");
    Segment& segment = *segments[i];
    segment.param = params[i];
    segment.grad = grads[i];
    segment.grad_dtype = grad_dtypes[i];
    segment.grad_scale = grad_scale;
    segment.scalars = of_kernel;
  }
}

void bind_functions(nb::module_& m) {
  m.attr("TILE_NUMEL") = kTileNumel;
  m.def("available_isas", &available_isas);
  m.def("rules", &rules);
  m.def("renew", &renew, "segments"_a, "params"_a, "grads"_a, "grad_dtypes"_a, "scalars"_a);
  // Segments are not copied: who calls leaves them as they are while the kernel runs without the GIL.
  m.def(
      "update",
      [](ThreadPool& pool, const std::string& isa, const std::vector<const Segment*>& segments, Address entry,
         std::int64_t entry_bytes, const std::vector<SummedMemory>& summed) {
        const Updated updated = update(pool, isa, segments, LogEntry{entry, entry_bytes}, summed);
        return std::make_pair(updated.num_changed, updated.log_bytes);
      },
      "pool"_a, "isa"_a, "segments"_a, "entry"_a, "entry_bytes"_a, "summed"_a, ReleaseGil());
  m.def("split", &split, "pool"_a, "isa"_a, "src"_a, "hi"_a, "lo"_a, "numel"_a, ReleaseGil());
  m.def("join", &join, "pool"_a, "isa"_a, "hi"_a, "lo"_a, "dst"_a, "numel"_a, ReleaseGil());
  m.def("fp16_to_fp32", &fp16_to_fp32, "pool"_a, "isa"_a, "src"_a, "dst"_a, "numel"_a, ReleaseGil());
  m.def("fp32_to_fp16", &fp32_to_fp16, "pool"_a, "isa"_a, "src"_a, "dst"_a, "numel"_a, ReleaseGil());
  m.def("checksum", &checksum, "pool"_a, "isa"_a, "address"_a, "itemsize"_a, "numel"_a, "out"_a, ReleaseGil());
  m.def("grad_sq_sums", &grad_sq_sums, "pool"_a, "isa"_a, "addresses"_a, "grad_dtypes"_a, "numels"_a, "out"_a,
        ReleaseGil());
  m.def("mark_changed", &mark_changed, "pool"_a, "isa"_a, "before"_a, "after"_a, "numel"_a, "marks"_a, ReleaseGil());
  m.def("num_marked", &num_marked, "isa"_a, "marks"_a, "numel"_a, ReleaseGil());
  m.def("marked", &marked, "pool"_a, "isa"_a, "marks"_a, "numel"_a, "first"_a, "source"_a, "indices"_a, "index_size"_a,
        "values"_a, "count"_a, ReleaseGil());
  m.def("ordered_sum", &ordered_sum, "address"_a, "numel"_a, ReleaseGil());
}

}  // namespace

NB_MODULE(_kernels, m) {
  // Python does not promise to free what a module still names when it ends: no leak of ours, and no news to a user.
  nb::set_leak_warnings(false);
  bind_types(m);
  bind_functions(m);
}
