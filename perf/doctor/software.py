"""Versions of this package and of what it stands on, and the GPU."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.host.region import HostRegion
from nvme_offload.offload.units import MiB
from nvme_offload.perf.doctor.findings import Finding, Level, ok, problem

OLDEST_TORCH = (2, 11)


def check_software(config: OffloadConfig) -> Iterator[Finding]:
    """Versions of what matters, and whether the GPU takes pinned memory."""
    yield check_versions()
    yield check_torch(torch.__version__)
    yield check_gpu(config)


def check_versions() -> Finding:
    """Check the versions of this package, of Python and of the io_uring binding."""
    values = {name: _version(name) for name in ("nvme-offload", "pyuring", "aiofiles")}
    values["python"] = platform.python_version()
    found = ", ".join(f"{name} {number or 'not installed'}" for name, number in values.items())
    return ok("versions", found, **values)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_torch(release: str) -> Finding:
    """Whether this torch is one of those that are tested."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers and (int(numbers[1]), int(numbers[2])) >= OLDEST_TORCH:
        return ok("torch", release, version=release)
    oldest = ".".join(map(str, OLDEST_TORCH))
    meaning = f"torch {oldest} is the oldest that is supported"
    return problem(Level.ERROR, "torch", release, meaning, f"pip install 'torch>={oldest}'", version=release)


def check_gpu(config: OffloadConfig) -> Finding:
    """Whether there is a CUDA device, and pinning memory of ours for it works."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch is built for CUDA {built}, but sees no device" if built else "torch is built without CUDA"
        return ok("GPU", f"none ({why}); the CPU trains", cuda=built, devices=[])
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    values = {"cuda": torch.version.cuda, "devices": names}
    found = f"{', '.join(names)} (CUDA {torch.version.cuda})"
    region = HostRegion(MiB)
    try:
        region.pin(torch.device("cuda", torch.cuda.current_device()))
    except RuntimeError as error:
        asked = config.zero_optimization.offload_optimizer.pin_memory is not False
        meaning = f"copies between GPU and host cannot run asynchronously: {error}"
        remedy = "write false for zero_optimization.offload_optimizer.pin_memory"
        return problem(Level.ERROR if asked else Level.NOTE, "GPU", found, meaning, remedy, **values)
    finally:
        region.unpin()
    return ok("GPU", f"{found}; pinning memory works", **values)
