"""A timeline as a trace file, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nvme_offload.offload.user_path import user_path
from .stats import Span, SpanKind

TRACKS: dict[str, tuple[SpanKind, ...]] = {
    "training": ("forward", "backward", "step", "norm", "wait"),
    "updates": ("compute",),
    "drive reads": ("read",),
    "drive writes": ("write",),
    "commits": ("commit",),
}
"""Names of tracks, in their order, and what is on them."""

_NAMES: dict[SpanKind, str] = {"compute": "update", "wait": "waiting"}


def write_trace(spans: Iterable[Span], path: str | Path) -> None:
    """Write a timeline, `OffloadEngine.timeline` say, in the trace event format."""
    document = {"traceEvents": trace_events(spans), "displayTimeUnit": "ms"}
    user_path(path).write_text(json.dumps(document), encoding="utf-8")


def trace_events(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """Return complete events (``ph: X``), in microseconds since the first span began, and the names of their tracks.

    On a track, one span is inside another or beside it; what would overlap gets a further track of the same name.
    """
    spans = list(spans)
    zero = min((span.start_ns for span in spans), default=0)
    events: list[dict[str, Any]] = []
    number = 0
    for name, kinds in TRACKS.items():
        for lane in _lanes([span for span in spans if span.kind in kinds]):
            number += 1
            events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": name}})
            events += [_event(span, number, zero) for span in lane]
    return events


def _lanes(spans: list[Span]) -> list[list[Span]]:
    """Share spans out so that in each lane those that overlap are inside each other."""
    lanes: list[list[Span]] = []
    open_in: list[list[int]] = []
    """Ends of the spans that are still open in each lane, the innermost last."""
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        for lane, ends in zip(lanes, open_in, strict=True):
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
            if not ends or span.end_ns <= ends[-1]:
                lane.append(span)
                ends.append(span.end_ns)
                break
        else:
            lanes.append([span])
            open_in.append([span.end_ns])
    return lanes


def _event(span: Span, number: int, zero: int) -> dict[str, Any]:
    name = _NAMES.get(span.kind, span.kind)
    return {
        "ph": "X",
        "name": name if span.subgroup < 0 else f"{name} {span.subgroup}",
        "cat": span.kind,
        "pid": 1,
        "tid": number,
        "ts": (span.start_ns - zero) / 1e3,
        "dur": (span.end_ns - span.start_ns) / 1e3,
    }
