#!/usr/bin/env bash
# After gc.freeze() a program that uses a nanobind module reports leaks when it ends.
#
# Guess: gc.freeze() (recommended before a fork) changes what the collector looks at while the
#   program runs; at its end nothing is to be seen of it.
# Seen: An object of manifold3d in a reference cycle ends without a word. With gc.freeze() before
#   the end standard error has "nanobind: leaked 1 instances!" and a list of types and functions;
#   with gc.unfreeze() behind it nothing again. triton 3.9.0 needs no more than its import: 27
#   lines with "leaked".
# Version: manifold3d 3.5.4, numpy 2.4.6 (nanobind is compiled in).
# Why: The last collection of the interpreter passes over frozen objects, as every collection does,
#   so that what lives in cycles is never destroyed; nanobind counts what is alive when the
#   interpreter ends.
# Means: The lines name no leak of the module, and a destructor that was to run at the end (close a
#   file, end a thread) does not run. Call gc.unfreeze() in the parent after the fork.

folder=$(mktemp -d) || exit 77
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENVS:-$folder}/manifold3d-3.5.4-numpy-2.4.6
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" install -qq --disable-pip-version-check \
    manifold3d==3.5.4 numpy==2.4.6 || { rm -rf "$venv"; exit 77; }
fi
cat > "$folder/once.py" <<'PYTHON'
import gc
import sys

import manifold3d


class Holder:
    pass


holder = Holder()
holder.itself = holder
holder.shape = manifold3d.Manifold.cube((1, 1, 1))
del holder
for call in sys.argv[1:]:
    getattr(gc, call)()
PYTHON
cat > "$folder/seen.py" <<'PYTHON'
import importlib.metadata
import subprocess
import sys

print("manifold3d", importlib.metadata.version("manifold3d"), "numpy", importlib.metadata.version("numpy"))
seen = []
for calls in ([], ["freeze"], ["freeze", "unfreeze"]):
    ended = subprocess.run([sys.executable, sys.argv[1], *calls], capture_output=True, text=True)
    lines = [line for line in ended.stderr.splitlines() if "leaked" in line]
    print(f"gc calls {calls}: exit {ended.returncode}, {len(lines)} lines with 'leaked'", *lines[:1])
    seen.append((ended.returncode, len(lines) > 0))
sys.exit(seen != [(0, False), (0, True), (0, False)])
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py" "$folder/once.py"
