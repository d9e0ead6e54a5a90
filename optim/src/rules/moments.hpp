// Two moments with bias correction, as torch's for-loop Adam has them (torch/optim/adam.py, _single_tensor_adam), operation
// by operation. Its bits differ in places because its lerp and addcmul are compiled to fused multiply-adds on some machines.
struct Moments {
  static constexpr size_t kNumScalars = 6;

  explicit Moments(const float* scalars)
      : beta2(scalars[1]),
        beta2_complement(scalars[2]),
        step_size(scalars[3]),
        bias_correction2_sqrt(scalars[4]),
        eps(scalars[5]),
        near_grad(scalars[0] >= 0.5f),
        weight(near_grad ? scalars[0] - 1.0f : scalars[0]) {}

  // Takes the gradient into the moments; returns what step_size * exp_avg is divided by.
  template <class Float>
  Float operator()(Float grad, Float& exp_avg, Float& exp_avg_sq) const {
    exp_avg = (near_grad ? grad : exp_avg) + weight * (grad - exp_avg);
    exp_avg_sq = exp_avg_sq * beta2 + (beta2_complement * grad) * grad;
    return root(exp_avg_sq) / bias_correction2_sqrt + eps;
  }

  float beta2;
  float beta2_complement;  // 1 - beta2
  float step_size;         // lr / (1 - beta1^step)
  float bias_correction2_sqrt;
  float eps;
  bool near_grad;  // torch.lerp starts at the nearer end: with a weight of 1 the result is the gradient exactly
  float weight;    // 1 - beta1, or what is left of it from there
};
