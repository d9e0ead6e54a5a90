# nvme_offload.optim._kernels: the optimizer kernels. loops.cpp is compiled once per ISA; isa.cpp chooses among them at run time.
# A domain of its own: nanobind's settings are shared by all modules of a domain.
nanobind_add_module(_kernels NB_STATIC NB_DOMAIN nvme_offload_optim ${PARTS}/optim/src/module.cpp ${PARTS}/optim/src/kernels.cpp
                    ${PARTS}/optim/src/isa.cpp ${PARTS}/optim/src/thread_pool.cpp)
target_compile_options(_kernels PRIVATE -Wall -Wextra)
find_package(Threads REQUIRED)
target_link_libraries(_kernels PRIVATE Threads::Threads)

set(KERNEL_ISAS portable)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  list(APPEND KERNEL_ISAS avx2 avx512)
endif()
set(KERNEL_FLAGS_avx2 -mavx2 -mfma)
set(KERNEL_FLAGS_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mprefer-vector-width=512)

foreach(isa IN LISTS KERNEL_ISAS)
  add_library(_kernels_${isa} OBJECT ${PARTS}/optim/src/loops.cpp)
  set_target_properties(_kernels_${isa} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)
  target_compile_definitions(_kernels_${isa} PRIVATE KERNEL_ISA=${isa})
  # A contraction (a*b + c in one rounding) would give each ISA its own bits. The other two flags change no value: they
  # only say that nobody looks at errno or at the exception flags, without which sqrt and selections stay scalar.
  target_compile_options(_kernels_${isa} PRIVATE -Wall -Wextra -O3 -ffp-contract=off -fno-math-errno
                         -fno-trapping-math ${KERNEL_FLAGS_${isa}})
  target_sources(_kernels PRIVATE $<TARGET_OBJECTS:_kernels_${isa}>)
endforeach()
install(TARGETS _kernels LIBRARY DESTINATION nvme_offload/optim)
