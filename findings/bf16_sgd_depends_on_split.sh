#!/usr/bin/env bash
# Plain SGD over bf16 gives other weights where a parameter is split.
#
# Guess: SGD with foreach=False and fused=False is elementwise: a parameter updated as a whole and
#   in pieces has the same bits.
# Seen: Of 1,003 bf16 weights some 50 differ after 3 steps between one parameter and pieces of 7
#   (or 17) elements; torch.add(x, y, alpha=0.1) of strided operands differs from that of
#   contiguous ones. fp32 is exact, and so is AdamW.
# Version: torch 2.13.0, CPU with AVX2 or AVX-512 (77 without).
# Why: x + alpha * y is computed in fp32 and rounded once by the vector code, and rounds the
#   product to bf16 first in the scalar code for tails and strides; both round alpha to bf16
#   (aten/src/ATen/native/cpu/BinaryOpsKernel.cpp; each formula, written out in fp32, gives the
#   bits of its case).
# Means: Sharding or offloading by pieces whose sizes fill no vector changes the bits of bf16 SGD;
#   a reference for a comparison must be cut in the same way, or the update be done in fp32.

folder=$(mktemp -d) || exit 77
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENVS:-$folder}/torch-2.13.0-numpy-2.4.6
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" install -qq --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 || { rm -rf "$venv"; exit 77; }
fi
cat > "$folder/seen.py" <<'PYTHON'
import sys

import torch

capability = torch.backends.cpu.get_cpu_capability()
print("torch", torch.__version__, capability)
if capability not in ("AVX2", "AVX512"):
    sys.exit(77)
SIZE = 1003


def trained(optimizer, dtype, piece):
    torch.manual_seed(0)
    weights, gradients = torch.randn(SIZE, dtype=dtype), torch.randn(3, SIZE, dtype=dtype)
    parameters = [torch.nn.Parameter(part.clone()) for part in weights.split(piece)]
    stepper = optimizer(parameters, lr=1e-2, weight_decay=0.01, foreach=False, fused=False)
    for gradient in gradients:
        for parameter, part in zip(parameters, gradient.split(piece), strict=True):
            parameter.grad = part.clone()
        stepper.step()
    return torch.cat([parameter.data for parameter in parameters])


seen = {}
for optimizer in (torch.optim.SGD, torch.optim.AdamW):
    for dtype in (torch.bfloat16, torch.float32):
        whole = trained(optimizer, dtype, SIZE)
        differing = int((trained(optimizer, dtype, 7) != whole).sum())
        seen[optimizer.__name__, str(dtype)] = differing
        print(f"{optimizer.__name__:6} {dtype}: {differing} of {SIZE} differ when split by 7")
x, y = torch.randn(2, 4000).bfloat16()
strided = int((torch.add(x[::2], y[::2], alpha=0.1) != torch.add(x, y, alpha=0.1)[::2]).sum())
print("torch.add(alpha=0.1), bf16, strided:", strided, "of 2,000 differ")
sgd = seen.pop(("SGD", "torch.bfloat16"))
sys.exit(not sgd or not strided or any(seen.values()))
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
