#!/usr/bin/env bash
# FSDP2 computes with old weights where parameters change between two forward passes.
#
# Guess: Each forward pass of an FSDP2 module gathers the parameters as they are now.
# Seen: The second forward pass without a backward in between gives the old output (ratio 1.0)
#   after all parameters were doubled in place through the list that an optimizer holds. With
#   reshard_after_forward=True, after module.reshard() or after a backward, it is 2.0.
# Version: torch 2.13.0, gloo, 2 ranks; reshard_after_forward left out or False.
# Why: The root is not resharded after a forward pass, and unshard() returns at once where the
#   group is still gathered (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
# Means: An EMA that is swapped in after an evaluation, a resume after a warm-up pass or clipping
#   of weights between evaluations is not seen. Call module.reshard() after an update outside of a
#   training step.

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
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard


def ratio(mesh, between=lambda module: None, **options):
    module = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
    fully_shard(module, mesh=mesh, **options)
    held, x = list(module.parameters()), torch.ones(1, 4)
    first = module(x).sum()
    if between == "backward":
        first.backward()
    with torch.no_grad():
        for parameter in held:
            parameter.mul_(2)
    if between not in ("nothing", "backward"):
        between(module)
    return round((module(x).sum() / first).item(), 3)


def rank_of(rank, folder):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    seen = {
        "default": ratio(mesh, "nothing"),
        "reshard_after_forward=False": ratio(mesh, "nothing", reshard_after_forward=False),
        "reshard_after_forward=True": ratio(mesh, "nothing", reshard_after_forward=True),
        "module.reshard()": ratio(mesh, lambda module: module.reshard()),
        "backward between": ratio(mesh, "backward"),
    }
    if rank == 0:
        print("torch", torch.__version__, "output after doubling / before:", seen)
    dist.destroy_process_group()
    sys.exit([*seen.values()] != [1.0, 1.0, 2.0, 2.0, 2.0])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_of, (folder,), nprocs=2)
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
