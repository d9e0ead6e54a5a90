"""From the name of an optimizer to its class. The names are those of the section: `offload.config.optimizer`."""

import importlib
from collections.abc import Callable

from nvme_offload.optim.optimizer import OffloadOptimizer


def optimizer_class(name: str) -> Callable[..., OffloadOptimizer]:
    """Return ``OffloadX`` for the optimizer called X, from the module of that name in lower case."""
    module = importlib.import_module(f"{__package__}.{name.lower()}")
    found: Callable[..., OffloadOptimizer] = getattr(module, f"Offload{name}")
    return found
