"""The engine and its optimizer under DeepSpeed's names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, Dataset

from nvme_offload.deepspeed.loaders import loader_of
from nvme_offload.deepspeed.loss_scale import DynamicLossScaler
from nvme_offload.deepspeed.optimizer_names import as_deepspeeds
from nvme_offload.deepspeed.plain_backward import PlainBackward
from nvme_offload.deepspeed.refusal import PAGE, refuse_arguments
from nvme_offload.deepspeed.zero import mark_sharded
from nvme_offload.offload.sync import make_folder, sync_file, sync_folder
from nvme_offload.offload.user_path import user_path
from nvme_offload.offload.warn import warn_user
from nvme_offload.optim.access.full_values import set_full_param
from nvme_offload.optim.ranks.collective import on_first_rank
from nvme_offload.optim.zero.engine import OffloadEngine

_SAFETENSORS = ".safetensors"


class DeepSpeedEngine:
    """An `OffloadEngine` under the names of DeepSpeed's. What neither has is looked for in the model.

    Args:
        engine: with all that is not DeepSpeed's.
        config: the section as it was given.
        loader: of the training data, if there is one.
        has_optimizer: whether the script, or the section, has one.
        is_managed: whether micro-batches are counted; else every `step` acts.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        config: Any,
        loader: DataLoader[Any] | None = None,
        *,
        has_optimizer: bool = True,
        is_managed: bool = True,
    ) -> None:
        self.engine = engine
        """The engine itself, with all that is not DeepSpeed's."""
        self.config = config
        """The section as it was given; ``engine.engine.config`` is what was read."""
        self.training_dataloader = loader
        self._awaits_backward = self._was_applied = False
        self.latest_was_skipped = False
        """Whether the latest step was skipped."""
        self._micro_batches_seen = 0
        self._plain = PlainBackward(engine)
        self._is_managed, self._is_coalescing = is_managed, False
        mark_sharded(engine.parameters())
        if not is_managed:
            engine.set_gradient_accumulation_boundary(True)
        section = engine.config
        if engine.loss_scaler is not None:
            engine.scale_by(DynamicLossScaler.of_stage(section.fp16, section.zero_optimization.stage))
        engine.module.register_state_dict_post_hook(_say_that_it_is_sharded)  # type: ignore[no-untyped-call]  # of torch
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.global_rank = dist.get_rank()
        self.world_size = self.dp_world_size = dist.get_world_size()
        self.device = next(engine.module.parameters()).device
        self.optimizer = as_deepspeeds(self) if has_optimizer else None
        self.monitor = SimpleNamespace(enabled=False, write_events=lambda *events: None)
        """It writes events for those that DeepSpeed's monitors are for; nothing is written here."""
        self.tput_timer = SimpleNamespace(update_epoch_count=lambda: None)
        """It counts epochs for what DeepSpeed prints; nothing is printed here."""

    @property
    def module(self) -> nn.Module:
        """The model. After an evaluation it has its own parameters again, so that what changes them is kept."""
        if not self._awaits_backward:
            self.empty_partition_cache()
        return self.engine.module

    def empty_partition_cache(self) -> None:
        """Free whole parameters that a forward without a backward left in memory."""
        for module in self.engine.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; see `OffloadEngine`."""
        self._awaits_backward = torch.is_grad_enabled()
        return self._plain.watched(self.engine(*args, **kwargs))

    forward = __call__

    def __getattr__(self, name: str) -> Any:
        if name == "engine":  # before there is one
            raise AttributeError(name)
        for owner in (self.engine, self.module):
            if (found := getattr(owner, name, self)) is not self:
                return found
        raise AttributeError(
            f"engine.{name} is not there: neither the engine nor the model has it, and if DeepSpeed's engine does, it "
            f"is not done here: {PAGE}",
            name=name,
            obj=self,
        )

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Set the module's training mode."""
        self.engine.module.train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        """Set the module's evaluation mode."""
        return self.train(False)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run backward of one loss of a micro-batch; see `OffloadEngine.backward`."""
        with self._plain.divided():
            divided = self.engine.backward(loss, retain_graph, scale_wrt_gas=scale_wrt_gas)
        self._awaits_backward = retain_graph
        self._micro_batches_seen += not self._is_managed
        return divided

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """See `OffloadEngine.scale`: for ``engine.scale(loss).backward()``, of each loss of a micro-batch."""
        scaled = self.engine.scale(loss)
        self._plain.is_divided = True
        return scaled

    def accumulate(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """See `OffloadEngine.accumulate`."""
        with self._plain.divided():
            return self.engine.accumulate(*args, **kwargs)

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Within, backwards add to the gradients of one step. Each of them reduces gradients all the same.

        Raises:
            RuntimeError: micro-batches are not counted, or it is called within itself.
        """
        if not self._is_managed or self._is_coalescing:
            why = "within itself" if self._is_coalescing else "where managed_gradient_accumulation is false"
            raise RuntimeError(f"engine.coalesce_grad_reduction was called {why}: leave it out")
        self._is_coalescing = True
        try:
            yield
        finally:
            self._is_coalescing = False

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End the micro-batch; see `OffloadEngine.step`. Raises ValueError for arguments of a scheduler."""
        if lr_kwargs:
            raise ValueError(f"engine.step: lr_kwargs = {lr_kwargs!r}: call the scheduler's step with them yourself")
        if self._is_coalescing:
            raise RuntimeError("engine.step was called within engine.coalesce_grad_reduction: call it after the block")
        self._plain.is_divided = False
        steps, skipped = self.engine.global_steps, self.skipped_steps
        self.engine.step()
        self._awaits_backward = False
        self._micro_batches_seen += self._is_managed
        self.latest_was_skipped = self.skipped_steps > skipped
        self._was_applied = self.engine.global_steps > steps and not self.latest_was_skipped

    def was_step_applied(self) -> bool:
        """Whether the latest `step` changed the parameters: neither between two boundaries, nor skipped."""
        return self._was_applied

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped because a gradient was not finite."""
        return self.engine.optimizer.num_skipped_steps

    @property
    def micro_steps(self) -> int:
        """Micro-batches since the engine was made."""
        return self._micro_batches_seen

    @property
    def global_samples(self) -> int:
        """Samples of the steps so far, over all ranks; 0 where the section does not say how many a step has."""
        if not self._is_managed:  # the calls of `backward` are counted
            return self._micro_batches_seen * self.world_size * (self.train_micro_batch_size_per_gpu() or 0)
        return self.engine.global_steps * (self.train_batch_size() or 0)

    def managed_gradient_accumulation(self) -> bool:
        """Whether micro-batches are counted; else every `step` acts."""
        return self._is_managed

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """See `OffloadEngine.set_gradient_accumulation_boundary`. RuntimeError: every `step` acts."""
        if not self._is_managed:
            what = "engine.set_gradient_accumulation_boundary"
            raise RuntimeError(f"{what}: managed_gradient_accumulation is false, so that every engine.step() acts")
        self.engine.set_gradient_accumulation_boundary(is_boundary)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.engine.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Return the momentum of each parameter group, or its betas; None of a group that has neither."""
        return [group.get("betas", group.get("momentum")) for group in self.engine.optimizer.param_groups]

    def get_type(self) -> list[str]:
        """Return the optimizer's rule, for each parameter group."""
        return [self.engine.optimizer.rule.name] * len(self.engine.optimizer.param_groups)

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches of one step."""
        return self.engine.gradient_accumulation_steps

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Return the samples of one micro-batch on one rank, where the section says."""
        return self.engine.config.batch_sizes(self.world_size).train_micro_batch_size_per_gpu

    def train_batch_size(self) -> int | None:
        """Return the samples of one step over all ranks, where the section says."""
        return self.engine.config.batch_sizes(self.world_size).train_batch_size

    def get_batch_info(self) -> tuple[int | None, int | None, int]:
        """Return samples of a step, samples of a micro-batch on one rank, and micro-batches of a step."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage."""
        return self.engine.config.zero_optimization.stage

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_offload_optimizer(self) -> Any:
        """Return the section that says where the optimizer's state is."""
        return self.engine.config.zero_optimization.offload_optimizer

    def zero_offload_param(self) -> Any:
        """Return the section that says where parameters are."""
        return self.engine.config.zero_optimization.offload_param

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bf16."""
        return self.engine.config.bf16.enabled

    def fp16_enabled(self) -> bool:
        """Whether the model computes in fp16."""
        return self.engine.config.fp16.enabled

    def loss_scale(self) -> float:
        """Return the constant loss scale of the section; 0 is a dynamic one, which is ``optimizer.cur_scale``."""
        return self.engine.config.fp16.loss_scale

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is dynamic."""
        return self.engine.config.fp16.loss_scale == 0

    def gradient_clipping(self) -> float:
        """Return the largest norm of all gradients; 0 is no limit."""
        return self.engine.config.gradient_clipping

    def steps_per_print(self) -> int | None:
        """Return after how many steps DeepSpeed prints; nothing is printed here."""
        return self.config.get("steps_per_print") if isinstance(self.config, Mapping) else None

    @property
    def client_optimizer(self) -> Any:
        """The optimizer; that of the script is not used, only its class and hyperparameters are."""
        return self.optimizer

    def get_data_parallel_world_size(self) -> int:
        """Return the number of ranks that have other data."""
        return self.dp_world_size

    def no_sync(self) -> AbstractContextManager[None]:
        """See `OffloadEngine.no_sync`."""
        return self.engine.no_sync()

    def allreduce_gradients(self, *unused: Any, **also_unused: Any) -> None:
        """Do nothing: `backward` reduces gradients, at the boundary at the latest."""

    def compile(self, *unused: Any, **also_unused: Any) -> None:
        """Raises TypeError: what is compiled has to be before it is sharded."""
        raise TypeError(f"engine.compile is not done here: call torch.compile on the model's blocks before. {PAGE}")

    def deepspeed_io(self, dataset: Dataset[Any], batch_size: int | None = None, **more: Any) -> DataLoader[Any]:
        """Return a loader of micro-batches, another part on each rank.

        Raises:
            TypeError: something is asked for that is not done here, by name.
            ValueError: the section does not say how many samples a micro-batch has.
        """
        collate, sampler = more.pop("collate_fn", None), more.pop("data_sampler", None)
        workers = more.pop("num_local_io_workers", None)
        pin, route = more.pop("pin_memory", True), more.pop("route", "train")
        refuse_arguments("engine.deepspeed_io", more)
        size = batch_size or self.train_micro_batch_size_per_gpu()
        is_pinned = pin and self.device.type != "cpu"
        return loader_of(dataset, size, collate, sampler, workers=workers or 0, pin=is_pinned, shuffle=route == "train")

    def save_checkpoint(
        self, save_dir: str | Path, tag: object = None, client_state: Mapping[str, Any] | None = None, **more: Any
    ) -> bool:
        """Write a checkpoint; see `OffloadEngine.save_checkpoint`. Raises TypeError for what is not done here."""
        frozen = not more.pop("exclude_frozen_parameters", False)
        refuse_arguments("engine.save_checkpoint", more, save_latest=True)
        if not save_dir:
            raise ValueError(f"engine.save_checkpoint: save_dir = {save_dir!r}: name a folder")
        return self.engine.save_checkpoint(save_dir, None if tag is None else str(tag), client_state, frozen=frozen)

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Take a checkpoint, or what is asked for of it; see `OffloadEngine.load_checkpoint`.

        Raises:
            TypeError: `custom_load_fn` is given.
        """
        refuse_arguments("engine.load_checkpoint", {"custom_load_fn": custom_load_fn}, custom_load_fn=None)
        path, client_state = self.engine.load_checkpoint(
            load_dir,
            None if tag is None else str(tag),
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            lr_scheduler=load_lr_scheduler_states and not load_module_only,
            counters=not load_module_only,
        )
        return path, {} if path is not None and load_module_only else client_state

    def module_state_dict(self, exclude_frozen_parameters: bool = False, **more: Any) -> dict[str, torch.Tensor]:
        """Return the whole weights on the CPU, in the dtype of the forward; every rank must call it.

        Raises:
            TypeError: something is asked for that is not done here, by name.
        """
        refuse_arguments("engine.module_state_dict", more, destination=None, prefix="", keep_vars=False)
        return dict(self._weights("own", exclude_frozen_parameters))

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True, **more: Any) -> None:
        """Set the whole weights, masters too; every rank must call it, with the same values.

        Args:
            checkpoint: weights by name, or a dict with them under ``module``.
            strict: whether all names must be in both.
            more: refused, each by name.

        Raises:
            KeyError: names differ; nothing was changed.
            ValueError: a shape differs.
        """
        refuse_arguments("engine.load_module_state_dict", more, custom_load_fn=None, fetch_z3_params=False)
        weights: Mapping[str, torch.Tensor] = checkpoint.get("module", checkpoint)
        model = self.module
        params = dict(model.named_parameters(remove_duplicate=False))
        own = {**params, **dict(model.named_buffers(remove_duplicate=False))}
        expected = {name for name in own if name in params or name in model.state_dict(keep_vars=True)}
        if strict and (other := sorted(expected ^ weights.keys())):
            raise KeyError(f"engine.load_module_state_dict: not in both, the model and the weights: {other[:10]}")
        with torch.no_grad():
            for name in own:
                if name in params and name in weights:
                    set_full_param(params[name], weights[name])
                elif name in weights:
                    own[name].copy_(weights[name])

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the 16-bit weights into a folder; every rank must call it.

        ``*.safetensors`` is written weight by weight, as `OffloadEngine.save_16bit_model` does, into
        ``model*.safetensors``. A file of any other name is one of ``torch.save``, for which rank 0 holds all weights.
        """
        if not save_dir:
            raise ValueError(f"engine.save_16bit_model: save_dir = {save_dir!r}: name a folder")
        if save_filename.endswith(_SAFETENSORS):
            if save_filename != (written := f"model{_SAFETENSORS}"):
                warn_user(f"engine.save_16bit_model: {save_filename!r} is not used: the file is called {written}")
            return self.engine.save_16bit_model(save_dir, frozen=not exclude_frozen_parameters)
        dtype, is_first = "fp16" if self.fp16_enabled() else "bf16", dist.get_rank() == 0
        weights = {name: weight.clone() for name, weight in self._weights(dtype, exclude_frozen_parameters) if is_first}
        on_first_rank(partial(save_torch_file, weights, user_path(save_dir) / save_filename))
        return True

    save_fp16_model = save_16bit_model

    def _weights(self, dtype: str, without_frozen: bool) -> Iterator[tuple[str, torch.Tensor]]:
        frozen = {name for name, param in self.engine.named_parameters() if not param.requires_grad}
        for name, weight in self.engine.weights(dtype):
            if not (without_frozen and name in frozen):
                yield name, weight.cpu()

    def destroy(self) -> None:
        """Free the optimizer's memory and files."""
        self.engine.close()


def save_torch_file(weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a file of ``torch.save``, which gets its name when it is whole."""
    make_folder(path.parent)
    unfinished = path.with_name(f"{path.name}.partial")
    try:
        torch.save(weights, unfinished)
        with unfinished.open("rb") as file:
            sync_file(file.fileno())
        unfinished.replace(path)
        sync_folder(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def _say_that_it_is_sharded(module: nn.Module, found: Mapping[str, Any], *unused: Any) -> None:
    if not any(isinstance(value, nn.Parameter) for value in found.values()):  # which this package asks for
        warn_user(
            "engine.module.state_dict() has the shards of this rank, at every ZeRO stage: a file with them is no whole "
            "model. Call engine.save_16bit_model(folder), or save_checkpoint, on every rank"
        )
