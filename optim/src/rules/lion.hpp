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

  float operator()(float grad, float master, float& exp_avg) const {
    const float mixed = exp_avg * beta1 + grad * beta1_complement;
    const float sign = static_cast<float>(mixed > 0.0f) - static_cast<float>(mixed < 0.0f);
    exp_avg = exp_avg * beta2 + grad * beta2_complement;
    // The sign of a NaN is a NaN, as torch.sign has it.
    const float direction = float_of(select(is_nan(bits_of(mixed)), kQuietNan, bits_of(sign)));
    return master * decay - lr * direction;
  }

  float decay;  // 1 - lr * weight_decay
  float lr;
  float beta1, beta1_complement;
  float beta2, beta2_complement;
};
