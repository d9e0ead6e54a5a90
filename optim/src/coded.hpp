// Updates of states in codes of 8 bits with an exponent for each block: docs/numerics.md and optim/layout/codes.py say which.
// Vectors are written out: no compiler does one block's codes beside another's update. loops.cpp includes this.

struct CodedStates : Chance {
  using Element = uint8_t;
  using Chance::Chance;
};

// The first state of a rule is signed; the second is a mean of squares, and never negative.
template <size_t k>
struct Code {
  static constexpr bool kIsSigned = k == 0;
  using Element = std::conditional_t<kIsSigned, int8_t, uint8_t>;
  static constexpr uint32_t kShift = 19;  // 4 bits of fp32's mantissa stay: an octave has 16 levels
  static constexpr uint32_t kBottom = (kIsSigned ? 121 : 113) << 23;  // the least octave; below it are 16 levels, too
  static constexpr uint32_t kBelow = kBottom - (1 << 23);  // the octave below: its bits of levels are zero
  static constexpr uint32_t kLevels = (kIsSigned ? 0x7f : 0xff) << kShift;

  static Words magnitude(Words value) { return kIsSigned ? value & kMagnitude : value; }

  // Levels of the octave below the least are twice as far from each other as that octave's are: y becomes 2 y - bottom.
  static Floats decode(const uint8_t* codes, Floats scale) {
    const Words code = load<Words>(reinterpret_cast<const Element*>(codes));
    const Floats y = float_of((code << kShift & kLevels) | kBelow);
    const Words low = bits_of(times_plus(y, scale + scale, -(scale * float_of(kBottom))));
    const Words value = smaller(bits_of(y * scale), low);
    return float_of(kIsSigned ? value | (code & ~kMagnitude) : value);
  }

  static Words encode(Words value, Floats factor, Words dither) {
    const Floats share = float_of(magnitude(value)) * factor;
    const Words low = bits_of(times_plus(share, Floats{} + 0.5f, Floats{} + float_of(kBelow)));
    const Words found = (larger(bits_of(share), low) + dither) >> kShift;
    if constexpr (kIsSigned) return merged(spread<Words>(0x7f), found, value >> 24);
    return larger(found, Words{} + (kBelow >> kShift | 1));  // no level of 0, see docs/numerics.md
  }

  static Words dither(Words word) { return kIsSigned ? word >> (32 - kShift) : word & ((1 << kShift) - 1); }
};

// The exponent of a block, with which the level of its largest magnitude is the highest that there is, or nearly so.
struct BlockExponent {
  explicit BlockExponent(uint32_t top)
      : is_coded(!is_greater(bits_of(0x1p-100f), top) && is_greater(bits_of(0x1p126f), top)),
        biased(is_coded ? (top + (1u << Code<0>::kShift) - 1) >> 23 : is_greater(top, bits_of(1.0f)) ? 255 : 0) {}

  static Floats scale(uint8_t biased) {
    return Floats{} + float_of(biased == 255 ? kQuietNan : static_cast<uint32_t>(biased) << 23);
  }
  Floats factor() const { return Floats{} + (is_coded ? float_of((254 - biased) << 23) : 0.0f); }

  bool is_coded;
  uint32_t biased;  // 0: all is zero, 255: all is NaN
};

// A block whose update is computed, but not yet in memory: that is done while the next block's is computed. So nothing waits
// for a root and two divisions but one store, and many of them are under way at once.
template <class Form, class Differs, size_t kNumStates>
struct ComputedBlock {
  template <size_t... k>
  void store(std::index_sequence<k...>, size_t i) {
    const Words now = Form::store(settle(float_of(load<Words>(values[kNumStates] + i))), master, i);
    if constexpr (sizeof(Differs) == sizeof(*param)) optim::store(load<Words>(param + i) ^ now, differs + i);
    optim::store(now, param + i);
    (optim::store(Code<k>::encode(load<Words>(values[k] + i), factor[k], Code<k>::dither(word)), codes[k] + i), ...);
    word += static_cast<uint32_t>(kLanes) * Chance::kBetween;
  }
  // Writes zeros over the codes where the exponent says all.
  void end(size_t block) const {
    for (size_t k = 0; k < kNumStates; ++k) {
      if (!is_coded[k]) __builtin_memset(codes[k], 0, block);
    }
  }

  const uint32_t (*values)[kMostBlock];  // of the states, then the new masters
  typename Form::Param* param;
  typename Form::Master* master;
  Differs* differs;
  uint8_t* codes[kNumStates];
  Floats factor[kNumStates];
  bool is_coded[kNumStates];
  Words word;
};

template <class Rule, class Form, class Grad, class Differs, size_t... k>
void update_blocks(std::index_sequence<k...> all, typename Form::Param* param, typename Form::Master* master,
                   const typename Grad::Element* grad, void* const* states, size_t numel, float grad_scale,
                   const Rule rule, const CodedStates kept, size_t block, Differs* differs) {
  constexpr size_t kNum = Rule::kNumStates;
  alignas(64) uint32_t values[2][kNum + 1][kMostBlock] = {};
  typename Form::Param no_param[kMostBlock] = {};
  typename Form::Master no_master[kMostBlock];
  Differs no_differs[kMostBlock];
  uint8_t no_codes[kMostBlock];
  Words steps;
  for (size_t j = 0; j < kLanes; ++j) steps[j] = static_cast<uint32_t>(j) * Chance::kBetween;
  ComputedBlock<Form, Differs, kNum> before = {values[1], no_param, no_master, no_differs, {}, {}, {}, steps};  // nothing
  ((before.codes[k] = no_codes), ...);
  for (size_t done = 0; done < numel; done += block) {
    auto& own = values[done / block % 2];
    uint8_t* const codes[] = {static_cast<uint8_t*>(states[k]) + done...};
    uint8_t* const exponents[] = {static_cast<uint8_t*>(states[kNum + k]) + done / block...};
    const Floats scales[] = {BlockExponent::scale(*exponents[k])...};
    Words tops[kNum] = {};
    for (size_t i = 0; i < block; i += kLanes) {
      Floats state[] = {Code<k>::decode(codes[k] + i, scales[k])...};
      const Floats scaled = Grad::of(load<Words>(grad + done + i)) * grad_scale;
      const Floats weight = rule(scaled, Form::load(load<Words>(param + done + i), master, done + i), state[k]...);
      store(bits_of(weight), own[kNum] + i);
      ((tops[k] = larger(tops[k], Code<k>::magnitude(bits_of(state[k])))), ...);
      (store(bits_of(state[k]), own[k] + i), ...);
      before.store(all, i);
    }
    before.end(block);
    const BlockExponent found[] = {BlockExponent(largest(tops[k]))...};
    ((*exponents[k] = static_cast<uint8_t>(found[k].biased)), ...);
    before = {own,
              param + done,
              master + (master ? done : 0),
              differs + (differs ? done : 0),
              {codes[k]...},
              {found[k].factor()...},
              {found[k].is_coded...},
              steps + kept.word(done)};
  }
  for (size_t i = 0; i < block; i += kLanes) before.store(all, i);
  before.end(block);
}

template <class Rule, class Form, class Grad>
void update_coded(void* param, void* master, const void* grad, void* const* states, size_t numel, float grad_scale,
                  const float* scalars, Dither dither, uint16_t* differs) {
  const auto run = [&](auto* wanted) {
    update_blocks<Rule, Form, Grad>(
        std::make_index_sequence<Rule::kNumStates>{}, static_cast<typename Form::Param*>(param),
        static_cast<typename Form::Master*>(master), static_cast<const typename Grad::Element*>(grad), states, numel,
        grad_scale, Rule(scalars), CodedStates(scalars + Rule::kNumScalars, dither), dither.block, wanted);
  };
  if constexpr (sizeof(typename Form::Param) == sizeof *differs) {
    if (differs) return run(differs);
  }
  run(static_cast<Nothing*>(nullptr));
}
