#!/usr/bin/env bash
# HDF5 makes infinity of float32 values that the nearest float16 holds.
#
# Guess: HDF5 converts float32 to float16 as IEEE 754 and numpy do: what is below 65520 becomes
#   65504.
# Seen: 65504.01, 65510 and 65519.9 become inf; numpy gives 65504. 65504 stays. All of 1,000
#   normal values, ties and denormal halves are as numpy has them.
# Version: h5py 3.16.0 with HDF5 2.0.0, numpy 2.4.6.
# Why: The conversion in the library asks whether the value is above the largest of the target
#   before it rounds (H5Tconv_macros.h).
# Means: A float16 dataset that float32 values were written to may hold inf where training in
#   fp16 had 65504. Convert before writing.

folder=$(mktemp -d) || exit 77
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENVS:-$folder}/h5py-3.16.0-numpy-2.4.6
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" install -qq --disable-pip-version-check \
    h5py==3.16.0 numpy==2.4.6 || { rm -rf "$venv"; exit 77; }
fi
cat > "$folder/seen.py" <<'PYTHON'
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np

edge = np.array([65504, 65504.01, 65510, 65519.9, 65520], np.float32)
others = np.random.default_rng(0).normal(size=1000).astype(np.float32)
others = np.concatenate([others, np.array([1 + 2**-11, 1 + 3 * 2**-11, 6e-8, 2.9e-8, -0.0], np.float32)])


def through_a_file(values):
    with tempfile.TemporaryDirectory() as folder, h5py.File(Path(folder) / "a.h5", "w") as file:
        dataset = file.create_dataset("half", values.shape, "f2")
        dataset[:] = values
        return dataset[:]


with np.errstate(over="ignore"):
    expected, stored = edge.astype(np.float16), through_a_file(edge)
print("h5py", h5py.__version__, "HDF5", h5py.version.hdf5_version, "numpy", np.__version__)
print("values:", edge.tolist(), "numpy:", expected.tolist(), "HDF5:", stored.tolist())
rest = np.array_equal(through_a_file(others).view(np.uint16), others.astype(np.float16).view(np.uint16))
print("all others the same:", rest)
right = expected.tolist() == [65504.0, 65504.0, 65504.0, 65504.0, np.inf]
sys.exit(not (right and stored.tolist() == [65504.0, np.inf, np.inf, np.inf, np.inf] and rest))
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
