#!/usr/bin/env bash
# netCDF4 gives the 255s of a uint8 variable back as masked.
#
# Guess: Of a variable without _FillValue, all of which was written, every value comes back. The
#   known problems of netCDF say so of bytes, and _netCDF4.pyx quotes them: "There should be no
#   default fill values when reading any byte type".
# Seen: A uint8 variable that holds 0 to 255 has 255 masked, so its mean is 127.0 instead of 127.5;
#   int8 loses -127, and uint16 65,535. In the file all is there. The uint8 variable says of itself
#   "default _FillValue of 255 ignored". With fill_value=False no byte is masked, 65,535 still is.
# Version: netCDF4 1.7.5.1.post1.
# Why: _toma leaves bytes alone only where filling is switched off, "no_fill != 1 or dtype not in
#   u1, i1" (_netCDF4.pyx), and other types never. Filling is on unless somebody said no.
# Means: White pixels and saturated samples drop out of means, maxima and every loss that goes over
#   a masked array. Call set_auto_mask(False) when you read.

folder=$(mktemp -d) || exit 77
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENVS:-$folder}/netCDF4-1.7.5.1.post1-numpy-2.4.6
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" install -qq --disable-pip-version-check \
    netCDF4==1.7.5.1.post1 numpy==2.4.6 || { rm -rf "$venv"; exit 77; }
fi
cat > "$folder/seen.py" <<'PYTHON'
import sys

import netCDF4
import numpy as np

path = sys.argv[1] + "/images.nc"
written = {
    "u1": np.arange(256, dtype=np.uint8),
    "i1": np.arange(-128, 128, dtype=np.int8),
    "u2": np.arange(65_280, 65_536, dtype=np.uint16),
}
print("netCDF4", netCDF4.__version__)
with netCDF4.Dataset(path, "w") as file:
    file.createDimension("n", 256)
    for dtype, values in written.items():
        file.createVariable(dtype, dtype, ("n",))[:] = values
        file.createVariable(f"{dtype} without", dtype, ("n",), fill_value=False)[:] = values
lost, as_described = {}, True
with netCDF4.Dataset(path) as file:
    print("printed:", repr(file["u1"]).splitlines()[-1], "/", repr(file["u2"]).splitlines()[-1])
    for dtype, values in written.items():
        back, without = file[dtype][:], file[f"{dtype} without"][:]
        lost[dtype] = values[np.ma.getmaskarray(back)].tolist()
        print(f"{dtype}: attributes {file[dtype].ncattrs()}, masked {lost[dtype]}", end=", ")
        print(f"mean {back.mean()} of {values.mean()}; with fill_value=False masked {np.ma.count_masked(without)}")
        as_described &= np.array_equal(np.ma.getdata(back), values)
        as_described &= np.ma.count_masked(without) == (dtype == "u2")
    as_described &= "of 255 ignored" in repr(file["u1"])
    file.set_auto_mask(False)
    as_described &= all(np.array_equal(file[dtype][:], values) for dtype, values in written.items())
sys.exit(not (as_described and lost == {"u1": [255], "i1": [-127], "u2": [65535]}))
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py" "$folder"
