// The kernels as Python calls them: whole tensors and subgroups, checked, cut into tiles and shared out over a pool.
// Addresses are integers as torch's data_ptr() gives them; the caller keeps the memory alive. Every function throws
// std::invalid_argument for arguments that cannot be right, before it has touched anything.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "kernel_table.hpp"
#include "thread_pool.hpp"

namespace optim {

using Address = std::uintptr_t;

// Names of the update rules that have kernels, in the order of Segment::rule.
std::vector<std::string> rules();

// A run of elements of one parameter, starting at a multiple of kTileNumel within it.
struct Segment {
  Address param;   // kSplit: bf16, the upper half; kFull: fp16; kItself: fp32
  Address grad;    // of grad_dtype, or 0: no gradient, the segment is left as it is
  Address master;  // kSplit: uint16, the lower half; kFull: fp32; kItself: 0
  std::vector<Address> states;  // fp32, those of the rule in its order
  Address checksums;  // uint64 per tile, of the parameter as the last update left it; or 0: changes are not looked for
  std::int64_t numel;
  int form;        // MasterForm
  int grad_dtype;  // GradDtype
  int rule;        // index in rules()
  float grad_scale;
  std::vector<float> scalars;  // those of the rule in its order
};

// One optimizer step for every segment. Returns, per segment, the number of tiles whose parameter somebody changed since
// the checksums were taken: there the parameter as found is the truth, and the master is made from it before the update.
std::vector<std::int64_t> update(ThreadPool& pool, const std::string& isa, const std::vector<Segment>& segments);

void split(ThreadPool& pool, const std::string& isa, Address src, Address hi, Address lo, std::int64_t numel);
void join(ThreadPool& pool, const std::string& isa, Address hi, Address lo, Address dst, std::int64_t numel);
void fp16_to_fp32(ThreadPool& pool, const std::string& isa, Address src, Address dst, std::int64_t numel);
void fp32_to_fp16(ThreadPool& pool, const std::string& isa, Address src, Address dst, std::int64_t numel);

// out: uint64 per tile of kTileNumel elements.
void checksum(ThreadPool& pool, const std::string& isa, Address address, int itemsize, std::int64_t numel,
              Address out);

// out: fp64 per tile, the sum of squares of its elements.
void grad_sq_sums(ThreadPool& pool, const std::string& isa, Address address, int grad_dtype, std::int64_t numel,
                  Address out);

// Sum of fp64 numbers in index order.
double ordered_sum(Address address, std::int64_t numel);

}  // namespace optim
