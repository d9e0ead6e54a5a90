"""An optimizer makes the same bits of given gradients on every device and tier, whatever goes on around it."""

import math
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nvme_offload import TensorSwapper
from nvme_offload.offload.devices.device import current_of, page_lock
from nvme_offload.offload.host.region import HostRegion
from ..measure.bits import LeftOutError, WrongError, must_be_near, must_equal, values_of
from ..measure.on_device import queue_of
from ..measure.trainings import OPTIMIZERS, Params, Site, section_at, trained


def update(site: Site) -> str:
    """Every rule has the CPU's bits, with state in host memory, on NVMe and on the device."""
    for name in OPTIMIZERS:
        expected, _ = trained("cpu", optimizer=name)
        must_equal(trained(site.device, site, optimizer=name)[0], expected, f"{name} on NVMe")
        if not site.has_device:
            continue
        must_equal(trained(site.device, optimizer=name)[0], expected, f"{name} in memory")
        mixed, stats = trained(site.device, site, optimizer=name, device_budget="1MiB")
        must_equal(mixed, expected, f"{name} with a part of its state on the device")
        if not 0 < stats.device_state_bytes < stats.state_bytes:
            raise WrongError(f"{name}: {stats.device_state_bytes:,} bytes of state are on the device")
    return f"{', '.join(OPTIMIZERS)}: the same bits"


def clipping(site: Site) -> str:
    """One norm, one factor, wherever state is; with torch's own clipping, too."""

    def by_torch(params: Params, step: int) -> None:
        nn.utils.clip_grad_norm_([param for param in params if param.grad is not None], 0.5)

    ways: dict[str, dict[str, Any]] = {"clipped by torch": {"before": by_torch}, "clipped": {"gradient_clipping": 0.5}}
    for what, way in ways.items():
        (on_nvme, stats), (in_memory, _) = (trained(site.device, its, **way) for its in (site, None))
        must_equal(on_nvme, in_memory, f"{what}, on NVMe and in memory")
    must_be_near(stats.total_norm, trained("cpu", **way)[1].total_norm, "the norm on the device")
    return f"norm {stats.total_norm:.6g}"


def scaler(site: Site) -> str:
    """GradScaler changes no bits; a gradient that is not finite costs a step and half of the scale.

    They are not bf16: there torch 2.11 has no operator on CUDA that looks for infinities (torch/amp/grad_scaler.py).
    """
    dtypes, full = (torch.float16, torch.float32), 1024.0
    for bad_step, skipped, scale in ((-1, 0, full), (2, 1, full / 2)):
        grad_scaler = torch.amp.GradScaler(site.device, init_scale=full, growth_interval=1000)
        grad_scaler.scale(torch.zeros(1, device=site.device))

        def scaled(params: Params, step: int, bad_step: int = bad_step) -> None:
            grads = [param.grad for param in params if param.grad is not None]
            for grad in grads:
                grad.mul_(full)
            if step == bad_step:
                grads[-1].view(-1)[-1] = math.inf

        bits, stats = trained(site.device, site, before=scaled, scaler=grad_scaler, dtypes=dtypes)
        if not skipped:
            must_equal(bits, trained(site.device, dtypes=dtypes)[0], f"gradients scaled by {full:g}")
        if (stats.skipped_steps, grad_scaler.get_scale()) != (skipped, scale):
            raise WrongError(f"{stats.skipped_steps} steps skipped for {skipped}, scale {grad_scaler.get_scale()}")
    return "the same bits; a step with inf is skipped"


def swapper(site: Site) -> str:
    """Tensors with gaps and transposed ones come back from the drive as they were."""
    with section_at(site) as section, TensorSwapper(section) as swap:
        for number in range(12):
            there = values_of((96, 1537), number, 1.0).to(site.device)
            given = there.t() if number % 2 else there[:, ::2]
            keep = given.clone()
            swap.swap_out(f"{number}", given).wait()
            if number % 3:
                swap.prefetch(f"{number}")
            must_equal({"it": swap.swap_in(f"{number}").wait()}, {"it": keep}, f"tensor {number}")
    return "the same bits"


def races(site: Site) -> str:
    """Whoever must wait waits: gradients come at the end of a long queue, and readers right behind the step."""
    side, numel = (4096, 8_000_000) if site.large else (64, 300_000)
    queue = queue_of(site.device, side)

    def late(params: Params, step: int) -> None:
        for param in params:
            assert param.grad is not None
            there, param.grad = param.grad, torch.full_like(param, math.nan)
            queue()
            param.grad.copy_(there)

    size: dict[str, Any] = {"shapes": ((numel,),), "steps": 12}
    found, stats = trained(site.device, site, before=late, **size)
    must_equal(found, trained("cpu", **size)[0], "steps with late gradients")
    if stats.resplit_blocks:
        raise WrongError(f"{stats.resplit_blocks} tiles looked as if somebody else had changed them")
    return "the same bits" if site.has_device else "the same bits; nothing is late on a CPU"


def process(site: Site) -> str:
    """Default devices, workers forked between steps and a refusal to pin change nothing."""
    expected, _ = trained("cpu")
    with torch.device(site.device if site.has_device else "meta"):
        must_equal(trained(site.device, site)[0], expected, "under a default device")

    def fork(params: Params, step: int) -> None:
        list(DataLoader(TensorDataset(torch.arange(16)), num_workers=2, multiprocessing_context="fork"))

    must_equal(trained(site.device, site, before=fork)[0], expected, "with workers forked meanwhile")
    if site.has_device:
        _refuse_to_pin(current_of(site.device))
    return "the same bits under a default device and with forked workers"


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
