"""How long durable steps take beside steps in place, by turns: A B B A, with a second run in place as control.

python -m nvme_offload.perf.benchmarks.durable_steps FOLDER [--millions 25] [--quads 10] [--rewrite-every 1]
    [--compute 0.5] [--flush 0.01]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

from nvme_offload import OffloadAdamW
from nvme_offload.offload import sync
from nvme_offload.offload.durable import run
from nvme_offload.perf.benchmarks.durable_bytes import optimizer_of, remove_runs, settle

_STEPS = 2  # of one turn
_RUNS = ("in place", "durable", "control")


@dataclass(frozen=True)
class Ratio:
    """Seconds of one against those of steps in place, over all quads."""

    median: float
    low: float
    high: float
    seconds: float
    """Of a step of it, the median."""


def ratios(path: str, *, millions: int, quads: int, compute: float, period: int) -> dict[str, object]:
    """Measure, and what share of an iteration with `compute` seconds of nothing in it waited for commits."""
    with ExitStack() as stack:
        made = {
            name: stack.enter_context(
                optimizer_of(path, millions=millions, durable=name == "durable", rewrite_every=period)
            )
            for name in _RUNS
        }
        for optimizer in made.values():
            _seconds(optimizer, 0.0)
        before, begun, total = made["durable"].stats().commit_wait_seconds, time.perf_counter(), 0.0
        found: dict[str, object] = {}
        for name in _RUNS[1:]:
            pairs = []
            for _ in range(quads):
                quad = [(each, _seconds(made[each], compute)) for each in ("in place", name, name, "in place")]
                pairs.append(tuple(sum(s for each, s in quad if each == wanted) for wanted in (name, "in place")))
                total += pairs[-1][0] if name == "durable" else 0.0
            quotients = sorted(own / other for own, other in pairs)
            seconds = statistics.median(own for own, _ in pairs) / (2 * _STEPS)
            found[name] = asdict(Ratio(statistics.median(quotients), quotients[0], quotients[-1], seconds))
        waited = made["durable"].stats().commit_wait_seconds - before
        found |= {"share_waited_for_commits": waited / total, "minutes": (time.perf_counter() - begun) / 60}
        return found


def _seconds(optimizer: OffloadAdamW, compute: float) -> float:
    """Of a few iterations, the last of which is brought to an end."""
    start = time.perf_counter()
    for _ in range(_STEPS):
        time.sleep(compute)
        optimizer.step()
    settle(optimizer)
    return time.perf_counter() - start


@contextmanager
def _slow_flushes(seconds: float) -> Iterator[None]:
    """Each flush of a file takes so long at least."""
    flush = sync.sync_data

    def slow(descriptor: int) -> None:
        flush(descriptor)
        time.sleep(seconds)

    vars(run)["sync_data"] = slow
    try:
        yield
    finally:
        vars(run)["sync_data"] = flush


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the ratios as JSON. The durable run is removed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--millions", type=int, default=25)
    parser.add_argument("--quads", type=int, default=10)
    parser.add_argument("--rewrite-every", type=int, default=1)
    parser.add_argument("--compute", type=float, default=0.0, help="seconds of each iteration without a step")
    parser.add_argument("--flush", type=float, default=0.0, help="seconds that are added to each flush")
    given = parser.parse_args(arguments)
    with _slow_flushes(given.flush):
        found = ratios(
            given.folder,
            millions=given.millions,
            quads=given.quads,
            compute=given.compute,
            period=given.rewrite_every,
        )
    remove_runs(given.folder)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
