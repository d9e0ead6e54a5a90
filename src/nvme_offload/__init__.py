"""An NVMe tier for PyTorch training: exact, at the speed of the drive, and nothing lost.

An optimizer whose state lives on a drive, in place of torch's::

    import torch
    from nvme_offload import OffloadAdamW

    model = torch.nn.Linear(256, 256).bfloat16()
    section = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/mnt/nvme0"}}}
    with OffloadAdamW(model.parameters(), lr=3e-4, offload=section) as optimizer:
        model(torch.randn(8, 256).bfloat16()).square().mean().backward()
        optimizer.step()

`initialize` does more: it shards a model, places parameters and gradients, and returns an engine. Callbacks for others'
trainers are in `nvme_offload.adapters`.

A name is imported when it is first used, so that ``import nvme_offload`` costs nothing and the `offload` command starts
without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from nvme_offload._names import fetched, homes_of

_ADAPTERS = "nvme_offload.adapters"
_HOMES = homes_of(__file__)

__all__ = sorted(name for name, home in _HOMES.items() if home != _ADAPTERS)  # a star import imports no trainer


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("nvme-offload")
    return import_module(_ADAPTERS) if name == "adapters" else fetched(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "adapters"])
