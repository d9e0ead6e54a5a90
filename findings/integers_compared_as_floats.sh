#!/usr/bin/env bash
# torch compares integers with floats in the floats' precision.
#
# Guess: An int64 tensor of 2**24 + 1 is not equal to 16777216.0, as in Python and numpy, and
#   torch.equal, "same size and elements", tells 257 from 256. clamp(max=1e9) leaves it alone.
# Seen: torch.tensor([2**24 + 1]) == 16777216.0 is True and > is False. torch.equal of int64 257 and
#   bfloat16 256 is True. torch.testing.assert_close with rtol=0, atol=0 and check_dtype=False
#   passes. clamp(max=1e9) and torch.where(x > 0, x, 0.0) give 16777216.0, as float32. numpy says
#   False to the comparisons and clips to 16777217.
# Version: torch 2.13.0.
# Why: The rules of promotion, which the documentation tells of add, sub, mul and div, hold for all
#   of these: a number has the default dtype (float32), a float tensor wins over an integer one of
#   any width, and the integers are rounded first. numpy goes to float64.
# Means: Sample counters, token offsets and byte positions beyond 2**24 meet a float as a
#   threshold, and tests that compare an integer buffer with its copy in bf16 see nothing.
#   Compare with an int, compare dtypes too, and clamp with max=10**9.

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

print("torch", torch.__version__, "numpy", np.__version__)
x = torch.tensor([2**24 + 1])
n = x.numpy()
compared = [bool(x == 16777216.0), bool(x > 16777216.0), bool(n == 16777216.0), bool(n > 16777216.0)]
print("2**24 + 1 == 16777216.0, > 16777216.0: torch", compared[:2], "numpy", compared[2:])
equal = torch.equal(torch.tensor([257]), torch.tensor([256.0], dtype=torch.bfloat16))
print("torch.equal of int64 257 and bfloat16 256:", equal)
torch.testing.assert_close(x, torch.tensor([16777216.0]), rtol=0, atol=0, check_dtype=False)
print("assert_close of int64 2**24 + 1 and float32 2**24, rtol and atol 0: passes")
clamped, chosen = x.clamp(max=1e9), torch.where(x > 0, x, 0.0)
print("clamp(max=1e9):", clamped.item(), clamped.dtype, "where(x > 0, x, 0.0):", chosen.item(), chosen.dtype)
clipped, right = np.clip(n, None, 1e9).item(), x.clamp(max=10**9).item()
print("numpy.clip:", clipped, "clamp(max=10**9):", right)
sys.exit(
    compared != [True, False, False, True]
    or not equal
    or [clamped.item(), chosen.item()] != [16777216.0, 16777216.0]
    or {clamped.dtype, chosen.dtype} != {torch.float32}
    or clipped != 2**24 + 1
    or right != 2**24 + 1
)
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
