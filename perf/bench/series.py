"""A drive under load for as long as a training would load it: second by second, until caches and heat have shown.

A drive is fast as long as its cache holds what is written, and while it is cool. A run of seconds measures that; a
training of hours gets what comes after.
"""

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from nvme_offload.offload.progress import progress, say
from nvme_offload.offload.units import format_bytes, format_rate
from nvme_offload.perf.measure.command_line import Rw
from nvme_offload.perf.measure.comparison import percentile
from nvme_offload.perf.measure.workloads import Sample, Target

SECONDS = 1.0  # the time of one point, about; longer where the duration has more than `MOST_POINTS` of them
MOST_POINTS = 3600
PASS_SECONDS = 0.2  # a pass is as long as that: between two of them the queue runs empty
LEAST_SIDE = 5  # points before a cliff, and after it
LEAST_DROP = 0.2  # the share of the rate before it: less is the weather

Warmth = Callable[[], float | None]  # degrees Celsius of the warmest drive now


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point says what happened in about a second."""

    at: float  # seconds from the beginning to the end of it
    seconds: float
    size_bytes: int
    bw_bytes: float
    p50_ns: float
    p99_ns: float
    p99_9_ns: float
    temperature: float | None


@dataclass(frozen=True, kw_only=True)
class Cliff:
    """A cliff is where a drive becomes slower for good."""

    at: float  # seconds after the beginning
    bytes_before: int  # bytes moved until then: what a cache holds, where it is one
    before: float  # bytes per second until then, median
    after: float  # bytes per second from then on, median


def measure_series(
    target: Target, rw: Rw, duration: float, least_bytes: int, warmth: Warmth
) -> tuple[list[Point], list[Sample]]:
    """Load a prepared target without a pause for `duration` seconds; give points by time, and all passes.

    A pass has `least_bytes` or more; `warmth` is asked once for each point.
    """
    every = max(SECONDS, duration / MOST_POINTS)
    points: list[Point] = []
    samples: list[Sample] = []
    size, began = least_bytes, time.monotonic()
    say(f"{rw} for {duration:.0f} s ...")
    with progress(rw, duration) as advance:
        while not points or time.monotonic() - began < duration:
            own: list[Sample] = []
            while not own or sum(sample.seconds for sample in own) < every:
                own.append(target.run(rw, size))
                size = max(least_bytes, round(own[-1].bw_bytes * PASS_SECONDS))
            points.append(point_of(own, time.monotonic() - began, warmth()))
            samples += own
            advance(points[-1].seconds)
    return points, samples


def point_of(samples: Sequence[Sample], at: float, temperature: float | None) -> Point:
    """One point of passes that followed each other."""
    clat_ns = array("q", (latency for sample in samples for latency in sample.clat_ns))
    seconds = sum(sample.seconds for sample in samples)
    size_bytes = sum(sample.size_bytes for sample in samples)
    return Point(
        at=at,
        seconds=seconds,
        size_bytes=size_bytes,
        bw_bytes=size_bytes / seconds,
        p50_ns=percentile(clat_ns, 50),
        p99_ns=percentile(clat_ns, 99),
        p99_9_ns=percentile(clat_ns, 99.9),
        temperature=temperature,
    )


def cliff_of(points: Sequence[Point]) -> Cliff | None:
    """The step down that explains the rates best, if they are much lower after it than before.

    Of all places to cut the series in two, the one where two means leave the least squares; a second in which the drive
    stood still counts as its neighbours do.
    """
    plain = [point.bw_bytes for point in points]
    rates = [median(plain[max(0, at - 1) : at + 2]) for at in range(len(plain))]
    cuts = range(LEAST_SIDE, len(rates) - LEAST_SIDE + 1)
    if not cuts:
        return None
    sums, squares = [0.0], [0.0]
    for rate in rates:
        sums.append(sums[-1] + rate)
        squares.append(squares[-1] + rate * rate)

    def spread(first: int, last: int) -> float:
        return squares[last] - squares[first] - (sums[last] - sums[first]) ** 2 / (last - first)

    cut = min(cuts, key=lambda cut: spread(0, cut) + spread(cut, len(rates)))
    before, after = median(plain[:cut]), median(plain[cut:])
    if after > (1 - LEAST_DROP) * before:
        return None
    moved = sum(point.size_bytes for point in points[:cut])
    return Cliff(at=points[cut - 1].at, bytes_before=moved, before=before, after=after)


def found_in(points: Sequence[Point], rw: Rw) -> dict[str, Any]:
    """Return what points by time say, for programs and in words."""
    cliff = cliff_of(points)
    last = mean(point.bw_bytes for point in points[-max(1, len(points) // 4) :])
    words = []
    if cliff is None:
        words.append(f"{rw}: no cliff; {format_rate(last)} in the last quarter")
    else:
        words.append(
            f"{rw}: from {format_rate(cliff.before)} to {format_rate(cliff.after)} after {cliff.at:.0f} s and "
            f"{format_bytes(cliff.bytes_before)}: plan with what comes after"
        )
    worst = max(points, key=lambda point: point.p99_9_ns)
    words.append(f"{rw}: p99.9 of a transfer at worst {worst.p99_9_ns / 1e6:.1f} ms, at {worst.at:.0f} s")
    warm = [point.temperature for point in points if point.temperature is not None]
    if warm:
        words.append(f"{rw}: {warm[0]:.0f} °C at first, {max(warm):.0f} °C at most")
    else:
        words.append(f"{rw}: no temperature: the drive's driver tells none")
    return {"cliff": asdict(cliff) if cliff else None, "last_bw_bytes": last, "words": words}
