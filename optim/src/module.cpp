// Thin bindings: docstrings, defaults and checks of tensors live in optim/kernels.py, types in optim/_kernels.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

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

  nb::class_<AdamWScalars>(m, "AdamWScalars")
      .def(
          "__init__",
          [](AdamWScalars* self, float decay, float beta1_complement, float beta2, float beta2_complement,
             float step_size, float bias_correction2_sqrt, float eps, float grad_scale) {
            new (self) AdamWScalars{decay,     beta1_complement,      beta2, beta2_complement,
                                    step_size, bias_correction2_sqrt, eps,   grad_scale};
          },
          nb::kw_only(), "decay"_a, "beta1_complement"_a, "beta2"_a, "beta2_complement"_a, "step_size"_a,
          "bias_correction2_sqrt"_a, "eps"_a, "grad_scale"_a)
      .def_ro("decay", &AdamWScalars::decay)
      .def_ro("beta1_complement", &AdamWScalars::beta1_complement)
      .def_ro("beta2", &AdamWScalars::beta2)
      .def_ro("beta2_complement", &AdamWScalars::beta2_complement)
      .def_ro("step_size", &AdamWScalars::step_size)
      .def_ro("bias_correction2_sqrt", &AdamWScalars::bias_correction2_sqrt)
      .def_ro("eps", &AdamWScalars::eps)
      .def_ro("grad_scale", &AdamWScalars::grad_scale);

  nb::class_<Segment>(m, "Segment")
      .def(
          "__init__",
          [](Segment* self, Address param, Address grad, Address master, Address exp_avg, Address exp_avg_sq,
             Address checksums, std::int64_t numel, int form, int grad_dtype, const AdamWScalars& scalars) {
            new (self) Segment{param,     grad,  master, exp_avg,    exp_avg_sq,
                               checksums, numel, form,   grad_dtype, scalars};
          },
          nb::kw_only(), "param"_a, "grad"_a, "master"_a, "exp_avg"_a, "exp_avg_sq"_a, "checksums"_a, "numel"_a,
          "form"_a, "grad_dtype"_a, "scalars"_a)
      .def_rw("param", &Segment::param)
      .def_rw("grad", &Segment::grad)
      .def_rw("master", &Segment::master)
      .def_rw("exp_avg", &Segment::exp_avg)
      .def_rw("exp_avg_sq", &Segment::exp_avg_sq)
      .def_rw("checksums", &Segment::checksums)
      .def_rw("numel", &Segment::numel)
      .def_rw("form", &Segment::form)
      .def_rw("grad_dtype", &Segment::grad_dtype)
      // A copy: a reference into the segment would change under whoever holds it.
      .def_prop_rw(
          "scalars", [](const Segment& self) { return self.scalars; },
          [](Segment& self, const AdamWScalars& scalars) { self.scalars = scalars; });
}

void bind_functions(nb::module_& m) {
  m.attr("BLOCK_NUMEL") = kBlockNumel;
  m.def("available_isas", &available_isas);
  // Segments are copied on the way in, so nobody changes one while the kernel runs without the GIL.
  m.def("adamw_update", &adamw_update, "pool"_a, "isa"_a, "segments"_a, ReleaseGil());
  m.def("split", &split, "pool"_a, "isa"_a, "src"_a, "hi"_a, "lo"_a, "numel"_a, ReleaseGil());
  m.def("join", &join, "pool"_a, "isa"_a, "hi"_a, "lo"_a, "dst"_a, "numel"_a, ReleaseGil());
  m.def("fp16_to_fp32", &fp16_to_fp32, "pool"_a, "isa"_a, "src"_a, "dst"_a, "numel"_a, ReleaseGil());
  m.def("fp32_to_fp16", &fp32_to_fp16, "pool"_a, "isa"_a, "src"_a, "dst"_a, "numel"_a, ReleaseGil());
  m.def("checksum", &checksum, "pool"_a, "isa"_a, "address"_a, "itemsize"_a, "numel"_a, "out"_a, ReleaseGil());
  m.def("grad_sq_sums", &grad_sq_sums, "pool"_a, "isa"_a, "address"_a, "grad_dtype"_a, "numel"_a, "out"_a,
        ReleaseGil());
  m.def("ordered_sum", &ordered_sum, "address"_a, "numel"_a, ReleaseGil());
}

}  // namespace

NB_MODULE(_kernels, m) {
  // Python does not promise to free what a module still names when it ends: no leak of ours, and no news to a user.
  nb::set_leak_warnings(false);
  bind_types(m);
  bind_functions(m);
}
