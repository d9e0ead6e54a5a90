"""A small training run that is saved and resumed: model, configuration, batches."""

import torch
from torch import nn

from nvme_offload import initialize
from tests.support import build
from tests.support.sharded_model import VOCABULARY, Model

MODES = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}},
    "int8": {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-4, "weight_decay": 0.1, "state_dtype": "int8"}},
    },
}


class ResumedModel(Model):
    """With a layer of several subgroups whose rows no boundary meets, frozen parameters, and a buffer."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(37, 3008), nn.GELU(), nn.Linear(3008, 37))
        self.blocks[1][0].requires_grad_(False)
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        self.num_batches += 1
        hidden = self.embedding(tokens)
        hidden = hidden + self.wide(hidden)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def section(mode, path=None, **more):
    more = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}}, **MODES[mode], **more}
    adamw = {"lr": 5e-4, "weight_decay": 0.1}
    return build.section(path, stage=2, sub_group_size=65536, clip=0.5, adamw=adamw, **more)


def fresh_engine(mode, path=None, *, seed=0, mesh=None, **more):
    torch.manual_seed(seed)
    return initialize(build.nudged(ResumedModel()), section(mode, path, **more), mesh=mesh)


def loss_of(model, part, step):
    """Of one of the parts of a global batch."""
    return build.token_loss(model, 1000 * step + part, VOCABULARY)


def steps_of(engine, rank, steps):
    losses = []
    for step in steps:
        loss = loss_of(engine, rank, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def next_loss(engine, num_parts=2):
    """Of the same global batch on any number of ranks."""
    with torch.no_grad():
        return sum(loss_of(engine, part, 99).item() for part in range(num_parts)) / num_parts


def scalars_of(engine):
    """Everything that is no tensor, and the buffer."""
    return {
        "global_steps": engine.global_steps,
        "loss_scale": engine._part.scaler.state_dict() if engine._part.scaler else None,
        "schedule": engine.lr_scheduler.state_dict(),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups],
        "num_batches": int(engine.module.num_batches),
    }
