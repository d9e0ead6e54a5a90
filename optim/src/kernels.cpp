#include "kernels.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <numeric>
#include <stdexcept>

#include "isa.hpp"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace optim {
namespace {

constexpr std::size_t kParamSize[kNumMasterForms] = {2, 2, 4};
constexpr std::size_t kMasterSize[kNumMasterForms] = {2, 4, 0};
constexpr std::size_t kGradSize[kNumGradDtypes] = {4, 2, 2};
constexpr std::size_t kCacheLine = 64;

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

void check_inside(std::int64_t offset, std::int64_t size_bytes, std::int64_t entry_bytes) {
  if (offset == kAbsent || (offset >= 0 && offset % 4 == 0 && offset <= entry_bytes - size_bytes)) return;
  throw std::invalid_argument("offset " + std::to_string(offset) + " of " + std::to_string(size_bytes) +
                              " bytes is no place in an entry of " + std::to_string(entry_bytes) + " bytes");
}

void check(const LoggedStep& step, const Segment& s, const RuleKernels& rule) {
  check_choice("grad_dtype of a logged step", step.grad_dtype, kNumGradDtypes);
  check_count(rule.name, "scalars", step.scalars.size(), rule.num_scalars);
  check_address("entry", step.entry, kCacheLine, step.entry_bytes);  // of zeros alone it has nothing
  check_address("offsets", step.offsets, sizeof(std::int64_t), s.numel);
  for (std::size_t index = 0; index < num_tiles(s.numel); ++index) {
    const TileOffsets& offsets = pointer<const TileOffsets>(step.offsets)[index];
    const auto numel = static_cast<std::int64_t>(Tile(index, s.numel).numel);
    check_inside(offsets.grad, numel * static_cast<std::int64_t>(kGradSize[step.grad_dtype]), step.entry_bytes);
    check_inside(offsets.param, numel * static_cast<std::int64_t>(kParamSize[s.form]), step.entry_bytes);
  }
}

void check(const Origin& origin, const RuleKernels& rule, std::int64_t numel) {
  const auto is_size = [](std::int64_t size) { return size > 0; };
  const bool dithers = rule.state_size < sizeof(float);
  if (origin.sizes.empty() == dithers || origin.sizes.size() != origin.strides.size() ||
      !std::all_of(origin.sizes.begin(), origin.sizes.end(), is_size)) {
    throw std::invalid_argument(std::string(rule.name) + (dithers ? " needs" : " does without") + " an origin");
  }
  const std::int64_t block = origin.block;
  const bool is_block = block == 32 || block == 64 || block == static_cast<std::int64_t>(kMostBlock);
  if (rule.is_coded ? !is_block : block != 0) throw std::invalid_argument(std::to_string(block) + " is no size of a block");
  if (rule.is_coded && (numel % block != 0 || origin.start % block != 0 || origin.sizes.back() % block != 0)) {
    throw std::invalid_argument("a block of " + std::to_string(block) + " elements is cut");
  }
}

void check(const Segment& s, const KernelTable& kernels) {
  check_numel(s.numel);
  check_choice("rule", s.rule, static_cast<int>(kernels.num_rules));
  const RuleKernels& rule = kernels.rules[s.rule];
  check_count(rule.name, "states", s.states.size(), rule.num_states * (rule.is_coded ? 2 : 1));
  check_choice("form", s.form, kNumMasterForms);
  check_address("master", s.master, kMasterSize[s.form], s.numel);
  for (const Address state : s.states) check_address("state", state, rule.state_size, s.numel);
  check(s.origin, rule, s.numel);
  for (const LoggedStep& step : s.log) check(step, s, rule);
  if (!s.log.empty() && s.form != kFull) check_address("base", s.base, kParamSize[s.form], s.numel);
  if (s.grad == 0) return;
  check_count(rule.name, "scalars", s.scalars.size(), rule.num_scalars);
  check_choice("grad_dtype", s.grad_dtype, kNumGradDtypes);
  check_address("param", s.param, kParamSize[s.form], s.numel);
  check_address("grad", s.grad, kGradSize[s.grad_dtype], s.numel);
  if (s.checksums != 0) check_address("checksums", s.checksums, sizeof(std::uint64_t), s.numel);
  if (s.offsets != 0) check_address("offsets", s.offsets, sizeof(std::int64_t), s.numel);
  if (s.tail != 0) check_address("tail", s.tail, kParamSize[s.form], s.numel);
  if (s.marks != 0 && s.form == kItself) throw std::invalid_argument("marks are of 16-bit parameters alone");
  if (s.marks != 0) check_address("marks", s.marks, sizeof(std::uint64_t), s.numel);
}

void check(const SummedMemory& summed) {
  check_numel(summed.size_bytes);
  check_address("summed memory", summed.address, 1, summed.size_bytes);
  check_address("sums", summed.sums, sizeof(std::uint64_t), summed.size_bytes);
}

// Memory for tiles of an entry, handed out in the order in which threads ask.
class EntrySpace {
 public:
  explicit EntrySpace(const LogEntry& entry) : entry_(entry) {}

  // Returns where the bytes were put, from the beginning of the entry.
  std::int64_t put(const void* bytes, std::size_t size_bytes) {
    const auto size = static_cast<std::int64_t>(size_bytes);
    const std::int64_t at = used_.fetch_add((size + kLine - 1) / kLine * kLine, std::memory_order_relaxed);
    if (at + size <= entry_.size_bytes) std::memcpy(pointer<char>(entry_.address, at), bytes, size_bytes);
    return at;
  }

  std::int64_t used() const { return used_.load(std::memory_order_relaxed); }

 private:
  static constexpr auto kLine = static_cast<std::int64_t>(kCacheLine);
  const LogEntry entry_;
  std::atomic<std::int64_t> used_ = 0;
};

SumLanes fresh_sum() {
  SumLanes lanes;
  for (std::size_t j = 0; j < kSumLanes; ++j) lanes.lane[j] = static_cast<std::uint32_t>(j + 1) * 0x9e3779b1u;
  return lanes;
}

std::uint64_t ended(const SumLanes& lanes, std::size_t size_bytes) {
  std::uint64_t sum = size_bytes;
  for (const std::uint32_t lane : lanes.lane) {
    sum = (sum ^ lane) * 0x9e3779b97f4a7c15u;
    sum ^= sum >> 29;
  }
  return sum;
}

std::uint64_t checksum_of(const KernelTable& kernels, const void* data, std::size_t size_bytes) {
  SumLanes lanes = fresh_sum();
  kernels.absorb(lanes, data, size_bytes);
  return ended(lanes, size_bytes);
}

// Rows of segments lie over blocks of memory, each block has a checksum, and threads write a row from front to back:
//
//   blocks     |       0       |       1       |       2       |       3       |
//   row, Rows      [ - - - - - - - - - - - - - - - - - - - - - - - - - ]
//   threads        [      A            |           B           |   C   ]
//   RowSum     | sums nothing  | sums nothing  | sums and puts | sums nothing  |
//   BlockSums  | counts, takes | counts, takes |               | counts, takes |
//
// B alone writes block 2: it sums each strip in its nearest cache, and the count of that block never falls to 0. Other
// blocks are written by several threads, or in several rows: whoever writes the last byte takes the sum from memory.

// Checksums of blocks of memory, each taken as soon as nothing more will be written in it. `expect` everything that will
// be, before the first `note_written`.
class BlockSums {
 public:
  BlockSums(const KernelTable& kernels, const SummedMemory& memory)
      : kernels_(kernels),
        memory_(memory),
        missing_((static_cast<std::size_t>(memory.size_bytes) + kSummedBytes - 1) / kSummedBytes) {}

  void expect(Address begin, std::size_t size_bytes) {
    each_block(begin, size_bytes, [this](std::size_t block, Address, std::size_t part) {
      missing_[block].fetch_add(part, std::memory_order_relaxed);  // no thread of the update has begun
    });
  }

  // Takes the sums of what nobody writes.
  void begin() {
    for (std::size_t block = 0; block < missing_.size(); ++block) {
      if (missing_[block].load(std::memory_order_relaxed) == 0) take(block);
    }
  }

  void note_written(Address begin, std::size_t size_bytes) {
    each_block(begin, size_bytes, [this](std::size_t block, Address, std::size_t part) {
      // The last one reads what all others have written.
      if (missing_[block].fetch_sub(part, std::memory_order_acq_rel) == part) take(block);
    });
  }

  // Notes the sum of a block that one thread has written, all of it.
  void put(std::size_t block, std::uint64_t sum) { *pointer<std::uint64_t>(memory_.sums, block) = sum; }

  Address begin_of(std::size_t block) const { return memory_.address + block * kSummedBytes; }
  Address end_of(std::size_t block) const {
    return std::min<Address>(begin_of(block + 1), memory_.address + static_cast<Address>(memory_.size_bytes));
  }

  // Calls visit(block, address, size_bytes) with the parts of [begin, begin + size_bytes) that lie in this memory.
  template <class Visit>
  void each_block(Address begin, std::size_t size_bytes, const Visit& visit) const {
    const Address end = std::min(begin + size_bytes, memory_.address + static_cast<Address>(memory_.size_bytes));
    for (Address at = std::max(begin, memory_.address); at < end;) {
      const std::size_t block = (at - memory_.address) / kSummedBytes;
      const Address next = std::min(end_of(block), end);
      visit(block, at, static_cast<std::size_t>(next - at));
      at = next;
    }
  }

 private:
  void take(std::size_t block) {
    put(block, checksum_of(kernels_, bytes_at(begin_of(block), 0), end_of(block) - begin_of(block)));
  }

  const KernelTable& kernels_;
  const SummedMemory memory_;
  std::vector<std::atomic<std::size_t>> missing_;  // bytes of each block that are still to be written
};

// What one thread writes of a row, from front to back.
class RowSum {
 public:
  void begin(const KernelTable& kernels, std::deque<BlockSums>& summed, Address end) {
    kernels_ = &kernels;
    summed_ = &summed;
    row_end_ = end;
    begin_ = end_ = 0;
  }

  // Notes bytes that are what lies at `source`, too, in the cache.
  void note_written(Address begin, std::size_t size_bytes, Address source) {
    for (BlockSums& sums : *summed_) {
      sums.each_block(begin, size_bytes, [&](std::size_t block, Address at, std::size_t part) {
        // Of a block that reaches behind the last tile of this thread another one writes the rest.
        if (at != end_) begin_part(sums, at, sums.begin_of(block) == at && sums.end_of(block) <= row_end_);
        if (in_stripes_) kernels_->absorb(lanes_, bytes_at(at - begin + source, 0), part);
        end_ = at + part;
        if (end_ == sums.end_of(block)) {
          end_part(block);
        } else if (part % kSumStripe != 0) {
          in_stripes_ = false;  // lanes go on only behind a whole stripe
        }
      });
    }
  }

  // Notes what is left, which is less than a block: without it the block's count would not fall to 0.
  void end() {
    if (begin_ != end_) sums_->note_written(begin_, end_ - begin_);
    begin_ = end_ = 0;
  }

 private:
  void begin_part(BlockSums& sums, Address at, bool is_whole) {
    end();
    sums_ = &sums;
    begin_ = end_ = at;
    in_stripes_ = is_whole;
    if (is_whole) lanes_ = fresh_sum();
  }

  void end_part(std::size_t block) {
    if (!in_stripes_) return end();  // the lanes lack a part
    sums_->put(block, ended(lanes_, end_ - begin_));
    begin_ = end_ = 0;
  }

  // Without values until `begin`: as a rule nothing is summed, and to write them takes memory that is in no cache.
  const KernelTable* kernels_;
  std::deque<BlockSums>* summed_;
  BlockSums* sums_;  // those of the block that it is in
  Address row_end_, begin_, end_;  // what it has of that block is [begin, end)
  bool in_stripes_;  // whether the lanes have all of that
  SumLanes lanes_;
};

// Memory that the updates of a segment write beside its parameter: an item for each of its elements, or blocks of them.
struct Row {
  std::size_t bytes_of(std::size_t numel) const { return numel / per * itemsize; }
  Address address;
  std::size_t itemsize, per;
};

struct Rows {
  Rows() = default;
  Rows(const KernelTable& kernels, const Segment& s) {
    const RuleKernels& rule = kernels.rules[s.rule];
    add(s.master, kMasterSize[s.form]);
    for (std::size_t k = 0; k < s.states.size(); ++k) {
      add(s.states[k], rule.state_size, k < rule.num_states ? 1 : s.origin.block);
    }
    if (s.grad != 0) add(s.tail, kParamSize[s.form]);
  }

  static constexpr std::size_t kMost = kMaxStates + 2;
  Row row[kMost];
  std::size_t count = 0;

 private:
  void add(Address address, std::size_t itemsize, std::size_t per = 1) {
    if (address != 0 && itemsize != 0) row[count++] = {address, itemsize, per};
  }
};

// Elements that go through all of their updates before the next ones do: what they touch is then in the cache.
constexpr std::size_t kStripNumel = 4096;
alignas(64) constexpr unsigned char kZeros[kStripNumel * sizeof(float)] = {};

bool is_zero(const void* data, std::size_t size_bytes) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (std::size_t done = 0; done < size_bytes; done += sizeof kZeros) {
    if (std::memcmp(bytes + done, kZeros, std::min(sizeof kZeros, size_bytes - done)) != 0) return false;
  }
  return true;
}

void master_from_param(const KernelTable& kernels, int form, const void* param, void* master, std::size_t numel) {
  if (form == kSplit) {
    std::memset(master, 0, numel * sizeof(std::uint16_t));
  } else if (form == kFull) {
    kernels.fp16_to_fp32(static_cast<const std::uint16_t*>(param), static_cast<float*>(master), numel);
  }
}

// Elements of a run, from one on, that lie together in the whole parameter; at most `numel`.
struct Stretch {
  Stretch(const Origin& origin, std::size_t first, std::size_t most) : numel(most), dither{origin.param, 0, origin.block} {
    if (origin.sizes.empty()) return;
    std::int64_t at = origin.start + static_cast<std::int64_t>(first), index = origin.offset;
    numel = std::min(most, static_cast<std::size_t>(origin.sizes.back() - at % origin.sizes.back()));
    for (std::size_t dim = origin.sizes.size(); dim-- > 0; at /= origin.sizes[dim]) {
      index += at % origin.sizes[dim] * origin.strides[dim];
    }
    dither.index = static_cast<std::uint32_t>(index);
  }
  std::size_t numel;
  Dither dither;
};

// Master and states of a few elements, and the updates that they go through.
class Strip {
 public:
  Strip(const KernelTable& kernels, const Segment& segment, std::size_t first, std::size_t numel)
      : kernels_(kernels), s_(segment), first_(first), numel_(numel) {}

  void replay() const {
    std::uint16_t unwanted[kStripNumel];  // of kFull the parameter, which is the rounded master
    void* base = s_.base ? bytes_at(s_.base, first_ * kParamSize[s_.form]) : unwanted;
    for (const LoggedStep& step : s_.log) {
      const TileOffsets& at = pointer<const TileOffsets>(step.offsets)[first_ / kTileNumel];
      if (at.param != kAbsent) {
        const void* found = logged(step, at.param, kParamSize[s_.form]);
        std::memcpy(base, found, numel_ * kParamSize[s_.form]);
        believe(base);
      }
      const void* grad = at.grad == kAbsent ? kZeros : logged(step, at.grad, kGradSize[step.grad_dtype]);
      update(base, grad, step.grad_dtype, step.grad_scale, step.scalars, nullptr);
    }
  }

  // differs: see Update.
  void step(void* param, std::uint16_t* differs) const {
    const void* grad = bytes_at(s_.grad, first_ * kGradSize[s_.grad_dtype]);
    update(param, grad, s_.grad_dtype, s_.grad_scale, s_.scalars, differs);
  }

  // Makes the master from a parameter that somebody has set.
  void believe(const void* param) const { master_from_param(kernels_, s_.form, param, master(), numel_); }

 private:
  void* master() const { return bytes_at(s_.master, first_ * kMasterSize[s_.form]); }

  const void* logged(const LoggedStep& step, std::int64_t offset, std::size_t itemsize) const {
    return bytes_at(step.entry, static_cast<std::size_t>(offset) + first_ % kTileNumel * itemsize);
  }

  void update(void* param, const void* grad, int grad_dtype, float grad_scale, const std::vector<float>& scalars,
              std::uint16_t* differs) const {
    const RuleKernels& rule = kernels_.rules[s_.rule];
    for (std::size_t done = 0; done < numel_;) {
      const Stretch stretch(s_.origin, first_ + done, numel_ - done);
      void* states[kMaxStates] = {};
      for (std::size_t k = 0; k < s_.states.size(); ++k) {
        const std::size_t at = first_ + done;
        states[k] = bytes_at(s_.states[k], k < rule.num_states ? at * rule.state_size : at / s_.origin.block);
      }
      rule.update[s_.form][grad_dtype](static_cast<char*>(param) + done * kParamSize[s_.form],
                                       static_cast<char*>(master()) + done * kMasterSize[s_.form],
                                       static_cast<const char*>(grad) + done * kGradSize[grad_dtype], states,
                                       stretch.numel, grad_scale, scalars.data(), stretch.dither,
                                       differs ? differs + done : nullptr);
      done += stretch.numel;
    }
  }

  const KernelTable& kernels_;
  const Segment& s_;
  const std::size_t first_, numel_;
};

void log_tile(const Segment& s, const Tile& tile, std::size_t index, const void* changed_param, EntrySpace& entry) {
  const void* grad = bytes_at(s.grad, tile.first * kGradSize[s.grad_dtype]);
  const std::size_t grad_bytes = tile.numel * kGradSize[s.grad_dtype];
  TileOffsets& offsets = *pointer<TileOffsets>(s.offsets, index);
  offsets.grad = is_zero(grad, grad_bytes) ? kAbsent : entry.put(grad, grad_bytes);
  offsets.param = changed_param ? entry.put(changed_param, tile.numel * kParamSize[s.form]) : kAbsent;
}

// Copies what goes to the drive next: past the cache, where nobody looks for it, and without reading what was there.
void copy_out(void* to, const void* from, std::size_t size_bytes) {
#if defined(__x86_64__)
  if (reinterpret_cast<Address>(to) % sizeof(__m128i) == 0) {
    const std::size_t count = size_bytes / sizeof(__m128i), done = count * sizeof(__m128i);
    const auto* source = static_cast<const __m128i*>(from);
    auto* target = static_cast<__m128i*>(to);
    for (std::size_t i = 0; i < count; ++i) _mm_stream_si128(target + i, _mm_loadu_si128(source + i));
    std::memcpy(static_cast<char*>(to) + done, static_cast<const char*>(from) + done, size_bytes - done);
    _mm_sfence();  // before other threads are told
    return;
  }
#endif
  std::memcpy(to, from, size_bytes);
}

// The tiles of a segment that one thread updates, one after the other.
class Tiles {
 public:
  // Up to tile `end`, which is not one of them.
  Tiles(const KernelTable& kernels, const Segment& segment, std::size_t end, EntrySpace& entry,
        std::deque<BlockSums>& summed)
      : kernels_(kernels),
        s_(segment),
        entry_(entry),
        rows_(summed.empty() ? Rows() : Rows(kernels, segment)) {
    const std::size_t numel = std::min(end * kTileNumel, static_cast<std::size_t>(segment.numel));
    for (std::size_t k = 0; k < rows_.count; ++k) {
      sums_[k].begin(kernels, summed, rows_.row[k].address + rows_.row[k].bytes_of(numel));
    }
  }

  // Returns whether the parameter was found changed.
  bool update(std::size_t index) {
    const Tile tile(index, s_.numel);
    const std::size_t param_bytes = tile.numel * kParamSize[s_.form];
    void* param = param_at(tile.first);
    auto* stored = s_.checksums && s_.grad ? pointer<std::uint64_t>(s_.checksums, index) : nullptr;

    const bool changed = stored && checksum_of(kernels_, param, param_bytes) != *stored;
    if (s_.offsets && s_.grad) log_tile(s_, tile, index, changed ? param : nullptr, entry_);
    if (changed && s_.marks) mark_all(tile);
    const std::size_t strip_numel = s_.log.empty() && rows_.count == 0 && !s_.marks ? kTileNumel : kStripNumel;
    for (std::size_t first = tile.first; first < tile.first + tile.numel; first += strip_numel) {
      update_strip(first, std::min(strip_numel, tile.first + tile.numel - first), changed);
    }
    if (stored) *stored = checksum_of(kernels_, param, param_bytes);
    return changed;
  }

  void end() {
    for (std::size_t k = 0; k < rows_.count; ++k) sums_[k].end();
  }

 private:
  void* param_at(std::size_t first) const { return bytes_at(s_.param, first * kParamSize[s_.form]); }

  void update_strip(std::size_t first, std::size_t numel, bool changed) {
    const Strip strip(kernels_, s_, first, numel);
    strip.replay();
    if (changed) strip.believe(param_at(first));
    if (s_.grad) step(strip, first, numel);
    if (s_.tail && s_.grad) {
      copy_out(bytes_at(s_.tail, first * kParamSize[s_.form]), param_at(first), numel * kParamSize[s_.form]);
    }
    for (std::size_t k = 0; k < rows_.count; ++k) {
      const Row& row = rows_.row[k];
      // The tail was written past the caches, and is the parameter, which is in them.
      const Address at = row.bytes_of(first), source = row.address == s_.tail ? s_.param : row.address;
      sums_[k].note_written(row.address + at, row.bytes_of(numel), source + at);
    }
  }

  void step(const Strip& strip, std::size_t first, std::size_t numel) {
    if (!s_.marks) return strip.step(param_at(first), nullptr);
    alignas(kCacheLine) std::uint16_t differs[kStripNumel];
    strip.step(param_at(first), differs);
    kernels_.mark(differs, numel, pointer<std::uint64_t>(s_.marks, first / kMarksInWord));
  }

  void mark_all(const Tile& tile) {
    auto* marks = pointer<std::uint64_t>(s_.marks, tile.first / kMarksInWord);
    const std::size_t whole = tile.numel / kMarksInWord, rest = tile.numel % kMarksInWord;
    std::fill_n(marks, whole, ~std::uint64_t{0});
    if (rest != 0) marks[whole] = (std::uint64_t{1} << rest) - 1;
  }

  const KernelTable& kernels_;
  const Segment& s_;
  EntrySpace& entry_;
  const Rows rows_;  // none where nothing is summed
  RowSum sums_[Rows::kMost];  // one for each of them
};

bool has_work(const Segment& s) { return s.grad != 0 || !s.log.empty(); }

// The tiles [first, end) of a segment.
struct Share {
  std::size_t segment, first, end;
};

// What an update reads between two tiles has gone from the caches meanwhile: a thread takes so many in a row. And a block
// of sums can be more than a tile, and lie across two: of so many in a row most are one thread's alone.
constexpr std::size_t kTilesInARow = 8;

// Shares of all segments in one row, so that many small segments share the threads as well as one large segment does:
// of each segment at least so many for a thread, where it has as many tiles.
std::vector<Share> shared_out(const std::vector<const Segment*>& segments, std::size_t shares_of_a_thread,
                              std::size_t num_threads) {
  std::vector<Share> shares;
  for (std::size_t k = 0; k < segments.size(); ++k) {
    if (!has_work(*segments[k])) continue;
    const std::size_t count = num_tiles(segments[k]->numel);
    const std::size_t each = std::clamp(count / (shares_of_a_thread * num_threads), std::size_t{1}, kTilesInARow);
    for (std::size_t first = 0; first < count; first += each) {
      shares.push_back({k, first, std::min(first + each, count)});
    }
  }
  return shares;
}

// A deque, for its elements stay where they are.
std::deque<BlockSums> begin_sums(const KernelTable& kernels, const std::vector<const Segment*>& segments,
                                 const std::vector<SummedMemory>& summed) {
  std::deque<BlockSums> begun;
  for (const SummedMemory& memory : summed) {
    check(memory);
    BlockSums& sums = begun.emplace_back(kernels, memory);
    for (const Segment* s : segments) {
      if (!has_work(*s)) continue;
      const Rows rows(kernels, *s);
      for (std::size_t k = 0; k < rows.count; ++k) {
        sums.expect(rows.row[k].address, rows.row[k].bytes_of(static_cast<std::size_t>(s->numel)));
      }
    }
    sums.begin();
  }
  return begun;
}

}  // namespace

std::vector<std::string> rules() {
  const KernelTable& kernels = kernel_table(available_isas().front());
  std::vector<std::string> names;
  for (std::size_t k = 0; k < kernels.num_rules; ++k) names.emplace_back(kernels.rules[k].name);
  return names;
}

Updated update(ThreadPool& pool, const std::string& isa, const std::vector<const Segment*>& segments,
               const LogEntry& entry, const std::vector<SummedMemory>& summed) {
  const KernelTable& kernels = kernel_table(isa);
  EntrySpace space(entry);
  for (const Segment* s : segments) {
    if (s == nullptr) throw std::invalid_argument("a segment is None");
    if (has_work(*s)) check(*s, kernels);
  }
  // Many, so that all threads end together; fewer where a row that is short costs sums.
  const std::vector<Share> shares = shared_out(segments, summed.empty() ? 16 : 4,
                                               static_cast<std::size_t>(pool.num_threads()));
  std::deque<BlockSums> sums = begin_sums(kernels, segments, summed);
  std::vector<std::int64_t> changed(shares.size());
  pool.parallel_for(shares.size(), [&](std::size_t i) {
    const Share& share = shares[i];
    Tiles tiles(kernels, *segments[share.segment], share.end, space, sums);
    for (std::size_t index = share.first; index < share.end; ++index) changed[i] += tiles.update(index);
    tiles.end();
  });
  Updated updated = {std::vector<std::int64_t>(segments.size()), space.used()};
  for (std::size_t i = 0; i < shares.size(); ++i) updated.num_changed[shares[i].segment] += changed[i];
  return updated;
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
    *pointer<std::uint64_t>(out, i) = checksum_of(kernels, bytes_at(address, tile.first * size), tile.numel * size);
  });
}

void grad_sq_sums(ThreadPool& pool, const std::string& isa, const std::vector<Address>& addresses,
                  const std::vector<int>& grad_dtypes, const std::vector<std::int64_t>& numels, Address out) {
  const KernelTable& kernels = kernel_table(isa);
  if (grad_dtypes.size() != addresses.size() || numels.size() != addresses.size())
    throw std::invalid_argument("as many dtypes and sizes are needed as addresses");
  struct Piece {
    Address address;
    int grad_dtype;
    std::int64_t numel;
  };
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    check_numel(numels[i]);
    check_choice("grad_dtype", grad_dtypes[i], kNumGradDtypes);
    const std::size_t size = kGradSize[grad_dtypes[i]];
    check_address("address", addresses[i], size, numels[i]);
    for (std::size_t j = 0; j < num_tiles(numels[i]); ++j) {
      const Tile tile(j, numels[i]);
      pieces.push_back({addresses[i] + tile.first * size, grad_dtypes[i], static_cast<std::int64_t>(tile.numel)});
    }
  }
  check_address("out", out, sizeof(double), static_cast<std::int64_t>(pieces.size()));
  pool.parallel_for(pieces.size(), [&](std::size_t i) {
    const Piece& piece = pieces[i];
    *pointer<double>(out, i) = kernels.sq_sum[piece.grad_dtype](bytes_at(piece.address, 0), piece.numel);
  });
}

void mark_changed(ThreadPool& pool, const std::string& isa, Address before, Address after, std::int64_t numel,
                  Address marks) {
  const KernelTable& kernels = kernel_table(isa);
  check_numel(numel);
  check_address("before", before, sizeof(std::uint16_t), numel);
  check_address("after", after, sizeof(std::uint16_t), numel);
  check_address("marks", marks, sizeof(std::uint64_t), numel);
  pool.parallel_for(num_tiles(numel), [&](std::size_t i) {
    const Tile tile(i, numel);
    const auto *was = pointer<const std::uint16_t>(before, tile.first), *is = pointer<const std::uint16_t>(after, tile.first);
    auto* own = pointer<std::uint64_t>(marks, tile.first / kMarksInWord);
    std::uint16_t differs[kStripNumel];
    for (std::size_t done = 0; done < tile.numel; done += kStripNumel) {
      const std::size_t count = std::min(kStripNumel, tile.numel - done);
      for (std::size_t j = 0; j < count; ++j) differs[j] = was[done + j] ^ is[done + j];
      kernels.mark(differs, count, own + done / kMarksInWord);
    }
  });
}

std::int64_t num_marked(const std::string& isa, Address marks, std::int64_t numel) {
  check_numel(numel);
  check_address("marks", marks, sizeof(std::uint64_t), numel);
  const std::size_t count = (static_cast<std::size_t>(numel) + kMarksInWord - 1) / kMarksInWord;
  return static_cast<std::int64_t>(kernel_table(isa).num_marked(pointer<const std::uint64_t>(marks), count));
}

void marked(ThreadPool& pool, const std::string& isa, Address marks, std::int64_t numel, std::int64_t first,
            Address source, Address indices, int index_size, Address values, std::int64_t count) {
  const KernelTable& kernels = kernel_table(isa);
  check_numel(numel);
  check_address("marks", marks, sizeof(std::uint64_t), numel);
  if (index_size != sizeof(std::int32_t) && index_size != sizeof(std::int64_t)) {
    throw std::invalid_argument("indices are int32 or int64");
  }
  check_address("indices", indices, static_cast<std::size_t>(index_size), count);
  if (source != 0) {
    check_address("source", source, sizeof(std::uint16_t), numel);
    check_address("values", values, sizeof(std::uint16_t), count);
  }
  const auto words = [&](const Tile& tile) { return (tile.numel + kMarksInWord - 1) / kMarksInWord; };
  const auto at = [&](const Tile& tile) { return pointer<const std::uint64_t>(marks, tile.first / kMarksInWord); };
  std::vector<std::size_t> begin{0};  // of each tile's own, in indices and values
  for (std::size_t i = 0; i < num_tiles(numel); ++i) {
    const Tile tile(i, numel);
    begin.push_back(begin.back() + kernels.num_marked(at(tile), words(tile)));
  }
  if (begin.back() != static_cast<std::size_t>(count)) throw std::invalid_argument("other marks than were counted");
  pool.parallel_for(begin.size() - 1, [&](std::size_t i) {
    const Tile tile(i, numel);
    const std::int64_t from = first + static_cast<std::int64_t>(tile.first);
    const auto* own = source ? pointer<const std::uint16_t>(source, tile.first) : nullptr;
    auto* out = source ? pointer<std::uint16_t>(values, begin[i]) : nullptr;
    if (index_size == sizeof(std::int32_t)) {
      kernels.marked(at(tile), words(tile), from, own, pointer<std::int32_t>(indices, begin[i]), out);
    } else {
      kernels.marked_wide(at(tile), words(tile), from, own, pointer<std::int64_t>(indices, begin[i]), out);
    }
  });
}

double ordered_sum(Address address, std::int64_t numel) {
  check_numel(numel);
  check_address("address", address, sizeof(double), numel);
  const auto* values = pointer<const double>(address);
  return std::accumulate(values, values + numel, 0.0);
}

}  // namespace optim
