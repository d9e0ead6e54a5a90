// What one ISA offers: the loops over a run of elements, without threads, checks or Python.
#pragma once
#include <cstddef>
#include <cstdint>

namespace optim {

// Results that are reduced or compared (square sums, checksums) are per tile, so that they never depend on how the
// work was shared out. A multiple of every vector width; a split tile with its moments and gradient is 0.9 MiB.
constexpr std::size_t kTileNumel = 65536;

enum MasterForm { kSplit, kFull, kItself, kNumMasterForms };
enum GradDtype { kFp32, kBf16, kFp16, kNumGradDtypes };

constexpr std::size_t kMaxStates = 4;

// States in codes of 8 bits have an exponent for each block of 32, 64 or 128 elements.
constexpr std::size_t kMostBlock = 128;

// What the rounding of narrow states is dithered by, beside the step: the same for an element, whoever updates it.
struct Dither {
  std::uint32_t param;  // number of the parameter
  std::uint32_t index;  // of the first element, in the whole parameter
  std::uint32_t block;  // elements that share an exponent, of which all there are is a multiple; 0: there are none
};

// One step over a run of elements. grad_scale is unscaling and clipping in one factor, negative to maximize. States are
// those of the rule; where they are coded their exponents follow, in the same order. differs: gets the old word xor the
// new one of each 16-bit parameter; or null.
using Update = void (*)(void* param, void* master, const void* grad, void* const* states, std::size_t numel,
                        float grad_scale, const float* scalars, Dither dither, std::uint16_t* differs);

// The kernels of one update rule. What its states and scalars mean, only the rule knows: see rules/ and optim/rules.
struct RuleKernels {
  const char* name;
  std::size_t num_states, state_size, num_scalars;
  bool is_coded;  // each state has exponents
  Update update[kNumMasterForms][kNumGradDtypes];
};

// A checksum under way: one number for each of the words that are taken in together. Begun and ended in kernels.cpp.
constexpr std::size_t kSumLanes = 64;
constexpr std::size_t kSumStripe = kSumLanes * sizeof(std::uint32_t);
struct SumLanes {
  std::uint32_t lane[kSumLanes];
};

struct KernelTable {
  const RuleKernels* rules;
  std::size_t num_rules;
  void (*split)(const float* src, std::uint16_t* hi, std::uint16_t* lo, std::size_t numel);
  void (*join)(const std::uint16_t* hi, const std::uint16_t* lo, float* dst, std::size_t numel);
  void (*fp16_to_fp32)(const std::uint16_t* src, float* dst, std::size_t numel);
  void (*fp32_to_fp16)(const float* src, std::uint16_t* dst, std::size_t numel);
  // Takes in what follows; only the last of it may be no multiple of kSumStripe.
  void (*absorb)(SumLanes& lanes, const void* data, std::size_t size_bytes);
  double (*sq_sum[kNumGradDtypes])(const void* grad, std::size_t numel);
  // Sets the bit of each word that is not zero: 64 of them, from the lowest bit on, in each of `marks`.
  void (*mark)(const std::uint16_t* differs, std::size_t numel, std::uint64_t* marks);
  std::size_t (*num_marked)(const std::uint64_t* marks, std::size_t count);
  // Gives the numbers of the bits that are set, counted from `first` on, and the words of `source` there, if it is given.
  void (*marked)(const std::uint64_t* marks, std::size_t count, std::int64_t first, const std::uint16_t* source,
                 std::int32_t* indices, std::uint16_t* values);
  void (*marked_wide)(const std::uint64_t* marks, std::size_t count, std::int64_t first, const std::uint16_t* source,
                      std::int64_t* indices, std::uint16_t* values);
};

}  // namespace optim
