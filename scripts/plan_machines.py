"""Run sections that are chosen for machines people have, with small models of the same shape, beside their plans.

python -m scripts.plan_machines [part of a name ...]

A small model has as many layers, and its embedding, head, adapters, activations and budgets are as large, and its drive
as fast, beside these as those of the large one are. Layers sleep as long as they would compute, and the drive has an
exact rate. A line for each says bytes of resident memory, of memory without what the libraries take, bytes that a step
moves and seconds of an iteration: planned, measured, and one over the other.

Exit status: 1 where resident memory is more than 10 % from the plan, bytes 2 % and a layer, or seconds 15 %.
"""

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.host.proc import status_field
from nvme_offload.offload.storage.tier_plan import TIERS
from nvme_offload.offload.units import GB, TB, GiB, KiB, MiB
from nvme_offload.optim.tiers.units import STAGING
from nvme_offload.perf.experiments.paced_drive import STANDS_IN_FOR, paced_drive
from nvme_offload.perf.experiments.training import SleepingLayer, Training, sleep
from nvme_offload.perf.measure.machine import (
    peak_resident_bytes,
    reset_peak_resident_bytes,
    settled_resident_bytes,
)
from nvme_offload.perf.measure.sections import merged
from nvme_offload.perf.plan import catalog
from nvme_offload.perf.plan.choosing import Chooser, ChosenSection
from nvme_offload.perf.plan.lora import Lora
from nvme_offload.perf.plan.machine import Drives, Machine
from nvme_offload.perf.plan.placing import Job, account_of_job
from nvme_offload.perf.plan.prediction import Prediction, predict
from nvme_offload.perf.plan.shape import ModelShape

ROOT = Path(__file__).parents[1]
MODELS = {"llama-3.1-8b": 0, "qwen3-30b-a3b": 0, "llama-3.1-70b": 0, "gpt-oss-120b": 16}
"""Models by name, and the rank of adapters over them; 0: all of it is trained."""
CARDS = (("4090", 64), ("4090", 128), ("h100", 256))
"""Cards by name, and GiB of their hosts."""
TOKENS, MICRO_BATCHES = 2048, 32
WIDTH, RANK, FEW, MOST_TOKENS = 512, 4, 2, 64
"""Small models have these: the width of a matrix that is a layer, and of adapters; micro-batches, and their tokens."""
COMPUTING, COUNT, ROUNDS, MOST_MOVING = 3.0, 2, 2, 2.0
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(64 * KiB), "MALLOC_TRIM_THRESHOLD_": str(64 * KiB)}
"""Without it malloc keeps freed tensors of such small layers: 50 MiB beside 23 that are planned."""
LIMITS = {"memory": 0.10, "bytes": 0.02, "seconds": 0.15}
BLOCK_BYTES = 2 * WIDTH**2
"""A layer each way is within the limit of bytes, too: a budget that holds nearly all of a small model leaves out
another part of it."""


class SmallLayer(SleepingLayer):
    """A layer whose matrix is frozen where it has a `rank`: a product of two thin ones beside it is trained then."""

    def __init__(self, rank: int) -> None:
        super().__init__(WIDTH)
        self.weight.requires_grad_(not rank)
        thin = (nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False)) if rank else ()
        self.adapter = nn.Sequential(*thin)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [..., width], as a layer without adapters has it, and what they give."""
        return super().forward(hidden) + (self.adapter(hidden) if len(self.adapter) else 0)


class SmallModel(nn.Module):
    """An embedding, layers that sleep, and a head; all but adapters is frozen where there are any."""

    def __init__(self, layers: int, vocab: int, rank: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, WIDTH).requires_grad_(not rank)
        self.layers = nn.ModuleList(SmallLayer(rank) for _ in range(layers))
        self.head = nn.Linear(WIDTH, vocab, bias=False).requires_grad_(not rank)
        self.vocab, self.head_seconds = vocab, 0.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [tokens, vocab] of tokens [tokens]."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: torch.Tensor = self.head(sleep(hidden, self.head_seconds))
        return logits

    def compute_for(self, seconds: float, of_head: float) -> None:
        """Let forward and backward together take so long, in the head this share of it."""
        self.head_seconds = seconds * of_head
        for layer in self.layers:
            layer.seconds = seconds * (1 - of_head) / len(self.layers)


@dataclass(frozen=True)
class HandMachine:
    """A model on a machine that people have."""

    model: str
    card: str
    host: int

    @property
    def name(self) -> str:
        """Say which."""
        return f"{self.model}{' LoRA' * bool(MODELS[self.model])}, {self.card} + {self.host} GiB"

    @cached_property
    def shape(self) -> ModelShape:
        """The model, with adapters where it has them."""
        shape, rank = catalog.model_of(self.model), MODELS[self.model]
        return shape.with_lora(Lora(rank)) if rank else shape

    @cached_property
    def machine(self) -> Machine:
        """The machine, with two drives."""
        card, drives = catalog.card_of(self.card), Drives.of_rates(15 * GB, 3 * GB)
        rates: dict[str, Any] = {"flops": catalog.REACHED * 1e12 * card.teraflops, "pcie": GB * card.pcie}
        memory = {"host_memory": self.host * GiB, "device_memory": card.memory * GiB, "capacity": 4 * TB}
        return Machine(**memory, **rates, drives=drives)

    @cached_property
    def choice(self) -> ChosenSection:
        """The section that `offload init` writes; AssertionError where none fits."""
        choice = Chooser(self.machine, [Path("/")], TOKENS, MICRO_BATCHES).choose(self.shape)
        assert not choice.tiers.missing, self.name
        return choice

    @property
    def drive_seconds(self) -> float:
        """Seconds in which the drives move all bytes of a step once, over those in which the card computes it.

        Where they are many times as long, `MOST_MOVING` has the same limit and takes less time.
        """
        time = predict(self.choice.job, self.machine, alone=True).time
        assert time is not None
        return min(MOST_MOVING, time.work.nvme / time.work.compute)

    @property
    def part(self) -> float:
        """Elements of a layer of the small model over those of a layer."""
        return WIDTH**2 / sum(self.shape.layers[0])

    @property
    def tokens(self) -> int:
        """Tokens of a small micro-batch: all hidden states of a step together are as large beside a layer."""
        return min(MOST_TOKENS, math.ceil(TOKENS * MICRO_BATCHES / FEW * self.shape.hidden_size * self.part / WIDTH))

    def small_model(self) -> SmallModel:
        """A model of the same shape, on meta."""
        vocab = round(self.part * self.shape.vocab_size * self.shape.hidden_size / WIDTH)
        with torch.device("meta"):
            model = SmallModel(self.shape.num_layers, vocab, RANK if self.shape.adapters else 0)
        return model.bfloat16() if self.shape.adapters else model

    def small_shape(self) -> ModelShape:
        """The small model as a plan knows it."""
        model = self.small_model()
        found = ModelShape.of_layers(model, self.name, WIDTH)
        idle = sum(self.shape.idle) / sum(map(sum, self.shape.layers))
        if self.shape.adapters:
            sizes = [[param.numel() for param in layer.parameters()] for layer in model.layers]
            found = replace(
                found, layers=tuple((all_[0],) for all_ in sizes), adapters=tuple(tuple(s[1:]) for s in sizes)
            )
        idle_of_each = tuple(round(idle * sum(layer)) for layer in found.layers)
        return replace(found, vocab_size=model.vocab, idle=idle_of_each)

    def small_job(self, folder: Path) -> Job:
        """The small model with the section of the large one, whose budgets are as large beside it."""
        text = json.dumps(self.choice.section).replace('["/"]', json.dumps([str(folder)]))
        beside = {"zero_optimization": {"sub_group_size": WIDTH**2 // 4}, "gradient_accumulation_steps": FEW}
        config = OffloadConfig.of(merged(json.loads(text), beside | {"aio": {"engine": STANDS_IN_FOR}}))
        job = Job(shape=self.small_shape(), config=config, tokens=self.tokens, checkpointing=False, baseline_bytes=0)
        large, budgets = self.choice.job, dict[str, Any]()
        if isinstance(config.host_budget, int):
            part = _placed_bytes(job, Machine(host_memory=GiB)) / _placed_bytes(large, self.machine)
            budgets["host_budget"] = max(4 * KiB, round(config.host_budget * part))
        if config.activations.device == "nvme":
            assert isinstance(config.activations.host_budget, int)
            budget = max(4 * KiB, round(config.activations.host_budget * job.boundaries_bytes / large.boundaries_bytes))
            budgets["activations"] = config.activations.model_copy(update={"host_budget": budget, "min_bytes": KiB})
        return job.with_keys(**budgets)


CASES = [HandMachine(model, *card) for model in MODELS for card in CARDS]


def _placed_bytes(job: Job, machine: Machine) -> int:
    """Bytes of all that a host budget may hold."""
    account = account_of_job(job, machine)
    return account.state_bytes + sum(unit.size_bytes for unit in account.blocks() if unit.kind != STAGING)


def planned(job: Job, computing: float, rate: float) -> Prediction:
    """Plan a job that computes for so many seconds over a drive of this rate."""
    drives = Drives(read=rate, write=rate, mixed=rate)
    machine = Machine(host_memory=64 * GiB, drives=drives, flops=1.0, update_rate=1e15)
    time = predict(job, machine, alone=True).time
    assert time is not None
    return predict(job, replace(machine, flops=time.work.compute / computing), alone=True)


def train(case: HandMachine, compute: float, folder: Path) -> dict[str, Any]:
    """Train a case whose iterations compute for so many seconds at least; return what was planned and measured."""
    job, model = case.small_job(folder), case.small_model()
    weights = folder / "model.safetensors"
    save_file({name: 0.02 * torch.randn(p.shape, dtype=p.dtype) for name, p in model.named_parameters()}, weights)
    rank = RANK if case.shape.adapters else 0
    with Training(SmallModel(2, WIDTH, rank), torch.arange(case.tokens), job.config):
        pass  # what torch and the libraries take once and for all
    before = settled_resident_bytes()
    batch = torch.randint(model.vocab, (case.tokens,))
    with paced_drive() as pace, Training(model, batch, job.config, weights=weights) as training:
        own = min(training.seconds(COUNT) for _ in range(ROUNDS))
        model.compute_for(max(0.1, compute - own) / FEW, job.shape.work[-1] / sum(job.shape.work))
        computing, moved = training.seconds(COUNT), planned(job, 1.0, 1.0).total_traffic
        moving = case.drive_seconds * computing
        rate = (moved.read + moved.written) / moving if moving and moved.written else math.inf
        settled_resident_bytes()
        reset_peak_resident_bytes()
        each, seconds = dict.fromkeys(training.moved(), 0.0), math.inf
        for _ in range(ROUNDS):  # the shortest of each was disturbed least
            pace.rate, begun = rate, training.moved()
            seconds = min(seconds, training.seconds(COUNT))
            each = {name: each[name] + size - begun[name] for name, size in training.moved().items()}
            pace.rate = math.inf
            computing = min(computing, training.seconds(COUNT))
        plan = training.engine.optimizer.tier_plan
        # The drive is memory that is shared, all of which has been written by now.
        grown = peak_resident_bytes() - int(str(status_field("RssShmem")).split()[0]) * KiB - before
    found = planned(job, computing, min(rate, 1e15))
    assert found.time is not None
    growth = found.tiers.bytes_on("host")
    return {
        "memory": (before + growth, before + grown),
        "growth": (growth, grown),
        "bytes": (moved.read + moved.written, sum(each.values()) / (ROUNDS * (1 + COUNT))),
        "seconds": (found.time.seconds, seconds),
        "kinds": each,
        "places": [
            (f"{kind} on {tier}", found.tiers.bytes_on(tier, kind), plan.bytes_on(tier, kind))
            for kind in {unit.kind for unit in plan.units}
            for tier in TIERS
        ],
    }


def in_child(number: int, compute: float) -> dict[str, Any]:
    """Train a case in a process of its own."""
    alone = [sys.executable, "-m", "scripts.plan_machines", "--alone", str(number), str(compute)]
    done = subprocess.run(alone, stdout=subprocess.PIPE, check=True, env=os.environ | GIVES_BACK, cwd=ROOT)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main(words: list[str]) -> int:
    """Print a line for each case, and return the exit status."""
    if words[:1] == ["--alone"]:
        with TemporaryDirectory() as folder:
            sys.stdout.write(f"{json.dumps(train(CASES[int(words[1])], float(words[2]), Path(folder)))}\n")
        return 0
    status = 0
    for number, case in enumerate(CASES):
        if words and not any(word in case.name for word in words):
            continue
        figures = in_child(number, COMPUTING)
        sys.stdout.write(f"{case.name}: fits; {case.choice.name}\n")
        for what in "memory", "growth", "bytes", "seconds":
            expected, measured = figures[what]
            unit, name = (1, "s") if what == "seconds" else (MiB, "MiB")
            slack = 2 * BLOCK_BYTES if what == "bytes" else 0
            is_away = abs(measured - expected) > max(LIMITS.get(what, math.inf) * expected, slack)
            status |= is_away
            ratio = f": {measured / expected:.3f}{' AWAY' * is_away}" if expected else ""
            sys.stdout.write(f"  {what} {expected / unit:.2f} {name}, {measured / unit:.2f} {name}{ratio}\n")
        sys.stdout.flush()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
