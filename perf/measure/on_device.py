"""These figures are of a device: memory that was reserved there, bytes that were copied to it and from it."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from nvme_offload.offload.devices.device import is_host, wait_for_all


def peak_reserved_bytes(device: torch.device) -> int:
    """The most that torch's allocator has reserved there since `reset_peak_reserved_bytes`; 0 on the host."""
    return 0 if is_host(device) else int(torch.get_device_module(device).max_memory_reserved(device))


def reset_peak_reserved_bytes(device: torch.device) -> None:
    """Let the peak begin anew at what is reserved now."""
    if not is_host(device):
        torch.get_device_module(device).reset_peak_memory_stats(device)


def copied_by(device: torch.device, work: Callable[[], object]) -> tuple[int, int] | None:
    """Do some work under torch's profiler; return the bytes of its copies to a device and from it.

    All threads of the process and all streams count. None where the profiler sees no copies: on the host, and of
    devices that are not CUDA's.
    """
    known = supported_activities()  # type: ignore[no-untyped-call]
    if is_host(device) or ProfilerActivity.CUDA not in known:
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        work()
        wait_for_all(device)
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        return copied_bytes(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"])


def copied_bytes(events: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Sum the bytes of copies to a device and from it, as the events of a trace of torch's profiler have them."""
    sums = {"HtoD": 0, "DtoH": 0}
    for event in events:
        if event.get("cat") == "gpu_memcpy":
            for way in sums:
                sums[way] += event["args"]["bytes"] if way in event["name"] else 0
    return sums["HtoD"], sums["DtoH"]
