#!/usr/bin/env bash
# sigmoid, silu and gelu of one number depend on its neighbours in memory.
#
# Guess: An elementwise function in fp32 gives each element the same bits, whatever its place, the
#   stride and the length: loops over vectors and their tails use the same code.
# Seen: f(x[::2]) differs from f(x)[::2] in some bits for sigmoid, silu, gelu, softplus, elu, exp2
#   and others (up to a third of the elements), and f of pieces of 7 differs from f of the whole;
#   exp, log, tanh, sin and sqrt do not.
# Version: torch 2.13.0, CPU with AVX2 or AVX-512 (77 without).
# Why: Contiguous memory goes through vector code (SLEEF), strided memory and, for these
#   functions, the rest behind the last full vector through scalar code with the C library
#   (cpu_kernel_vec in aten/src/ATen/native/cpu/Loops.h).
# Means: Activations that are recomputed in pieces, in another layout or for another batch length
#   are not bit for bit those of the first pass. Who promises equal bits keeps shapes and strides
#   as they were.

folder=$(mktemp -d) || exit 77
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENVS:-$folder}/torch-2.13.0-numpy-2.4.6
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" install -qq --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 || { rm -rf "$venv"; exit 77; }
fi
cat > "$folder/seen.py" <<'PYTHON'
import sys

import torch
from torch.nn import functional

capability = torch.backends.cpu.get_cpu_capability()
print("torch", torch.__version__, capability)
if capability not in ("AVX2", "AVX512"):
    sys.exit(77)
torch.manual_seed(0)
x = torch.randn(40_000) * 2
VARY = {
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "softplus": functional.softplus,
    "elu": functional.elu,
    "exp2": torch.exp2,
}
HOLD = {"exp": torch.exp, "tanh": torch.tanh, "sin": torch.sin, "relu": torch.relu}


def differing(function):
    whole = function(x)
    strided = int((function(x[::2]) != whole[::2]).sum())
    pieces = torch.cat([function(piece) for piece in x[:2800].split(7)])
    return strided, int((pieces != whole[:2800]).sum())


torch.set_num_threads(1)
seen = {name: differing(function) for name, function in (VARY | HOLD).items()}
for name, (strided, pieces) in seen.items():
    print(f"{name:9} of 20,000 strided: {strided:5}   of 2,800 in pieces of 7: {pieces:4}")
sys.exit(not all(seen[name][0] for name in VARY) or any(sum(seen[name]) for name in HOLD))
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
