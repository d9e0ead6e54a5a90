#!/usr/bin/env bash
# Blosc compresses the same array to other bytes each time.
#
# Guess: The same bytes, codec and settings give the same compressed bytes: a codec is a function.
# Seen: Of 4 MiB of floats eight calls with two threads or more give up to eight results, of one
#   length, and all are decoded to the same floats. With one thread there is one result; the
#   defaults take more where there are processors. numcodecs' GZip gives another result in the
#   next second; its Zstd, LZ4 and Zlib do not.
# Version: numcodecs 0.16.6, blosc2 4.14.1, numpy 2.4.6.
# Why: Threads of Blosc and Blosc2 append their blocks in the order in which they end, and a table
#   of offsets finds them (t_blosc in c-blosc's blosc/blosc.c, and c-blosc2's blosc/blosc2.c).
#   GZip writes the time into its header.
# Means: Chunks of a Zarr or Blosc2 store that was written again have other checksums: copies by
#   content, rsync and tests of bytes see changes. Compare what is decoded, or set one thread.

folder=$(mktemp -d) || exit 77
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENVS:-$folder}/numcodecs-0.16.6-blosc2-4.14.1-numpy-2.4.6
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" install -qq --disable-pip-version-check \
    numcodecs==0.16.6 blosc2==4.14.1 numpy==2.4.6 || { rm -rf "$venv"; exit 77; }
fi
cat > "$folder/seen.py" <<'PYTHON'
import sys
import time

import blosc2
import numcodecs
import numpy as np
from numcodecs import blosc

x = np.random.default_rng(0).normal(size=1 << 20).astype(np.float32)
codec = numcodecs.Blosc("zstd", 5, numcodecs.Blosc.SHUFFLE)


def encoded(threads):
    blosc.set_nthreads(threads)
    return [bytes(codec.encode(x)) for _ in range(8)], [
        bytes(blosc2.compress2(x, nthreads=threads, typesize=4)) for _ in range(8)
    ]


def equal_a_second_later(name):
    other = numcodecs.get_codec({"id": name})
    first = bytes(other.encode(x[:1000]))
    time.sleep(1.1)
    return first == bytes(other.encode(x[:1000]))


one, four = encoded(1), encoded(4)
decoded = all(np.array_equal(np.frombuffer(codec.decode(each), np.float32), x) for each in four[0])
decoded &= all(np.array_equal(np.frombuffer(blosc2.decompress2(each), np.float32), x) for each in four[1])
print("numcodecs", numcodecs.__version__, "blosc2", blosc2.__version__, "numpy", np.__version__)
counts = [[len(set(results)) for results in each] for each in (one, four)]
lengths = [len({len(each) for each in results}) for results in four]
print(f"8 calls, 1 thread: {counts[0][0]} result of Blosc, {counts[0][1]} of Blosc2")
print(f"8 calls, 4 threads: {counts[1][0]} results of Blosc, {counts[1][1]} of Blosc2; lengths: {lengths}")
print("all decoded to the same floats:", decoded)
later = {name: equal_a_second_later(name) for name in ("gzip", "zstd", "lz4", "zlib")}
print("the same bytes a second later:", later)
sys.exit(
    not (counts[0] == [1, 1] and min(counts[1]) > 1 and decoded)
    or later != {"gzip": False, "zstd": True, "lz4": True, "zlib": True}
)
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
