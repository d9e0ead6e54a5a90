#!/usr/bin/env bash
# index_add over a vector loses what index_add over a column keeps.
#
# Guess: index_add_, scatter_add_ and index_put_(accumulate=True) over bf16 all add in bf16: 1,000
#   ones give 256, whatever the shape.
# Seen: index_add gives 256 for a vector and 1,000 for the same numbers as a column (1,000 x 1).
#   scatter_add gives 1,000 for both, index_put 256 for both, and segment_reduce, of which 1,000
#   was expected, 256.
# Version: torch 2.13.0, CPU.
# Why: index_add of two or more dimensions is turned into scatter_add, whose kernel keeps an fp32
#   sum; that of a vector is a loop over elements of the tensor's dtype
#   (aten/src/ATen/native/TensorAdvancedIndexing.cpp, index_add_cpu_out).
# Means: Whoever flattens tensors into one buffer and adds by index gets other sums than before;
#   do it in fp32, or keep a dimension of 1.

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

ZEROS = torch.zeros(1000, dtype=torch.long)
VECTOR = torch.ones(1000, dtype=torch.bfloat16)
COLUMN = VECTOR[:, None]


def target(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


print("torch", torch.__version__)
seen = {
    "index_add": (
        target(2).index_add(0, ZEROS, VECTOR)[0].item(),
        target(2, 1).index_add(0, ZEROS, COLUMN)[0].item(),
    ),
    "scatter_add": (
        target(2).scatter_add(0, ZEROS, VECTOR)[0].item(),
        target(2, 1).scatter_add(0, ZEROS[:, None], COLUMN)[0].item(),
    ),
    "index_put": (
        target(2).index_put((ZEROS,), VECTOR, accumulate=True)[0].item(),
        target(2, 1).index_put((ZEROS,), COLUMN, accumulate=True)[0].item(),
    ),
    "segment_reduce": (
        torch.segment_reduce(VECTOR, "sum", lengths=torch.tensor([1000])).item(),
        torch.segment_reduce(COLUMN, "sum", lengths=torch.tensor([1000])).item(),
    ),
}
for name, (vector, column) in seen.items():
    print(f"{name:14} vector {vector:6} column {column:6}")
expected = {
    "index_add": (256.0, 1000.0),
    "scatter_add": (1000.0, 1000.0),
    "index_put": (256.0, 256.0),
    "segment_reduce": (256.0, 256.0),
}
sys.exit(seen != expected)
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
