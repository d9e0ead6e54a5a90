# nvme_offload.aio_native._native: files and the io_uring engine. Without liburing's header and static library everything but the
# ring is built, and aio_native says so when an engine is chosen.
nanobind_add_module(_native NB_STATIC NB_DOMAIN nvme_offload_aio ${PARTS}/aio_native/src/module.cpp ${PARTS}/aio_native/src/bind_file.cpp ${PARTS}/aio_native/src/file.cpp)
target_compile_options(_native PRIVATE -Wall -Wextra)

find_path(LIBURING_INCLUDE_DIR liburing.h)
find_library(LIBURING_LIBRARY NAMES liburing.a)
# An empty file in the header's place counts as absent: compile something before believing in it.
if(LIBURING_INCLUDE_DIR AND LIBURING_LIBRARY)
  include(CheckCXXSourceCompiles)
  set(CMAKE_REQUIRED_INCLUDES "${LIBURING_INCLUDE_DIR}")
  set(CMAKE_REQUIRED_LIBRARIES "${LIBURING_LIBRARY}")
  check_cxx_source_compiles(
    "#include <liburing.h>\nint main() { io_uring ring; io_uring_register_buffers_sparse(&ring, 1); return io_uring_queue_init(1, &ring, 0); }"
    LIBURING_WORKS)
endif()
if(LIBURING_WORKS)
  message(STATUS "liburing: ${LIBURING_LIBRARY}")
  target_sources(_native PRIVATE ${PARTS}/aio_native/src/uring_engine.cpp ${PARTS}/aio_native/src/ring.cpp
                 ${PARTS}/aio_native/src/operation.cpp ${PARTS}/aio_native/src/witness.cpp ${PARTS}/aio_native/src/bind_uring.cpp)
  target_include_directories(_native PRIVATE "${LIBURING_INCLUDE_DIR}")
  target_link_libraries(_native PRIVATE "${LIBURING_LIBRARY}")
  target_compile_definitions(_native PRIVATE HAVE_LIBURING=1)
else()
  message(WARNING "liburing 2.2 or newer not found: building without the C++ io_uring engine (pyuring or aiofiles serve instead)")
endif()
install(TARGETS _native LIBRARY DESTINATION nvme_offload/aio_native)
