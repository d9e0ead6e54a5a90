"""Models and configuration sections of what is measured and verified."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

MODES: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "fp32": {},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
}
"""A section says this of its precision, by name."""


def section(
    path: Path | None,
    *,
    state: Mapping[str, Any] = {},
    params: int | str = 0,
    grads: int | str = 0,
    sub_group_size: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Make a section of stage 3 with the optimizer's state on a drive, or without a path all of it in host memory.

    `state` is keys of `offload_optimizer` on a drive; `params` and `grads` are staging buffers of what is on the drive,
    too, or 0, or the name of another device.
    """
    drive = {"device": "nvme", "nvme_path": str(path)}
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "cpu"} if path is None else {**drive, **state}}
    if sub_group_size is not None:
        zero["sub_group_size"] = sub_group_size
    for place, key, where in ((zero, "offload_param", params), (more, "offload_gradients", grads)):
        if where:
            place[key] = {"device": where} if isinstance(where, str) else {**drive, "buffer_count": where}
    return {"zero_optimization": zero, **more}


class Layer(nn.Module):
    """A norm and a feed-forward network with four times the width, on a residual stream: 8 x width^2 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [tokens, width] after this layer."""
        changed: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(hidden))))
        return hidden + changed


def layered_model(layers: int, width: int) -> nn.Sequential:
    """`layers` layers, with values of torch's generator, or on the device of the context."""
    return nn.Sequential(*(Layer(width) for _ in range(layers)))


def merged(section: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """Return a section with the keys of a case in place of its own."""
    inner = {key: merged(section[key], value) for key, value in case.items() if isinstance(section.get(key), dict)}
    return section | case | inner
