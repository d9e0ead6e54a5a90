#include "isa.hpp"

#include <stdexcept>

namespace optim {

extern const KernelTable kernels_portable;
#if defined(__x86_64__)
extern const KernelTable kernels_avx2;
extern const KernelTable kernels_avx512;
#endif

namespace {

struct Isa {
  const char* name;
  const KernelTable* table;
};

const std::vector<Isa>& isas() {
  static const std::vector<Isa> available = [] {
    std::vector<Isa> found = {{"portable", &kernels_portable}};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back({"avx2", &kernels_avx2});
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      found.push_back({"avx512", &kernels_avx512});
    }
#endif
    return found;
  }();
  return available;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : isas()) names.emplace_back(isa.name);
  return names;
}

const KernelTable& kernel_table(const std::string& isa) {
  std::string names;
  for (const Isa& each : isas()) {
    if (isa == each.name) return *each.table;
    names += names.empty() ? each.name : std::string(", ") + each.name;
  }
  throw std::invalid_argument("isa '" + isa + "' is not available on this machine; available: " + names);
}

}  // namespace optim
