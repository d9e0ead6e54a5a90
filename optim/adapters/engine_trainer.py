"""Hugging Face's `Trainer` over an engine: a sharded model, with parameters and gradients on tiers, block by block."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.errors import CheckpointError
from nvme_offload.offload.weights.reader import SafetensorsReader
from ..access.full_values import get_full_param, set_full_param
from ..checkpoint.peft_files import has_adapters
from ..zero.engine import OffloadEngine
from .figures import missing

try:
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import Trainer, TrainingArguments
except ModuleNotFoundError as error:
    Trainer = missing("transformers, accelerate", error)  # type: ignore[misc, unused-ignore]
    AcceleratedOptimizer = object  # type: ignore[misc, assignment, unused-ignore]

_FIRST = re.compile(r"\.lora_(embedding_)?A\.")
"""Names of the first of the two matrices of a LoRA, whose second is zero when it begins."""


class OffloadTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """A `Trainer` whose model, steps and checkpoints are an engine's: it hands in all micro-batches of a step at once.

    Losses, their shares of a step, logs, schedule and callbacks are `Trainer`'s; clipping and precision the section's,
    which has to say the same as `args`: make it by ``OffloadConfig.from_training_arguments``. Callbacks at the end of a
    micro-batch come when all of the step are computed. To go with a subclass of `Trainer`, put this class in front:
    ``class Mine(OffloadTrainer, SFTTrainer)``.

    Args:
        engine: made by `initialize`, and closed by its owner.
        args: of the run.
        given: what else `Trainer` takes, but for a model and an optimizer; a schedule is one of ``engine.optimizer``.

    Raises:
        ConfigError: the section says something else than `args`.
        ValueError: the section has a schedule, one process has several devices, or `args` converts for evaluation.
    """

    def __init__(self, engine: OffloadEngine, args: TrainingArguments, **given: Any) -> None:
        OffloadConfig.from_training_arguments(engine.config.model_dump(mode="json", exclude_unset=True), args)
        if engine.lr_scheduler is not None:
            raise ValueError("OffloadTrainer: the schedule is Trainer's; leave scheduler out of the section")
        if args.n_gpu > 1:
            raise ValueError(f"OffloadTrainer: this process has {args.n_gpu} devices; start one for each, by torchrun")
        if args.bf16_full_eval or args.fp16_full_eval:
            remedy = "leave out bf16_ and fp16_full_eval"
            raise ValueError(f"OffloadTrainer: it evaluates in the section's precision; {remedy}")
        self.engine = engine
        self._micro_batches: list[Any] = []
        self._losses: list[torch.Tensor] = []
        self._backwards: list[torch.Tensor] = []
        """The loss of the micro-batch from which `Trainer` would go backward."""
        # accelerate puts nothing around it, and Trainer, who shifts smoothed labels by its name, finds the one of old.
        name = type(engine.module).__name__.removeprefix("FSDP")
        vars(engine.module).update(_is_accelerate_prepared=True, _get_name=partial(str, name))
        with _reference_without_a_copy(engine.module):
            super().__init__(model=engine.module, args=args, **given)
        for callback in self.callback_handler.callbacks:
            # It would save between backward and update, where a step is half done; it looks again at the step's end.
            if getattr(callback, "jit_manager", None) is not None:
                callback.on_pre_optimizer_step = lambda *_, **__: None

    def create_accelerator_and_postprocess(self) -> None:
        """Have no backward and no clipping but the engine's."""
        super().create_accelerator_and_postprocess()
        instead = {"backward": lambda loss, **_: self._backwards.append(loss), "clip_grad_norm_": lambda *_, **__: None}
        vars(self.accelerator).update(instead)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Return what takes the engine's steps, as one that accelerate has prepared."""
        self.optimizer = _Steps(self.engine)
        return self.optimizer

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Take the micro-batches of a step; drop what is left of one that a callback or an exception ended."""
        self.engine.zero_grad()
        samples = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._micro_batches, self._losses = samples[0], []
        return samples

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Return the loss of a micro-batch. The first one of a step runs forward and backward of all."""
        if not self._losses:
            one = super().training_step

            def loss_of(batch: Any) -> torch.Tensor:
                one(model, batch, num_items_in_batch)
                return self._backwards.pop()

            self._losses = self.engine.accumulate(loss_of, self._micro_batches, scale_wrt_gas=False)
        return self._losses.pop(0)

    def log(self, logs: dict[str, float], *more: Any, **given: Any) -> None:
        """Add the norm of the gradients, which is known after the step, to what is logged of it."""
        if "loss" in logs:
            logs["grad_norm"] = self.engine.get_global_grad_norm()
        super().log(logs, *more, **given)

    def _move_model_to_device(self, *_: Any) -> None:
        """Leave the model where the engine has it."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the weights as `from_pretrained` reads them, and what `Trainer` saves beside them."""
        folder = Path(output_dir or str(self.args.output_dir))
        if has_adapters(self.engine.module):
            self.engine.save_adapter(folder)
        else:
            self.engine.export_safetensors(folder, "own", published=not self.args.save_only_model)  # which reads it
        if self.args.should_save:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            for part in (*(getattr(self.model, name, None) for name in ("config", "generation_config")), tokenizer):
                if part is not None:
                    part.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.engine.save_checkpoint(Path(output_dir, "engine"), client_state=self._schedule.state_dict())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            found, schedule = self.engine.load_checkpoint(Path(checkpoint, "engine"))
            if found is None:
                raise CheckpointError(
                    checkpoint,
                    "has weights and no engine's checkpoint: another Trainer saved it, or "
                    "save_only_model was set; make the model with from_pretrained from there, and train it anew",
                )
            self._schedule.load_state_dict(schedule or {})

    @property
    def _schedule(self) -> LRScheduler:
        assert self.lr_scheduler is not None
        return self.lr_scheduler

    def _load_from_checkpoint(self, *_: Any) -> None:
        """Load nothing yet: weights come with their state."""

    def _load_best_model(self) -> None:
        best = str(self.state.best_model_checkpoint)
        if not self.args.save_only_model:
            self._load_optimizer_and_scheduler(best)
            return
        if has_adapters(self.engine.module):
            for name in self.engine.module.peft_config:  # type: ignore[union-attr]
                self.engine.module.load_adapter(best if name == "default" else Path(best, name), name)  # type: ignore[operator]
            return
        with SafetensorsReader(best) as weights:
            for name, param in self.engine.named_parameters():
                set_full_param(param, weights.read(name).view(param.shape))
            for name, buffer in self.engine.module.named_buffers():
                if name in weights.tensors:
                    buffer.copy_(weights.read(name).view(buffer.shape))


@contextmanager
def _reference_without_a_copy(model: Any) -> Iterator[None]:
    """Have adapters switched off be the reference of TRL's trainers, which copy them to a new adapter ``ref``.

    A sharded model gets no new parameters. The copy would add nothing where the adapters begin as zero; ValueError
    where they do not.
    """
    if not has_adapters(model):
        yield
        return

    def add(name: str, *_: Any, **__: Any) -> None:
        trained = [(key, param) for key, param in model.named_parameters() if param.requires_grad]
        if name != "ref" or any(not _FIRST.search(key) and get_full_param(param).any() for key, param in trained):
            raise ValueError(
                f"OffloadTrainer: this trainer copies adapters that are no zeros to a new one, {name!r}, and a sharded "
                "model takes none: give it a ref_model, or switch adapters off by disable_adapter() in your own loop"
            )
        nowhere = SimpleNamespace(copy_=lambda _: None)
        vars(model)["get_parameter"] = lambda _: SimpleNamespace(data=nowhere)

    vars(model)["add_adapter"] = add
    try:
        yield
    finally:
        for name in ("add_adapter", "get_parameter"):
            vars(model).pop(name, None)


class _Steps(AcceleratedOptimizer):  # type: ignore[misc, unused-ignore]
    """The engine's optimizer, whose step is the engine's."""

    _is_accelerate_prepared = True

    def __init__(self, engine: OffloadEngine) -> None:
        super().__init__(engine.optimizer, device_placement=False)
        self._engine = engine

    def step(self, closure: None = None) -> None:
        """End the step; `Trainer` does not call it between micro-batches."""
        skipped = self._engine.optimizer.num_skipped_steps
        self._engine.step()
        self._is_overflow = self._engine.optimizer.num_skipped_steps > skipped
