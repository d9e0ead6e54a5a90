#!/usr/bin/env bash
# A NaN in a bfloat16 array of numpy leaves the numbers beside it unsorted.
#
# Guess: np.sort of bfloat16 with a NaN is as of float16: the numbers in order, the NaN last.
# Seen: np.sort([3, nan, 1, 2]) returns [3, nan, 1, 2], by every kind of sort; of 1,000 values
#   with ten NaNs the other 990 are not in order. fp8 is the same. float16 and float32 are
#   right. Without a NaN bfloat16 is right, too.
# Version: ml_dtypes 0.6.0, numpy 2.4.6.
# Why: numpy sorts a dtype that it does not know with the comparison that the dtype registers.
#   For that of ml_dtypes (NPyCustomFloat_CompareFunc) a NaN is neither less nor greater than a
#   number, so it is equal to each of them, which is no order.
# Means: Quantiles, medians, top-k and np.unique of 16-bit weights or gradients are wrong where
#   one NaN is among them, and they look like numbers. Sort them in float32, or look for NaNs
#   first.

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

small = np.array([3, np.nan, 1, 2], np.float32)
many = np.random.default_rng(0).normal(size=1000).astype(np.float32)
many[::100] = np.nan


def in_order(values, kind):
    found = np.sort(values, kind=kind).astype(np.float32)
    numbers = found[~np.isnan(found)]
    return bool((np.diff(numbers) >= 0).all())


print("ml_dtypes", ml_dtypes.__version__, "numpy", np.__version__)
as_guessed = {}
for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16):
    orders = [in_order(many.astype(dtype), kind) for kind in ("quicksort", "stable", "heapsort")]
    print(dtype.__name__, np.sort(small.astype(dtype)).tolist(), "numbers in order:", orders)
    as_guessed[dtype.__name__] = all(orders)
    if dtype is ml_dtypes.bfloat16:
        stays = np.array_equal(np.sort(small.astype(dtype)).astype(np.float32), small, equal_nan=True)
without = in_order(many[~np.isnan(many)].astype(ml_dtypes.bfloat16), "stable")
sys.exit(as_guessed != {"bfloat16": False, "float8_e4m3fn": False, "float16": True} or not (stays and without))
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
