"""Arithmetic on what took time in a step."""

from collections.abc import Iterable

Span = tuple[str, int, int, int]
"""Kind, subgroup, start and end in nanoseconds of the monotonic clock."""
Interval = tuple[float, float]

MOVING = ("read", "write")


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The times in which at least one of the intervals runs, disjoint and in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def total(intervals: Iterable[Interval]) -> float:
    """Length of all spans together."""
    return sum(end - start for start, end in intervals)


def io_seconds(spans: Iterable[Span]) -> float:
    """Time in which a read or a write was under way."""
    return total(merge((start, end) for kind, _, start, end in spans if kind in MOVING)) / 1e9
