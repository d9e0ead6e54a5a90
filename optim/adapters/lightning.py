"""Lightning: what an optimizer with its state on a tier does, in the loggers of its `Trainer`."""

from __future__ import annotations

from typing import Any

from .figures import figures_of, missing, offloaded

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError as error:
    Callback = missing("lightning", error)  # type: ignore[misc, unused-ignore]


class OffloadLightningCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Hands figures of ``optimizer.stats()`` to all loggers, every ``log_every_n_steps``, as ``offload/...``.

    Args:
        all_figures: hand over all of ``stats().scalars()``, in place of five: steps, seconds of an iteration, its share
            of the ideal, and bytes of optimizer state that were read and written.
    """

    def __init__(self, *, all_figures: bool = False) -> None:
        self._all_figures = all_figures

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the figures, where it is time for that."""
        optimizer = offloaded(trainer.optimizers)
        if optimizer is None or trainer.global_step % trainer.log_every_n_steps:
            return
        figures = figures_of(optimizer, every=self._all_figures)
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for what still runs behind the last step.

        Raises:
            SwapIOError: a write failed; the bytes are still in memory.
        """
        if (optimizer := offloaded(trainer.optimizers)) is not None:
            optimizer.synchronize()
