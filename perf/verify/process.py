"""Much goes on around a training: default devices, forks, compilers, late copies, gradients freed early, ranks."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nvme_offload.offload.devices.device import current_of, page_lock
from nvme_offload.offload.host.region import HostRegion
from nvme_offload.optim.optimizers.adamw import OffloadAdamW
from nvme_offload.perf.measure.child import Child, ChildFailedError, Send
from nvme_offload.perf.verify.outcome import Found, LeftOutError, Site, WrongError, must_be_near, must_equal
from nvme_offload.perf.verify.training import BF16, layered_run, slope_run
from nvme_offload.perf.verify.updates import Params, section, trained

_KEPT: dict[str, Any] = {"gradient_clipping": 0.1, **BF16}
ROUNDS = 12
_NUMEL = {True: 8_000_000, False: 300_000}
_BUSY = {True: 4096, False: 64}
_LINKS = 20
MOST_RANKS = 8
RANKS_ON_CPU = 2
LIMIT = 240


def process(site: Site) -> Found:
    """Steps under a default device, and with workers forked between them; a refusal to pin that is over when told."""
    expected = trained("cpu", section(None)).bits
    with site.drive() as drive, torch.device(site.device if site.has_device else "meta"):
        must_equal(trained(site.device, section(drive)).bits, expected, "under a default device")

    def fork(params: Params, step: int) -> None:
        for _ in DataLoader(TensorDataset(torch.arange(16)), num_workers=2, multiprocessing_context="fork"):
            pass

    with site.drive() as drive:
        must_equal(trained(site.device, section(drive), before=fork).bits, expected, "with workers forked meanwhile")
    if site.has_device:
        _refuse_to_pin(current_of(site.device))
    return Found("the same bits under a default device and with forked workers", {})


def _refuse_to_pin(device: torch.device) -> None:
    """Ask for what is pinned already; whoever computes next must not be told of that."""
    region = HostRegion(1 << 20)
    region.pin(device)
    try:
        if not page_lock(region.address, region.size_bytes, device):
            raise LeftOutError("memory can be pinned twice here")
        torch.ones(10, device=device).sum().item()
    except RuntimeError as error:
        raise WrongError(f"the next kernel raised what pinning was refused for: {error}") from error
    finally:
        region.unpin()


def compiled(site: Site) -> Found:
    """Compiled blocks, wherever anything is kept: the bits of the same blocks with all of it in memory."""
    backend = "inductor" if site.large else "aot_eager"
    torch.compiler.reset()
    try:
        torch.compile(torch.neg, backend=backend)(torch.ones(1, device=site.device))
    except Exception as error:  # a compiler that is missing is none of ours
        raise LeftOutError(f"torch.compile does not work here: {error}") from error
    with site.drive() as drive:
        found = layered_run(site, section(drive, **_KEPT), backend)
    must_equal(found, layered_run(site, section(None, **_KEPT), backend), "state on NVMe and in memory")
    with site.drive() as drive:
        found = layered_run(site, _away({"device": "nvme", "nvme_path": str(drive)}, drive), backend)
    must_equal(found, layered_run(site, _away({"device": "cpu"}, None), backend), "all on NVMe and in memory")
    return Found(f"{backend}: the same bits, wherever anything is kept", {})


def _away(kept: dict[str, Any], drive: Path | None) -> dict[str, Any]:
    config = section(drive, offload_gradients=kept, **_KEPT)
    config["zero_optimization"]["offload_param"] = kept
    return config


def races(site: Site) -> Found:
    """Gradients that come at the end of a long queue, readers right behind the step, and memory that is taken again."""
    late, seen = _train(site, is_late=True)
    calm, expected = _train(site, is_late=False)
    must_equal(late, calm, "parameters after steps with late gradients")
    for number, (first, then) in enumerate(seen):
        if first != then:
            raise WrongError(f"round {number}: what was queued behind the step read other parameters than there are")
    must_equal(seen, expected, "what was queued behind the steps")
    text = "the same bits" if site.has_device else "the same bits; nothing is late on a CPU"
    return Found(text, {"rounds": ROUNDS, "parameters": late.numel()})


def _train(site: Site, *, is_late: bool) -> tuple[torch.Tensor, list[tuple[float, float]]]:
    numel, sums = _NUMEL[site.large], []
    waits = site.has_device and not is_late
    busy = torch.randn(_BUSY[site.large], _BUSY[site.large], device=site.device)
    param = nn.Parameter(torch.ones(numel, dtype=torch.bfloat16, device=site.device))
    ramp = torch.linspace(-1, 1, numel, device=site.device).bfloat16()
    with site.drive() as drive, OffloadAdamW([param], lr=1e-2, offload=section(drive)) as optimizer:
        for number in range(ROUNDS):
            param.grad = torch.full_like(param, float("nan"))
            product = busy
            for _ in range(_LINKS if is_late else 1):
                product = (product @ busy) * 1e-3
            param.grad.copy_(ramp * (number + 1))
            if waits:
                torch.get_device_module(site.device).synchronize()
            optimizer.step()
            first = param.detach().sum(dtype=torch.float64)
            param.grad = None
            # Takes the memory of the gradient again, which copies may still be reading.
            junk = [torch.full((numel // 4,), 7.0, dtype=torch.bfloat16, device=site.device) for _ in range(4)]
            if waits:
                torch.get_device_module(site.device).synchronize()
            sums.append((first, param.detach().sum(dtype=torch.float64)))
            del junk, product
        if optimizer.stats().resplit_blocks:
            raise WrongError(f"{optimizer.stats().resplit_blocks} tiles looked as if somebody else had changed them")
        return param.detach().cpu(), [(first.item(), then.item()) for first, then in sums]


def ranks(site: Site) -> Found:
    """Check several ranks; the mean of gradients that are the same on all is exact for a power of two of them."""
    there = torch.get_device_module(site.device).device_count() if site.has_device else RANKS_ON_CPU
    count = 1 << min(there, MOST_RANKS).bit_length() - 1
    if count < 2:
        raise LeftOutError("one device; ranks need two")
    with TemporaryDirectory(prefix="verify-") as folder, site.drive() as drive, ExitStack() as stack:
        meeting = Path(folder)
        children = []
        for rank in range(count):
            told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            environment = {name: str(number) for name, number in told.items()}
            child = Child(one_rank, meeting / f"log {rank}", environment=environment)
            children.append(stack.enter_context(child))
            child.tell((site.device, meeting, drive))
        try:
            for child in children:
                child.expect("done", within=LIMIT)
        except ChildFailedError as error:
            raise WrongError(f"a rank of {count} failed: {error}") from None
        values, norm, backend = torch.load(meeting / "values")
    expected, expected_norm = slope_run("cpu", section(None, **BF16))
    must_equal(values, expected, f"{count} ranks")
    must_be_near(norm, expected_norm, f"the norm of {count} ranks")
    return Found(f"{count} ranks over {backend}: the bits of one process", {"ranks": count, "backend": backend})


def one_rank(told: Iterator[Any], send: Send) -> None:
    """Train as one rank, look at whole values, and leave them behind."""
    device, meeting, drive = next(told)
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.get_device_module(device).set_device(rank)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, init_method=f"file://{meeting}/store", rank=rank, world_size=count)
    values, norm = slope_run(device, section(drive, **BF16))
    if rank == 0:
        torch.save((values, norm, backend), meeting / "values")
    dist.barrier()
    dist.destroy_process_group()
    send("done", None)
