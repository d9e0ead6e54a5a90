"""Iterations on this machine's GPU by where things are kept, beside `offload plan` and torch's own AdamW.

The rates that a plan needs are measured in the same run: the drive's, that of copies between host and device in both
directions at once, that of updates on the host, and how fast the model computes with its state in host memory.
"""

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, get_args

import torch
import typer
from torch import nn

from nvme_offload import OffloadAdamW, OffloadConfig, initialize
from nvme_offload.offload.devices.device import CopyQueue, current_of, wait_for_all
from nvme_offload.offload.units import GB, GiB
from nvme_offload.perf.experiments.plan_check import drive_rates
from nvme_offload.perf.measure.accelerator import device_here, facts_of
from nvme_offload.perf.measure.command_line import Folder, Rw, SaveTo
from nvme_offload.perf.measure.experiment import Row, run_experiment
from nvme_offload.perf.measure.sections import MODES
from nvme_offload.perf.measure.training import bf16_params, layered_model
from nvme_offload.perf.plan.machine import Drives, Machine
from nvme_offload.perf.plan.placing import Job
from nvme_offload.perf.plan.prediction import predict
from nvme_offload.perf.plan.shape import ModelShape

_WARM_UP = 3
_COPIED_BYTES = 512 << 20
_UPDATED = 64_000_000  # parameters

ON_DEVICE, _STEPS = "state on the device", "gradient_accumulation_steps"
CASES: dict[str, dict[str, Any]] = {
    "state in host memory, off": {"overlap_step": "off"},
    "state in host memory": {},
    "state in host memory, backward": {"overlap_step": "backward", "gradient_clipping": 0.0, "skip_non_finite": False},
    "state and gradients in host memory": {"grads": "cpu"},
    "all in host memory": {"grads": "cpu", "params": "cpu"},
    ON_DEVICE: {"device_budget": "1TiB"},
    "state on NVMe, off": {"state": "nvme", "overlap_step": "off"},
    "state on NVMe": {"state": "nvme"},
    "all on NVMe": {"state": "nvme", "grads": "nvme", "params": "nvme"},
    "all on NVMe, 4 micro-batches": {"state": "nvme", "grads": "nvme", "params": "nvme", _STEPS: 4},
}
"""A run keeps its state, gradients and parameters there; beside them the rest of its section; by name."""


def section_of(case: str, path: Path) -> dict[str, Any]:
    """Make the configuration section of a case."""
    rest = dict(CASES[case])
    state, grads, params = rest.pop("state", "cpu"), rest.pop("grads", "none"), rest.pop("params", "none")

    def on(place: str) -> dict[str, Any]:
        return {"device": place, **({"nvme_path": str(path)} if place == "nvme" else {})}

    zero = {"stage": 3, "offload_optimizer": on(state), "offload_param": on(params)}
    return {"zero_optimization": zero, "offload_gradients": on(grads), "gradient_clipping": 1.0, **MODES["bf16"]} | rest


@dataclass(frozen=True)
class Bench:
    """Models of one size are trained with one batch on one device."""

    device: torch.device
    path: Path
    layers: int
    width: int
    tokens: int
    count: int
    rates: dict[str, float] = field(default_factory=dict)  # of the machine, for the plan

    def made(self) -> tuple[nn.Sequential, torch.Tensor]:
        """Make a model on the device, and one micro-batch of hidden states [tokens, width]."""
        with self.device:
            return layered_model(self.layers, self.width), torch.randn(self.tokens, self.width)

    def measure_rates(self) -> None:
        """Measure the machine: bytes, updates and operations per second."""
        self.rates.update(drive_rates(self.path))
        self.rates["update_rate"] = _update_rate()
        if self.device.type != "cpu":
            self.rates["pcie"] = _copy_rate(self.device)

    def torchs_own(self) -> Row:
        """Measure torch's AdamW with parameters and state in bf16, and how fast a model computes there."""
        model, batch = self.made()
        model, batch = model.bfloat16(), batch.bfloat16()
        numel = sum(map(torch.numel, model.parameters()))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def compute() -> None:
            model(batch).float().square().mean().backward()

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        seconds = self._seconds(compute, step, bool)
        self.rates["flops"] = 6.0 * numel * self.tokens / seconds["computing"]
        return self._row("torch.optim.AdamW, all of it bf16 on the device", seconds)

    def of_case(self, name: str) -> Row:
        """Measure a case, beside its plan."""
        model, batch = self.made()
        with initialize(model, section_of(name, self.path)) as engine:
            del model
            micro_batches = [batch] * engine.gradient_accumulation_steps
            compute = partial(engine.accumulate, lambda batch: engine(batch).float().square().mean(), micro_batches)
            seconds = self._seconds(compute, engine.step, engine.optimizer.synchronize)
        return self._row(name, seconds, self._planned(section_of(name, self.path)))

    def _seconds(self, compute: Any, step: Any, settle: Any) -> dict[str, float]:
        """Return seconds of computing alone, of `step` alone as the host sees it, and of an iteration in a row."""
        wait = partial(wait_for_all, self.device) if self.device.type != "cpu" else bool
        for _ in range(_WARM_UP):
            compute()
            step()
        moments = []
        for _ in range(self.count):
            settle(), wait()
            began = time.perf_counter()
            compute(), wait()
            computed = time.perf_counter()
            step()
            moments.append((computed - began, time.perf_counter() - computed))
        wait()  # not for updates behind the step: the row ends with as many as it begins with
        began = time.perf_counter()
        for _ in range(self.count):
            compute()
            step()
        wait()
        whole = (time.perf_counter() - began) / self.count
        computing, stepping = (median(each) for each in zip(*moments, strict=True))
        return {"iteration": whole, "computing": computing, "in step()": stepping}

    def _planned(self, config: dict[str, Any]) -> float | None:
        with torch.device("meta"):
            shape = ModelShape.of_layers(layered_model(self.layers, self.width), "layers", self.width)
        job = Job(shape=shape, config=OffloadConfig.of(config), tokens=self.tokens, checkpointing=False)
        rates: dict[str, Any] = {name: rate for name, rate in self.rates.items() if name not in get_args(Rw)}
        drives = Drives.of_rates(*(self.rates[rw] for rw in get_args(Rw)))
        memory = facts_of(self.device)["memory_bytes"] if self.device.type != "cpu" else None
        time = predict(job, Machine(host_memory=1024 * GiB, device_memory=memory, drives=drives, **rates)).time
        return None if time is None else time.seconds

    def _row(self, name: str, seconds: dict[str, float], plan: float | None = None) -> Row:
        peak = None
        if self.device.type != "cpu":
            module = torch.get_device_module(self.device)
            peak = module.max_memory_allocated()
            gc.collect()
            module.empty_cache()
            module.reset_peak_memory_stats()
        shown = {"kept": name, **{f"{part} s": f"{each:.3f}" for part, each in seconds.items()}}
        quotient = f"{seconds['iteration'] / plan:.2f}" if plan else ""
        shown |= {"plan s": f"{plan:.3f}" if plan else "", "quotient": quotient}
        shown |= {"device GiB": f"{peak / GiB:.2f}" if peak else ""}
        return Row(shown, {**seconds, "plan": plan, "device_bytes": peak})


def _update_rate() -> float:
    """Return parameters per second of AdamW's kernel with everything in host memory."""
    section = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    with OffloadAdamW(bf16_params(4, _UPDATED // 4), offload=section) as optimizer:
        optimizer.step()
        before = optimizer.stats().step_seconds
        for _ in range(3):
            optimizer.step()
        return 3 * _UPDATED / (optimizer.stats().step_seconds - before)


def _copy_rate(device: torch.device) -> float:
    """Return bytes per second each way between pinned memory and a device, both ways at once."""
    here = [torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there, queues = [each.to(device) for each in here], [CopyQueue(device) for _ in here]
    seconds = []
    for _ in range(4):
        wait_for_all(device)
        began = time.perf_counter()
        queues[0].copy(there[0], here[0])
        queues[1].copy(here[1], there[1])
        wait_for_all(device)
        seconds.append(time.perf_counter() - began)
    return _COPIED_BYTES / min(seconds)


def on_device(
    path: Folder,
    layers: Annotated[int, typer.Option(min=1, help="Layers, each of 8 x width^2 parameters.")] = 8,
    width: Annotated[int, typer.Option(min=64, help="Width of the model.")] = 4096,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch.")] = 16384,
    count: Annotated[int, typer.Option(min=1, help="Iterations measured in a row.")] = 3,
    only: Annotated[list[str] | None, typer.Option(help="Measure the cases whose name has this; repeat it.")] = None,
    save_to: SaveTo = None,
) -> None:
    """Measure iterations on this machine's GPU by where things are kept, beside `offload plan`."""
    bench = Bench(device_here() or current_of("cpu"), path, layers, width, tokens, count)
    here = [name for name in CASES if bench.device.type != "cpu" or name != ON_DEVICE]
    names = [name for name in here if not only or any(each in name for each in only)]

    def outcomes() -> Iterator[Row]:
        bench.measure_rates()
        yield bench.torchs_own()
        yield from map(bench.of_case, names)

    def notes(found: list[Row]) -> list[str]:
        facts = facts_of(bench.device) if bench.device.type != "cpu" else {"name": "CPU"}
        rates = ", ".join(f"{name} {rate / GB:.4g}" for name, rate in bench.rates.items())
        numel = 8 * width**2 * layers
        return [f"{facts['name']}: {numel:,} parameters, {tokens} tokens in a micro-batch", f"In 1e9 a second: {rates}"]

    run_experiment("on-device", "Iterations by where things are kept", outcomes(), notes, path=path, save_to=save_to)
