#!/usr/bin/env bash
# reduce(dst=0) leaves a mixture of sums in the tensors of all other ranks.
#
# Guess: A rank that is not the destination of torch.distributed.reduce keeps its tensor as it
#   was.
# Seen: With two ranks rank 1 ends with half of its own numbers and half of the sums: [2, 2, 3, 3]
#   of [2, 2, 2, 2]. reduce_scatter leaves its input alone.
# Version: torch 2.13.0, gloo, 2 ranks.
# Why: gloo reduces in place, by halves that are exchanged, and the caller's tensor is its scratch
#   memory. The documentation promises a result for dst alone and says nothing about the others.
# Means: Whoever reduces gradients or statistics to one rank and goes on with the own ones
#   elsewhere trains on garbage; pass a clone, or use all_reduce.

folder=$(mktemp -d) || exit 77
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENVS:-$folder}/torch-2.13.0-numpy-2.4.6
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" install -qq --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 || { rm -rf "$venv"; exit 77; }
fi
cat > "$folder/seen.py" <<'PYTHON'
import sys
import tempfile

import torch
import torch.distributed as dist


def rank_of(rank, folder):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    own = torch.full((4,), float(rank + 1))
    dist.reduce(own, 0)
    parts, result = torch.full((8,), float(rank + 1)), torch.empty(4)
    dist.reduce_scatter_tensor(result, parts)
    print("torch", torch.__version__, "rank", rank, "after reduce(dst=0):", own.tolist())
    dist.destroy_process_group()
    right = [3.0] * 4 if rank == 0 else [2.0, 2.0, 3.0, 3.0]
    sys.exit(own.tolist() != right or parts.unique().tolist() != [rank + 1.0])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_of, (folder,), nprocs=2)
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
