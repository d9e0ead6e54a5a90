"""The one door to a section of an engine, to values for its model, and to its training."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn


def section(
    path: Path | str | None = None,
    *,
    stage: int = 3,
    staging_budget: str = "4MiB",
    sub_group_size: int | None = None,
    accumulation: int | None = None,
    clip: float | None = None,
    adamw: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """State on NVMe below `path`, or in host memory without one. None leaves a key out; `more` replaces keys."""
    place = {"device": "nvme", "nvme_path": str(path)} if path else {"device": "cpu"}
    zero = {"stage": stage, "offload_optimizer": {**place, "staging_budget": staging_budget}}
    keys = {
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": adamw} if adamw is not None else None,
    }
    if sub_group_size is not None:
        zero["sub_group_size"] = sub_group_size
    return {"zero_optimization": zero, **{key: value for key, value in keys.items() if value is not None}, **more}


def nudged(model: nn.Module) -> nn.Module:
    """The same model with other values of every parameter, also of those that begin as zeros or ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def token_loss(model: Any, seed: int, vocabulary: int, shape: tuple[int, int] = (3, 7)) -> torch.Tensor:
    """Of a batch of tokens from the seed. Targets are not the inputs, so that gradients stay large."""
    tokens = torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(seed))
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), (tokens * 7 + 3).flatten() % vocabulary)


def train(
    engine: Any, steps: Iterable[int], loss_of: Callable[[Any, int, int], torch.Tensor]
) -> tuple[list[float], list[float]]:
    """Whole steps of an engine; `loss_of` is called with it, the step and the micro-batch. Returns losses and norms."""
    losses, norms = [], []
    for step in steps:
        for micro in range(engine.gradient_accumulation_steps):
            loss = loss_of(engine, step, micro)
            engine.backward(loss)
            losses.append(loss.item())
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return losses, norms
