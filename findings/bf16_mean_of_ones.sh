#!/usr/bin/env bash
# The mean of 1,000 bfloat16 ones is 0.256 in numpy.
#
# Guess: numpy sums bfloat16 as it sums float16, pairwise and over float32, so a mean of ones is
#   1 and a standard deviation is right to bfloat16.
# Seen: ones(1000).sum() is 256, mean() is 0.2559, and std() of 100,000 normal values is 0.205.
#   float16 gives 1000, 1 and, of the same values, 1. With dtype=float32 bfloat16 is right.
# Version: ml_dtypes 0.6.0, numpy 2.4.6.
# Why: numpy has a loop of its own for float16, which adds in pairs and in float32. A dtype from
#   outside is reduced with its own add, one element after the other, and 256 + 1 is 256 in
#   bfloat16.
# Means: Norms, means and error figures of bf16 weights that were read with numpy
#   (safetensors.numpy, say) are wrong by factors. Pass dtype=numpy.float32, or convert first.

folder=$(mktemp -d) || exit 77
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENVS:-$folder}/ml-dtypes-0.6.0-numpy-2.4.6
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" install -qq --disable-pip-version-check \
    ml_dtypes==0.6.0 numpy==2.4.6 || { rm -rf "$venv"; exit 77; }
fi
cat > "$folder/seen.py" <<'PYTHON'
import sys

import ml_dtypes
import numpy as np

normal = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
print("ml_dtypes", ml_dtypes.__version__, "numpy", np.__version__)
seen = {}
for dtype in (ml_dtypes.bfloat16, np.float16):
    ones, values = np.ones(1000, dtype), normal.astype(dtype)
    figures = ones.sum(), ones.mean(), values.std(dtype=np.float32 if dtype is np.float16 else None)
    seen[dtype.__name__] = [round(float(figure), 3) for figure in figures]
    print(dtype.__name__, "sum, mean of 1,000 ones, standard deviation of normal values:", seen[dtype.__name__])
wide = float(np.ones(1000, ml_dtypes.bfloat16).mean(dtype=np.float32))
print("bfloat16 with dtype=float32:", wide)
sys.exit(seen != {"bfloat16": [256.0, 0.256, 0.205], "float16": [1000.0, 1.0, 1.0]} or wide != 1.0)
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
