"""Hugging Face's `Trainer`: its optimizer from a configuration section, and what that does in its logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nvme_offload.offload.config.honoured import part_for_optimizer
from nvme_offload.offload.config.section import OffloadConfig
from ..named_optimizers import optimizer_class
from ..optimizer import OffloadOptimizer
from .figures import figures_of, missing, offloaded

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ModuleNotFoundError as error:
    TrainerCallback = missing("transformers", error)  # type: ignore[misc, unused-ignore]


def trainer_optimizer(
    section: Mapping[str, Any] | str | Path, args: TrainingArguments, num_training_steps: int | None = None
) -> tuple[Callable[..., OffloadOptimizer], dict[str, Any]]:
    """Return what `Trainer` takes as ``optimizer_cls_and_kwargs``: it makes the optimizer itself, with its own groups.

    Args:
        section: the configuration section, as for DeepSpeed, "auto" included. ``optimizer`` chooses the class and its
            hyperparameters; without it they are those of `args`, and AdamW.
        args: of the run. `Trainer` gives its groups the weight decay of `args`.
        num_training_steps: optimizer steps of the run, where a schedule of the section needs them. The schedule itself
            is `Trainer`'s.

    Returns:
        The class, and its arguments.

    Raises:
        ConfigError: the section is wrong, or says something else than `args`.
    """
    config = OffloadConfig.from_training_arguments(section, args, num_training_steps)
    chosen = config.optimizer
    return optimizer_class(chosen.kind), {**chosen.hyperparameters, "offload": part_for_optimizer(config)}


class OffloadTrainerCallback(TrainerCallback):
    """Adds figures of ``optimizer.stats()`` to what `Trainer` logs, every ``logging_steps``.

    As one of ``callbacks`` it reaches the log history and what is printed beside the progress bar. Reporters
    (``report_to``: TensorBoard, W&B, MLflow) have their turn before; `add_to` puts it in front of them. Names begin
    with ``offload/``.

    Args:
        all_figures: log all of ``stats().scalars()``, in place of five: steps, seconds of an iteration, its share of
            the ideal, and bytes of optimizer state that were read and written.
    """

    def __init__(self, *, all_figures: bool = False) -> None:
        self._all_figures = all_figures

    def add_to(self, trainer: Trainer) -> None:
        """Put it in front of all callbacks of a trainer, so that every one of them sees the figures."""
        trainer.callback_handler.callbacks.insert(0, self)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Add the figures to the logs of a step. An evaluation's, and those of the end of a run, stay as they are."""
        logs, optimizer = given.get("logs"), offloaded([given.get("optimizer")])
        if logs is None or "loss" not in logs or optimizer is None:
            return
        figures = figures_of(optimizer, every=self._all_figures)
        logs.update(figures)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Wait for what still runs behind the last step.

        Raises:
            SwapIOError: a write failed; the bytes are still in memory.
        """
        if (optimizer := offloaded([given.get("optimizer")])) is not None:
            optimizer.synchronize()
