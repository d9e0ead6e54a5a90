// The loops, written once and compiled once per ISA (KERNEL_ISA is its name): the compiler vectorises most of them.
// Every fp32 operation is one IEEE operation and every reduction has an order fixed here, so all ISAs give the same bits.
//
// Nothing in this file may have external linkage but the table. An inline function shared with another file (std::sqrt,
// std::bit_cast) would be emitted once for all ISAs, possibly with instructions that this machine does not have.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <type_traits>
#include <utility>

#include "kernel_table.hpp"

namespace optim {
namespace {

using std::int16_t;
using std::int32_t;
using std::int64_t;
using std::size_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;

#include "lanes.hpp"

// ---- formats: integer arithmetic, no branches, nothing that flushing of denormals could change ----

constexpr uint32_t kMagnitude = 0x7fffffff;
constexpr uint32_t kInf = 0x7f800000;
constexpr uint32_t kQuietNan = 0x7fc00000;

template <class Word>
auto is_nan(Word bits) {
  return is_greater(bits & kMagnitude, spread<Word>(kInf));
}

// IEEE leaves the sign and payload of a NaN to the order of operands, and so to the compiler: store one NaN for all.
template <class Float>
Float settle(Float value) {
  const auto bits = bits_of(value);
  using Word = std::remove_const_t<decltype(bits)>;
  return float_of(select(value != value, spread<Word>(kQuietNan), bits));
}

template <class Word>
struct Halves {
  Word hi, lo;  // the lower 16 bits count
};

// hi is the nearest bf16, ties away from zero, and lo the signed remainder. Rounding could carry a NaN's payload into the
// sign, that is into zero: a settled NaN has none.
template <class Float>
auto split_settled(Float value) {
  const auto bits = bits_of(value);
  return Halves<std::remove_const_t<decltype(bits)>>{(bits + 0x8000) >> 16, bits};
}

// As above, where a NaN may have a payload: it is made quiet and loses its lower payload.
Halves<uint32_t> split(float value) {
  const uint32_t bits = bits_of(value);
  const bool nan = is_nan(bits);
  return {select(nan, bits | 0x00400000, bits + 0x8000) >> 16, select(nan, 0, bits)};
}

// Takes lo with its sign.
template <class Word>
auto join(Word hi, Word lo) {
  return float_of((hi << 16) + lo);
}

template <class Word>
auto from_bf16(Word half) {
  return float_of(half << 16);
}

template <class Word>
auto from_fp16(Word half) {
  constexpr uint32_t kRebias = (127 - 15) << 23;
  const Word magnitude = half & 0x7fff;
  const Word sign = (half & 0x8000) << 16;
  // A denormal half counts units of 2^-24: the last place of 0.5 + x, so that no fp32 denormal comes up on the way.
  const Word denormal = bits_of(float_of(bits_of(0.5f) | magnitude) - 0.5f);
  const Word normal = (magnitude << 13) + kRebias;
  const Word quiet = select(is_greater(magnitude, spread<Word>(0x7c00)), spread<Word>(0x00400000), Word{});
  const Word special = (normal + kRebias) | quiet;
  const Word finite = select(is_greater(spread<Word>(0x0400), magnitude), denormal, normal);
  return float_of(sign | select(is_greater(spread<Word>(0x7c00), magnitude), finite, special));
}

// Round to nearest, ties to even.
template <class Float>
auto to_fp16(Float value) {
  const auto bits = bits_of(value);
  using Word = std::remove_const_t<decltype(bits)>;
  const Word magnitude = bits & kMagnitude;
  const Word rounded = (magnitude + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const Word normal = rounded - ((127 - 15) << 10);
  // Below 2^-14 the adder rounds for us, again because 2^-24 is the last place of 0.5 + x.
  const Word denormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const Word finite = select(is_greater(spread<Word>(bits_of(0x1p-14f)), magnitude), denormal, normal);
  const Word nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  const Word infinite = select(is_greater(magnitude, spread<Word>(kInf)), nan, spread<Word>(0x7c00));
  return (bits >> 16 & 0x8000) | select(is_greater(spread<Word>(bits_of(0x1p16f)), magnitude), finite, infinite);
}

void split_run(const float* __restrict src, uint16_t* __restrict hi, uint16_t* __restrict lo, size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    const auto halves = split(src[i]);
    hi[i] = static_cast<uint16_t>(halves.hi);
    lo[i] = static_cast<uint16_t>(halves.lo);
  }
}

void join_run(const uint16_t* __restrict hi, const uint16_t* __restrict lo, float* __restrict dst, size_t numel) {
  for (size_t i = 0; i < numel; ++i) dst[i] = join<uint32_t>(hi[i], static_cast<uint32_t>(static_cast<int16_t>(lo[i])));
}

void fp16_to_fp32_run(const uint16_t* __restrict src, float* __restrict dst, size_t numel) {
  for (size_t i = 0; i < numel; ++i) dst[i] = from_fp16<uint32_t>(src[i]);
}

void fp32_to_fp16_run(const float* __restrict src, uint16_t* __restrict dst, size_t numel) {
  for (size_t i = 0; i < numel; ++i) dst[i] = static_cast<uint16_t>(to_fp16(src[i]));
}

// ---- gradients and master forms, as the update sees them ----

struct Fp32Grad {
  using Element = float;
  template <class Word>
  static auto of(Word bits) {
    return float_of(bits);
  }
};

struct Bf16Grad {
  using Element = uint16_t;
  template <class Word>
  static auto of(Word half) {
    return from_bf16(half);
  }
};

struct Fp16Grad {
  using Element = uint16_t;
  template <class Word>
  static auto of(Word half) {
    return from_fp16(half);
  }
};

struct SplitMaster {
  using Param = uint16_t;
  using Master = uint16_t;
  template <class Word>
  static auto load(Word param, const Master* master, size_t i) {
    return join(param, optim::load<Word>(reinterpret_cast<const int16_t*>(master) + i));
  }
  template <class Float>
  static auto store(Float value, Master* master, size_t i) {
    const auto halves = split_settled(value);
    optim::store(halves.lo, master + i);
    return halves.hi;
  }
};

struct FullMaster {
  using Param = uint16_t;
  using Master = float;
  template <class Word>
  static auto load(Word, const Master* master, size_t i) {
    return float_of(optim::load<Word>(master + i));
  }
  template <class Float>
  static auto store(Float value, Master* master, size_t i) {
    optim::store(bits_of(value), master + i);
    return to_fp16(value);
  }
};

struct ItselfMaster {
  using Param = float;
  using Master = float;  // absent: a null pointer
  template <class Word>
  static auto load(Word param, const Master*, size_t) {
    return float_of(param);
  }
  template <class Float>
  static auto store(Float value, Master*, size_t) {
    return bits_of(value);
  }
};

// ---- states, as the update sees them ----

struct Fp32States {
  using Element = float;
  static constexpr size_t kNumScalars = 0;
  Fp32States(const float*, Dither) {}
  template <size_t k>
  float load(float element) const {
    return element;
  }
  uint32_t word(size_t) const { return 0; }
  template <size_t k>
  static float store(float value, uint32_t) {
    return value;
  }
};

// 32 random bits for each element: `words` in optim/layout/dither.py is the same, and says where it is from.
struct Chance {
  static constexpr size_t kNumScalars = 1;  // the step, modulo 2^24
  static constexpr uint32_t kBetween = 0x9e3779b9;  // of elements of a block, see docs/numerics.md

  Chance(const float* scalars, Dither dither)
      : first(dither.index), before(mixed(mixed(dither.param) + static_cast<uint32_t>(scalars[0]))),
        between(mixed(before + dither.param)) {}

  static uint32_t halfway(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352d;
    return x ^ x >> 15;
  }
  static uint32_t rest(uint32_t x) {
    x *= 0x846ca68b;
    return x ^ x >> 16;
  }
  static uint32_t mixed(uint32_t x) { return rest(halfway(x)); }

  uint32_t word(size_t i) const { return rest(halfway((first + static_cast<uint32_t>(i)) ^ before) ^ between); }
  template <size_t k>
  static uint32_t half(uint32_t word) {
    static_assert(k < 2);  // a word has dither for two
    return k == 0 ? word & 0xffff : word >> 16;
  }

  uint32_t first, before, between;
};

// bf16, rounded up with the probability with which the value lies above its lower neighbour: a change below half a last
// place is not lost, but made now and then.
struct Bf16States : Chance {
  using Element = uint16_t;
  using Chance::Chance;
  template <size_t k>
  float load(uint16_t element) const {
    return from_bf16(element);
  }
  template <size_t k>
  static uint16_t store(float value, uint32_t word) {
    return static_cast<uint16_t>((bits_of(value) + half<k>(word)) >> 16);
  }
};

// ---- the update ----

struct Nothing {};

template <class Rule, class States, class Form, class Grad, class Differs, size_t... k, class... State>
[[gnu::always_inline]] inline void update_loop(std::index_sequence<k...>, typename Form::Param* __restrict param,
                 typename Form::Master* __restrict master, const typename Grad::Element* __restrict grad, size_t numel,
                 float grad_scale, const Rule rule, const States kept, Differs* __restrict differs,
                 State* __restrict... states) {
  for (size_t i = 0; i < numel; ++i) {
    float state[] = {kept.template load<k>(states[i])..., 0.0f};  // registers: a store to memory before the last load would cost a reload
    const auto before = load<uint32_t>(param + i);
    const float weight = rule(Grad::of(load<uint32_t>(grad + i)) * grad_scale, Form::load(before, master, i), state[k]...);
    [[maybe_unused]] const uint32_t word = kept.word(i);
    ((states[i] = States::template store<k>(settle(state[k]), word)), ...);
    const uint32_t after = Form::store(settle(weight), master, i);
    store(after, param + i);
    if constexpr (sizeof(Differs) == sizeof(param[i])) differs[i] = static_cast<uint16_t>(before ^ after);
  }
}

template <class Rule, class States, class Form, class Grad>
void update(void* param, void* master, const void* grad, void* const* states, size_t numel, float grad_scale,
            const float* scalars, Dither dither, uint16_t* differs) {
  const auto run = [&]<class Differs, size_t... k>(std::index_sequence<k...> all, Differs* wanted) {
    update_loop<Rule, States, Form, Grad>(
        all, static_cast<typename Form::Param*>(param), static_cast<typename Form::Master*>(master),
        static_cast<const typename Grad::Element*>(grad), numel, grad_scale, Rule(scalars),
        States(scalars + Rule::kNumScalars, dither), wanted, static_cast<typename States::Element*>(states[k])...);
  };
  constexpr std::make_index_sequence<Rule::kNumStates> all;
  if constexpr (sizeof(typename Form::Param) == sizeof *differs) {
    if (differs) return run(all, differs);
  }
  run(all, static_cast<Nothing*>(nullptr));
}

#include "coded.hpp"

template <class Rule, class States, class Form, class Grad>
constexpr Update update_of() {
  if constexpr (std::is_same_v<States, CodedStates>) {
    return update_coded<Rule, Form, Grad>;
  } else {
    return update<Rule, States, Form, Grad>;
  }
}

template <class Rule, class States = Fp32States>
constexpr RuleKernels kernels_of(const char* name) {
  constexpr bool kIsCoded = std::is_same_v<States, CodedStates>;
  static_assert(Rule::kNumStates * (kIsCoded ? 2 : 1) <= kMaxStates);
  return {name,
          Rule::kNumStates,
          sizeof(typename States::Element),
          Rule::kNumScalars + States::kNumScalars,
          kIsCoded,
          {{update_of<Rule, States, SplitMaster, Fp32Grad>(),
            update_of<Rule, States, SplitMaster, Bf16Grad>(),
            update_of<Rule, States, SplitMaster, Fp16Grad>()},
           {update_of<Rule, States, FullMaster, Fp32Grad>(),
            update_of<Rule, States, FullMaster, Bf16Grad>(),
            update_of<Rule, States, FullMaster, Fp16Grad>()},
           {update_of<Rule, States, ItselfMaster, Fp32Grad>(),
            update_of<Rule, States, ItselfMaster, Bf16Grad>(),
            update_of<Rule, States, ItselfMaster, Fp16Grad>()}}};
}

#include "rules/all.hpp"

// ---- reductions: explicit lanes, combined in a fixed order ----

// Lanes over 32-bit words. One step is a bijection of the lane for a given word and of the word for a given lane (xor,
// odd multiplier, xor-shift), and the fold at the end is one of each lane: a change confined to one word always shows, any
// other is missed about once in 2^32. The xor-shift brings top bits (signs) down where later multiplications spread them.
void absorb(SumLanes& sum, const void* data, size_t size_bytes) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  SumLanes lanes = sum;  // registers
  const auto absorb_stripe = [&lanes](const unsigned char* stripe) {
    for (size_t j = 0; j < kSumLanes; ++j) {
      uint32_t word;
      __builtin_memcpy(&word, stripe + j * sizeof word, sizeof word);
      const uint32_t mixed = (lanes.lane[j] ^ word) * 0x85ebca6bu;
      lanes.lane[j] = mixed ^ (mixed >> 15);
    }
  };
  size_t done = 0;
  for (; done + kSumStripe <= size_bytes; done += kSumStripe) absorb_stripe(bytes + done);
  if (done < size_bytes) {
    unsigned char rest[kSumStripe] = {};
    __builtin_memcpy(rest, bytes + done, size_bytes - done);
    absorb_stripe(rest);
  }
  sum = lanes;
}

// A square of an fp32 number is exact in fp64, so only the order of additions matters.
template <class Grad>
double sq_sum(const void* data, size_t numel) {
  constexpr size_t kSums = 32;
  const auto* grad = static_cast<const typename Grad::Element*>(data);
  double lanes[kSums] = {};
  const auto add = [&lanes](size_t lane, float value) {
    lanes[lane] += static_cast<double>(value) * static_cast<double>(value);
  };
  size_t done = 0;
  for (; done + kSums <= numel; done += kSums) {
    for (size_t j = 0; j < kSums; ++j) add(j, Grad::of(load<uint32_t>(grad + done + j)));
  }
  for (size_t j = 0; done + j < numel; ++j) add(j, Grad::of(load<uint32_t>(grad + done + j)));
  for (size_t width = kSums / 2; width > 0; width /= 2) {
    for (size_t j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  }
  return lanes[0];
}

// ---- which 16-bit words differ ----

// Sets the bit of each of 64 words that is not zero. What a compiler makes of the portable loop packs bits one by one.
#if defined(__AVX512BW__)
uint64_t not_zero(const uint16_t* words) {
  const auto mask = [&](size_t at) -> uint64_t {
    const __m512i all = _mm512_loadu_si512(words + at);
    return _mm512_test_epi16_mask(all, all);
  };
  return mask(0) | mask(32) << 32;
}
#elif defined(__AVX2__)
uint64_t not_zero(const uint16_t* words) {
  const auto zero = [&](size_t at) {
    return _mm256_cmpeq_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + at)), _mm256_setzero_si256());
  };
  const auto mask = [&](size_t at) -> uint64_t {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi16(zero(at), zero(at + 16)), 0xd8);
    return static_cast<uint32_t>(_mm256_movemask_epi8(packed));
  };
  return ~(mask(0) | mask(32) << 32);
}
#elif defined(__x86_64__)
uint64_t not_zero(const uint16_t* words) {
  const auto zero = [&](size_t at) {
    return _mm_cmpeq_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words + at)), _mm_setzero_si128());
  };
  const auto mask = [&](size_t at) -> uint64_t {
    return static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(zero(at), zero(at + 8))));
  };
  return ~(mask(0) | mask(16) << 16 | mask(32) << 32 | mask(48) << 48);
}
#else
uint64_t not_zero(const uint16_t* words) {
  unsigned char differs[64];
  for (size_t j = 0; j < 64; ++j) differs[j] = words[j] != 0;
  uint64_t marks = 0;
  for (size_t k = 0; k < 8; ++k) {
    uint64_t bytes;
    __builtin_memcpy(&bytes, differs + 8 * k, sizeof bytes);
    marks |= bytes * 0x0102040810204080u >> 56 << 8 * k;  // the lowest bit of each byte, side by side
  }
  return marks;
}
#endif

void mark(const uint16_t* __restrict differs, size_t numel, uint64_t* __restrict marks) {
  const size_t whole = numel / 64;
  for (size_t k = 0; k < whole; ++k) marks[k] |= not_zero(differs + 64 * k);
  if (const size_t rest = numel % 64) {
    uint16_t last[64] = {};
    __builtin_memcpy(last, differs + 64 * whole, rest * sizeof *last);
    marks[whole] |= not_zero(last);
  }
}

size_t num_marked(const uint64_t* marks, size_t count) {
  size_t found = 0;
  for (size_t k = 0; k < count; ++k) found += static_cast<size_t>(__builtin_popcountll(marks[k]));
  return found;
}

// Few bits of a word are set, as a rule: the first two are looked up without a jump that would be guessed wrong.
template <class Index>
void marked(const uint64_t* __restrict marks, size_t count, int64_t first, const uint16_t* __restrict source,
            Index* __restrict indices, uint16_t* __restrict values) {
  constexpr size_t kWords = 64;
  uint16_t found[64 * kWords + 2];
  for (size_t done = 0; done < count; done += kWords) {
    const size_t end = done + kWords < count ? done + kWords : count, begin = 64 * done;
    size_t num = 0;
    for (size_t k = done; k < end; ++k) {
      uint64_t rest = marks[k];
      const size_t next = num + static_cast<size_t>(__builtin_popcountll(rest)), base = 64 * (k - done);
      for (;;) {
        found[num] = static_cast<uint16_t>(base + static_cast<size_t>(__builtin_ctzll(rest | uint64_t{1} << 63)));
        rest &= rest - 1;
        found[num + 1] = static_cast<uint16_t>(base + static_cast<size_t>(__builtin_ctzll(rest | uint64_t{1} << 63)));
        rest &= rest - 1;
        if (rest == 0) break;
        num += 2;
      }
      num = next;
    }
    for (size_t j = 0; j < num; ++j) {
      indices[j] = static_cast<Index>(first + static_cast<int64_t>(begin)) + static_cast<Index>(found[j]);
    }
    indices += num;
    if (!source) continue;
    for (size_t j = 0; j < num; ++j) values[j] = source[begin + found[j]];
    values += num;
  }
}

}  // namespace

#define CONCAT_(a, b) a##b
#define CONCAT(a, b) CONCAT_(a, b)

extern const KernelTable CONCAT(kernels_, KERNEL_ISA);  // a const object is internal unless declared so
const KernelTable CONCAT(kernels_, KERNEL_ISA) = {
    .rules = kRules,
    .num_rules = sizeof kRules / sizeof *kRules,
    .split = split_run,
    .join = join_run,
    .fp16_to_fp32 = fp16_to_fp32_run,
    .fp32_to_fp16 = fp32_to_fp16_run,
    .absorb = absorb,
    .sq_sum = {sq_sum<Fp32Grad>, sq_sum<Bf16Grad>, sq_sum<Fp16Grad>},
    .mark = mark,
    .num_marked = num_marked,
    .marked = marked<int32_t>,
    .marked_wide = marked<int64_t>,
};

}  // namespace optim
