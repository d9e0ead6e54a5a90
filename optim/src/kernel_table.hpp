// What one ISA offers: the loops over a run of elements, without threads, checks or Python.
#pragma once
#include <cstddef>
#include <cstdint>

namespace optim {

// Results that are reduced or compared (square sums, checksums) are per block, so that they never depend on how the
// work was shared out. A multiple of every vector width; a split block with its moments and gradient is 0.9 MiB.
constexpr std::size_t kBlockNumel = 65536;

enum MasterForm { kSplit, kFull, kItself, kNumMasterForms };
enum GradDtype { kFp32, kBf16, kFp16, kNumGradDtypes };

struct AdamWScalars {
  float decay;             // 1 - lr * weight_decay
  float beta1_complement;  // 1 - beta1
  float beta2;
  float beta2_complement;  // 1 - beta2
  float step_size;         // lr / (1 - beta1^step)
  float bias_correction2_sqrt;
  float eps;
  float grad_scale;  // unscaling and clipping in one factor; negative to maximize
};

struct KernelTable {
  using AdamW = void (*)(void* param, void* master, const void* grad, float* exp_avg, float* exp_avg_sq,
                         std::size_t numel, const AdamWScalars&);

  AdamW adamw[kNumMasterForms][kNumGradDtypes];
  void (*split)(const float* src, std::uint16_t* hi, std::uint16_t* lo, std::size_t numel);
  void (*join)(const std::uint16_t* hi, const std::uint16_t* lo, float* dst, std::size_t numel);
  void (*fp16_to_fp32)(const std::uint16_t* src, float* dst, std::size_t numel);
  void (*fp32_to_fp16)(const float* src, std::uint16_t* dst, std::size_t numel);
  std::uint64_t (*checksum)(const void* data, std::size_t size_bytes);
  double (*sq_sum[kNumGradDtypes])(const void* grad, std::size_t numel);
};

}  // namespace optim
