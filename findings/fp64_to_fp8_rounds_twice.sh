#!/usr/bin/env bash
# ml_dtypes rounds a float64 to fp8 twice.
#
# Guess: ml_dtypes converts float64 to float8_e4m3fn and float8_e5m2 in one correct rounding; only
#   bfloat16 goes through float32.
# Seen: 1 + 2**-4 + 2**-40 lies above the middle between 1.0 and 1.125 and becomes 1.0; numpy's
#   own float16 rounds the corresponding number up, as it should.
# Version: ml_dtypes 0.6.0, numpy 2.4.6; torch 2.13 gives the same wrong 1.0.
# Why: The conversion takes the step over float32, where 2**-40 is lost and a tie remains, which
#   goes to the even neighbour.
# Means: Quantizers that compute scales in float64 and compare with an exact reference see off-by-
#   one codes near ties; round once from float64 by hand, or do everything in float32.

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

print("ml_dtypes", ml_dtypes.__version__, "numpy", np.__version__)
CASES = {  # dtype: bits of its fraction, what comes out
    np.float16: (10, "right"),
    ml_dtypes.bfloat16: (7, "twice"),
    ml_dtypes.float8_e4m3fn: (3, "twice"),
    ml_dtypes.float8_e4m3fnuz: (3, "twice"),
    ml_dtypes.float8_e5m2: (2, "twice"),
}
wrong = False
for dtype, (bits, expected) in CASES.items():
    number = 1 + 2.0 ** -(bits + 1) + 2.0**-40  # a little above the middle of two neighbours
    became = float(np.array([number]).astype(dtype)[0])
    seen = {1.0: "twice", 1 + 2.0**-bits: "right"}.get(became, "neither")
    print(f"{np.dtype(dtype).name:16} {became:<12} {seen}")
    wrong |= seen != expected
sys.exit(wrong)
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
