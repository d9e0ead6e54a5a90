#!/usr/bin/env bash
# The bias gradient of a bf16 LayerNorm is at most 256 x threads.
#
# Guess: LayerNorm adds the gradients of its weight and bias up in fp32 over the rows, as Linear,
#   GroupNorm and RMSNorm do: 8,192 ones give 8,192.
# Seen: With 1 thread the bias gradient of 8,192 rows of ones is 256, with 2 threads 512. The loss
#   is silent, and the number of threads is part of the result. GroupNorm and Linear give 8,192.
# Version: torch 2.13.0, CPU, bf16 input; fp32 parameters with a bf16 input behave in the same
#   way.
# Why: The backward kernel keeps one row of sums per thread in the dtype of the input, bf16, and
#   adds these in fp32 at the end (aten/src/ATen/native/cpu/layer_norm_kernel.cpp).
# Means: A bf16 run on a CPU with LayerNorm is not repeatable on a machine with another number of
#   threads, and its bias hardly learns from more than 256 tokens per thread. A comparison on the
#   CPU sets torch.set_num_threads, or keeps LayerNorm in fp32.

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

ROWS = 8192


def bias_gradient(module, dtype=torch.bfloat16):
    module(torch.randn(ROWS, 64, dtype=dtype)).sum().backward()
    return module.bias.grad[0].item()


print("torch", torch.__version__)
seen = {}
for threads in (1, 2):
    torch.set_num_threads(threads)
    seen[threads] = {
        "LayerNorm": bias_gradient(torch.nn.LayerNorm(64, dtype=torch.bfloat16)),
        "LayerNorm fp32": bias_gradient(torch.nn.LayerNorm(64), torch.float32),
        "GroupNorm": bias_gradient(torch.nn.GroupNorm(1, 64, dtype=torch.bfloat16)),
        "Linear": bias_gradient(torch.nn.Linear(64, 64, dtype=torch.bfloat16)),
    }
    print(threads, "thread(s), of", ROWS, "rows:", seen[threads])
right = {"LayerNorm fp32": 8192.0, "GroupNorm": 8192.0, "Linear": 8192.0}
sys.exit(seen != {1: {"LayerNorm": 256.0} | right, 2: {"LayerNorm": 512.0} | right})
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
