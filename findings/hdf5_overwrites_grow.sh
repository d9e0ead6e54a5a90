#!/usr/bin/env bash
# An HDF5 file whose compressed data is overwritten grows with every session.
#
# Guess: Overwriting all of a gzip dataset, in a file that is opened anew each time, leaves the
#   file about as large as its data: what the old chunks had is used again.
# Seen: After 20 sessions the file is five times its data. Most of it belongs to nobody: a
#   chunk whose compressed size changed has moved, and its old place is forgotten. The same 20
#   overwrites in one session take a fifth more; with fs_strategy="page" and fs_persist=True at
#   creation the file keeps its size over the sessions, too.
# Version: h5py 3.16.0, HDF5 2.0.0.
# Why: Free space is tracked in memory and dropped at the close unless the file was created to
#   keep it: H5Pset_file_space_strategy has persist = false by default, and so has h5py's
#   fs_persist. Without compression a chunk is written where it was.
# Means: A log of activations, a replay buffer or a state that is saved over itself in HDF5 fills
#   the drive, and nothing but h5repack gives it back. Create such files with the page strategy and
#   fs_persist.

folder=$(mktemp -d) || exit 77
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENVS:-$folder}/h5py-3.16.0-numpy-2.4.6
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" install -qq --disable-pip-version-check \
    h5py==3.16.0 numpy==2.4.6 || { rm -rf "$venv"; exit 77; }
fi
cat > "$folder/seen.py" <<'PYTHON'
import os
import sys

import h5py
import numpy as np

COUNT, SESSIONS = 100_000, 20
print("h5py", h5py.__version__, "HDF5", h5py.version.hdf5_version)


def seen(what, *, together=False, compression="gzip", **creation):
    """Print the size in KiB at first and after 20 overwrites. Return their ratio."""
    rng, path = np.random.default_rng(0), f"{sys.argv[1]}/{what}.h5"
    with h5py.File(path, "w", **creation) as file:
        file.create_dataset("x", (COUNT,), "f4", chunks=(10_000,), compression=compression)
        file["x"][:] = rng.integers(0, 1000, COUNT)
    first = os.path.getsize(path)
    for _ in range(1 if together else SESSIONS):
        with h5py.File(path, "r+") as file:
            for _ in range(SESSIONS if together else 1):
                file["x"][:] = rng.integers(0, 1000, COUNT)
                file.flush()
    with h5py.File(path) as file:
        data = file["x"].id.get_storage_size()
    last = os.path.getsize(path)
    print(f"{what}: {first // 1024} KiB, after {SESSIONS} overwrites {last // 1024}, of which data {data // 1024}")
    return last / first


gzip, once = seen("gzip, 20 sessions"), seen("gzip, one session", together=True)
kept = seen("gzip, kept by page", fs_strategy="page", fs_persist=True)
plain = seen("not compressed", compression=None)
sys.exit(not (gzip > 4 and once < 1.4 and kept < 1.1 and plain < 1.1))
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py" "$folder"
