"""A small model whose blocks FSDP2 gathers one by one, and sections that put its state on any mix of tiers."""

import threading
import time

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nvme_offload import StateError, initialize
from tests.support.build import token_loss
from tests.support.interrupts import struck
from tests.support.sharded_model import assert_same, full_state
from tests.support.training import noted

VOCABULARY = 89
ACCUMULATION = 2
EVERYTHING = {"param": "nvme", "grads": "nvme", "state": "nvme"}


PRECISIONS = {
    "bf16": {},
    "bf16 added up in fp32": {"gradient_accumulation_dtype": "fp32"},
    "fp16": {"bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 4}},
    "fp32": {"bf16": {"enabled": False}},
    "mixed": {"fp32_modules": ["*.norm", "layers.1"]},
    "autocast": {"bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": "bf16"}},
}
"""What of a `section` makes another precision."""


class Layer(nn.Module):
    """A layer in sizes that two ranks do not divide."""

    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden):
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


class Model(nn.Module):
    """An embedding, tied or not, around layers. `uses`: which of them run, in which order, also twice or not at all."""

    def __init__(self, num_layers=6, width=33, checkpointing=False, tied=True):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.checkpointing = checkpointing
        self.uses = list(range(num_layers))

    def forward(self, tokens):
        hidden = self.embedding(tokens) * 1.0
        for use in self.uses:
            layer = self.layers[use]
            if self.checkpointing and self.training:
                hidden = checkpoint(layer, hidden, use_reentrant=self.checkpointing == "reentrant")
            else:
                hidden = layer(hidden)
        return self.head(hidden) * 1.0


def section(path, param="none", grads="none", state="cpu", accumulation=ACCUMULATION, stage=3, **offload_param):
    """A configuration with parameters, gradients and optimizer state on the tiers named."""

    def tier(device, **more):
        return {"device": device, **({"nvme_path": str(path), **more} if device == "nvme" else {})}

    zero = {"stage": stage, "sub_group_size": 65536}
    zero["offload_optimizer"] = tier(state, buffer_count=2, staging_budget="2MiB")
    zero["offload_param"] = tier(param, **{"buffer_count": 3, **offload_param})
    config = {"zero_optimization": zero, "offload_gradients": tier(grads, buffer_count=2), "bf16": {"enabled": True}}
    config |= {"aio": {"block_size": "64KiB"}, "gradient_clipping": 0.5, "gradient_accumulation_steps": accumulation}
    return config | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}}


def make(config, **model):
    """An engine around a `Model` that is the same every time."""
    torch.manual_seed(0)
    return initialize(Model(**model), config)


def loss_of(module, step, micro=0, rank=0, length=7):
    """Of a batch from the numbers."""
    return token_loss(module, 1000 * step + 10 * micro + rank, VOCABULARY, (3, length))


def slow_updates(optimizer):
    """Every look at what is in memory takes a while, so that updates behind a step are behind it, if there are any."""
    if optimizer.config.overlap_step == "off":
        return
    here = optimizer.store.pipeline.is_here
    optimizer.store.pipeline.is_here = lambda slot: (time.sleep(0.01), here(slot))[1]


def be_eager(patch):
    """One step is enough to guess the next one, whatever went wrong before."""
    for name in ("_LEAST_RUN", "_LONGEST_RUN"):
        patch.setattr(f"nvme_offload.optim.step.guess.{name}", 1)


def wait_for_guessed(optimizer):
    """Wait until backward has updated something, where it guesses; whether it has."""
    store, worker = optimizer.store, optimizer.store.worker
    job, idle, here = worker.job, [], threading.get_ident()
    if job is None or store.record is None or store.record.phase.name != "BEGUN":
        return False
    guess = job.source and job.source.guess

    def can_go_on(slot):
        return store.pipeline.is_here(slot) and slot not in job.source.guess._refused

    def is_over():
        is_settled = store.pipeline.is_quiet and store.durability.may_write
        # Who waits says nothing of what the worker finds to do.
        if threading.get_ident() != here and is_settled and job.record.claims.final == set(job.source.sums):
            idle.append(not (guess and any(map(can_go_on, tuple(job.record.pending)))))
        return worker.job is not job or job.record.done > 1 or (guess and guess.is_off) or sum(idle) > 30

    worker.wait_until(is_over)
    return worker.job is job and job.record.done > 0


def train_step(engine, step, rank=0, length=7):
    """All micro-batches of a step."""
    for micro in range(engine.gradient_accumulation_steps):
        engine.backward(loss_of(engine, step, micro, rank, length))
        engine.step()


def goes_on(optimizer, before):
    """Finish a step that was cut short, or repeat it where no more than `before` are done; False: it says it cannot."""
    if optimizer.has_unfinished_step:
        try:
            optimizer.finish_step()
        except StateError:
            return False
    elif optimizer.stats().steps == before:
        optimizer.step()
    return True


def check_buffers(optimizer, place, *, may_hold=False):
    """Each buffer of an optimizer struck at that place is free or has one owner; no block is held unless one may be."""
    store = optimizer.store
    owners = [(store.pipeline.pool, store.pipeline.residents)]
    for cache in (tier.cache for tier in (store.blocks.params, store.blocks.grads) if tier is not None):
        assert may_hold or not any(block.holds for block in cache.blocks), place
        owners.append((cache.pool, cache.residents))
    for pool, residents in owners:
        assert pool.num_free + len(residents) == pool.num_buffers, place
        assert len({each.buffer.place for each in residents}) == len(residents), place


def strike_each(interrupts, engine, twin, step, go_on, load, *, may_refuse):
    """Have an engine do the steps of its twin, struck at another point in each; yield it and the interrupt behind each.

    Args:
        step, go_on: do a step, and what is left of one, of an engine with a number.
        load: has an engine, which refused to go on, take over its twin's state; returns the one to go on with.
        may_refuse: whether it may.
    """
    for number, interrupt in enumerate(interrupts):
        step(twin, number)
        before = engine.global_steps
        if struck(interrupt, lambda engine=engine, number=number: step(engine, number)) is not None:
            torch.set_grad_enabled(True)  # which a cut constructor of torch.no_grad leaves off
        try:
            if engine.global_steps == before:
                go_on(engine, number)
            state = full_state(engine.module, engine.optimizer)
        except (StateError, AssertionError, RuntimeError):
            assert may_refuse, interrupt.place
            engine = load(engine)
            state = full_state(engine.module, engine.optimizer)
        with noted(f"struck at {interrupt.place}"):
            assert_same(state, full_state(twin.module, twin.optimizer))
            assert engine.global_steps == twin.global_steps
        yield engine, interrupt
