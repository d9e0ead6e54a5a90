#!/usr/bin/env bash
# A filter finds a NaN in a table, and not in the Parquet file of that table.
#
# Guess: read_table(file, filters=f) returns the rows that table.filter(f) does.
# Seen: Of [1, nan, 2] the filter ~(x < 5) returns the NaN in memory, and no row of the file. So
#   do x != 1 of [1, nan, 1] and is_null(x, nan_is_null=True). is_nan(x) finds it in both. In one
#   row group with a 7, ~(x < 5) returns the NaN, too: it depends on the neighbours.
# Version: pyarrow 26.0.1.
# Why: The minimum and maximum in a Parquet file leave NaNs out, as its format says. Arrow takes
#   them as bounds of all rows, so that x < 5 is proven and the row group is never read.
# Means: "All steps whose loss was not below 5" over a log of losses is empty for the run that went
#   to NaN. Ask for is_nan by name, or read and then filter.

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
import pyarrow.compute as pc
import pyarrow.parquet as pq

NAN = float("nan")
x = pc.field("x")
CASES = [
    ("~(x < 5)", [1.0, NAN, 2.0], ~(x < 5)),
    ("x != 1", [1.0, NAN, 1.0], x != 1),
    ("is_null(x, nan_is_null=True)", [1.0, NAN, 2.0], pc.is_null(x, nan_is_null=True)),
    ("is_nan(x)", [1.0, NAN, 2.0], pc.is_nan(x)),
    ("~(x < 5)", [1.0, NAN, 7.0], ~(x < 5)),
]
print("pyarrow", pa.__version__)
seen = []
for text, values, expression in CASES:
    table = pa.table({"x": values, "row": [0, 1, 2]})
    pq.write_table(table, sys.argv[1])
    memory = table.filter(expression)["row"].to_pylist()
    file = pq.read_table(sys.argv[1], filters=expression)["row"].to_pylist()
    print(f"{values}, {text}: rows {memory} in memory, {file} of the file")
    seen.append((memory, file))
sys.exit(seen != [([1], []), ([1], []), ([1], []), ([1], [1]), ([1, 2], [1, 2])])
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py" "$folder/x.parquet"
