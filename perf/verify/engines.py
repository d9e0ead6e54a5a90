"""Whole runs in an engine: of a model whose gradients are exact on every device, and of others."""

import os
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessException, spawn

from nvme_offload import OffloadEngine, get_full_optimizer_state, get_full_param, initialize
from nvme_offload.offload._torch_private import has_context
from nvme_offload.offload.units import format_bytes
from nvme_offload.optim.zero.meshes import default_mesh
from ..measure.sections import MODES, layered_model
from .optimizers import section, values_of
from .outcome import Bits, LeftOutError, Site, WrongError, must_be_near, must_equal

BF16 = MODES["bf16"]
LAYERS, ROWS, COLUMNS = 4, 331, 257
BATCH = (LAYERS, ROWS, COLUMNS)
MOST_RANKS, RANKS_ON_CPU = 8, 2


class _Slope(nn.Module):
    """A weight whose gradient is what comes with the input: no rounding depends on the device."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(values_of((ROWS, COLUMNS), seed, 0.05))

    def forward(self, total: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        return total + (self.weight * slope).sum(dtype=torch.float64).float()  # in whatever order, the same bits


class Slopes(nn.Module):
    """Layers whose gradients are the slopes [layers, rows, columns] that the batch gives them, bit for bit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Slope(seed) for seed in range(LAYERS))

    def forward(self, slopes: torch.Tensor) -> torch.Tensor:
        """The sum of all weights times their slopes; a scalar, fp32."""
        total = torch.zeros((), device=slopes.device)
        for layer, slope in zip(self.layers, slopes, strict=True):
            total = layer(total, slope)
        return total


def full(engine: OffloadEngine) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole parameters and the states of AdamW, on the CPU."""
    for name, param in engine.module.named_parameters():
        yield name, get_full_param(param)
        for state in ("exp_avg", "exp_avg_sq", "step"):
            yield f"{name} {state}", get_full_optimizer_state(param, state)


class MeanSquare(nn.Module):
    """The loss of layers as models have them."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """A scalar, fp32."""
        return hidden.float().square().mean()


def layers_of(site: Site, backend: str = "") -> nn.Sequential:
    """Make layers as models have them, which a backend of ``torch.compile`` compiles, and their loss."""
    torch.manual_seed(0)
    layers = layered_model(LAYERS, 512 if site.large else 96)
    for layer in layers if backend else ():
        layer.compile(backend=backend)
    return nn.Sequential(*layers, MeanSquare()).to(site.device)


def take_steps(
    engine: OffloadEngine, device: str, steps: range = range(3), *, busy: int = 8
) -> dict[str, torch.Tensor]:
    """Take steps with batches from their number, each behind products of so many rows; return losses and values."""
    square, losses = torch.ones(busy, busy, device=device), []
    shape = BATCH if isinstance(engine.module, Slopes) else (64, next(engine.parameters()).shape[-1])
    for step in steps:
        for micro in range(engine.gradient_accumulation_steps):
            batch = values_of(shape, 100 * step + micro, 0.1).bfloat16().float()
            for _ in range(20):
                torch.mm(square, square)
            losses.append(engine(batch.to(device)))
            engine.backward(losses[-1])
            engine.step()
    return {"losses": torch.stack([loss.detach() for loss in losses]), **dict(full(engine))}


def section_of(drive: str | None, grads: str = "none", params: str = "none", **keys: Any) -> dict[str, Any]:
    """Make a section that keeps gradients and parameters on these devices; few buffers, so that blocks come and go."""
    on_drive = {"nvme_path": drive, "buffer_count": 3}
    places = [{"device": place, **(on_drive if place == "nvme" else {})} for place in (grads, params)]
    made = section(drive, offload_gradients=places[0], **keys)
    made["zero_optimization"]["offload_param"] = places[1]
    return made


def run(device: str, site: Site | None = None, model: nn.Module | None = None, **keys: Any) -> tuple[Bits, float]:
    """Take steps with state on the drive of a site, or in memory; return what is there then, and the norm."""
    busy, own = 4096 if site is not None and site.large else 8, model or Slopes().to(device)
    with site.drive() if site else nullcontext() as drive, initialize(own, section_of(drive, **keys)) as engine:
        return take_steps(engine, device, busy=busy), engine.get_global_grad_norm()


def gradients(site: Site) -> str:
    """Off the device, in host memory and on NVMe, runs have the CPU's bits, and its norms."""
    _off_device(site, "grads")
    keys: dict[str, Any] = {"gradient_accumulation_steps": 2, **BF16}
    (values, norm), (expected, its) = run(site.device, site, **keys), run("cpu", **keys)
    must_equal(values, expected, "bf16, gradients where they are computed")
    must_be_near(norm, its, "bf16, the norm of gradients where they are computed")
    return f"{', '.join(MODES)}: the same bits as on the CPU; norm {norm:.6g}"


def parameters(site: Site) -> str:
    """Off the device with gradients and state, they are gathered with the CPU's bits."""
    _off_device(site, "grads", "params")
    return f"{', '.join(MODES)}: the same bits as on the CPU"


def _off_device(site: Site, *kinds: str) -> None:
    """Compare whole runs, clipped to a fifth or so, and added up."""
    for name, mode in MODES.items():
        keys: dict[str, Any] = {"gradient_clipping": 5.0, "gradient_accumulation_steps": 4, **mode}
        expected, its = run("cpu", **keys)
        for where in ("cpu", "nvme"):
            what = f"{name}, {' and '.join(kinds)} on {where}"
            places: dict[str, Any] = dict.fromkeys(kinds, where)
            found, norm = run(site.device, site, **places, **keys)
            must_equal(found, expected, what)
            if norm != its:
                raise WrongError(f"{what}: norm {norm!r} in place of {its!r}")


def precisions(site: Site) -> str:
    """NVMe and memory have the same losses and bits, with layers as models have them."""
    for name, mode in MODES.items():
        keys = {"gradient_clipping": 0.1, **mode}
        (on_nvme, norm), (in_memory, its) = (run(site.device, at, layers_of(site), **keys) for at in (site, None))
        must_equal(on_nvme, in_memory, f"{name}, on NVMe and in memory")
        must_be_near(norm, its, f"{name}, the norm on NVMe and in memory")
    return f"{', '.join(MODES)}: the same bits"


def compiled(site: Site) -> str:
    """Blocks are compiled, and have the same bits, wherever anything is kept."""
    backend = "inductor" if site.large else "aot_eager"
    torch.compiler.reset()
    try:
        torch.compile(torch.neg, backend=backend)(torch.ones(1, device=site.device))
    except Exception as error:  # a compiler that is missing is none of ours
        raise LeftOutError(f"torch.compile does not work here: {error}") from error
    keys: dict[str, Any] = {"gradient_clipping": 0.1, **BF16}
    for name, moved in {"state": (), "all": ("grads", "params")}.items():
        on_nvme, _ = run(site.device, site, layers_of(site, backend), **dict.fromkeys(moved, "nvme"), **keys)
        in_memory, _ = run(site.device, None, layers_of(site, backend), **dict.fromkeys(moved, "cpu"), **keys)
        must_equal(on_nvme, in_memory, f"{name} on NVMe and in memory")
    return f"{backend}: the same bits, wherever anything is kept"


def birth(site: Site) -> str:
    """From meta, weights are those of a construction, on the device, in host memory and on NVMe."""
    for where in ("none", "cpu", "nvme"):
        weights = []
        for place in ("meta", "cpu"):
            torch.manual_seed(0)
            with torch.device(place):
                model = layered_model(LAYERS, 96)
            torch.manual_seed(0)
            if place == "cpu":
                model.to(site.device)
            with site.drive() as drive:
                made = section_of(drive, params=where, **BF16)
                with initialize(model, made, mesh=default_mesh(site.device)) as engine:
                    named = engine.module.named_parameters()
                    weights.append({name: get_full_param(each).cpu() for name, each in named})
        must_equal(weights[0], weights[1], f"parameters on {where}")
    return "on the device, in host memory and on NVMe: the same weights"


def checkpoint(site: Site) -> str:
    """A checkpoint of the device goes on there, and on the CPU too, with the same bits."""
    next_step = range(3, 4)
    with site.drive() as drive, site.drive() as folder:
        with initialize(Slopes().to(site.device), section_of(drive, **BF16)) as engine:
            take_steps(engine, site.device)
            engine.save_checkpoint(folder)
            saved, later = dict(full(engine)), take_steps(engine, site.device, next_step)
        for device, its in ((site.device, drive), ("cpu", None)):
            with initialize(Slopes().to(device), section_of(its, **BF16)) as engine:
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
        values, norm, backend = torch.load(Path(meeting, "values"))
    expected, its = run("cpu", **BF16)
    must_equal(values, expected, f"{count} ranks")
    must_be_near(norm, its, f"the norm of {count} ranks")
    return f"{count} ranks over {backend}: the bits of one process"


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
    values, norm = run(site.device, site, **BF16)
    if rank == 0:
        torch.save((values, norm, backend), meeting / "values")
    dist.barrier()
    dist.destroy_process_group()


FEW, MANY, MOST_WAITS, _WARM_UP = 4, 12, 2, 2
_WIDTH, _BUSY = {True: 2048, False: 128}, {True: 8192, False: 64}


def growth(site: Site) -> str:
    """More layers take no more of the device: parameters and gradients are in host memory, the device is behind it."""
    if not site.has_device:
        raise LeftOutError("no GPU")
    (few, *_), (many, _, in_step) = found = [_measured(site, layers) for layers in (FEW, MANY)]
    if many - few > 3 * 2 * _WIDTH[site.large] ** 2:
        sizes = f"{format_bytes(many)} beside the model, and {FEW} {format_bytes(few)}"
        raise WrongError(f"{MANY} layers reserve {sizes}: it grows with them")
    if any(passes or step > MOST_WAITS for _, passes, step in found):
        raise WrongError(f"the host waits in a pass, or more than {MOST_WAITS} times in a step: {found}")
    device = torch.get_device_module(site.device)
    contexts = [number for number in range(device.device_count()) if has_context(torch.device(site.device, number))]
    if contexts != [device.current_device()]:
        raise WrongError(f"this process uses device {device.current_device()}, and has contexts on {contexts}")
    return f"{FEW} and {MANY} layers: {format_bytes(many)} beside the model, {in_step} waits in a step"


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
    return sum("called a synchronizing" in str(each.message) for each in said)
