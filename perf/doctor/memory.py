"""Host memory, versions of what this package stands on, and the GPU."""

import platform
from collections.abc import Iterator

import torch

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.host.available_memory import available_bytes, cgroup_limit
from nvme_offload.offload.host.proc import meminfo
from nvme_offload.offload.host.region import HostRegion
from nvme_offload.offload.units import MiB, format_bytes
from nvme_offload.perf.doctor.findings import Finding, Level, saw
from nvme_offload.perf.measure.machine import version_of


def check_memory(config: OffloadConfig) -> Finding:
    """Whether the host budget fits, or without one the staging buffers."""
    facts, limit, available = meminfo(), cgroup_limit(), available_bytes()
    key, what = "zero_optimization.offload_optimizer.staging_budget", "the staging buffers"
    budget = config.zero_optimization.offload_optimizer.staging_budget
    if isinstance(config.host_budget, int):  # "auto" fits by itself
        key, what, budget = "host_budget", "the host budget", config.host_budget
    total = facts.get("MemTotal", 0)
    found = f"{format_bytes(facts.get('MemAvailable', 0))} available of {format_bytes(total)}"
    if limit:
        found += (
            f"; cgroup v{limit.version} limit {format_bytes(limit.limit_bytes)}, "
            f"{format_bytes(limit.free_bytes)} of it left"
        )
    else:
        found += "; no cgroup limit"
    remedy = f"write less than {format_bytes(budget)} for {key}"
    seen = saw("memory", found)
    if budget > available:
        return seen.error(f"too little for {what} ({format_bytes(budget)})", remedy)
    if key != "host_budget" and 2 * budget > available:
        return seen.warning(f"{what} ({format_bytes(budget)}) take more than half of it", remedy)
    return seen


def check_software(config: OffloadConfig) -> Iterator[Finding]:
    """Versions of what matters, and whether the GPU takes pinned memory."""
    versions = {name: version_of(name) for name in ("nvme-offload", "torch", "pyuring", "aiofiles")}
    versions["python"] = platform.python_version()
    listed = ", ".join(f"{name} {number or 'not installed'}" for name, number in versions.items())
    yield saw("versions", listed)
    yield check_gpu(config)


def check_gpu(config: OffloadConfig) -> Finding:
    """Whether there is a CUDA device, and pinning memory of ours for it works."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch is built for CUDA {built}, but sees no device" if built else "torch is built without CUDA"
        return saw("GPU", f"none ({why}); the CPU trains")
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    found = f"{', '.join(names)} (CUDA {torch.version.cuda})"
    region = HostRegion(MiB)
    try:
        region.pin(torch.device("cuda", torch.cuda.current_device()))
    except RuntimeError as error:
        asked = config.zero_optimization.offload_optimizer.pin_memory
        meaning = f"copies between GPU and host cannot run asynchronously: {error}"
        remedy = "write false for zero_optimization.offload_optimizer.pin_memory"
        return saw("GPU", found).at(Level.ERROR if asked else Level.NOTE, meaning, remedy)
    finally:
        region.unpin()
    return saw("GPU", f"{found}; pinning memory works")
