"""Others' trainers, and callbacks for them. Each needs the package of its trainer, which is imported with the name.

In Hugging Face's `Trainer`::

    from nvme_offload.adapters import OffloadTrainerCallback, trainer_optimizer

    trainer = Trainer(..., optimizer_cls_and_kwargs=trainer_optimizer("ds_config.json", settings))
    OffloadTrainerCallback().add_to(trainer)

`OffloadTrainer` is one over an engine of `initialize`.

In Lightning's: ``Trainer(callbacks=[OffloadLightningCallback()])``.
"""

from __future__ import annotations

from typing import Any

from nvme_offload._names import fetched, homes_of

_HOMES = homes_of(__file__)

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    return fetched(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return __all__
