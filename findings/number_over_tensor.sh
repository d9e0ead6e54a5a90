#!/usr/bin/env bash
# A Python number divided by a tensor is rounded twice, and overflows.
#
# Guess: 3.0 / x is the quotient, correctly rounded, as torch.tensor(3.0) / x and numpy's 3.0 / x
#   are; n / n is 1.
# Seen: 29 % of the elements have other bits than torch.tensor(3.0) / x, in fp64, fp32, bf16 and
#   fp16. 41.0 / torch.tensor([41.0]) is 0.99999994: of the integers up to 256, 38 over themselves
#   are not 1 in fp32, and 24 in bf16. In fp16 0.5 / 1e-5 is inf instead of 49,920.
# Version: torch 2.13.0.
# Why: Tensor.__rdiv__ is self.reciprocal() * other (torch/_tensor.py): two roundings, and the
#   reciprocal must be finite. A tensor on the left is divided.
# Means: A rule of an optimizer or a scale that is written 1 / x is exact, one with any other
#   number over a tensor is not: other bits than a kernel, a twin in numpy or a formula has. Write
#   torch.full_like(x, number) / x.

folder=$(mktemp -d) || exit 77
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENVS:-$folder}/torch-2.13.0-numpy-2.4.6
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" install -qq --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 || { rm -rf "$venv"; exit 77; }
fi
cat > "$folder/seen.py" <<'PYTHON'
import sys

import numpy as np
import torch

torch.manual_seed(0)
values = torch.rand(10_000, dtype=torch.float64) * 9 + 1
print("torch", torch.__version__)
as_described = True
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    x = values.to(dtype)
    number, scalar, full = 3.0 / x, torch.tensor(3.0, dtype=dtype) / x, torch.full_like(x, 3.0) / x
    other = float((number != full).double().mean())
    print(f"{dtype}: other bits than a division of tensors: {other:.1%}")
    as_described &= 0.2 < other < 0.4 and torch.equal(scalar, full)
single = values.float()
as_described &= np.array_equal((torch.full_like(single, 3.0) / single).numpy(), 3.0 / single.numpy())
for dtype in (torch.float32, torch.bfloat16):
    integers = torch.arange(1, 257).to(dtype)
    off = [n for n, x in enumerate(integers, 1) if (float(n) / x).item() != 1]
    print(f"{dtype}: of 1 to 256, number / tensor of itself is not 1 for {len(off)}; the first is {off[0]}")
    as_described &= len(off) > 10 and torch.equal(integers / integers, torch.ones(256, dtype=dtype))
small = torch.tensor([1e-5], dtype=torch.float16)
half, right = (0.5 / small).item(), (torch.full_like(small, 0.5) / small).item()
print("0.5 / 1e-5 in fp16:", half, "as tensors:", right)
sys.exit(not (as_described and half == float("inf") and right == 49920))
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
