"""More layers take no more of the device, nor of the host: memory that is reserved there, waits for it, contexts."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.profiler import profile, supported_activities

from nvme_offload.offload._torch_private import has_context
from nvme_offload.offload.units import format_bytes
from nvme_offload.optim.zero.initialize import initialize
from nvme_offload.optim.zero.meshes import default_mesh
from nvme_offload.perf.verify.outcome import Found, LeftOutError, Site, WrongError
from nvme_offload.perf.verify.training import BF16
from nvme_offload.perf.verify.updates import section

LAYERS = (4, 12)
MOST_WAITS = 2
_WIDTH = {True: 2048, False: 128}
_BUSY = {True: 8192, False: 64}
_LINKS = 20
_WARM_UP = 2


def growth(site: Site) -> Found:
    """Parameters and gradients in host memory, the device behind the host: compare a step of few layers and of many."""
    if not site.has_device:
        raise LeftOutError("no GPU")
    few, many = (_measured(site, layers) for layers in LAYERS)
    if many["reserved_bytes"] - few["reserved_bytes"] > 3 * 2 * _WIDTH[site.large] ** 2:
        raise WrongError(
            f"{LAYERS[1]} layers reserve {format_bytes(many['reserved_bytes'])} beside the model, and {LAYERS[0]} "
            f"{format_bytes(few['reserved_bytes'])}: it grows with them"
        )
    for each in (few, many):
        if each["waits_in_passes"] or each["waits_in_step"] > MOST_WAITS:
            raise WrongError(f"the host waits in a pass, or more than {MOST_WAITS} times in a step: {each}")
    device = torch.get_device_module(site.device)
    contexts = [number for number in range(device.device_count()) if has_context(torch.device(site.device, number))]
    if contexts != [device.current_device()]:
        raise WrongError(f"this process uses device {device.current_device()}, and has contexts on {contexts}")
    text = f"{format_bytes(many['reserved_bytes'])} beside the model, {many['waits_in_step']} waits in a step"
    found = {"few": few, "many": many, "contexts": contexts}
    launches = f", {many['launches']} launches in an iteration" if many["launches"] else ""  # else nobody counts them
    return Found(f"{LAYERS[0]} and {LAYERS[1]} layers: {text}{launches}", found)


def _measured(site: Site, layers: int) -> dict[str, int]:
    device, width = torch.get_device_module(site.device), _WIDTH[site.large]
    config = section(None, offload_gradients={"device": "cpu"}, **BF16)
    config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    batch = torch.ones(8, width, device=site.device)
    busy = torch.ones(_BUSY[site.large], _BUSY[site.large], device=site.device)
    with initialize(model, config, mesh=default_mesh(site.device)) as engine:
        for _ in range(_WARM_UP):
            engine.backward(engine(batch).float().square().mean())
            engine.step()
        engine.optimizer.synchronize()
        device.synchronize()
        torch.mm(busy, busy, out=(product := torch.empty_like(busy)))
        device.empty_cache()
        before = device.memory_reserved()
        device.reset_peak_memory_stats()
        with _waits(device) as waits:
            for _ in range(_LINKS):
                torch.mm(busy, busy, out=product)
            engine.backward(engine(batch).float().square().mean())
            in_passes = _count(waits)
            engine.step()
            in_step = _count(waits) - in_passes
        reserved = device.max_memory_reserved() - before
        with profile(activities=supported_activities()) as counted:  # type: ignore[no-untyped-call]
            engine.backward(engine(batch).float().square().mean())
            engine.step()
            engine.optimizer.synchronize()
        launches = sum(each.count for each in counted.key_averages() if each.key.startswith("cudaLaunchKernel"))
    waits_of = {"waits_in_passes": in_passes, "waits_in_step": in_step}
    return {"layers": layers, "reserved_bytes": reserved, **waits_of, "launches": launches}


@contextmanager
def _waits(device: Any) -> Iterator[list[warnings.WarningMessage]]:
    """Collect the warnings of torch for calls of it that make the host wait for the device."""
    with warnings.catch_warnings(record=True, action="always") as said:
        device.set_sync_debug_mode("warn")
        try:
            yield said
        finally:
            device.set_sync_debug_mode("default")


def _count(said: list[warnings.WarningMessage]) -> int:
    return sum("called a synchronizing" in str(each.message) for each in said)
