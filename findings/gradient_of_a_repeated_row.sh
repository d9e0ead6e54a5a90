#!/usr/bin/env bash
# The gradient of a row that is taken 1,000 times depends on how the row was taken.
#
# Guess: x[rows], x.index_select(0, rows), x.gather and an embedding have the same gradient in
#   bf16: all add up in bf16 and stop at 256.
# Seen: x[rows], nn.Embedding and take() stop at 256; index_select and gather give the right
#   1,000. The forward passes are the same bits.
# Version: torch 2.13.0, CPU. fp32 has no difference.
# Why: index_select and gather go back through scatter_add, which has a path that sums in fp32
#   (can_use_expanded_index_path in aten/src/ATen/native/TensorAdvancedIndexing.cpp). x[rows] goes
#   back through index_put(accumulate=True) and an embedding through its own kernel; both add each
#   row to a bf16 element.
# Means: A rewrite that leaves the forward pass alone changes gradients by a factor of four; the
#   gradient of a frequent token is lost above 256 equal parts. Compare gradients, too, before two
#   models are called equal.

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

ROWS = torch.zeros(1000, dtype=torch.long)
WAYS = {
    "x[rows]": lambda x: x[ROWS],
    "index_select": lambda x: x.index_select(0, ROWS),
    "gather": lambda x: x.gather(0, ROWS[:, None].expand(-1, 4)),
    "embedding": lambda x: torch.nn.functional.embedding(ROWS, x),
    "take": lambda x: x.take(ROWS),
}


def gradient(way, dtype):
    x = torch.ones(3, 4, dtype=dtype, requires_grad=True)
    way(x).sum().backward()
    return x.grad[0, 0].item()


print("torch", torch.__version__)
seen = {name: (gradient(way, torch.bfloat16), gradient(way, torch.float32)) for name, way in WAYS.items()}
for name, (bf16, fp32) in seen.items():
    print(f"{name:13} bf16 {bf16:6} fp32 {fp32:6}")
expected = {name: (256.0, 1000.0) for name in WAYS} | {name: (1000.0, 1000.0) for name in ("index_select", "gather")}
sys.exit(seen != expected)
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
