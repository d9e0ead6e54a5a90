"""Models in an engine. One has gradients that are exact on every device, so that whole runs can be compared by bits."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nvme_offload.optim.access.full_values import get_full_optimizer_state, get_full_param
from nvme_offload.optim.zero.engine import OffloadEngine
from nvme_offload.optim.zero.initialize import initialize
from nvme_offload.optim.zero.meshes import default_mesh
from nvme_offload.perf.measure.sections import MODES
from nvme_offload.perf.measure.training import layered_model
from nvme_offload.perf.verify.outcome import Found, Site, must_be_near, must_equal
from nvme_offload.perf.verify.updates import section, values_of

BF16 = MODES["bf16"]
LAYERS, ROWS, COLUMNS = 4, 331, 257
STEPS, NEXT_STEP = range(3), range(3, 4)
BUSY = {True: 4096, False: 8}
"""Products of matrices of this size keep a device behind the host."""
_LINKS = 20

Values = dict[str, list[torch.Tensor]]


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


def full(engine: OffloadEngine) -> Values:
    """Whole parameters and the states of AdamW, on the CPU."""
    return {
        name: [get_full_param(param).cpu()]
        + [get_full_optimizer_state(param, state).cpu() for state in ("exp_avg", "exp_avg_sq")]
        for name, param in engine.module.named_parameters()
    }


def take_slope_steps(engine: OffloadEngine, device: str, steps: range = STEPS, busy: int = 8) -> list[torch.Tensor]:
    """Losses of steps with gradients from the step's number, each at the end of a queue of products of so many rows."""
    square, losses = torch.ones(busy, busy, device=device), []
    for step in steps:
        for micro in range(engine.gradient_accumulation_steps):
            slopes = values_of((LAYERS, ROWS, COLUMNS), 100 * step + micro, 0.1).bfloat16().float()
            for _ in range(_LINKS):
                torch.mm(square, square)
            losses.append(engine(slopes.to(device)))
            engine.backward(losses[-1])
            engine.step()
    return losses


def slope_run(device: str, config: dict[str, Any], busy: int = 8) -> tuple[Values, float]:
    """Losses of a few steps, parameters and states after them, and the last norm; see `take_slope_steps`."""
    with initialize(Slopes().to(device), config) as engine:
        losses = take_slope_steps(engine, device, busy=busy)
        return {"losses": losses, **full(engine)}, engine.get_global_grad_norm()


def gradients(site: Site) -> Found:
    """Whole runs, clipped, with gradients in host memory and on NVMe: the bits and the norm of the CPU."""
    for name, mode in MODES.items():
        for where in ("cpu", "nvme"):
            with site.drive() as drive:
                found = slope_run(site.device, _moved(drive, where, mode), BUSY[site.large])
                expected = slope_run("cpu", _moved(None, "none", mode))
            must_equal(found, expected, f"{name}, gradients on {where}")
    with site.drive() as drive:
        values, norm = slope_run(site.device, section(drive, gradient_accumulation_steps=2, **BF16))
    expected = slope_run("cpu", section(None, gradient_accumulation_steps=2, **BF16))
    must_equal(values, expected[0], "bf16, gradients where they are computed")
    must_be_near(norm, expected[1], "bf16, the norm of gradients where they are computed")
    return Found(f"{', '.join(MODES)}: the same bits as on the CPU, norms too", {"total_norm": norm})


def parameters(site: Site) -> Found:
    """Whole runs with parameters, gradients and state off the device, in host memory and on NVMe."""
    for name, mode in MODES.items():
        expected = slope_run("cpu", _moved(None, "none", mode))
        for where in ("cpu", "nvme"):
            with site.drive() as drive:
                config = _moved(drive, where, mode)
                config["zero_optimization"]["offload_param"] = config["offload_gradients"]
                must_equal(slope_run(site.device, config, BUSY[site.large]), expected, f"{name}, all on {where}")
    return Found(f"{', '.join(MODES)}: the same bits as on the CPU", {})


def _moved(drive: Path | None, where: str, mode: Mapping[str, Any]) -> dict[str, Any]:
    """Gradients are clipped to a fifth or so, and added up: with few buffers, blocks of them come and go meanwhile."""
    kept: dict[str, Any] = {"device": where}
    if where == "nvme":
        kept |= {"nvme_path": str(drive), "buffer_count": 3}
    return section(drive, clip=5.0, offload_gradients=kept, gradient_accumulation_steps=4, **mode)


def precisions(site: Site) -> Found:
    """Layers as models have them: losses, norms and bits are the same with state on NVMe and in host memory."""
    losses = {}
    for name, mode in MODES.items():
        with site.drive() as drive:
            on_nvme = layered_run(site, section(drive, clip=0.1, **mode))
        in_memory = layered_run(site, section(None, clip=0.1, **mode))
        must_equal(on_nvme, in_memory, f"{name}, on NVMe and in memory")
        losses[name] = on_nvme[0]
    return Found(f"{', '.join(MODES)}: the same bits", {"losses": losses})


def layered_run(site: Site, config: dict[str, Any], backend: str = "") -> tuple[list[float], list[float], Values]:
    """Losses, norms and values after a few steps of a model whose layers a backend of ``torch.compile`` compiles."""
    torch.manual_seed(0)
    width, losses, norms = 512 if site.large else 96, [], []
    model = layered_model(LAYERS, width).to(site.device)
    for layer in model if backend else ():
        layer.compile(backend=backend)
    with initialize(model, config) as engine:
        for step in STEPS:
            batch = values_of((64, width), step, 1.0).to(site.device)
            loss = engine(batch).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            norms.append(engine.get_global_grad_norm())
        return losses, norms, full(engine)


def birth(site: Site) -> Found:
    """A model on meta has, on the device or on its tier, the weights of one that was built there."""
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
                config = section(drive, **BF16)
                config["zero_optimization"]["offload_param"] = {"device": where, "nvme_path": str(drive)}
                with initialize(model, config, mesh=default_mesh(site.device)) as engine:
                    named = engine.module.named_parameters()
                    weights.append({name: get_full_param(each).cpu() for name, each in named})
        must_equal(weights[0], weights[1], f"parameters on {where}")
    return Found("on the device, in host memory and on NVMe: the same weights", {})


def checkpoint(site: Site) -> Found:
    """Return what is saved on the device goes on with the same bits there, and on the CPU."""
    with site.drive() as drive, site.drive() as folder:
        with initialize(Slopes().to(site.device), section(drive, **BF16)) as engine:
            take_slope_steps(engine, site.device)
            engine.save_checkpoint(folder)
            saved = full(engine)
            take_slope_steps(engine, site.device, NEXT_STEP)
            later = full(engine)
            engine.load_checkpoint(folder)
            must_equal(full(engine), saved, "what was loaded")
            take_slope_steps(engine, site.device, NEXT_STEP)
            must_equal(full(engine), later, "the step after loading")
        with initialize(Slopes(), section(None, **BF16)) as engine:
            engine.load_checkpoint(folder)
            must_equal(full(engine), saved, "what was loaded on the CPU")
            take_slope_steps(engine, "cpu", NEXT_STEP)
            must_equal(full(engine), later, "the step after loading on the CPU")
    return Found("goes on with the same bits", {})
