#!/usr/bin/env bash
# A checkpoint that torch.save writes under skip_data is a hole.
#
# Guess: skip_data leaves out the copy of the data but writes the space, as zeros, so that a later
#   write into it cannot run out of room.
# Seen: A file of 64 MiB holds 8 KiB on the drive; the rest is a hole, and it reads as zeros.
# Version: torch 2.13.0; on file systems with holes (ext4, XFS, btrfs, tmpfs).
# Why: The writer of the zip file seeks over the bytes of each tensor (torch/serialization.py,
#   skip_data; PyTorchFileWriter).
# Means: Who fills the file in later, with direct or mapped writes, meets ENOSPC (SIGBUS for a
#   mapping) in the middle of a checkpoint, and fragments. posix_fallocate over the whole file
#   first.

folder=$(mktemp -d) || exit 77
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENVS:-$folder}/torch-2.13.0-numpy-2.4.6
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" install -qq --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 || { rm -rf "$venv"; exit 77; }
fi
cat > "$folder/seen.py" <<'PYTHON'
import os
import sys
import tempfile

import torch

with tempfile.TemporaryDirectory() as folder:
    path = f"{folder}/skipped.pt"
    with torch.serialization.skip_data():
        torch.save({"x": torch.ones(16 << 20)}, path)
    size, held = os.stat(path).st_size, os.stat(path).st_blocks * 512
    total = torch.load(path)["x"].sum().item()
print("torch", torch.__version__, "size", size, "on the drive", held, "sum", total)
sys.exit(not (size > 64 << 20 and held < 1 << 20 and total == 0))
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
