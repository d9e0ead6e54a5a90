#!/usr/bin/env bash
# A convolution of DTensors says a shape that its parts do not have.
#
# Guess: conv1d of a DTensor gathers what it cannot compute in parts, or raises.
# Seen: With the input sharded along the length the result says "Replicate, 10 long" and each rank
#   holds 4 columns of its own; with the weight sharded by output channels (as FSDP shards it) the
#   result says 4 channels and holds 2; an input that is Partial is not reduced, and the result is
#   half of what it should be. No error.
# Version: torch 2.13.0, gloo, 2 ranks; an input sharded by batch with a whole weight is right.
# Why: The rule of the operator computes the shape of the output from the whole input and weight
#   and takes only placements of the batch into account
#   (torch/distributed/tensor/_ops/_conv_ops.py).
# Means: full_tensor().shape differs from .shape: such outputs cannot be saved, sharded again or
#   compared. Convolutions get plain tensors (as FSDP2 gives them), or are checked by shape.

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
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.functional import conv1d


def rank_of(rank, folder):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x, weight = torch.randn(2, 4, 12), torch.randn(4, 4, 3)
    right = conv1d(x, weight)

    def shapes(of_x, of_weight):
        result = conv1d(distribute_tensor(x, mesh, [of_x]), distribute_tensor(weight, mesh, [of_weight]))
        return str(result.placements[0]), tuple(result.shape), tuple(result.full_tensor().shape)

    seen = {
        "batch, whole": shapes(Shard(0), Replicate()),
        "length, whole": shapes(Shard(2), Replicate()),
        "batch, output channels": shapes(Shard(0), Shard(0)),
    }
    part = DTensor.from_local(x / 2, mesh, [Partial()], run_check=False)
    ratio = conv1d(part, distribute_tensor(weight, mesh, [Replicate()])).full_tensor() / right
    seen["Partial, ratio"] = round(ratio.mean().item(), 3)
    if rank == 0:
        print("torch", torch.__version__, "right shape", tuple(right.shape))
        for name, what in seen.items():
            print(f"input, weight: {name:23} {what}")
    dist.destroy_process_group()
    sys.exit(
        seen["batch, whole"][1:] != ((2, 4, 10), (2, 4, 10))
        or seen["length, whole"][1:] != ((2, 4, 10), (2, 4, 4))
        or seen["batch, output channels"][1:] != ((2, 4, 10), (2, 2, 10))
        or seen["Partial, ratio"] != 0.5
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_of, (folder,), nprocs=2)
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
