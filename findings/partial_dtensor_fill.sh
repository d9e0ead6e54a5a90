#!/usr/bin/env bash
# A sum of a sharded DTensor that is filled with 3 holds 3 x ranks.
#
# Guess: An operator of a DTensor either raises or gives what the plain tensor gives: fill_(3.0)
#   makes 3.0 of a sum that is not reduced yet.
# Seen: On two ranks x.sum().fill_(3.0) is 6.0 once it is read with full_tensor(); the mean
#   (Partial of "avg") and full_like are right, and add_(1) raises.
# Version: torch 2.13.0, gloo, 2 ranks.
# Why: The sum stays Partial; fill_ writes 3.0 into each rank's part and leaves the placement
#   (pointwise rules in torch/distributed/tensor/_ops), so that the reduction adds the parts up.
# Means: A running loss or a counter that is reset with fill_ on a sharded model is wrong by the
#   number of ranks. Reduce first (full_tensor or redistribute), or zero_(), which is right by
#   luck.

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
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


def rank_of(rank, folder):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    total = x.sum()
    kind = str(total.placements[0])
    seen = {
        "sum().fill_(3)": total.fill_(3.0).full_tensor().item(),
        "mean().fill_(3)": x.mean().fill_(3.0).full_tensor().item(),
        "full_like(sum(), 3)": torch.full_like(x.sum(), 3.0).full_tensor().item(),
    }
    try:
        x.sum().add_(1)
        seen["sum().add_(1)"] = "no error"
    except RuntimeError:
        seen["sum().add_(1)"] = "RuntimeError"
    if rank == 0:
        print("torch", torch.__version__, "sum() is", kind, seen)
    dist.destroy_process_group()
    sys.exit([*seen.values()] != [6.0, 3.0, 3.0, "RuntimeError"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_of, (folder,), nprocs=2)
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
