"""Trainings at a site whose bits are the same wherever they compute and keep what they have."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from nvme_offload import OffloadEngine, get_full_optimizer_state, get_full_param, initialize
from nvme_offload.optim.named_optimizers import optimizer_class
from nvme_offload.optim.telemetry.stats import OptimizerStats
from .bits import NORM, Bits, values_of
from .on_device import queue_of
from .sections import section

SHAPES = ((1,), (7,), (251, 257), (65535,), (65536,), (65537,), (2, 3, 5, 7), (200_003,))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "AdamW": {"lr": 1e-3, "weight_decay": 0.1},
    "Adam": {"lr": 1e-3, "weight_decay": 0.1},
    "Lion": {"lr": 1e-4, "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "nesterov": True},
    "Adagrad": {"lr": 1e-2},
}
Params = Sequence[nn.Parameter]
LAYERS, ROWS, COLUMNS = 4, 331, 257
BATCH = (LAYERS, ROWS, COLUMNS)


@dataclass(frozen=True, kw_only=True)
class Site:
    """Trainings are made at a site."""

    device: str  # type of the device that trains: that of a GPU, or "cpu"
    folder: Path  # on the drive
    large: bool  # whether tensors are as large as it takes to keep a GPU busy

    @property
    def has_device(self) -> bool:
        """Whether anything but the CPU trains."""
        return self.device != "cpu"

    def drive(self) -> "TemporaryDirectory[str]":
        """Return a folder on the drive for one run."""
        return TemporaryDirectory(dir=self.folder, prefix="verify-")


@contextmanager
def section_at(site: Site | None, grads: str = "", params: str = "", **more: Any) -> Iterator[dict[str, Any]]:
    """Give a section with state on the drive of a site, or without one in host memory.

    Gradients and parameters are on these devices; buffers are few, so that blocks come and go.
    """
    few: dict[str, Any] = {"nvme": 3}
    more |= {"grads": few.get(grads, grads), "params": few.get(params, params), "sub_group_size": 65536}
    with site.drive() if site else nullcontext() as drive:
        yield section(Path(drive) if drive else None, state={"staging_budget": "64MiB"}, **more)


def trained(
    device: str,
    site: Site | None = None,
    *,
    optimizer: str = "AdamW",
    before: Callable[[Params, int], object] = lambda params, step: None,
    scaler: torch.amp.GradScaler | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    steps: int = 4,
    **keys: Any,
) -> tuple[Bits, OptimizerStats]:
    """Take steps over parameters of awkward sizes on a device, one of which has no gradient each time.

    State is on the drive of a site, or in host memory; `keys` are further ones of the section. `before` is called with
    the parameters and the number of the step when gradients are there; `scaler` takes steps. Right behind each step a
    parameter is read, and the memory of gradients, which copies may still be reading, is taken again.
    """
    scaler, bits = scaler or torch.amp.GradScaler(enabled=False), dict[str, torch.Tensor]()
    values = (values_of(shape, i, 0.05).to(dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes))
    params = [nn.Parameter(value.to(device)) for value in values]
    make = partial(optimizer_class(optimizer), params, **OPTIMIZERS[optimizer])
    with section_at(site, **keys) as keys, make(offload=keys) as made:
        for step in range(steps):
            for number, param in enumerate(params):
                grad = values_of(param.shape, 1000 * step + number, 0.1).to(param.dtype).to(device)
                param.grad = None if number == step and len(params) > 1 else grad
            before(params, step)
            scaler.step(made)
            scaler.update()
            bits[f"behind step {step}"] = params[-1].detach().clone()
            made.zero_grad()
            junk = [torch.full_like(param, 7.0) for param in params]
        del junk
        bits |= {f"parameter {number}": param.detach().cpu() for number, param in enumerate(params)}
        for number, entries in made.state_dict()["state"].items():
            bits |= {f"{name} of {number}": torch.as_tensor(value, device="cpu") for name, value in entries.items()}
        return bits, made.stats()


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


def take_steps(engine: OffloadEngine, device: str, steps: range = range(3), *, busy: int = 8) -> Bits:
    """Take steps with batches from their number, each behind products of so many rows; return losses and values."""
    queue, losses = queue_of(device, busy), []
    shape = BATCH if isinstance(engine.module, Slopes) else (64, next(engine.parameters()).shape[-1])
    for step in steps:
        for micro in range(engine.gradient_accumulation_steps):
            batch = values_of(shape, 100 * step + micro, 0.1).bfloat16().float()
            queue()
            out = engine(batch.to(device))
            losses.append(out.float().square().mean() if out.dim() else out)
            engine.backward(losses[-1])
            engine.step()
    return {"losses": torch.stack([loss.detach() for loss in losses]), **dict(full(engine))}


def run(device: str, site: Site | None = None, model: nn.Module | None = None, **keys: Any) -> Bits:
    """Take steps with state on the drive of a site, or in memory; return what is there then, and the norm."""
    busy, own = 4096 if site is not None and site.large else 8, model or Slopes().to(device)
    with section_at(site, **keys) as keys, initialize(own, keys) as engine:
        values = take_steps(engine, device, busy=busy)
        return {**values, NORM: torch.tensor(engine.get_global_grad_norm(), dtype=torch.float64)}
