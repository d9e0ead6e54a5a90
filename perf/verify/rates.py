"""These rates are measured here: copies to the device and back, and what of a step an iteration shows."""

import time
from typing import Any

import torch

from nvme_offload.offload.units import format_bytes
from nvme_offload.optim.zero.engine import OffloadEngine
from nvme_offload.optim.zero.initialize import initialize
from nvme_offload.perf.measure.accelerator import copy_rates, device_here
from nvme_offload.perf.measure.training import layered_model
from nvme_offload.perf.verify.outcome import Found, LeftOutError, Site
from nvme_offload.perf.verify.training import BF16
from nvme_offload.perf.verify.updates import section

WIDTH = {True: 2048, False: 128}
TOKENS = {True: 16384, False: 64}
STAGING = {True: "2GiB", False: "8MiB"}
WARM_UP, COUNTED = 3, 4


def copies(site: Site) -> Found:
    """Rates of page-locked copies, in each direction and in both at once."""
    device = device_here() if site.has_device else None
    if device is None:
        raise LeftOutError("no GPU")
    rates = copy_rates(device)
    words = {"to_device": "there", "to_host": "back", "both": "both at once"}
    return Found(", ".join(f"{words[name]} {rate / 1e9:.1f} GB/s" for name, rate in rates.items()), rates)


def iteration(site: Site) -> Found:
    """Forward and backward alone beside whole iterations with the state on NVMe: what of the step is exposed."""
    width = WIDTH[site.large]
    layers = max(2, round(site.params / (8 * width * width)))
    torch.manual_seed(0)
    with torch.device(site.device):
        model = layered_model(layers, width)
        batch = torch.randn(TOKENS[site.large], width)
    numel = sum(param.numel() for param in model.parameters())
    with site.drive() as folder:
        its = section(folder, clip=1.0, staging=STAGING[site.large], sub_group_size=None, **BF16)
        with initialize(model, its) as engine:
            values = {"parameters": numel, "layers": layers, **_timed(site, engine, batch)}
    shares = f"exposed {values['exposed_share']:.0%}, {values['share_of_ideal']:.0%} of the ideal"
    text = f"{numel / 1e9:.3g} B parameters: {values['seconds']:.3g} s, compute {values['compute_seconds']:.3g} s"
    peak = values.get("peak_device_bytes")
    return Found(f"{text}, {shares}{f', {format_bytes(peak)} on the device' if peak else ''}", values)


def _timed(site: Site, engine: OffloadEngine, batch: torch.Tensor) -> dict[str, Any]:
    device = torch.get_device_module(site.device) if site.has_device else None

    def settle() -> None:
        engine.optimizer.synchronize()
        if device is not None:
            device.synchronize()

    def seconds_of(count: int, *, steps: bool) -> float:
        """Seconds of forward and backward, and of steps too; what runs before and after is waited for."""
        settle()
        start = time.perf_counter()
        for _ in range(count):
            engine.backward(engine(batch).float().square().mean())
            if steps:
                engine.step()
        settle()
        return time.perf_counter() - start

    seconds_of(WARM_UP, steps=True)
    alone = []
    for _ in range(COUNTED):
        alone.append(seconds_of(1, steps=False))
        engine.step()
    settle()
    before, seconds, after = (
        engine.optimizer.stats(),
        seconds_of(COUNTED, steps=True) / COUNTED,
        engine.optimizer.stats(),
    )
    assert after.iteration is not None  # there were several
    moved = (after.bytes_read - before.bytes_read + after.bytes_written - before.bytes_written) / COUNTED
    peak = getattr(device, "max_memory_allocated", None)
    return {
        "seconds": seconds,
        "compute_seconds": min(alone),
        "drive_seconds": after.iteration.drive_seconds,
        "exposed_seconds": seconds - min(alone),
        "exposed_share": max(0.0, seconds - min(alone)) / seconds,
        "share_of_ideal": min(1.0, max(min(alone), after.iteration.drive_seconds) / seconds),
        "limit": after.iteration.limit,
        "bytes_moved": moved,
        **({} if peak is None else {"peak_device_bytes": peak()}),
    }
