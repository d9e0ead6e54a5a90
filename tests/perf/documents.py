"""Documents that commands read: the records of a run, and the result of a benchmark."""

import json

COUNTED = ("skipped_steps", "bytes_read", "bytes_written", "param_bytes_written", "grad_bytes_written")
SCALARS = dict.fromkeys(COUNTED, 0)
HOST = {"format": 1, "host": "elsewhere", "pid": 1, "rank": 3, "world_size": 8, "log": None}
RUN = {
    "optimizer": "OffloadLion", "engine": "io_uring", "queue_depth": 32, "paths": [], "limit": "drive", "since": None,
}  # fmt: skip
TIERS = {"optimizer state": {"device": 0, "host": 1 << 30, "nvme": 3 << 30}}


def record(time, scalars, **changes):
    """Return what a run notes of itself, so many seconds after it began."""
    times = {"started": 1e9, "time": 1e9 + time, "ended": False, "peak_rate": 4e9}
    return {**HOST, **RUN, **times, "tiers": TIERS, "scalars": {**SCALARS, **scalars}, **changes}


def write_bench(file, of_write=None, **changes):
    """Write what `offload plan` needs of a benchmark in which 6 GB took a second; `of_write`: that of writing."""
    result = {"summary": {"total_bytes": 6e9, "total_seconds": 1.0}}
    results = {"read": result, "write": of_write or result, "mixed": result}
    file.write_text(json.dumps({"verified": True, "engine": {"direct": True}, "results": results, **changes}))
    return file
