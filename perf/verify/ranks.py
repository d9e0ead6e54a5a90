"""Several ranks with the device's own backend and no other: the bits of one process on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from nvme_offload.optim.zero.initialize import initialize
from nvme_offload.perf.verify.bits import must_be_near, must_equal
from nvme_offload.perf.verify.outcome import Found, LeftOutError, Site, WrongError
from nvme_offload.perf.verify.training import BF16, Slopes, full, slope_run, take_slope_steps
from nvme_offload.perf.verify.updates import section

MOST_RANKS = 8
RANKS_ON_CPU = 2
LIMIT = 240


def ranks(site: Site) -> Found:
    """Of gradients that are the same on all ranks the mean is exact where their number is a power of two."""
    there = torch.get_device_module(site.device).device_count() if site.has_device else RANKS_ON_CPU
    count = 1 << min(there, MOST_RANKS).bit_length() - 1
    if count < 2:
        raise LeftOutError("one device; ranks need two")
    with tempfile.TemporaryDirectory(prefix="verify-") as meeting, site.drive() as drive:
        processes = [_start(site.device, rank, count, Path(meeting), drive) for rank in range(count)]
        try:
            said = [process.communicate(timeout=LIMIT)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        if failed := [text for process, text in zip(processes, said, strict=True) if process.returncode]:
            raise WrongError(f"{len(failed)} of {count} ranks failed: {failed[0].strip()[-600:]}")
        values, norm, backend = torch.load(Path(meeting) / "values")
    expected, expected_norm = slope_run("cpu", section(None, **BF16))
    must_equal(values, expected, f"{count} ranks")
    must_be_near(norm, expected_norm, f"the norm of {count} ranks")
    return Found(f"{count} ranks over {backend}: the bits of one process", {"ranks": count, "backend": backend})


def _start(device: str, rank: int, count: int, meeting: Path, drive: Path) -> subprocess.Popen[str]:
    told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    return subprocess.Popen(
        [sys.executable, "-m", __name__, device, str(meeting), str(drive)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **told},
    )


def main(device: str, meeting: Path, drive: Path) -> None:
    """One rank: train, look at whole values, and leave them behind."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.get_device_module(device).set_device(rank)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, init_method=f"file://{meeting}/store", rank=rank, world_size=count)
    with initialize(Slopes().to(device), section(drive, **BF16)) as engine:
        take_slope_steps(engine, device)
        values, norm = full(engine), engine.get_global_grad_norm()
    if rank == 0:
        torch.save((values, norm, backend), meeting / "values")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
