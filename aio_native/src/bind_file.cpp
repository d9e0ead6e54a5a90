#include "bindings.hpp"
#include "file.hpp"

#include <system_error>

namespace nb = nanobind;

void bind_file(nb::module_ &m) {
    m.def(
        "direct_io_alignment",
        [](int fd) -> nb::object {
            DirectIo answer{};
            try {
                answer = direct_io_of(fd);
            } catch (const std::system_error &error) {
                errno = error.code().value();
                PyErr_SetFromErrno(PyExc_OSError);
                throw nb::python_error();
            }
            if (!answer.reported) return nb::none();
            return nb::make_tuple(answer.memory_alignment, answer.offset_alignment);
        },
        nb::arg("fd"));
}
