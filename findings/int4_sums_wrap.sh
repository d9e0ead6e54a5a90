#!/usr/bin/env bash
# numpy's sum of a hundred int4 ones is 4, and the mean of int4 sevens is 0.
#
# Guess: np.sum of 100 ones of ml_dtypes' int4 is 100, as of int8: numpy sums integers that are
#   smaller than its int64 in int64, and means in float64.
# Seen: np.sum and np.cumsum give 4, as int4; of uint4 4 and of int2 0. The mean of ten
#   sevens is 0, as int4. int8 gives 100 and 7.0. With dtype=np.int64 the sum is 100.
# Version: ml_dtypes 0.6.0, numpy 2.4.6.
# Why: The documentation of np.sum promises the platform integer for integers of less precision.
#   numpy chooses by the kind of its own types (np.integer); int4 has the kind V, so add.reduce
#   accumulates in int4, and np.mean takes float64 for np.integer and np.bool alone
#   (numpy/_core/_methods.py).
# Means: Sums, means and checks over quantized weights are wrong without a word: a mean that is 0
#   looks like a good zero point. Convert to int8 or float32 first, or name dtype.

folder=$(mktemp -d) || exit 77
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENVS:-$folder}/ml_dtypes-0.6.0-numpy-2.4.6
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" install -qq --disable-pip-version-check \
    ml_dtypes==0.6.0 numpy==2.4.6 || { rm -rf "$venv"; exit 77; }
fi
cat > "$folder/seen.py" <<'PYTHON'
import sys

import ml_dtypes
import numpy as np

print("ml_dtypes", ml_dtypes.__version__, "numpy", np.__version__)


def seen(dtype):
    ones, full = np.ones(100, dtype), np.full(10, 7 if dtype in (np.int8, ml_dtypes.int4) else 1, dtype)
    sums = [int(np.sum(ones)), int(np.cumsum(ones)[-1]), int(np.sum(ones, dtype=np.int64))]
    means = float(np.mean(full))
    print(f"{np.dtype(dtype)}: sum, cumsum, sum as int64 of 100 ones: {sums}; mean of {int(full[0])}s: {means}")
    return *sums, means


int8, int4 = seen(np.int8), seen(ml_dtypes.int4)
uint4, int2 = seen(ml_dtypes.uint4), seen(ml_dtypes.int2)
sys.exit(
    int8[0] != 100
    or int8[3] != 7
    or int4 != (4, 4, 100, 0)
    or uint4[:3] != (4, 4, 100)
    or int2[:3] != (0, 0, 100)
)
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
