"""Whole runs in an engine: of a model whose gradients are exact on every device, and of others."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessException, spawn

from nvme_offload import initialize
from nvme_offload.offload._torch_private import has_context
from nvme_offload.offload.units import format_bytes
from nvme_offload.optim.zero.meshes import default_mesh
from ..measure.bits import NEAR, NORM, LeftOutError, WrongError, must_equal
from ..measure.on_device import costs_of, queue_of
from ..measure.sections import MODES, layered_model, section
from ..measure.trainings import LAYERS, Site, Slopes, full, run, section_at, take_steps

BF16 = MODES["bf16"]
MOST_RANKS, RANKS_ON_CPU = 8, 2
FEW, MANY, MOST_WAITS, _WARM_UP = 4, 12, 2, 2
_WIDTH, _BUSY = {True: 2048, False: 128}, {True: 8192, False: 64}
_SAME = f"{', '.join(MODES)}: the same bits"


def gradients(site: Site) -> str:
    """Off the device, in host memory and on NVMe, runs have the CPU's bits, and its norms."""
    _off_device(site, "grads")
    keys: dict[str, Any] = {"gradient_accumulation_steps": 2, **BF16}
    found = run(site.device, site, **keys)
    must_equal(found, run("cpu", **keys), "bf16, gradients where they are computed", NEAR)
    return f"{_SAME} as on the CPU; norm {float(found[NORM]):.6g}"


def parameters(site: Site) -> str:
    """Off the device with gradients and state, they are gathered with the CPU's bits."""
    _off_device(site, "grads", "params")
    return f"{_SAME} as on the CPU"


def _off_device(site: Site, *kinds: str) -> None:
    """Compare whole runs, clipped to a fifth or so, and added up."""
    for name, mode in MODES.items():
        keys: dict[str, Any] = {"gradient_clipping": 5.0, "gradient_accumulation_steps": 4, **mode}
        expected = run("cpu", **keys)
        for where in ("cpu", "nvme"):
            found = run(site.device, site, **keys | dict.fromkeys(kinds, where))
            must_equal(found, expected, f"{name}, {' and '.join(kinds)} on {where}")


def _on_nvme(site: Site, what: str, moved: tuple[str, ...] = (), backend: str = "", **mode: Any) -> None:
    """Compare layers as models have them, with state and what is moved on NVMe and in memory."""
    found = []
    for its, where in ((site, "nvme"), (None, "cpu")):
        torch.manual_seed(0)
        layers = layered_model(LAYERS, 512 if site.large else 96)
        for layer in layers if backend else ():
            layer.compile(backend=backend)
        keys = {"gradient_clipping": 0.1, **dict.fromkeys(moved, where), **mode}
        found.append(run(site.device, its, layers.to(site.device), **keys))
    must_equal(found[0], found[1], f"{what} on NVMe and in memory", NEAR)


def precisions(site: Site) -> str:
    """NVMe and memory have the same losses and bits, with layers as models have them."""
    for name, mode in MODES.items():
        _on_nvme(site, f"{name},", **mode)
    return _SAME


def compiled(site: Site) -> str:
    """Blocks are compiled, and have the same bits, wherever anything is kept."""
    backend = "inductor" if site.large else "aot_eager"
    torch.compiler.reset()
    try:
        torch.compile(torch.neg, backend=backend)(torch.ones(1, device=site.device))
    except Exception as error:  # a compiler that is missing is none of ours
        raise LeftOutError(f"torch.compile does not work here: {error}") from error
    _on_nvme(site, "state", (), backend, **BF16)
    _on_nvme(site, "all", ("grads", "params"), backend, **BF16)
    return f"{backend}: the same bits, wherever anything is kept"


def birth(site: Site) -> str:
    """From meta, weights are those of a construction, on the device, in host memory and on NVMe."""
    mesh = default_mesh(site.device)
    for where in ("none", "cpu", "nvme"):
        found = []
        for place in ("meta", "cpu"):
            torch.manual_seed(0)
            with torch.device(place):
                model = layered_model(LAYERS, 96)
            torch.manual_seed(0)
            if place == "cpu":
                model.to(site.device)
            with section_at(site, params=where, **BF16) as keys, initialize(model, keys, mesh=mesh) as engine:
                found.append(dict(full(engine)))
        must_equal(found[0], found[1], f"parameters on {where}")
    return "on the device, in host memory and on NVMe: the same weights"


def checkpoint(site: Site) -> str:
    """A checkpoint of the device goes on there, and on the CPU too, with the same bits."""
    next_step = range(3, 4)
    with site.drive() as folder:
        with section_at(site, **BF16) as keys, initialize(Slopes().to(site.device), keys) as engine:
            take_steps(engine, site.device)
            engine.save_checkpoint(folder)
            saved, later = dict(full(engine)), take_steps(engine, site.device, next_step)
        for device, its in ((site.device, site), ("cpu", None)):
            with section_at(its, **BF16) as keys, initialize(Slopes().to(device), keys) as engine:
                engine.load_checkpoint(folder)
                must_equal(dict(full(engine)), saved, f"what was loaded on {device}")
                must_equal(take_steps(engine, device, next_step), later, f"the step after loading on {device}")
    return "goes on with the same bits"


def ranks(site: Site) -> str:
    """Several have the bits of one; the mean of gradients that all have is exact for a power of two of them."""
    there = torch.get_device_module(site.device).device_count() if site.has_device else RANKS_ON_CPU
    count = 1 << min(there, MOST_RANKS).bit_length() - 1
    if count < 2:
        raise LeftOutError("one device; ranks need two")
    with TemporaryDirectory(prefix="verify-") as meeting:
        try:
            spawn(one_rank, (count, site, Path(meeting)), count)  # type: ignore[no-untyped-call]
        except ProcessException as error:
            raise WrongError(f"a rank of {count} failed: {error}") from None
        values = torch.load(Path(meeting, "values"))
    must_equal(values, run("cpu", **BF16), f"{count} ranks", NEAR)
    return f"{count} ranks over {dist.get_default_backend_for_device(site.device)}: the bits of one process"


def one_rank(rank: int, count: int, site: Site, meeting: Path) -> None:
    """Train as one rank, and leave whole values behind."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {name: str(number) for name, number in told.items()}
    if site.has_device:
        torch.get_device_module(site.device).set_device(rank)
    else:
        torch.set_num_threads(1)
    backend = dist.get_default_backend_for_device(site.device)
    dist.init_process_group(backend, init_method=f"file://{meeting}/store", rank=rank, world_size=count)
    values = run(site.device, site, **BF16)
    if rank == 0:
        torch.save(values, meeting / "values")
    dist.barrier()
    dist.destroy_process_group()


def growth(site: Site) -> str:
    """More layers take no more of the device: parameters and gradients are in host memory, the device is behind it."""
    if not site.has_device:
        raise LeftOutError("no GPU")
    (few, _), (many, [_, in_step]) = found = [_costs(site, layers) for layers in (FEW, MANY)]
    if many - few > 3 * 2 * _WIDTH[site.large] ** 2:
        sizes = f"{format_bytes(many)} beside the model, and {FEW} {format_bytes(few)}"
        raise WrongError(f"{MANY} layers reserve {sizes}: it grows with them")
    if any(passes or step > MOST_WAITS for _, (passes, step) in found):
        raise WrongError(f"the host waits in a pass, or more than {MOST_WAITS} times in a step: {found}")
    device = torch.get_device_module(site.device)
    contexts = [number for number in range(device.device_count()) if has_context(torch.device(site.device, number))]
    if contexts != [device.current_device()]:
        raise WrongError(f"this process uses device {device.current_device()}, and has contexts on {contexts}")
    return f"{FEW} and {MANY} layers: {format_bytes(many)} beside the model, {in_step} waits in a step"


def _costs(site: Site, layers: int) -> tuple[int, list[int]]:
    """Return bytes that an iteration reserves beside the model, and waits for the device in passes and in the step."""
    device, width = torch.device(site.device), _WIDTH[site.large]
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    batch, queue = torch.ones(8, width, device=device), queue_of(site.device, _BUSY[site.large])

    def passes() -> None:
        queue()
        engine.backward(engine(batch).float().square().mean())

    keys = section(None, params="cpu", grads="cpu", sub_group_size=65536, **BF16)
    with initialize(model, keys, mesh=default_mesh(site.device)) as engine:
        for _ in range(_WARM_UP):
            passes()
            engine.step()
        engine.optimizer.synchronize()
        return costs_of(device, passes, engine.step)
