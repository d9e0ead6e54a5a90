"""Host memory: how much there is for this process, and the rules it is given out by."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.host.available_memory import available_bytes, cgroup_limit
from nvme_offload.offload.host.proc import CAP_IPC_LOCK, SYS, has_capability, meminfo, read, read_sysctl
from nvme_offload.offload.units import GiB, format_bytes
from nvme_offload.perf.doctor.findings import Finding, Level, ok, problem

ENOUGH_FILES = 256
"""Open files: a few for each path and ring, beside those of torch and its data loaders."""


def check_memory(config: OffloadConfig) -> Iterator[Finding]:
    """Memory, overcommit, huge pages, swap, and the limits of this process."""
    yield check_available(config)
    yield check_overcommit(config)
    yield check_huge_pages()
    yield check_swap()
    yield check_open_files()
    yield check_locked_memory(config)


def check_available(config: OffloadConfig) -> Finding:
    """Whether the host budget fits, or without one the staging buffers."""
    facts, limit, available = meminfo(), cgroup_limit(), available_bytes()
    key, what = "zero_optimization.offload_optimizer.staging_budget", "the staging buffers"
    budget = staging = config.zero_optimization.offload_optimizer.staging_budget
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
    values = {
        "total_bytes": total,
        "available_bytes": available,
        "cgroup_limit_bytes": limit.limit_bytes if limit else None,
        "cgroup_version": limit.version if limit else None,
        "staging_budget_bytes": staging,
        "host_budget": config.host_budget,
    }
    remedy = f"write less than {format_bytes(budget)} for {key}"
    verb = "does" if key == "host_budget" else "do"
    if budget > available:
        meaning = f"{what} ({format_bytes(budget)}) {verb} not fit"
        return problem(Level.ERROR, "memory", found, meaning, remedy, **values)
    if key != "host_budget" and 2 * budget > available:
        meaning = f"{what} ({format_bytes(budget)}) take more than half of it"
        return problem(Level.WARNING, "memory", found, meaning, remedy, **values)
    return ok("memory", found, **values)


def check_overcommit(config: OffloadConfig) -> Finding:
    """Whether memory that is mapped may be more than there is."""
    policy = read_sysctl("vm.overcommit_memory")
    if policy != 2:
        return ok("overcommit", f"vm.overcommit_memory = {policy}, mapping memory is not limited", policy=policy)
    facts = meminfo()
    left = facts.get("CommitLimit", 0) - facts.get("Committed_AS", 0)
    found = f"vm.overcommit_memory = 2, {format_bytes(left)} may still be mapped"
    budget = config.zero_optimization.offload_optimizer.staging_budget
    level = Level.WARNING if left < 2 * budget else Level.NOTE
    meaning = "what is mapped counts as used, touched or not: torch maps far more than it uses"
    return problem(
        level, "overcommit", found, meaning, "sudo sysctl -w vm.overcommit_memory=0", policy=2, left_bytes=left
    )


def check_huge_pages() -> Finding:
    """Whether anonymous memory may come in huge pages."""
    text = read(SYS / "kernel/mm/transparent_hugepage/enabled") or ""
    match = re.search(r"\[(\w+)\]", text)
    policy = match[1] if match else None
    return ok("huge pages", f"transparent huge pages: {policy or 'not in this kernel'}", policy=policy)


def check_swap() -> Finding:
    """Whether the kernel moves memory to a drive behind our back."""
    facts = meminfo()
    total = facts.get("SwapTotal", 0)
    used = total - facts.get("SwapFree", 0)
    if not total:
        return ok("swap", "none", total_bytes=0, used_bytes=0)
    found = f"{format_bytes(used)} of {format_bytes(total)} used"
    if used < GiB:
        return ok("swap", found, total_bytes=total, used_bytes=used)
    meaning = "host memory is short: the kernel's swapping competes with the NVMe tier for the drive"
    remedy = "see who is swapped: grep VmSwap /proc/[0-9]*/status | sort -nk2 | tail"
    return problem(Level.NOTE, "swap", found, meaning, remedy, total_bytes=total, used_bytes=used)


def check_open_files() -> Finding:
    """Whether RLIMIT_NOFILE allows as many open files as are needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    found = (
        "unlimited" if unlimited else f"{soft} (hard limit {'unlimited' if hard == resource.RLIM_INFINITY else hard})"
    )
    if unlimited or soft >= ENOUGH_FILES:
        return ok("open files", found, soft=soft, hard=hard)
    meaning = "swap files, rings and data loaders may not get a file descriptor"
    return problem(Level.WARNING, "open files", found, meaning, "ulimit -n 4096", soft=soft, hard=hard)


def check_locked_memory(config: OffloadConfig) -> Finding:
    """RLIMIT_MEMLOCK, which bounds registered buffers. What follows from it is said where registering is tried."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    budget = config.zero_optimization.offload_optimizer.staging_budget
    values = {"soft_bytes": None if soft == resource.RLIM_INFINITY else soft, "staging_budget_bytes": budget}
    if soft == resource.RLIM_INFINITY:
        return ok("locked memory", "unlimited", **values)
    if has_capability(CAP_IPC_LOCK):
        found = f"{format_bytes(soft)}, which does not bind this process (CAP_IPC_LOCK)"
    elif soft < budget:
        found = f"{format_bytes(soft)}, less than the staging buffers ({format_bytes(budget)})"
    else:
        found = format_bytes(soft)
    return ok("locked memory", found, **values)
