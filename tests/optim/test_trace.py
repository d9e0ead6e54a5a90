"""A timeline as a trace file: the format, and that spans of a track are inside each other or apart."""

import json
from itertools import pairwise

import pytest

from nvme_offload import Span, write_trace
from nvme_offload.optim.telemetry.trace import TRACKS, trace_events

SPANS = [
    Span("forward", -1, 1_000, 5_000),
    Span("wait", -1, 2_000, 3_000),
    Span("backward", -1, 5_000, 9_000),
    Span("step", -1, 9_000, 12_000),
    Span("norm", -1, 9_000, 10_000),
    Span("compute", 3, 10_500, 11_000),
    Span("read", 4, 8_000, 11_500),
    Span("read", 5, 8_500, 12_500),
    Span("read", 6, 11_500, 13_000),
    Span("write", 3, 11_000, 14_000),
]


def assert_nested(events):
    """Within a track, any two spans are apart or one is inside the other."""
    for number in {event["tid"] for event in events}:
        ends = []
        for event in sorted(
            (e for e in events if e["tid"] == number and e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])
        ):
            while ends and ends[-1] <= event["ts"] + 1e-9:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-6, event
            ends.append(event["ts"] + event["dur"])


def test_the_trace_event_format(tmp_path):
    write_trace(SPANS, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(names.values()) == ["training", "updates", "drive reads", "drive reads", "drive writes"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(SPANS)
    for event in spans:
        assert {"name", "cat", "pid", "tid", "ts", "dur"} <= event.keys()
        assert event["cat"] in TRACKS[names[event["tid"]]]
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    [update] = [event for event in spans if event["cat"] == "compute"]
    assert (update["name"], update["ts"], update["dur"]) == ("update 3", pytest.approx(9.5), pytest.approx(0.5))
    assert_nested(events)


def test_nothing_is_an_empty_trace():
    assert trace_events([]) == []


def test_many_overlapping_transfers_get_no_more_tracks_than_run_at_a_time():
    events = trace_events([Span("read", number, number * 10, number * 10 + 35) for number in range(50)])
    assert len({event["tid"] for event in events}) == 4
    assert_nested(events)
    by_track = [event["ts"] for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert all(later - earlier >= 0.035 - 1e-9 for earlier, later in pairwise(by_track))
