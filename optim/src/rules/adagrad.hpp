// Adagrad: Duchi, Hazan and Singer, JMLR 12 (2011), in the order of torch's for-loop (torch/optim/adagrad.py).
struct Adagrad {
  static constexpr size_t kNumStates = 1, kNumScalars = 3;

  explicit Adagrad(const float* scalars)
      : step_size(scalars[0]), weight_decay(scalars[1]), eps(scalars[2]), decays(weight_decay != 0.0f) {}

  template <class Float>
  Float operator()(Float grad, Float master, Float& sum) const {
    const Float g = decays ? grad + weight_decay * master : grad;
    sum = sum + g * g;
    return master - (step_size * g) / (root(sum) + eps);
  }

  float step_size;  // lr / (1 + (step - 1) * lr_decay)
  float weight_decay;
  float eps;
  bool decays;
};
