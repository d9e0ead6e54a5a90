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

// Where a log entry has what belongs to one tile: bytes from its beginning, or kAbsent.
struct TileOffsets {
  std::int64_t grad;   // the gradient; absent: it is zero, every bit of it
  std::int64_t param;  // the parameter as found, where somebody had changed it since the step before
};
constexpr std::int64_t kAbsent = -1;

// An earlier step of a segment that is done again on the way.
struct LoggedStep {
  Address entry;  // what the offsets count from
  std::int64_t entry_bytes;
  Address offsets;  // TileOffsets per tile
  int grad_dtype;  // GradDtype
  float grad_scale;
  std::vector<float> scalars;  // those of the rule in its order
};

// Where this rank's part of a parameter lies in the whole one, for rules that dither. Dimensions are in order of memory,
// the slowest first; those that lie together in the part as in the whole are one.
struct Origin {
  std::uint32_t param;  // see Dither
  std::int64_t start;   // of the run, within the part
  std::int64_t offset;  // of the part's first element, within the whole
  std::vector<std::int64_t> sizes, strides;  // of the part, and in the whole; empty: the rule does not dither
  std::uint32_t block;  // see Dither
};

// A run of elements of one parameter, starting at a multiple of kTileNumel within it.
struct Segment {
  Address param;   // kSplit: bf16, the upper half; kFull: fp16; kItself: fp32
  Address grad;    // of grad_dtype, or 0: no gradient, there is no step but the logged ones
  Address master;  // kSplit: uint16, the lower half; kFull: fp32; kItself: 0
  std::vector<Address> states;  // those of the rule in its order, and where they are coded their exponents
  Address checksums;  // uint64 per tile, of the parameter as the last update left it; or 0: changes are not looked for
  std::int64_t numel;
  int form;        // MasterForm
  int grad_dtype;  // GradDtype
  int rule;        // index in rules()
  float grad_scale;
  std::vector<float> scalars;  // those of the rule in its order
  std::vector<LoggedStep> log;  // steps that master and states lack, the oldest first
  Address base;    // the parameter before those, which becomes what it was after them; kFull does without: 0
  Address offsets;  // TileOffsets per tile, which get where the entry has the gradient; 0: it is not wanted there
  Address tail;     // gets the parameter as the step leaves it; 0: it is not wanted there
  Address marks;    // uint64 per kMarksInWord elements: gets a bit for each 16-bit parameter that the step changed; or 0
  Origin origin;
};

constexpr std::size_t kMarksInWord = 64;

// Memory that gets the gradients of the segments that have offsets, and the parameters that were found changed.
struct LogEntry {
  Address address;
  std::int64_t size_bytes;
};

// Memory whose checksums are taken while it is in the cache: of each block by the thread that writes the last of it.
struct SummedMemory {
  Address address;
  std::int64_t size_bytes;
  Address sums;  // uint64 per block of kSummedBytes
};
constexpr std::size_t kSummedBytes = kTileNumel * sizeof(std::uint32_t);

struct Updated {
  std::vector<std::int64_t> num_changed;
  std::int64_t log_bytes;  // what the entry takes; more than there is room for: it holds nothing that can be used
};

// One optimizer step for every segment, after those of its log. num_changed is, per segment, the number of tiles whose
// parameter somebody changed since the checksums were taken: there the parameter as found is the truth, and the master
// is made from it before the update. Checksums are of what is in their memory when everything is updated.
Updated update(ThreadPool& pool, const std::string& isa, const std::vector<const Segment*>& segments,
               const LogEntry& entry, const std::vector<SummedMemory>& summed);

void split(ThreadPool& pool, const std::string& isa, Address src, Address hi, Address lo, std::int64_t numel);
void join(ThreadPool& pool, const std::string& isa, Address hi, Address lo, Address dst, std::int64_t numel);
void fp16_to_fp32(ThreadPool& pool, const std::string& isa, Address src, Address dst, std::int64_t numel);
void fp32_to_fp16(ThreadPool& pool, const std::string& isa, Address src, Address dst, std::int64_t numel);

// out: uint64 per tile of kTileNumel elements.
void checksum(ThreadPool& pool, const std::string& isa, Address address, int itemsize, std::int64_t numel,
              Address out);

// out: fp64 per tile, the sum of squares of its elements; of these gradients, one after the other.
void grad_sq_sums(ThreadPool& pool, const std::string& isa, const std::vector<Address>& addresses,
                  const std::vector<int>& grad_dtypes, const std::vector<std::int64_t>& numels, Address out);

// Marks the 16-bit words that differ; see Segment::marks.
void mark_changed(ThreadPool& pool, const std::string& isa, Address before, Address after, std::int64_t numel,
                  Address marks);

// Returns how many of the first `numel` elements are marked.
std::int64_t num_marked(const std::string& isa, Address marks, std::int64_t numel);

// Gives the numbers of the elements that are marked, which are `count`, from `first` on, and the 16-bit words of `source`
// there; source: 0, they are not wanted. index_size: bytes of a number.
void marked(ThreadPool& pool, const std::string& isa, Address marks, std::int64_t numel, std::int64_t first,
            Address source, Address indices, int index_size, Address values, std::int64_t count);

// Sum of fp64 numbers in index order.
double ordered_sum(Address address, std::int64_t numel);

}  // namespace optim
