// aio_native._native: thin bindings, one function per topic. Docstrings and types live in Python.
#include "bindings.hpp"

NB_MODULE(_native, m) {
    // An engine that is alive when the interpreter ends is no leak: its destructor has nothing left to do.
    nanobind::set_leak_warnings(false);
    bind_file(m);
#ifdef HAVE_LIBURING
    bind_uring(m);
#endif
}
