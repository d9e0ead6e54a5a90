// Adam: Kingma and Ba, arXiv:1412.6980, with torch's L2 penalty in the gradient.
struct Adam {
  static constexpr size_t kNumStates = 2, kNumScalars = 1 + Moments::kNumScalars;

  explicit Adam(const float* scalars) : weight_decay(scalars[0]), decays(weight_decay != 0.0f), moments(scalars + 1) {}

  template <class Float>
  Float operator()(Float grad, Float master, Float& exp_avg, Float& exp_avg_sq) const {
    const Float denom = moments(decays ? grad + weight_decay * master : grad, exp_avg, exp_avg_sq);
    return master - (moments.step_size * exp_avg) / denom;
  }

  float weight_decay;
  bool decays;
  Moments moments;
};
