#!/usr/bin/env bash
# torch.save writes other bytes under another file name.
#
# Guess: One state dict saved twice in one process gives the same bytes, whatever the files are
#   called: a checksum says whether two checkpoints are equal.
# Seen: a.pt and b.pt differ, and have not even one length with a.tmp.pt. Under one name in two
#   folders, or as a.bin, the bytes are the same; a file object or a buffer gives a third result,
#   and so does a name that is not ASCII. All load to the same tensors.
# Version: torch 2.13.0.
# Why: The file is a zip archive in which every member lies in a folder of the file's name without
#   its last ending (PyTorchFileWriter, caffe2/serialize/inline_container.h: archive_name). For a
#   file object the folder is "archive". The page on the format draws the members without a folder.
# Means: Whoever writes to a temporary name and renames it has that name in the checkpoint, and a
#   store that finds duplicates by their hash keeps step100.pt and step200.pt of frozen weights
#   apart. Save to an open file, and the bytes depend on the tensors.

folder=$(mktemp -d) || exit 77
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENVS:-$folder}/torch-2.13.0-numpy-2.4.6
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" install -qq --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 || { rm -rf "$venv"; exit 77; }
fi
cat > "$folder/seen.py" <<'PYTHON'
import hashlib
import io
import pathlib
import sys
import zipfile

import torch

folder = pathlib.Path(sys.argv[1])
state = {"weight": torch.arange(1000.0)}
print("torch", torch.__version__)


def seen(what, content):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        member = archive.namelist()[0]
    digest = hashlib.sha256(content).hexdigest()[:8]
    loaded = torch.load(io.BytesIO(content))["weight"]
    print(f"{what}: {len(content):,} bytes, {digest}, first member {member}")
    return content if torch.equal(loaded, state["weight"]) else None


def named(name):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    torch.save(state, path)
    return seen(name, path.read_bytes())


def opened(name):
    with open(folder / name, "wb") as file:
        torch.save(state, file)
    return seen(f"{name}, opened", (folder / name).read_bytes())


a, b, binary, other, temporary = map(named, ("a.pt", "b.pt", "a.bin", "other/a.pt", "a.tmp.pt"))
first, second, foreign = opened("a.pt"), opened("b.pt"), named("\u00e4.pt")
sys.exit(
    None in (a, b, binary, other, temporary, first, second, foreign)
    or not (a == binary == other and a != b and len(a) != len(temporary))
    or not (first == second == foreign and first != a)
)
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py" "$folder"
