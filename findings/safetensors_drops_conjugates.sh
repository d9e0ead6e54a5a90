#!/usr/bin/env bash
# safetensors saves the conjugate of a complex tensor without the conjugation.
#
# Guess: save_file of x.conj() raises, as numpy() does, or stores the conjugate.
# Seen: The file holds x: x.conj() = 1-2j is loaded as 1+2j, with no error. torch.save and
#   x.conj().resolve_conj() are right.
# Version: safetensors 0.8.0, torch 2.13.0.
# Why: conj() of torch is lazy: a flag over the same memory. is_contiguous() is true, and
#   safetensors takes the memory from data_ptr() without looking at the flag
#   (safetensors/torch.py).
# Means: A file of complex weights (spectral layers, rotary factors) may hold the wrong sign of
#   the imaginary part. Whoever reads memory by address calls resolve_conj() and resolve_neg()
#   first.

folder=$(mktemp -d) || exit 77
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENVS:-$folder}/torch-2.13.0-numpy-2.4.6-safetensors-0.8.0
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" install -qq --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 safetensors==0.8.0 || { rm -rf "$venv"; exit 77; }
fi
cat > "$folder/seen.py" <<'PYTHON'
import io
import sys

import safetensors
import torch
from safetensors.torch import load, save

x = torch.tensor([1 + 2j, 3 - 4j])
conjugate = x.conj()
stored = load(save({"x": conjugate}))["x"]
resolved = load(save({"x": conjugate.resolve_conj()}))["x"]
buffer = io.BytesIO()
torch.save(conjugate, buffer)
buffer.seek(0)
pickled = torch.load(buffer)
print("safetensors", safetensors.__version__, "torch", torch.__version__)
print("x.conj():", conjugate.tolist(), "safetensors:", stored.tolist(), "torch.save:", pickled.tolist())
sys.exit(not (torch.equal(stored, x) and torch.equal(resolved, conjugate) and torch.equal(pickled, conjugate)))
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
