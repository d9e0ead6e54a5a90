// Lion: Chen et al., arXiv:2302.06675.
struct Lion {
  static constexpr size_t kNumStates = 1, kNumScalars = 6;

  explicit Lion(const float* scalars)
      : decay(scalars[0]),
        lr(scalars[1]),
        beta1(scalars[2]),
        beta1_complement(scalars[3]),
        beta2(scalars[4]),
        beta2_complement(scalars[5]) {}

  template <class Float>
  Float operator()(Float grad, Float master, Float& exp_avg) const {
    const Float mixed = exp_avg * beta1 + grad * beta1_complement;
    exp_avg = exp_avg * beta2 + grad * beta2_complement;
    // The sign of a NaN is a NaN, as torch.sign has it.
    using Word = decltype(bits_of(grad));
    const Word negative = select(mixed < 0.0f, spread<Word>(bits_of(-1.0f)), Word{});
    const Word sign = select(mixed > 0.0f, spread<Word>(bits_of(1.0f)), negative);
    const Word direction = select(is_nan(bits_of(mixed)), spread<Word>(kQuietNan), sign);
    return master * decay - lr * float_of(direction);
  }

  float decay;  // 1 - lr * weight_decay
  float lr;
  float beta1, beta1_complement;
  float beta2, beta2_complement;
};
