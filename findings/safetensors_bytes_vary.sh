#!/usr/bin/env bash
# The same tensors and the same metadata give another safetensors file in each process.
#
# Guess: Safetensors sorts what it writes, so equal tensors and equal metadata are equal bytes.
# Seen: Without metadata, or with one entry, ten processes write one and the same file. With eight
#   entries they write up to ten: the tensors are sorted, and the bytes behind the header are the
#   same, but the entries of __metadata__ stand in another order each time.
# Version: safetensors 0.8.0, numpy 2.4.6.
# Why: Metadata.metadata is a HashMap of Rust, with a seed of its own in each map
#   (safetensors/src/tensor.rs), and is written in its order.
# Means: A digest of the file is none of the model: a cache by content, an upload that skips equal
#   files or a test that compares bytes sees a change where there is none. Take digests of the
#   tensors, or give one entry (a string of JSON).

folder=$(mktemp -d) || exit 77
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENVS:-$folder}/numpy-2.4.6-safetensors-0.8.0
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" install -qq --disable-pip-version-check \
    numpy==2.4.6 safetensors==0.8.0 || { rm -rf "$venv"; exit 77; }
fi
cat > "$folder/once.py" <<'PYTHON'
import hashlib

import numpy as np
from safetensors.numpy import save

tensors = {"b": np.zeros(3, np.float32), "a": np.ones(2, np.float32)}
for entries in (0, 1, 8):
    metadata = {f"key{number}": "value" for number in range(entries)} or None
    written = save(tensors, metadata)
    behind = written[8 + int.from_bytes(written[:8], "little") :]
    print(hashlib.sha256(written).hexdigest(), hashlib.sha256(behind).hexdigest())
PYTHON
cat > "$folder/seen.py" <<'PYTHON'
import importlib.metadata
import subprocess
import sys

runs = []
for _ in range(10):
    said = subprocess.run([sys.executable, sys.argv[1]], capture_output=True, text=True, check=True).stdout
    runs.append([line.split() for line in said.splitlines()])
files = [len({run[case][0] for run in runs}) for case in range(3)]
bodies = [len({run[case][1] for run in runs}) for case in range(3)]
print("safetensors", importlib.metadata.version("safetensors"), "numpy", importlib.metadata.version("numpy"))
for entries, whole, behind in zip((0, 1, 8), files, bodies):
    print(f"{entries} entries of metadata, 10 processes: {whole} different files, {behind} behind the header")
sys.exit(not (files[:2] == [1, 1] and files[2] > 1 and bodies == [1, 1, 1]))
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py" "$folder/once.py"
