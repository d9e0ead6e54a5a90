"""An optimizer makes the same bits of given gradients on every device and every tier."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from nvme_offload.offload.swapper.tensor_swapper import TensorSwapper
from nvme_offload.optim.optimizer import OffloadOptimizer
from nvme_offload.optim.optimizers.adagrad import OffloadAdagrad
from nvme_offload.optim.optimizers.adam import OffloadAdam
from nvme_offload.optim.optimizers.adamw import OffloadAdamW
from nvme_offload.optim.optimizers.lion import OffloadLion
from nvme_offload.optim.optimizers.sgd import OffloadSGD
from nvme_offload.optim.telemetry.stats import OptimizerStats
from nvme_offload.perf.measure import sections
from nvme_offload.perf.verify.outcome import Found, Site, WrongError, must_be_near, must_equal

SHAPES = ((1,), (7,), (251, 257), (65535,), (65536,), (65537,), (2, 3, 5, 7), (200_003,))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SCALED = (torch.float16, torch.float32)
OPTIMIZERS: Mapping[str, Callable[..., OffloadOptimizer]] = {
    "AdamW": partial(OffloadAdamW, lr=1e-3, weight_decay=0.1),
    "Adam": partial(OffloadAdam, lr=1e-3, weight_decay=0.1),
    "Lion": partial(OffloadLion, lr=1e-4, weight_decay=0.1),
    "SGD": partial(OffloadSGD, lr=1e-2, momentum=0.9, nesterov=True),
    "Adagrad": partial(OffloadAdagrad, lr=1e-2),
}
STEPS = 4
SCALE = 1024.0

Params = Sequence[nn.Parameter]
Before = Callable[[Params, int], None]


class Trained(NamedTuple):
    """A run left this."""

    params: list[torch.Tensor]
    state: dict[int, Any]
    stats: OptimizerStats

    @property
    def bits(self) -> tuple[Any, ...]:
        """Return what must be the same everywhere."""
        return self.params, self.state


def section(drive: Path | None, *, clip: float = 0.0, staging: str = "64MiB", **more: Any) -> dict[str, Any]:
    """A section with the optimizer's state in a folder, or without one in host memory."""
    clipped = {"gradient_clipping": clip} if clip else {}
    return sections.section(drive, state={"staging_budget": staging}, **{"sub_group_size": 65536, **clipped, **more})


def values_of(shape: Sequence[int], seed: int, scale: float) -> torch.Tensor:
    """Random numbers that are the same on every machine, fp32 on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu") * scale


def trained(
    device: str,
    offload: Mapping[str, Any],
    *,
    optimizer: str = "AdamW",
    before: Before | None = None,
    scaler: torch.amp.GradScaler | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> Trained:
    """Take steps over parameters of awkward sizes on a device, one of which has no gradient each time.

    `before` is called with the parameters and the number of the step when gradients are there; `scaler` takes steps.
    """
    params = [
        nn.Parameter(values_of(shape, number, 0.05).to(dtypes[number % len(dtypes)]).to(device))
        for number, shape in enumerate(SHAPES)
    ]
    with OPTIMIZERS[optimizer](params, offload=offload) as made:
        for step in range(STEPS):
            for number, param in enumerate(params):
                grad = values_of(param.shape, 1000 * step + number, 0.1).to(param.dtype).to(device)
                param.grad = None if number == step else grad
            if before is not None:
                before(params, step)
            if scaler is None:
                made.step()
            else:
                scaler.step(made)
                scaler.update()
        return Trained([param.detach().cpu() for param in params], made.state_dict()["state"], made.stats())


def update(site: Site) -> Found:
    """Without clipping every rule has the CPU's bits, with state in host memory, on NVMe and on the device."""
    for name in OPTIMIZERS:
        expected = trained("cpu", section(None), optimizer=name)
        with site.drive() as drive:
            must_equal(trained(site.device, section(drive), optimizer=name).bits, expected.bits, f"{name} on NVMe")
        if not site.has_device:
            continue
        must_equal(trained(site.device, section(None), optimizer=name).bits, expected.bits, f"{name} in memory")
        with site.drive() as drive:
            mixed = trained(site.device, section(drive, device_budget="1MiB"), optimizer=name)
        must_equal(mixed.bits, expected.bits, f"{name} with a part of its state on the device")
        if not 0 < mixed.stats.device_state_bytes < mixed.stats.state_bytes:
            raise WrongError(f"{name}: {mixed.stats.device_state_bytes:,} bytes of state are on the device")
    numel = sum(math.prod(shape) for shape in SHAPES)
    return Found(f"{', '.join(OPTIMIZERS)}: the same bits", {"parameters": numel, "steps": STEPS})


def clipping(site: Site) -> Found:
    """The same norm as on the CPU, and with it the same bits wherever state is; torch's own clipping, too."""
    expected = trained("cpu", section(None, clip=0.5))
    with site.drive() as drive:
        on_nvme, in_memory = (trained(site.device, section(path, clip=0.5)) for path in (drive, None))
    must_equal(on_nvme.bits, in_memory.bits, "clipped, on NVMe and in memory")
    must_be_near(on_nvme.stats.total_norm, expected.stats.total_norm, "the norm on the device")

    def by_torch(params: Params, step: int) -> None:
        nn.utils.clip_grad_norm_([param for param in params if param.grad is not None], 0.5)

    with site.drive() as drive:
        on_tier, by_hand = (trained(site.device, section(path), before=by_torch).bits for path in (drive, None))
    must_equal(on_tier, by_hand, "clipped by torch, on NVMe and in memory")
    return Found(f"norm {on_nvme.stats.total_norm:.6g}", {"total_norm": on_nvme.stats.total_norm})


def scaler(site: Site) -> Found:
    """Scaled gradients give the bits of unscaled ones; one that is not finite costs a step and half of the scale.

    They are not bf16: there torch 2.11 has no operator on CUDA that looks for infinities (torch/amp/grad_scaler.py).
    """
    plain = trained(site.device, section(None), dtypes=_SCALED)

    def scaled(bad_step: int) -> tuple[Trained, float]:
        grad_scaler = torch.amp.GradScaler(site.device, init_scale=SCALE, growth_interval=1000)
        grad_scaler.scale(torch.zeros(1, device=site.device))

        def scale(params: Params, step: int) -> None:
            for number, param in enumerate(params):
                if param.grad is not None:
                    param.grad.mul_(SCALE)
                    if step == bad_step and number == len(params) - 1:
                        param.grad.view(-1)[-1] = math.inf

        with site.drive() as drive:
            found = trained(site.device, section(drive), before=scale, scaler=grad_scaler, dtypes=_SCALED)
        return found, grad_scaler.get_scale()

    found, _ = scaled(-1)
    must_equal(found.bits, plain.bits, f"gradients scaled by {SCALE:g}")
    found, after = scaled(2)
    if (found.stats.skipped_steps, after) != (1, SCALE / 2):
        raise WrongError(
            f"{found.stats.skipped_steps} steps skipped in place of 1, scale {after} in place of {SCALE / 2}"
        )
    return Found("the same bits; a step with inf is skipped", {"skipped_steps": 1, "scale_after": after})


def swapper(site: Site) -> Found:
    """Tensors with gaps and transposed ones go to the drive and come back with their bits."""
    generator = torch.Generator().manual_seed(0)
    with site.drive() as drive, TensorSwapper(section(drive, staging="16MiB")) as swap:
        for number in range(12):
            values = torch.randint(-(2**31), 2**31 - 1, (96, 1537), generator=generator, dtype=torch.int32)
            there = values.to(site.device) + number
            given = there.t() if number % 2 else there[:, ::2]
            keep = given.clone()
            swap.swap_out(f"{number}", given).wait()
            if number % 3:
                swap.prefetch(f"{number}")
            must_equal(swap.swap_in(f"{number}").wait(), keep, f"tensor {number}")
        return Found("the same bits", {"engine": swap.stats().engine})
