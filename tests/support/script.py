"""Runs the script that its first argument names as `python script ...` would, but for the end of the process."""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    # Past gloo's own teardown: now and then one of its threads aborts the process, also where torch is alone.
    os._exit(0)
