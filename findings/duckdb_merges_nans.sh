#!/usr/bin/env bash
# DuckDB makes one NaN of all NaNs in a Parquet file that it writes.
#
# Guess: A column of floats keeps its bits through COPY ... TO a Parquet file, NaNs with their
#   payload and sign among them, as pyarrow and polars keep them.
# Seen: All NaNs of a column that is encoded with a dictionary become that NaN which came first;
#   -0.0 and 0.0 stay apart. In a table of DuckDB's own a column of equal NaNs loses its payload,
#   too.
# Version: duckdb 2.0.0, pyarrow 26.0.1.
# Why: The dictionary of the writer, and the compression of a constant column, compare floats by
#   value, and DuckDB defines all NaNs as equal.
# Means: Words of other meaning that were viewed as floats (packed codes, boxed values, bit
#   patterns of a checkpoint) do not survive; store them as integers.

folder=$(mktemp -d) || exit 77
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENVS:-$folder}/duckdb-2.0.0-pyarrow-26.0.1-numpy-2.4.6
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" install -qq --disable-pip-version-check \
    duckdb==2.0.0 pyarrow==26.0.1 numpy==2.4.6 || { rm -rf "$venv"; exit 77; }
fi
cat > "$folder/seen.py" <<'PYTHON'
import sys
import tempfile

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

print("duckdb", duckdb.__version__, "pyarrow", pa.__version__)
NANS = [0x7FC00005, 0x7FC00000, 0xFFC00000]
bits = np.array([*NANS, 0x80000000, 0x00000000, 0x3F800000] * 300, np.uint32)
rows = pa.table({"x": bits.view(np.float32)})
with tempfile.TemporaryDirectory() as folder:
    duckdb.sql(f"copy (select * from rows) to '{folder}/duckdb.parquet' (format parquet)")
    pq.write_table(rows, f"{folder}/pyarrow.parquet")
    read = {
        name: pq.read_table(f"{folder}/{name}.parquet")["x"].to_numpy().view(np.uint32)[:6].tolist()
        for name in ("duckdb", "pyarrow")
    }
for name, words in {"written": bits[:6].tolist(), **read}.items():
    print(f"{name:8}", [hex(word) for word in words])
kept, merged = bits[:6].tolist(), read["duckdb"]
sys.exit(read["pyarrow"] != kept or len({*merged[:3]}) != 1 or merged[3:] != kept[3:])
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
