// AdamW: decoupled weight decay, Loshchilov and Hutter, arXiv:1711.05101.
struct AdamW {
  static constexpr size_t kNumStates = 2, kNumScalars = 1 + Moments::kNumScalars;

  explicit AdamW(const float* scalars) : decay(scalars[0]), moments(scalars + 1) {}

  template <class Float>
  Float operator()(Float grad, Float master, Float& exp_avg, Float& exp_avg_sq) const {
    const Float denom = moments(grad, exp_avg, exp_avg_sq);  // before all else: root and division take longest
    return master * decay - (moments.step_size * exp_avg) / denom;
  }

  float decay;  // 1 - lr * weight_decay
  Moments moments;
};
