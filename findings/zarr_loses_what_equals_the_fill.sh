#!/usr/bin/env bash
# zarr drops chunks that equal the fill value, and with them signs, payloads and imaginary parts.
#
# Guess: A chunk that equals the fill value is not stored, as documented, and comes back with its
#   bits, since zarr compares -0.0 with 0.0 by bits. Complex numbers and NaNs are treated alike.
# Seen: Float -0.0 under fill 0.0 keeps its sign. Complex -0.0-0.0j under fill 0 comes back as 0j;
#   four different NaNs under fill NaN come back as one; a chunk of nan+5j under fill nan+0j comes
#   back as nan+0j. With config={"write_empty_chunks": True} all come back.
# Version: zarr 3.1.6.
# Why: NDBuffer.all_equal (zarr/core/buffer/core.py) compares bits only where the fill value is a
#   float and 0. All else goes to np.array_equal with equal_nan=True, to which -0 is 0 and every
#   complex number with a NaN in it is the same NaN. write_empty_chunks is False by default.
# Means: A store of spectra, or one whose fill value is NaN, is not exact to the bit, and what is
#   lost depends on the neighbours in the chunk. Switch write_empty_chunks on where bits count.

folder=$(mktemp -d) || exit 77
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENVS:-$folder}/zarr-3.1.6-numpy-2.4.6
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" install -qq --disable-pip-version-check \
    zarr==3.1.6 numpy==2.4.6 || { rm -rf "$venv"; exit 77; }
fi
cat > "$folder/seen.py" <<'PYTHON'
import sys

import numpy as np
import zarr

NAN = float("nan")
print("zarr", zarr.__version__)


def stored(what, values, fill, **config):
    """Write one chunk and read it. Say whether its bits came back."""
    path = f"{sys.argv[1]}/{what} {bool(config)}"
    array = zarr.create_array(path, shape=4, chunks=4, dtype=values.dtype, fill_value=fill, config=config or None)
    array[:] = values
    back = zarr.open_array(path)[:]
    same = back.tobytes() == values.tobytes()
    print(f"{what}: {'the same bits' if same else f'{values[0]} comes back as {back[0]}'} {config or ''}")
    return same


chunks = (
    ("float zeros", np.full(4, -0.0, np.float32), 0.0),
    ("complex zeros", np.full(4, complex(-0.0, -0.0), np.complex64), 0),
    ("nans", np.array([0x7FC00001, 0xFFC00000, 0x7FFFFFFF, 0x7FC12345], np.uint32).view(np.float32), NAN),
    ("complex nans", np.full(4, complex(NAN, 5.0), np.complex64), complex(NAN, 0)),
)
same = [stored(*each) for each in chunks]
kept = [stored(*each, write_empty_chunks=True) for each in chunks]
sys.exit(not (same == [True, False, False, False] and all(kept)))
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py" "$folder"
