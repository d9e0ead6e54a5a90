"""Which engine would do the I/O, and what the kernel allows it."""

import errno
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass

from nvme_offload.aio_native.engine import EngineOptions, EngineUnavailable
from nvme_offload.aio_native.registry import ENGINES, open_engine
from nvme_offload.aio_native.uring_refusal import cause_of, first_numbers, io_uring_disabled, probe_errno
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.host.proc import status_field
from nvme_offload.offload.storage.swap_file import MIN_ALIGNMENT
from .findings import Finding, saw

FIRST_KERNEL = (5, 6)
FULL_KERNEL = (6, 1)


@dataclass(frozen=True)
class EngineProbe:
    """A probe opened all engines."""

    refusals: dict[str, str]  # why an engine cannot be opened, by its name

    @property
    def first(self) -> str | None:
        """Name of the engine that ``auto`` takes; None if none works."""
        return next((name for name in ENGINES if name not in self.refusals), None)

    def chosen(self, config: OffloadConfig) -> str | None:
        """Name of the engine that this configuration takes; None if it cannot be opened."""
        return next(iter(self.usable(config)), None)

    def usable(self, config: OffloadConfig) -> list[str]:
        """Names of the engines that a run of this configuration may come to use, the first that it takes."""
        names = ENGINES if config.aio.engine == "auto" else [config.aio.engine]
        return [name for name in names if name not in self.refusals]


def probe_engines(config: OffloadConfig) -> EngineProbe:
    """Open and close engines with the configured sizes. Nothing is logged."""
    sizes = {name: getattr(config.aio, name) for name in ("queue_depth", "block_size", "rings")}
    options = EngineOptions(**sizes, alignment=MIN_ALIGNMENT, max_operations=8)
    refusals: dict[str, str] = {}
    for name in ENGINES:
        try:
            open_engine(name, options).engine.close()
        except (EngineUnavailable, OSError, ValueError) as error:
            reason = error.__cause__ if isinstance(error.__cause__, EngineUnavailable) else error
            refusals[name] = str(reason).rstrip(".")
    return EngineProbe(refusals)


def check_engines(config: OffloadConfig, probe: EngineProbe) -> Iterator[Finding]:
    """Check kernel, io_uring, and the choice of an engine."""
    refusal = probe_errno(config.aio.queue_depth)
    yield check_kernel()
    yield check_io_uring(refusal)
    if not refusal and "io_uring" in probe.refusals:
        meaning = "the fastest engine is missing; with pyuring each request costs some 20 us of Python"
        yield saw("C++ engine", "not available").warning(meaning, probe.refusals["io_uring"])
    yield check_choice(config, probe)


def check_kernel(release: str | None = None) -> Finding:
    """Which io_uring this kernel can have."""
    release = platform.release() if release is None else release
    found, remedy = saw("kernel", release), "update to Linux 6.1 or newer"
    if first_numbers(release) >= FULL_KERNEL:
        return saw("kernel", f"{release}, with all io_uring features in use")
    if first_numbers(release) < FIRST_KERNEL:
        meaning = f"io_uring as we use it came with 5.6: the engine {ENGINES[-1]} serves, which is slower"
        return found.warning(meaning, remedy)
    meaning = (
        "io_uring works with fewer flags (SINGLE_ISSUER and DEFER_TASKRUN came with 6.1), which costs processor time, "
        "and statx does not tell the alignment of direct I/O"
    )
    return found.note(meaning, remedy)


def check_io_uring(refusal: int) -> Finding:
    """Whether the kernel lets this process use io_uring, and what forbids it; `refusal`: errno of a try, or 0."""
    text = status_field("Seccomp")
    sysctl, seccomp = io_uring_disabled(), int(text) if text in ("0", "1", "2") else None
    shown = f"kernel.io_uring_disabled = {'absent' if sysctl is None else sysctl}, seccomp {_SECCOMP[seccomp]}"
    if not refusal:
        return saw("io_uring", f"allowed ({shown})")
    name = errno.errorcode.get(refusal, str(refusal))
    cause, remedy = cause_of(refusal, seccomp)
    found = f"refused with {name}, {os.strerror(refusal)} ({shown})"
    meaning = f"{cause}; without io_uring the engine {ENGINES[-1]} serves, with a thread for each request"
    return saw("io_uring", found).warning(meaning, remedy)


_SECCOMP = {0: "off", 1: "strict", 2: "filter active", None: "unknown"}


def check_choice(config: OffloadConfig, probe: EngineProbe) -> Finding:
    """Which engine does the I/O, and why."""
    asked, chosen = config.aio.engine, probe.chosen(config)
    if chosen is None:
        found = saw("engine", f"aio.engine = {asked} cannot be opened here")
        meaning = probe.refusals.get(asked) or "; ".join(probe.refusals.values())
        usable = f", which takes {probe.first} here" if probe.first else ""
        return found.error(meaning, f'write "auto" for aio.engine{usable}')
    if asked != "auto":
        return saw("engine", f"{chosen}, as aio.engine asks")
    passed_over = " and ".join(ENGINES[: ENGINES.index(chosen)])
    why = f"because {passed_over} cannot be opened" if passed_over else "the first choice"
    return saw("engine", f"auto takes {chosen}, {why}")
