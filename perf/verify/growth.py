"""More layers take no more of the device, nor of the host: memory that is reserved there, waits for it, contexts."""

import warnings

import torch
from torch import nn

from nvme_offload import initialize
from nvme_offload.offload._torch_private import has_context
from nvme_offload.offload.units import format_bytes
from nvme_offload.optim.zero.meshes import default_mesh
from nvme_offload.perf.verify.engines import BF16, section_of
from nvme_offload.perf.verify.outcome import LeftOutError, Site, WrongError

LAYERS, MOST_WAITS, _WARM_UP = (4, 12), 2, 2
_WIDTH, _BUSY = {True: 2048, False: 128}, {True: 8192, False: 64}


def growth(site: Site) -> str:
    """More layers take no more of the device: parameters and gradients are in host memory, the device is behind it."""
    if not site.has_device:
        raise LeftOutError("no GPU")
    (few, *_), (many, _, in_step) = found = [_measured(site, layers) for layers in LAYERS]
    if many - few > 3 * 2 * _WIDTH[site.large] ** 2:
        sizes = f"{format_bytes(many)} beside the model, and {LAYERS[0]} {format_bytes(few)}"
        raise WrongError(f"{LAYERS[1]} layers reserve {sizes}: it grows with them")
    if any(passes or step > MOST_WAITS for _, passes, step in found):
        raise WrongError(f"the host waits in a pass, or more than {MOST_WAITS} times in a step: {found}")
    device = torch.get_device_module(site.device)
    contexts = [number for number in range(device.device_count()) if has_context(torch.device(site.device, number))]
    if contexts != [device.current_device()]:
        raise WrongError(f"this process uses device {device.current_device()}, and has contexts on {contexts}")
    return f"{LAYERS[0]} and {LAYERS[1]} layers: {format_bytes(many)} beside the model, {in_step} waits in a step"


def _measured(site: Site, layers: int) -> tuple[int, int, int]:
    """Return bytes that an iteration reserves beside the model, and waits for the device in passes and in the step."""
    device, width = torch.get_device_module(site.device), _WIDTH[site.large]
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    batch = torch.ones(8, width, device=site.device)
    busy = torch.ones(_BUSY[site.large], _BUSY[site.large], device=site.device)
    with initialize(model, section_of(None, "cpu", "cpu", **BF16), mesh=default_mesh(site.device)) as engine:
        for _ in range(_WARM_UP):
            engine.backward(engine(batch).float().square().mean())
            engine.step()
        engine.optimizer.synchronize()
        device.synchronize()
        torch.mm(busy, busy, out=(product := torch.empty_like(busy)))
        device.empty_cache()
        before = device.memory_reserved()
        device.reset_peak_memory_stats()
        with warnings.catch_warnings(record=True, action="always") as said:
            device.set_sync_debug_mode("warn")
            try:
                for _ in range(20):
                    torch.mm(busy, busy, out=product)
                engine.backward(engine(batch).float().square().mean())
                in_passes = _waits(said)
                engine.step()
                in_step = _waits(said) - in_passes
            finally:
                device.set_sync_debug_mode("default")
        return device.max_memory_reserved() - before, in_passes, in_step


def _waits(said: list[warnings.WarningMessage]) -> int:
    """Count the warnings of torch for calls of it that make the host wait for the device."""
    return sum("called a synchronizing" in str(each.message) for each in said)
