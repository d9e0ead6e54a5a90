#!/usr/bin/env bash
# gloo cannot broadcast or gather fp8, int16 or uint16 tensors.
#
# Guess: Sums need arithmetic, but broadcast and all_gather copy bytes, so that they take every
#   dtype.
# Seen: All three raise "Invalid scalar type" for fp8 (e4m3fn, e8m0fnu), int16, uint16 and uint64;
#   a uint8 view of the same memory works.
# Version: torch 2.13.0, gloo, 2 ranks.
# Why: ProcessGroupGloo picks the gloo function by a switch over the dtypes that gloo knows, for
#   copies, too (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, GENERATE_ALL_TYPES).
# Means: Weights in fp8, and scales in e8m0, travel between CPU ranks as tensor.view(torch.uint8)
#   (int16 by view(torch.uint8), too).

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

DTYPES = (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int16, torch.uint16, torch.uint64)


def rank_of(rank, folder):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    wrong = False
    for dtype in DTYPES:
        own = torch.full((4,), float(rank + 1)).to(dtype)
        refused = []
        for collective in (
            lambda own=own: dist.broadcast(own, 0),
            lambda own=own: dist.all_gather_into_tensor(torch.empty(8, dtype=own.dtype), own),
        ):
            try:
                collective()
            except RuntimeError as error:
                refused.append(str(error).splitlines()[0])
        dist.broadcast(own.view(torch.uint8), 0)
        if rank == 0:
            print("torch", torch.__version__, dtype, refused, "as uint8:", own.float().tolist())
        wrong |= len(refused) != 2 or "Invalid scalar type" not in refused[0] or own.float()[0].item() != 1
    dist.destroy_process_group()
    sys.exit(wrong)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_of, (folder,), nprocs=2)
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
