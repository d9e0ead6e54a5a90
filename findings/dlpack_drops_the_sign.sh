#!/usr/bin/env bash
# numpy.from_dlpack of an imaginary part has the wrong sign.
#
# Guess: DLPack has no flag for a lazy negation, so that torch refuses to export such a tensor, as
#   it refuses a lazy conjugate.
# Seen: x.conj().imag is -2.0 in torch and 2.0 in numpy.from_dlpack, with shared memory and no
#   error; x.conj() itself raises BufferError, and .numpy() raises.
# Version: torch 2.13.0, numpy 2.4.6.
# Why: conj().imag is a view with the negative bit; __dlpack__ checks the conjugate bit only
#   (torch/_tensor.py).
# Means: Data handed to numpy, JAX or CuPy by DLPack flips its sign; call resolve_neg() before a
#   tensor leaves torch.

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

x = torch.tensor([1 + 2j, 3 - 4j])
imaginary = x.conj().imag
exported = np.from_dlpack(imaginary)
refused = []
for name, call in {"from_dlpack(x.conj())": lambda: np.from_dlpack(x.conj()), "numpy()": imaginary.numpy}.items():
    try:
        call()
    except (BufferError, RuntimeError) as error:
        refused.append((name, type(error).__name__))
print("torch", torch.__version__, "numpy", np.__version__)
print("is_neg", imaginary.is_neg(), "torch", imaginary.tolist(), "numpy", exported.tolist(), "refused", refused)
right = imaginary.tolist() == [-2.0, 4.0] and np.from_dlpack(imaginary.resolve_neg()).tolist() == [-2.0, 4.0]
sys.exit(not (right and exported.tolist() == [2.0, -4.0] and len(refused) == 2))
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
