#!/usr/bin/env bash
# A fused optimizer updates the last elements of a tensor with other bits.
#
# Guess: SGD(fused=True) and AdamW(fused=True) over fp32 give an element the same bits, wherever
#   it lies in the tensor: vector body and scalar tail do the same IEEE operations.
# Seen: Split into pieces of 7, 9 to 33 of 1,003 weights differ from those of one tensor after 3
#   steps; split by 16 none. The plain and the foreach loops are exact.
# Version: torch 2.13.0, CPU with AVX2 or AVX-512 (77 without); fp32 and fp64.
# Why: The kernel has its formula twice, for whole vectors and for single elements behind them
#   (sgd_math in aten/src/ATen/native/cpu/FusedSGDKernel.cpp, FusedAdamKernel.cpp); a compiler may
#   join a product and a sum into one rounding in one of the two.
# Means: A checkpoint of a fused run that is sharded in another way goes on with other bits, and a
#   test that compares fused optimizers must cut tensors at multiples of 16.

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


def trained(optimizer, piece, **options):
    torch.manual_seed(0)
    weights, gradients = torch.randn(SIZE), torch.randn(3, SIZE)
    parameters = [torch.nn.Parameter(part.clone()) for part in weights.split(piece)]
    stepper = optimizer(parameters, lr=1e-2, weight_decay=0.01, **options)
    for gradient in gradients:
        for parameter, part in zip(parameters, gradient.split(piece), strict=True):
            parameter.grad = part.clone()
        stepper.step()
    return torch.cat([parameter.data for parameter in parameters])


wrong = False
for optimizer, more in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {})):
    for options in ({"fused": True}, {"foreach": True}, {"foreach": False, "fused": False}):
        whole = trained(optimizer, SIZE, **options, **more)
        seven, sixteen = (int((trained(optimizer, piece, **options, **more) != whole).sum()) for piece in (7, 16))
        print(f"{optimizer.__name__:6} {options}: split by 7 {seven} differ, split by 16 {sixteen}")
        wrong |= bool(seven) != ("fused" in options and options["fused"]) or bool(sixteen)
sys.exit(wrong)
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
