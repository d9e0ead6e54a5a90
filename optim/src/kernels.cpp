#include "kernels.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "isa.hpp"

namespace optim {
namespace {

constexpr std::size_t kParamSize[kNumMasterForms] = {2, 2, 4};
constexpr std::size_t kMasterSize[kNumMasterForms] = {2, 4, 0};
constexpr std::size_t kGradSize[kNumGradDtypes] = {4, 2, 2};

template <class T>
T* pointer(Address address, std::size_t index = 0) {
  return reinterpret_cast<T*>(address) + index;
}

void* bytes_at(Address address, std::size_t offset) { return reinterpret_cast<void*>(address + offset); }

std::size_t num_tiles(std::int64_t numel) {
  return (static_cast<std::size_t>(numel) + kTileNumel - 1) / kTileNumel;
}

// The elements of one tile within a run: [first, first + numel).
struct Tile {
  Tile(std::size_t index, std::int64_t run_numel)
      : first(index * kTileNumel), numel(std::min(kTileNumel, static_cast<std::size_t>(run_numel) - first)) {}
  std::size_t first, numel;
};

void check_numel(std::int64_t numel) {
  if (numel < 0) throw std::invalid_argument("numel is " + std::to_string(numel) + "; it cannot be negative");
}

void check_choice(const char* name, int value, int num_choices) {
  if (value < 0 || value >= num_choices) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; it must be 0 to " +
                                std::to_string(num_choices - 1));
  }
}

void check_address(const char* name, Address address, std::size_t itemsize, std::int64_t numel) {
  if (numel == 0 || itemsize == 0) return;
  if (address == 0) throw std::invalid_argument(std::string(name) + " is a null address");
  if (address % itemsize != 0) {
    throw std::invalid_argument(std::string(name) + " is not aligned to its " + std::to_string(itemsize) +
                                "-byte elements");
  }
}

void check_count(const std::string& rule, const char* what, std::size_t given, std::size_t wanted) {
  if (given == wanted) return;
  throw std::invalid_argument(rule + " takes " + std::to_string(wanted) + " " + what + ", not " +
                              std::to_string(given));
}

void check(const Segment& s, const KernelTable& kernels) {
  check_numel(s.numel);
  check_choice("rule", s.rule, static_cast<int>(kernels.num_rules));
  const RuleKernels& rule = kernels.rules[s.rule];
  check_count(rule.name, "states", s.states.size(), rule.num_states);
  check_count(rule.name, "scalars", s.scalars.size(), rule.num_scalars);
  check_choice("form", s.form, kNumMasterForms);
  check_choice("grad_dtype", s.grad_dtype, kNumGradDtypes);
  check_address("param", s.param, kParamSize[s.form], s.numel);
  check_address("grad", s.grad, kGradSize[s.grad_dtype], s.numel);
  check_address("master", s.master, kMasterSize[s.form], s.numel);
  for (const Address state : s.states) check_address("state", state, sizeof(float), s.numel);
  if (s.checksums != 0) check_address("checksums", s.checksums, sizeof(std::uint64_t), s.numel);
}

void master_from_param(const KernelTable& kernels, const Segment& s, const Tile& tile) {
  if (s.form == kSplit) {
    std::memset(pointer<std::uint16_t>(s.master, tile.first), 0, tile.numel * sizeof(std::uint16_t));
  } else if (s.form == kFull) {
    kernels.fp16_to_fp32(pointer<const std::uint16_t>(s.param, tile.first), pointer<float>(s.master, tile.first),
                         tile.numel);
  }
}

// Returns whether the parameter was found changed.
bool update_tile(const KernelTable& kernels, const Segment& s, Update update, std::size_t index) {
  const Tile tile(index, s.numel);
  const std::size_t param_bytes = tile.numel * kParamSize[s.form];
  void* param = bytes_at(s.param, tile.first * kParamSize[s.form]);
  auto* stored = s.checksums ? pointer<std::uint64_t>(s.checksums, index) : nullptr;

  const bool changed = stored && kernels.checksum(param, param_bytes) != *stored;
  if (changed) master_from_param(kernels, s, tile);
  float* states[kMaxStates] = {};
  for (std::size_t k = 0; k < s.states.size(); ++k) states[k] = pointer<float>(s.states[k], tile.first);
  update(param, bytes_at(s.master, tile.first * kMasterSize[s.form]),
         bytes_at(s.grad, tile.first * kGradSize[s.grad_dtype]), states, tile.numel, s.grad_scale,
         s.scalars.data());
  if (stored) *stored = kernels.checksum(param, param_bytes);
  return changed;
}

}  // namespace

std::vector<std::string> rules() {
  const KernelTable& kernels = kernel_table(available_isas().front());
  std::vector<std::string> names;
  for (std::size_t k = 0; k < kernels.num_rules; ++k) names.emplace_back(kernels.rules[k].name);
  return names;
}

std::vector<std::int64_t> update(ThreadPool& pool, const std::string& isa, const std::vector<Segment>& segments) {
  const KernelTable& kernels = kernel_table(isa);
  // Tiles of all segments in one row, so that many small segments share the threads as well as one large segment does.
  std::vector<std::size_t> first_block = {0};
  std::vector<Update> updates;
  for (const Segment& s : segments) {
    if (s.grad != 0) check(s, kernels);
    updates.push_back(s.grad != 0 ? kernels.rules[s.rule].update[s.form][s.grad_dtype] : nullptr);
    first_block.push_back(first_block.back() + (s.grad != 0 ? num_tiles(s.numel) : 0));
  }
  std::vector<std::uint8_t> changed(first_block.back());
  pool.parallel_for(changed.size(), [&](std::size_t i) {
    const auto after = std::upper_bound(first_block.begin(), first_block.end(), i);
    const auto segment = static_cast<std::size_t>(after - first_block.begin()) - 1;
    changed[i] = update_tile(kernels, segments[segment], updates[segment], i - first_block[segment]);
  });
  std::vector<std::int64_t> num_changed;
  for (std::size_t k = 0; k < segments.size(); ++k) {
    const auto row = changed.begin();
    num_changed.push_back(std::accumulate(row + first_block[k], row + first_block[k + 1], std::int64_t{0}));
  }
  return num_changed;
}

void split(ThreadPool& pool, const std::string& isa, Address src, Address hi, Address lo, std::int64_t numel) {
  const KernelTable& kernels = kernel_table(isa);
  check_numel(numel);
  check_address("src", src, sizeof(float), numel);
  check_address("hi", hi, sizeof(std::uint16_t), numel);
  check_address("lo", lo, sizeof(std::uint16_t), numel);
  pool.parallel_for(num_tiles(numel), [&](std::size_t i) {
    const Tile tile(i, numel);
    kernels.split(pointer<const float>(src, tile.first), pointer<std::uint16_t>(hi, tile.first),
                  pointer<std::uint16_t>(lo, tile.first), tile.numel);
  });
}

void join(ThreadPool& pool, const std::string& isa, Address hi, Address lo, Address dst, std::int64_t numel) {
  const KernelTable& kernels = kernel_table(isa);
  check_numel(numel);
  check_address("hi", hi, sizeof(std::uint16_t), numel);
  check_address("lo", lo, sizeof(std::uint16_t), numel);
  check_address("dst", dst, sizeof(float), numel);
  pool.parallel_for(num_tiles(numel), [&](std::size_t i) {
    const Tile tile(i, numel);
    kernels.join(pointer<const std::uint16_t>(hi, tile.first), pointer<const std::uint16_t>(lo, tile.first),
                 pointer<float>(dst, tile.first), tile.numel);
  });
}

void fp16_to_fp32(ThreadPool& pool, const std::string& isa, Address src, Address dst, std::int64_t numel) {
  const KernelTable& kernels = kernel_table(isa);
  check_numel(numel);
  check_address("src", src, sizeof(std::uint16_t), numel);
  check_address("dst", dst, sizeof(float), numel);
  pool.parallel_for(num_tiles(numel), [&](std::size_t i) {
    const Tile tile(i, numel);
    kernels.fp16_to_fp32(pointer<const std::uint16_t>(src, tile.first), pointer<float>(dst, tile.first),
                         tile.numel);
  });
}

void fp32_to_fp16(ThreadPool& pool, const std::string& isa, Address src, Address dst, std::int64_t numel) {
  const KernelTable& kernels = kernel_table(isa);
  check_numel(numel);
  check_address("src", src, sizeof(float), numel);
  check_address("dst", dst, sizeof(std::uint16_t), numel);
  pool.parallel_for(num_tiles(numel), [&](std::size_t i) {
    const Tile tile(i, numel);
    kernels.fp32_to_fp16(pointer<const float>(src, tile.first), pointer<std::uint16_t>(dst, tile.first),
                         tile.numel);
  });
}

void checksum(ThreadPool& pool, const std::string& isa, Address address, int itemsize, std::int64_t numel,
              Address out) {
  const KernelTable& kernels = kernel_table(isa);
  check_numel(numel);
  if (itemsize < 1) throw std::invalid_argument("itemsize is " + std::to_string(itemsize) + "; at least 1");
  const auto size = static_cast<std::size_t>(itemsize);
  check_address("address", address, 1, numel);
  check_address("out", out, sizeof(std::uint64_t), numel);
  pool.parallel_for(num_tiles(numel), [&](std::size_t i) {
    const Tile tile(i, numel);
    *pointer<std::uint64_t>(out, i) = kernels.checksum(bytes_at(address, tile.first * size), tile.numel * size);
  });
}

void grad_sq_sums(ThreadPool& pool, const std::string& isa, Address address, int grad_dtype, std::int64_t numel,
                  Address out) {
  const KernelTable& kernels = kernel_table(isa);
  check_numel(numel);
  check_choice("grad_dtype", grad_dtype, kNumGradDtypes);
  check_address("address", address, kGradSize[grad_dtype], numel);
  check_address("out", out, sizeof(double), numel);
  pool.parallel_for(num_tiles(numel), [&](std::size_t i) {
    const Tile tile(i, numel);
    *pointer<double>(out, i) =
        kernels.sq_sum[grad_dtype](bytes_at(address, tile.first * kGradSize[grad_dtype]), tile.numel);
  });
}

double ordered_sum(Address address, std::int64_t numel) {
  check_numel(numel);
  check_address("address", address, sizeof(double), numel);
  const auto* values = pointer<const double>(address);
  return std::accumulate(values, values + numel, 0.0);
}

}  // namespace optim
