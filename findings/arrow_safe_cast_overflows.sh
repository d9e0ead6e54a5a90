#!/usr/bin/env bash
# A safe cast of Arrow turns large floats into infinities.
#
# Guess: cast(..., safe=True), the default, raises where a value does not survive: for 1e300 in
#   float32 as for 16,777,217 in float32 or 1.5 in int32.
# Seen: The two with integers raise ArrowInvalid. 1e300 becomes inf in float32, 70,000 becomes inf
#   in float16, and 1e-300 becomes 0, without a word; so does Table.cast to a schema.
# Version: pyarrow 26.0.1.
# Why: CastOptions has allow_int_overflow and allow_float_truncate (float to integer), and nothing
#   for float to a smaller float. The documentation of safe says "overflows or other unsafe
#   conversions".
# Means: Losses, norms or second moments that are written as float32 or float16 columns lose what
#   does not fit, and the cast that was meant to say so does not. Look for new infinities and
#   zeros after the cast.

folder=$(mktemp -d) || exit 77
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENVS:-$folder}/pyarrow-26.0.1
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" install -qq --disable-pip-version-check \
    pyarrow==26.0.1 || { rm -rf "$venv"; exit 77; }
fi
cat > "$folder/seen.py" <<'PYTHON'
import sys

import pyarrow as pa

INF = float("inf")


def cast(values, before, after):
    try:
        return pa.array(values, before).cast(after, safe=True).to_pylist()
    except pa.ArrowInvalid as error:
        return f"ArrowInvalid: {error}"


print("pyarrow", pa.__version__)
wide = cast([1e300, -1e300, 1e-300], pa.float64(), pa.float32())
half = cast([70000.0, 1e-9], pa.float32(), pa.float16())
print("1e300, -1e300, 1e-300 to float32:", wide)
print("70000, 1e-9 to float16:", half)
table = pa.table({"norm": [1e300]}).cast(pa.schema([("norm", pa.float32())]))["norm"].to_pylist()
print("a table to a schema:", table)
integers = [cast([16777217], pa.int64(), pa.float32()), cast([1.5], pa.float64(), pa.int32())]
print("16777217 to float32:", integers[0])
print("1.5 to int32:", integers[1])
sys.exit(
    not (wide == [INF, -INF, 0.0] and half == [INF, 0.0] and table == [INF])
    or not all(str(each).startswith("ArrowInvalid") for each in integers)
)
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
