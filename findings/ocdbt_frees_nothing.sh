#!/usr/bin/env bash
# TensorStore's OCDBT keeps every array that was ever written, also after a delete.
#
# Guess: Six overwrites of an array of 1 MiB take about 2 MiB, the old version goes when the new
#   one is there; a delete of all keys takes next to nothing.
# Seen: They take 1 MiB each, 6 at the end, and still 6 after delete_range over all keys, when the
#   list of keys is empty. With the driver "file" the array takes 1 MiB all along and 0 after the
#   delete.
# Version: tensorstore 0.1.86.
# Why: The format is a log: data files are never changed, and the manifest leads to the tree of
#   every version ("Manifest version tree" on the driver's page). A delete writes one more version.
#   tensorstore.ocdbt has nothing that drops versions: dump, undump and a coordinator.
# Means: Whoever updates arrays in place, as a state that is saved over itself does, fills the drive
#   by the bytes written. Write each checkpoint into a folder of its own and remove the folder,
#   or copy the keys into a new database.

folder=$(mktemp -d) || exit 77
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENVS:-$folder}/tensorstore-0.1.86-numpy-2.4.6
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" install -qq --disable-pip-version-check \
    tensorstore==0.1.86 numpy==2.4.6 || { rm -rf "$venv"; exit 77; }
fi
cat > "$folder/seen.py" <<'PYTHON'
import importlib.metadata
import pathlib
import sys

import numpy as np
import tensorstore as ts

SHAPE = (512, 512)  # of float32: 1 MiB, in 4 chunks
print("tensorstore", importlib.metadata.version("tensorstore"))
print("tensorstore.ocdbt:", *(name for name in dir(ts.ocdbt) if not name.startswith("_")))


def seen(kind, folder, store):
    """The MiB in the folder after each overwrite, and after a delete of all keys."""

    def size():
        return round(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20, 1)

    grid = {"name": "regular", "configuration": {"chunk_shape": [128, 512]}}
    metadata = {"shape": SHAPE, "data_type": "float32", "chunk_grid": grid}
    array = ts.open({"driver": "zarr3", "kvstore": store, "metadata": metadata, "create": True}).result()
    sizes, rng = [], np.random.default_rng(0)
    for _ in range(6):
        array.write(rng.random(SHAPE, dtype=np.float32)).result()
        sizes.append(size())
    keys = ts.KvStore.open(store).result()
    keys.delete_range(ts.KvStore.KeyRange()).result()
    left = len(keys.list().result())
    print(f"{kind}: MiB after each overwrite {sizes}, after the delete {size()}, keys left {left}")
    return sizes, size(), left


root = pathlib.Path(sys.argv[1])
file = seen("file", root / "file", {"driver": "file", "path": f"{root}/file/"})
ocdbt = seen("ocdbt", root / "ocdbt", {"driver": "ocdbt", "base": f"file://{root}/ocdbt/"})
sys.exit(
    not (max(file[0]) < 1.1 and file[1:] == (0, 0))
    or not (ocdbt[0] == sorted(ocdbt[0]) and ocdbt[0][-1] >= 6 and ocdbt[1] >= 6 and ocdbt[2] == 0)
)
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py" "$folder"
