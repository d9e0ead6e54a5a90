"""These figures are of a device: memory reserved there, how often the host waits for it, bytes copied both ways."""

import json
import warnings
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


def queue_of(device: str, side: int) -> Callable[[], None]:
    """Return a function that queues products of matrices with so many rows: what follows them comes late."""
    square = torch.ones(side, side, device=device)
    product = torch.empty_like(square)

    def queue() -> None:
        for _ in range(20):
            torch.mm(square, square, out=product)

    return queue


def costs_of(device: torch.device, *works: Callable[[], object]) -> tuple[int, list[int]]:
    """Do works in turn; return the bytes that the device reserves for them, and how often the host waits in each."""
    module, waits = torch.get_device_module(device), list[int]()
    wait_for_all(device)
    module.empty_cache()
    before = module.memory_reserved(device)
    reset_peak_reserved_bytes(device)
    module.set_sync_debug_mode("warn")
    try:
        for work in works:
            with warnings.catch_warnings(record=True, action="always") as said:
                work()
            waits.append(sum("called a synchronizing" in str(each.message) for each in said))
    finally:
        module.set_sync_debug_mode("default")
    return peak_reserved_bytes(device) - before, waits


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
