#!/usr/bin/env bash
# A Delta filter in front of a compressor gives other floats back.
#
# Guess: A filter of numcodecs (Zarr's) is lossless unless its name says otherwise: Delta gives
#   every float32 back.
# Seen: 2.5 % of 1,000 normal float32 values come back with their bits; the others are off by up
#   to 1.4e-6. Behind a value of 1e8 all that follow are off by 0.1. The same bits as integers
#   come back.
# Version: numcodecs 0.16.6, numpy 2.4.6.
# Why: It stores differences in the dtype of the data and adds them up again with cumsum. Both
#   round (numcodecs/delta.py). Its documentation warns of integers that overflow alone.
# Means: A checkpoint or a trace of floats behind Delta is another one. For floats take a
#   shuffle or bitshuffle, or view them as integers first: those wrap, and come back.

folder=$(mktemp -d) || exit 77
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENVS:-$folder}/numcodecs-0.16.6-numpy-2.4.6
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" install -qq --disable-pip-version-check \
    numcodecs==0.16.6 numpy==2.4.6 || { rm -rf "$venv"; exit 77; }
fi
cat > "$folder/seen.py" <<'PYTHON'
import sys

import numcodecs
import numpy as np

values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
spiked = values.copy()
spiked[0] = 1e8


def through(codec, array):
    return np.asarray(codec.decode(codec.encode(array))).view(array.dtype)


floats = numcodecs.Delta(dtype="f4")
found, after = through(floats, values), through(floats, spiked)
as_integers = through(numcodecs.Delta(dtype="i4"), values.view(np.int32)).view(np.float32)
same = float((found.view(np.uint32) == values.view(np.uint32)).mean())
off, far = float(np.abs(found - values).max()), float(np.abs(after[1:] - spiked[1:]).max())
print("numcodecs", numcodecs.__version__, "numpy", np.__version__)
print(f"same bits: {same:.3f}, off by up to {off:.1e}, behind 1e8 by up to {far:.2f}")
print("as integers the same:", np.array_equal(as_integers.view(np.uint32), values.view(np.uint32)))
exact = np.array_equal(as_integers.view(np.uint32), values.view(np.uint32))
sys.exit(not (same < 0.1 and 1e-7 < off < 1e-5 and far > 0.01 and exact))
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
