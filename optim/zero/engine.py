"""The ZeRO engine: a module sharded by FSDP2, an optimizer with its state on tiers, and the calls around them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import LRScheduler

from nvme_offload.aio_native.finalizing import finalize
from nvme_offload.aio_native.interrupt import DeferredInterrupt
from nvme_offload.offload._fsdp_passes import drop_unsharded_grads
from nvme_offload.offload.activations.activation_swapper import ActivationSwapper
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.errors import StateError
from nvme_offload.offload.units import parse_bytes
from nvme_offload.offload.user_path import user_path
from nvme_offload.offload.warn import door
from nvme_offload.offload.weights.patch import WeightPatch
from nvme_offload.offload.weights.writer import weight_items
from ..checkpoint import save_load as checkpoint
from ..checkpoint.background import begin_save
from ..checkpoint.contents import Wanted
from ..checkpoint.export import export_safetensors, save_adapter
from ..checkpoint.run_state import TrainingParts
from ..checkpoint.sites import CheckpointSite
from ..durable.identity import ModelRecord
from ..optimizer import OffloadOptimizer
from ..precision.loss_scale import LossScaler
from ..precision.plan import PrecisionPlan
from ..ranks.collective import on_every_rank
from ..ranks.peers import Peers
from ..state.condition import Need
from ..telemetry.stats import Span
from ..weights.patches import patch_of, version_of
from ..weights.whole import weights_of
from .accumulation import Accumulation, all_of, check_loss, check_loss_of
from .durable import DurableTraining, EnginePart
from .keeping import KeepingChoice
from .meshes import MeshRoles
from .micro_batches import MicroBatches, WholeStep, check_alike
from .outputs import instead_of
from .passes import Passes, Update
from .schedulers import take_on_groups

_NONE = (
    "none: the loss depends on no trainable parameter. Look whether the forward ran under torch.no_grad, detached its "
    "output, used frozen parameters alone, or hid its tensors (in a closure, in an object of an extension: return them "
    "in a dict). Nothing has moved, and the step begins anew with its first micro-batch"
)


def _folder(given: str | Path, method: str) -> Path:
    """Return the folder that a call was given; ValueError for none: "" would be wherever the job was started."""
    if not given:
        raise ValueError(f"engine.{method}: the folder is {given!r}: name one; '.' is the current folder")
    return user_path(given)


_BACKWARD_TWICE = (
    "A forward has one backward: call engine.backward once for each micro-batch, without loss.backward() beside it. "
    "Add up losses of the same forward, or pass retain_graph=True to all but the last."
)


class OffloadEngine:
    """A model and its optimizer, driven micro-batch by micro-batch. Made by `initialize`.

    Take these calls for every micro-batch::

        with initialize(model, section) as engine:
            for batch in batches:
                loss = engine(batch).square().mean()
                engine.backward(loss)
                engine.step()

    `backward` divides by the number of accumulation steps and scales the loss where fp16 asks for it; a micro-batch of
    several losses calls it for each. `step` ends the micro-batch, and acts at the accumulation boundary only.
    `accumulate` goes through all micro-batches of a step in one call, block by block where that saves bytes. The parts
    (`module`, `optimizer`, `lr_scheduler`) work alone too.

    In a mesh with a dimension ``pp`` the module is a stage, and the schedule of ``torch.distributed.pipelining`` runs
    forward and backward of all micro-batches of a step::

        stage = PipelineStage(engine.module, ...)
        schedule = Schedule1F1B(stage, n_microbatches, loss_fn=engine.pipeline_loss(loss_fn))
        schedule.step(batch)
        engine.step()
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: OffloadOptimizer,
        lr_scheduler: LRScheduler | None,
        config: OffloadConfig,
        mesh: DeviceMesh,
        precision_plan: PrecisionPlan,
        units: Sequence[nn.Module] = (),
        activations: ActivationSwapper | None = None,
        keeping: KeepingChoice | None = None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.config = config
        self.mesh = mesh
        self.precision_plan = precision_plan
        """Which dtype every parameter and buffer has, for what. Prints as a table."""
        self.activations = activations
        """Keeps what forwards save, where the section says so, or leaves it open until the first forward; else None."""
        self.global_steps = 0
        """Accumulation boundaries passed: steps taken and steps skipped."""
        self._roles = roles = MeshRoles.of(mesh)
        stage = config.zero_optimization.stage
        self._accumulation = Accumulation(
            config.gradient_accumulation_steps or 1,
            is_pipelined=self.is_pipelined,
            reduces_once=stage == 1 or (stage == 0 and roles.num_data_parallel_ranks > 1),
        )
        self._peers = Peers(mesh.mesh.flatten().tolist())
        self._passes = Passes(module, optimizer, mesh, self._peers)
        self._micro_batches = MicroBatches(
            config, module, units, mesh, self._accumulation, self._passes, activations, keeping
        )
        self._update = Update(optimizer, self._peers)
        scaler = LossScaler.of(config.fp16) if precision_plan.loss_scaling else None
        self._part = EnginePart(module, scaler, optimizer.store.blocks.bases)
        if optimizer.is_durable:
            record = ModelRecord.of(
                module,
                optimizer.store.table,
                precision=precision_plan.mode,
                rule=optimizer.rule.name,
                stage=roles.pipeline.get_local_rank() if roles.pipeline is not None else 0,
            )
            optimizer.durable.commits.serve(record)
        if self.is_pipelined:  # whose schedule scales gradients that have been reduced
            optimizer.expect_step(False)
        self._set_sync()
        if keeping is not None:
            keeping.tell(self._go_on_with)

    def _go_on_with(self, config: OffloadConfig) -> None:
        """Take what was chosen in the first forward."""
        self.config = config
        if config.activations.device == "none":
            self.activations = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, under autocast where the section says so.

        Raises:
            RuntimeError: called in an autocast context that the section does not know of.
            SwapIOError, CorruptionError: parameters on a tier could not be read. On one rank the gradients of this
                step are dropped, and it can be done again from its first micro-batch; of several, end all. The others
                log it, with rank, place and cause.
            PeerError: this happened on another rank, and a collective with it failed.
            StateError: this happened before, and could not be undone.
        """
        with self._passes.run("forward", self._drop_gradients), self.optimizer.passing("forward"):
            return self.module(*args, **kwargs)

    @property
    def is_pipelined(self) -> bool:
        """Whether a schedule runs forward and backward, and `step` follows it directly."""
        return self._roles.pipeline is not None

    def __iter__(self) -> Iterator[Any]:
        """Raises TypeError: a script of DeepSpeed's unpacks four values."""
        raise TypeError(
            "initialize returns the engine alone: write engine = initialize(model, config), and take engine.optimizer "
            "and engine.lr_scheduler; nvme_offload.deepspeed.initialize returns the four values of DeepSpeed's"
        )

    def train(self, mode: bool = True) -> Self:
        """Set the module's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the module's evaluation mode."""
        return self.train(False)

    @property
    def loss_scale(self) -> float:
        """Return what the loss of the next micro-batch is multiplied by; 1 without fp16."""
        return self._part.scaler.loss_scale if self._part.scaler else 1.0

    @property
    def loss_scaler(self) -> LossScaler | None:
        """Decides the loss scale; None without fp16."""
        return self._part.scaler

    def scale_by(self, scaler: LossScaler) -> None:
        """Let another decide the loss scale, before the first step."""
        self._part.scale_by(scaler)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The module's parameters: this rank's shards, as the optimizer has them."""
        return (param for _, param in self.named_parameters(recurse=recurse))

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's parameters with their qualified names."""
        self._drop_gathered()  # FSDP2 shows gathered copies in the place of parameters
        return self.module.named_parameters(prefix, recurse)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one step."""
        return self._accumulation.num_micro_batches

    @property
    def micro_steps(self) -> int:
        """Micro-batches that ended since the latest boundary."""
        return self._accumulation.micro_steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last of its step, so that the next `step` acts."""
        return self._accumulation.is_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say before a backward whether its micro-batch is the last of its step; holds until the next call.

        Gradients are divided by `gradient_accumulation_steps` as ever.
        """
        self._accumulation.boundary = is_boundary
        self._set_sync()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, gradients are added up on each rank without being reduced; the next backward reduces them all.

        Raises:
            RuntimeError: ZeRO stages 2 and 3 reduce gradients in every backward.
        """
        try:
            with self._accumulation.waiting(self.config.zero_optimization.stage):
                self._set_sync()
                yield
        finally:
            self._set_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and with them the micro-batches of a step under way. `step` does it after an update.

        Args:
            set_to_none: must be true; there for the signature of torch's modules.

        Raises:
            RuntimeError: called between two micro-batches of one step, whose gradients it would lose.
            ValueError: `set_to_none` is false.
        """
        if not set_to_none:
            raise ValueError("engine.zero_grad: set_to_none=False would keep zeros in memory; leave it out")
        if self.micro_steps and not self._accumulation.has_backward:
            raise RuntimeError(
                f"engine.zero_grad was called with {self._accumulation.progress}, whose gradients it would lose: leave "
                "it out, engine.step() zeroes them after the update. To give the step up, call it after a backward"
            )
        self._drop_gradients()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss for ``engine.scale(loss).backward()``: in fp32, scaled and divided, as `backward` has it.

        An I/O error in such a backward leaves no way on but a new engine and a checkpoint.

        Raises:
            TypeError, ValueError: as `backward`.
        """
        check_loss(loss)
        self.note_backward()
        return self._scaled(loss, self.gradient_accumulation_steps)

    def note_backward(self) -> None:
        """Say that a backward which is not `backward`'s has gradients that are scaled and divided as there.

        Raises RuntimeError in a step of `accumulate`.
        """
        self._accumulation.check_backward()
        self.optimizer.expect_step(self._accumulation.is_boundary)
        self._accumulation.has_backward = True

    def _scaled(self, loss: torch.Tensor, share: int) -> torch.Tensor:
        return loss.float() * (self.loss_scale / share)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, *, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run backward of one loss of a micro-batch.

        Args:
            loss: a scalar.
            retain_graph: keep the graph for another loss of the same forward.
            scale_wrt_gas: divide it by the number of accumulation steps.

        Returns:
            The loss as divided, without its graph.

        Raises:
            TypeError: `loss` is no tensor, but perhaps the output of a Hugging Face model.
            ValueError: `loss` is not a scalar.
            RuntimeError: the mesh has a dimension ``pp``.
            SwapIOError, CorruptionError, StateError: as in a forward.
            KeyboardInterrupt: with a note, if the gradients of the step were dropped; without one, if this backward is
                complete and `step` comes next.
        """
        if self.is_pipelined:
            raise RuntimeError(
                "engine.backward was called in a mesh with a dimension 'pp': the schedule runs backward there; call "
                "schedule.step(...) and then engine.step()"
            )
        self._accumulation.check_backward()
        check_loss(loss)
        share = self.gradient_accumulation_steps if scale_wrt_gas else 1
        divided = loss.detach() / share  # first: a device that refuses memory for it must not do so after the backward
        self._backward(loss, share, retain_graph=retain_graph)
        return divided

    def _backward(self, loss: torch.Tensor, share: int, *, retain_graph: bool = False) -> None:
        check_loss(loss)
        # From the first gradient that is final there is no way back: Ctrl-C is heard when `step` can complete the step.
        begins_updates = self.config.overlap.forbids_clipping and self._accumulation.is_boundary
        # Somebody's autocast context around this call is none of backward's.
        with (
            DeferredInterrupt() if begins_updates else nullcontext(),
            self._passes.run("backward", self._drop_gradients),
            self.optimizer.passing("backward"),
            torch.autocast(self.mesh.device_type, enabled=False),
        ):
            self.optimizer.expect_step(self._accumulation.is_boundary)
            self._set_sync()  # once more: an exception may have come before the call that belongs here
            try:
                torch.autograd.backward(self._scaled(loss, share), retain_graph=retain_graph)
            except RuntimeError as error:
                if "a second time" in str(error):  # torch's words
                    error.add_note(_BACKWARD_TWICE)
                raise instead_of(error, self.module) from error.__cause__
            self._accumulation.has_backward = True

    def accumulate(
        self, loss_of: Callable[[Any], torch.Tensor], micro_batches: Iterable[Any], *, scale_wrt_gas: bool = True
    ) -> list[torch.Tensor]:
        """Run forward and backward of all micro-batches of a step; `step` comes next, and acts.

        They go block by block where ``micro_batch_order`` says so: then each block of the model is gathered twice in a
        step, however many they are. The bits are those of the loop of `backward` and `step`, but for random numbers
        (dropout), which are drawn in another order, the same in every run. ``docs/block_by_block.md`` says what a model
        must not do. An exception leaves no gradients: do the step again.

        Args:
            loss_of: called with each micro-batch, calls the engine and returns a scalar. In block order it runs in a
                thread of its own, and all of them go on by turns.
            micro_batches: all of the step, ``gradient_accumulation_steps`` of them.
            scale_wrt_gas: divide each loss by their number. If not, losses are shares of the step's already, and there
                may be any number of them, the same on every rank.

        Returns:
            The losses, without their graphs, neither divided nor scaled.

        Raises:
            TypeError, ValueError: as `backward`, or another number of micro-batches.
            RuntimeError: the step has begun with `backward`, the mesh has a dimension ``pp``, or gradients are off.
            BlockOrderError: ``micro_batch_order`` is "vertical", and the model cannot be computed block by block.
            SwapIOError, CorruptionError, StateError, KeyboardInterrupt: as `backward`.
        """
        check_loss_of(loss_of)
        batches = all_of(micro_batches)
        if not scale_wrt_gas:
            check_alike(len(batches), self.mesh)
        try:
            self._accumulation.begin_whole(len(batches), divides=scale_wrt_gas)
        except ValueError as error:
            self._peers.tell("accumulate", error, goes_on=True)
            raise
        share = len(batches) if scale_wrt_gas else 1
        begin_backward = partial(self._begin_backward, share)
        step = WholeStep(loss_of, batches, begin_backward, self._drop_gradients, self.optimizer.catch_up)
        losses = self._micro_batches.go_through(step)
        return self._one_by_one(loss_of, batches, share) if losses is None else losses

    def _begin_backward(
        self, share: int, loss: torch.Tensor | None, is_last: bool, is_final: bool
    ) -> torch.Tensor | None:
        """Before backward through a part of the model: see `WholeStep`."""
        self.optimizer.expect_step(is_last and is_final, by_turns=True)
        self._set_sync(waits=self._accumulation.reduces_once and not is_last)
        if loss is None:
            return None
        check_loss(loss)
        return self._scaled(loss, share)

    def _one_by_one(
        self, loss_of: Callable[[Any], torch.Tensor], micro_batches: Sequence[Any], share: int
    ) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        with self._passes.run("accumulate", self._drop_gradients, self._accumulation.is_complete):
            self._accumulation.begin_whole(len(micro_batches), divides=False)
            for batch in micro_batches:
                if losses:
                    self._accumulation.end_micro_batch()
                    self._set_sync()
                loss = loss_of(batch)
                self._backward(loss, share)
                losses.append(loss.detach())
        return losses

    def pipeline_loss(self, loss_fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The loss function to hand to a pipeline's schedule: `loss_fn`, scaled where fp16 asks for it.

        The schedule divides gradients by the number of micro-batches itself (``scale_grads``). The losses it reports
        are scaled too: divide them by the `loss_scale` from before the step.
        """

        def scaled(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss = loss_fn(*args, **kwargs)
            return loss.float() * self.loss_scale if self._part.scaler else loss

        return scaled

    def step(self) -> None:
        """End the micro-batch; update the parameters if it was the last of the step.

        In a pipeline it always acts; every rank of every stage calls it after ``schedule.step``.

        A step with a gradient that is not finite on any rank is skipped on all; the schedule does not advance then.

        After an exception that is none of the scheduler's, calling this again completes the step, also after
        `OffloadOptimizer.finish_step`; gradients that were applied are not applied again.

        Raises:
            ClosedError: the engine is closed.
            RuntimeError: no backward came before, or a plain ``loss.backward()`` where `backward` does more; says what
                to write.
            ValueError: a parameter requires a gradient and is not the optimizer's; nothing has moved.
            SwapIOError: a read or write failed, see `OffloadOptimizer.step`.
            StateError: no parameter has had a gradient in this step, on any rank; on all of them. Nothing has moved,
                and the step begins anew. Or what stopped before left a step or a load unfinished; says what leads on.
            Exception: what the scheduler raises, when everything else is done.
        """
        self.optimizer.store.check_usable()
        self._passes.check()
        self._follow_groups()
        if self.optimizer.has_unfinished_step and not (self._accumulation.has_backward or self.is_pipelined):
            with self.optimizer.store.at_rest():
                self.optimizer.store.check(Need.NEXT_STEP)
        gradients = (param.grad for param in self.module.parameters())
        self._accumulation.check_step(gradients, is_scaled=self._part.scaler is not None)
        if not self._accumulation.is_boundary:
            self._accumulation.end_micro_batch()
            self._set_sync()
            return
        taken = self._update.outcome(self.global_steps)
        if taken is None and not self._update.has_begun(self.global_steps):
            self._check_trained()
        if taken is None:
            with self._peers.named():
                scaler = self._part.scaler
                taken = self._update.take(self.global_steps, scaler.loss_scale if scaler else None)
        if not self.optimizer.had_gradients:
            self._drop_gradients()
            raise StateError("engine.step", "a gradient of some parameter, in some micro-batch, on some rank", _NONE)
        self._end_step(taken)

    def _check_trained(self) -> None:
        self._drop_gathered()  # FSDP2 shows gathered copies in the place of parameters
        for name, param in self.module.named_parameters():
            if param.requires_grad and param not in self.optimizer.state:
                raise ValueError(
                    f"{name} ({param.dtype}, shape {tuple(param.shape)}) requires a gradient and would never be "
                    "trained: it was not there when initialize() was called, or not in a dtype that can be trained. "
                    "Freeze it with requires_grad_(False), or call initialize with the whole model. Nothing has moved; "
                    "engine.step() then does the step"
                )

    def _end_step(self, taken: bool) -> None:
        """Do what follows the update. The scheduler, which is the user's and may raise, comes late."""
        self._peers.tell_done()
        with DeferredInterrupt():
            self._drop_gathered()
            self.optimizer.zero_grad()
            if self._part.scaler:
                self._part.scaler.update(found_inf=not taken)
            self._accumulation.begin_step()
            self.global_steps += 1  # by this alone the step is over: what `_update` knows is of another one
            self._set_sync()
            if taken and self.lr_scheduler is not None:
                self.lr_scheduler.step()
        if self.optimizer.is_durable:
            self.durable.end_step(self.global_steps)

    def timeline(self) -> list[Span]:
        """Return what the latest iteration did and when: forward, backward, step, norm, reads, updates, writes, waits.

        See `OffloadOptimizer.timeline`. ``stats().iteration`` of the optimizer says how near it came to the ideal.
        """
        return self.optimizer.timeline()

    def get_global_grad_norm(self) -> float:
        """Return the norm of all gradients of the latest step, unscaled and before clipping; NaN before any step."""
        return self.optimizer.total_norm

    @property
    def durable(self) -> DurableTraining:
        """The durable run of the training: commits, snapshots, ways back.

        Raises:
            StateError: the section does not say ``durable``.
        """
        return DurableTraining(self.optimizer, self._part, self.lr_scheduler, self._between_steps, self._go_on_from)

    @property
    def client_state(self) -> dict[str, Any]:
        """See `DurableTraining.client_state`."""
        return self.durable.client_state

    @client_state.setter
    def client_state(self, value: Mapping[str, Any]) -> None:
        self.durable.client_state = dict(value)

    def commit(self) -> None:
        """See `DurableTraining.commit`."""
        with self._peers.named():
            self.durable.commit()

    def resume(self, snapshot: str | None = None) -> tuple[int, dict[str, Any]] | None:
        """See `DurableTraining.resume`."""
        return self.durable.resume(snapshot)

    def snapshot(self, name: str) -> int:
        """See `DurableTraining.snapshot`."""
        with self._peers.named():
            return self.durable.snapshot(name)

    def remove_snapshot(self, name: str) -> None:
        """See `DurableTraining.remove_snapshot`."""
        self.durable.remove_snapshot(name)

    def rewind(self, steps: int = 1) -> tuple[int, dict[str, Any]]:
        """See `DurableTraining.rewind`."""
        return self.durable.rewind(steps)

    def _between_steps(self, method: str) -> int:
        self._follow_groups()
        if (taken := self._update.outcome(self.global_steps)) is not None:
            self._end_step(taken)
        if under_way := self._accumulation.progress:
            actual = f"{under_way}: gradients are not saved"
            raise StateError(f"engine.{method}", "a call between two steps", actual)
        return self.global_steps

    def _follow_groups(self) -> None:
        """Let the schedule of the section set the learning rates of groups that were added since, too."""
        take_on_groups(self.lr_scheduler, self.config, self.optimizer)

    def _go_on_from(self, global_steps: int) -> None:
        self.global_steps = global_steps
        self._drop_gathered()
        self._drop_gradients()

    def save_checkpoint(
        self,
        dir: str | Path,  # noqa: A002  # the public name
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        background: bool = False,
        share: float = 0.25,
        frozen: bool | None = None,
    ) -> bool:
        """Write a checkpoint into the folder `tag` of `dir`, and make it the latest; every rank must call it.

        It gets its name only when it is whole: killed while saving, the checkpoint before is the one that is loaded.

        Args:
            dir: a folder that all ranks share; made if it is missing.
            tag: by default ``global_step`` and the number of steps.
            client_state: what else to keep: anything that ``torch.load(weights_only=True)`` can load. Rank 0's counts.
            background: return when the step is pinned, and write the same files while training goes on. Of a `durable`
                run, which reserves the space of another step for this. `wait_for_checkpoint`, `close` and the next save
                or load wait for it; ``stats().checkpoint_progress`` of the optimizer says how far it is.
            share: of the time that writing in the background may take, above 0, at most 1.
            frozen: whether parameters that were always frozen are written. By default all but those that are read in
                place: it notes their files, which a load must find as they were. With False, load ``strict=False``.

        Returns:
            True.

        Raises:
            StateError: micro-batches of an unfinished step, a step that stopped halfway, or another run saving there;
                `background` without a durable run.
            OutOfSpaceError: there is no room to pin the step; nothing has begun.
            ValueError: the tag, `client_state` or something else cannot be saved; nothing was written.
            FileExistsError: something that is no checkpoint has this name.
            CheckpointWriteError, SwapIOError: the drive is full or failed, or a tier did. Nothing of it is left.
        """
        if not 0 < share <= 1:
            raise ValueError(f"save_checkpoint: share = {share!r} of the time; write a number above 0, at most 1")
        self._between_steps("save_checkpoint")
        self._end_background()
        folder, training = _folder(dir, "save_checkpoint"), replace(self._training, has_frozen=frozen)
        with self._peers.named():
            if background:
                self._save_in_background(training, folder, tag, client_state, share)
            else:
                checkpoint.save(training, folder, tag, client_state)
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint that is written in the background has its name; every rank must call it.

        Raises:
            CheckpointWriteError, SwapIOError, CorruptionError: what it failed with, on any rank: nothing of it is left.
        """

        def end() -> None:
            if (failure := self._end_background()) is not None:
                raise failure

        with self._peers.named():
            on_every_rank(end, self._group)

    @door
    def load_checkpoint(
        self,
        dir: str | Path,  # noqa: A002  # the public name
        tag: str | None = None,
        *,
        strict: bool = True,
        optimizer: bool = True,
        lr_scheduler: bool = True,
        counters: bool = True,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Resume from a checkpoint, saved by any number of ranks on any tier; every rank must call it.

        With the last three false it takes the weights and buffers alone. What is not taken stays as it is.

        Args:
            dir: as for `save_checkpoint`.
            tag: by default the latest.
            strict: whether all tensors must be in both, model and checkpoint; else those are taken that both have.
            optimizer: take the optimizer's state, its hyperparameters and the loss scale.
            lr_scheduler: take the state of the schedule.
            counters: take `global_steps`.

        Returns:
            Its folder and the `client_state`; None twice, and a warning, where `dir` holds no checkpoint at all.

        Raises:
            CheckpointError, ValueError: it is damaged, unsafe or does not fit; nothing was changed.
            SwapIOError: a tier failed on the way; load again.
        """
        self._end_background()
        wanted = Wanted(strict, optimizer, lr_scheduler, counters)

        def go_on(found: checkpoint.Loaded) -> None:
            self._go_on_from(found.global_steps if counters else self.global_steps)

        loaded = checkpoint.load(self._training, _folder(dir, "load_checkpoint"), tag, go_on, wanted)
        if loaded is None:
            return None, None
        if self.optimizer.is_durable:  # what was before is not gone back to
            self.durable.client_state = loaded.client_state
            self.durable.commit()
        return str(loaded.path), loaded.client_state

    def _save_in_background(
        self,
        training: TrainingParts,
        root: Path,
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        share: float,
    ) -> None:
        commits = self.optimizer.durable.commits
        manifest = commits.pin(self.optimizer.param_groups, self._part.taken(self.lr_scheduler), self.global_steps)
        try:
            save = begin_save(training, manifest, root, tag, client_state, share)
        except BaseException:
            commits.unpin()
            raise
        commits.watch(save)

    def _end_background(self) -> BaseException | None:
        return self.optimizer.durable.commits.end_background() if self.optimizer.is_durable else None

    def export_safetensors(
        self,
        dir: str | Path,  # noqa: A002  # as above
        dtype: str = "fp32",
        max_shard_bytes: int | str = "1GiB",
        *,
        frozen: bool = True,
        published: bool = True,
        merge: bool | str | Sequence[str] = False,
    ) -> list[Path]:
        """Write the weights as safetensors in Hugging Face's layout; every rank must call it.

        Args:
            dir: on rank 0, with `checkpoint.use_node_local_storage` on each host; made if it is missing. Weights
                exported there before are replaced, other files stay.
            dtype: ``fp32``, ``bf16`` or ``fp16``; or ``own``: each weight as the forward has it. Modules that stay fp32
                in a ``bf16`` or ``fp16`` training are fp32 in 16-bit files, too. Under autocast all are fp32.
            max_shard_bytes: of one file, as bytes or ``"1GiB"``; a larger tensor has a file of its own.
            frozen: whether parameters that require no gradient are written.
            published: whether a model of transformers that holds weights fused, as experts, or under other names than
                are published, is written as `save_pretrained` does. False: as it is, which `initialize` loads.
            merge: write the base alone, into which adapters of PEFT are merged, one layer in memory at a time: the
                active ones, or these by name. PEFT merges the masters; `dtype` is what they are cast to then.

        Returns:
            The files.

        Raises:
            TypeError: `merge` for a model without adapters of PEFT.
            ValueError: the module is one stage of a pipeline, an argument cannot be used, a weight is too large for
                fp16, or PEFT cannot merge the adapters of a layer. Nothing was written.
            CheckpointWriteError: the files could not be written. Nothing is left, unless a rename failed at the very
                end; it says so.
        """
        if self.is_pipelined:
            raise ValueError(
                "engine.export_safetensors: this module is one stage of a pipeline; save a checkpoint, load it into "
                "the whole model (without 'pp' in the mesh, on any number of ranks), and export there"
            )
        folder, most = _folder(dir, "export_safetensors"), parse_bytes(max_shard_bytes)
        own, writes = self.precision_plan.own, CheckpointSite.of(self._training).is_keeper
        return export_safetensors(self.module, folder, dtype, most, own, self._group, writes, frozen, published, merge)

    def save_adapter(
        self,
        dir: str | Path,  # noqa: A002  # as above
        adapters: str | Iterable[str] | None = None,
        *,
        dtype: str = "fp32",
    ) -> list[Path]:
        """Write adapters of PEFT in its own format, which `PeftModel.from_pretrained` loads; every rank must call it.

        These are ``adapter_model.safetensors`` and ``adapter_config.json``: of the adapter ``default`` in `dir`, of
        others in folders of their names below it. Each adapter replaces an earlier one when it is complete. What the
        training has of it in memory is one tensor at a time, and nothing of the base is read.

        Args:
            dir: as for `export_safetensors`.
            adapters: their names; None: all.
            dtype: as for `export_safetensors`: ``own`` is what the forward computes with.

        Returns:
            The files with tensors.

        Raises:
            TypeError: the model has no adapters of PEFT.
            ValueError: one has no such name, `dtype` is unknown, or PEFT takes the values of a method from elsewhere.
            CheckpointWriteError: they could not be written. The adapter before is whole, unless the error says that a
                rename failed at the very end.
        """
        folder, writes = _folder(dir, "save_adapter"), CheckpointSite.of(self._training).is_keeper
        return save_adapter(self.module, folder, adapters, dtype, self.precision_plan.own, self._group, writes)

    @overload
    def weights(self, dtype: str = "own") -> Iterator[tuple[str, torch.Tensor]]: ...

    @overload
    def weights(self, dtype: str = "own", *, since: str) -> WeightPatch: ...

    def weights(
        self, dtype: str = "own", *, since: str | None = None
    ) -> Iterator[tuple[str, torch.Tensor]] | WeightPatch:
        """Return name and whole value of every weight, one at a time: to hand to another program, such as vLLM.

        With `since`, return what has changed since a version: a `WeightPatch`, for `apply_patch` or another program.
        When it was gone through, only its own version and later ones are known: give it to all who want it.

        Every rank has to go through all of them. Memory is taken for one; no step may come in between.

        Args:
            dtype: see `export_safetensors`.
            since: what `weights_version` was when the other program had the weights. For a version that is not known
                (any more) the patch has all weights; a warning says so, but for "".

        Raises:
            ValueError: there is no such `dtype`, or a weight is too large for fp16.
            SwapIOError: parameters on a tier could not be read.
            StateError: a step stopped halfway; or weights have changed while a patch was gone through.
        """
        self._drop_gathered()
        own, group = self.precision_plan.own, self._group
        if since is None:
            return weights_of(self.module, dtype, own, group)
        return patch_of(self.module, self.optimizer.store, since, dtype, own, group)

    @property
    def weights_version(self) -> str:
        """The version of the weights as they are: in a durable run the identity of their commit, else a number.

        The first call, or the first ``weights(since=...)``, begins to mark what changes: 1/8 B for each 16-bit
        parameter, in memory. Every rank has to ask.
        """
        self._drop_gathered()
        return version_of(self.optimizer.store, dict(weight_items(self.module)), self._group)

    def park(self) -> None:
        """Give memory back between two steps, while a sampler needs it; see `OffloadOptimizer.park`.

        Gathered parameters go, and shards on a device leave it; buffers and scalars of the module stay there. The first
        forward, or whatever else needs it, takes memory again, with the same bits. Every rank may call it.

        Raises:
            StateError: micro-batches of an unfinished step, or a step that stopped halfway.
            SwapIOError: something could not be written; it is still in memory. Call it again, or go on.
        """
        self._between_steps("park")
        self._drop_gathered()
        if self.activations is not None:
            self.activations.park()
        self.optimizer.park()

    def wake(self) -> None:
        """Take memory again, now; see `OffloadOptimizer.wake`. Without it the first forward does."""
        self.optimizer.wake()

    def save_16bit_model(
        self,
        dir: str | Path,  # noqa: A002  # as above
        max_shard_bytes: int | str = "1GiB",
        *,
        frozen: bool = True,
    ) -> bool:
        """Write the weights in the 16-bit compute dtype, or bf16 if there is none: see `export_safetensors`."""
        self.export_safetensors(dir, "fp16" if self.config.fp16.enabled else "bf16", max_shard_bytes, frozen=frozen)
        return True

    @property
    def _training(self) -> TrainingParts:
        self._follow_groups()
        return TrainingParts(
            self.module,
            self.optimizer,
            self.lr_scheduler,
            self._part.scaler,
            self.global_steps,
            self._group,
            self._roles.pipeline_group,
            self._roles.groups_of_copies,
            self.config.checkpoint.use_node_local_storage,
        )

    @property
    def _group(self) -> dist.ProcessGroup | None:
        """The ranks that have this model: all (None), or those of a 1-D mesh, as in a pipeline."""
        if self.mesh.size() == dist.get_world_size():
            return None
        if self.mesh.ndim > 1:
            raise ValueError(
                f"checkpoints of a {self.mesh.ndim}-D mesh need one that spans all {dist.get_world_size()} ranks, not "
                f"{self.mesh.size()}; use a 1-D mesh"
            )
        return self.mesh.get_group()

    def close(self) -> None:
        """Free memory and files, of activations too. Idempotent. The process group stays, for others may use it.

        Waits for a checkpoint that is written in the background. What an exception cuts short is done by the next call,
        or when nobody has the engine any more.
        """
        rest = finalize(self, self.optimizer.close)
        if self.activations is not None:
            self.activations.close()
        self._peers.close()
        self._end_background()
        self.optimizer.close()
        rest.detach()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an engine cannot be pickled or copied: parameters and state are on ranks and tiers. Use save_checkpoint, "
            "or weights() for the weights alone"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _drop_gradients(self) -> None:
        """Begin the step anew, also where FSDP2 has not reduced its gradients yet."""
        self.optimizer.zero_grad()
        drop_unsharded_grads(self.module)
        self._update.give_up()
        self._accumulation.begin_step()
        self._set_sync()

    def _drop_gathered(self) -> None:
        """Free what FSDP2 gathered before the step, perhaps for an evaluation: those are old weights."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _set_sync(self, *, waits: bool | None = None) -> None:
        """Stages 0 and 1 reduce gradients at the boundary only, where that loses nothing (the module itself knows)."""
        waits = self._accumulation.reduces_late if waits is None else waits
        if self.is_pipelined:  # its schedule decides, and the module knows here, too
            return
        if self.config.zero_optimization.stage < 2 and isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(not waits)
