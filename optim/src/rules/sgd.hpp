// Stochastic gradient descent, in the order of torch's for-loop (torch/optim/sgd.py).
struct SGD {
  static constexpr size_t kNumStates = 0, kNumScalars = 2;

  explicit SGD(const float* scalars) : lr(scalars[0]), weight_decay(scalars[1]), decays(weight_decay != 0.0f) {}

  template <class Float>
  Float operator()(Float grad, Float master) const {
    return master - lr * (decays ? grad + weight_decay * master : grad);
  }

  float lr, weight_decay;
  bool decays;
};

struct SGDMomentum {
  static constexpr size_t kNumStates = 1, kNumScalars = 6;

  explicit SGDMomentum(const float* scalars)
      : lr(scalars[0]),
        weight_decay(scalars[1]),
        momentum(scalars[2]),
        kept(scalars[3]),
        gain(scalars[4]),
        decays(weight_decay != 0.0f),
        nesterov(scalars[5] != 0.0f) {}

  template <class Float>
  Float operator()(Float grad, Float master, Float& buffer) const {
    const Float g = decays ? grad + weight_decay * master : grad;
    buffer = buffer * kept + gain * g;
    return master - lr * (nesterov ? g + momentum * buffer : buffer);
  }

  float lr, weight_decay, momentum;
  float kept;  // of the buffer: momentum, but in the first step nothing
  float gain;  // of the gradient: 1 - dampening, but in the first step 1
  bool decays, nesterov;
};
