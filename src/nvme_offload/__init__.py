"""An NVMe tier for PyTorch training: exact, at the speed of the drive, and nothing lost.

The public names of all parts in one place. A name is imported when it is first used, so that ``import nvme_offload``
costs nothing and the `offload` command starts without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "offload.config": ("OffloadConfig",),
    "offload.errors": (
        "CheckpointError",
        "CheckpointWriteError",
        "ClosedError",
        "ConfigError",
        "ConfigWarning",
        "CorruptionError",
        "ForkError",
        "OffloadError",
        "OutOfSpaceError",
        "StateError",
        "SwapIOError",
        "WeightsError",
    ),
    "offload.storage.transfer": ("Transfer",),
    "offload.swapper.tensor_swapper": ("TensorSwapper",),
    "optim.adamw": ("OffloadAdamW",),
    "optim.full_values": (
        "get_full_grad",
        "get_full_optimizer_state",
        "get_full_param",
        "set_full_grad",
        "set_full_optimizer_state",
        "set_full_param",
    ),
    "optim.stats": ("OptimizerStats", "Span"),
    "optim.tiers.halves": ("split_parameters",),
    "optim.zero.engine": ("OffloadEngine",),
    "optim.zero.initialize": ("initialize",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("nvme-offload")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
