"""A small model in an engine: configuration, model, batches."""

import torch

from tests.support import build
from tests.support.sharded_model import Model, loss_of

ACCUMULATION = 2
HYPERPARAMETERS = {"lr": 5e-4, "weight_decay": 0.1}
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 10}}


def section(stage=3, path=None, **more):
    return build.section(path, stage=stage, accumulation=ACCUMULATION, clip=0.5, adamw=HYPERPARAMETERS, **more)


def fresh_model():
    torch.manual_seed(0)
    return build.nudged(Model())


def backward(engine, rank, step):
    """All micro-batches but for the last `step`; returns their losses."""
    losses = []
    for micro in range(engine.gradient_accumulation_steps):
        if micro:
            engine.step()
        loss = loss_of(engine, rank, step, micro)
        engine.backward(loss)
        losses.append(loss.item())
    return losses
