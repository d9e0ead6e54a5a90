"""Offer torch and a training loop an optimizer whose state lives on a tier, whatever its update rule."""

import gc
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, Self, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from nvme_offload.offload._torch_private import not_compiled, running_last_before_load, shards_of, state_dict_hooks
from nvme_offload.offload.activations.activation_swapper import ActivationSwapper
from nvme_offload.offload.config.honoured import BY_OPTIMIZER, unread_text
from nvme_offload.offload.config.section import OffloadConfig, SectionLike
from nvme_offload.offload.devices.device import free_unused
from nvme_offload.offload.errors import ConfigWarning, StateError
from nvme_offload.offload.host.region import trim_heap
from nvme_offload.offload.storage.tier_plan import TierPlan
from nvme_offload.offload.warn import door, warn_user
from nvme_offload.offload.weights.patch import WeightPatch
from .access.entries import prepare_entries, write_entries
from .access.split import StateParts
from .access.view import StateView, matched_state, packed_state
from .durable.commits import Commits
from .durable.object import Durable
from .durable.state import DurableState, open_durability
from .durable.wear import EnginesOfRun, Wear
from .rules.rule import UpdateRule, without_torch_switches
from .state.choice import CANDIDATES
from .state.condition import Need, StepPhase
from .state.store import StateStore
from .step.groups import follow, take_on
from .step.plain_modules import PlainModules
from .step.scalars import check_group, with_own_states
from .step.stepper import Stepper
from .telemetry.run_record import RunRecord, place_in_words, said
from .telemetry.stats import DriveTotals, Meter, OptimizerStats, Span
from .weights.patches import patch_of, version_of

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]
"""Parameters, or dicts of parameter groups, as for any torch optimizer."""


class OffloadOptimizer(Optimizer):
    """An optimizer with its state on NVMe or in host memory; a subclass names its rule and torch's arguments.

    Make one for an `UpdateRule` of your own::

        class OffloadMine(OffloadOptimizer):
            rule = Mine()

            def __init__(self, params, lr=1e-3, *, offload, norm_group=None):
                super().__init__(params, {"lr": lr}, offload, norm_group)

    The state gets its place in the first step or load, or by `place`. Until then the parameters are those that the
    groups hold: code that shards the model later may put its shards there.

    Args:
        params: parameters, or dicts of parameter groups, as for any torch optimizer, in the same order in every run.
        defaults: hyperparameters by name, for groups that do not have their own.
        offload: the configuration section, as `OffloadConfig`, dict or path of a JSON, TOML or YAML file, or a folder
            on a drive: ``"offload": "auto"`` there. One `ConfigWarning` names keys that only `initialize` honours.
        norm_group: ranks with other parameters whose gradients belong to the same global norm.
        torch_arguments: what else the subclass was given. ``fused`` and ``foreach`` change nothing; what the rule
            refuses must be false.

    Raises:
        ConfigError: the section is wrong.
        TypeError: an argument that this optimizer does not have.
        ValueError: a hyperparameter or a parameter cannot be used; names it.
        OutOfSpaceError: the paths cannot hold the state; names bytes needed and free, and leaves nothing behind.
        SwapIOError: a path cannot be used.
    """

    rule: UpdateRule
    """The rule of the subclass; a group's own may differ in its states, see `UpdateRule.of`."""

    _step_supports_amp_scaling = True
    """Tells ``torch.amp.GradScaler`` to leave the unscaling to us."""

    @door
    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        offload: SectionLike | None,
        norm_group: dist.ProcessGroup | None = None,
        torch_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._check_torch_arguments(torch_arguments or {}, defaults)
        if offload is None:
            raise TypeError(
                f'{type(self).__name__}: offload= is missing: name a folder on a drive, as offload="/mnt/nvme0", or a '
                "section, as a dict or a file; `offload init` writes one"
            )
        if isinstance(params, nn.Module | set | frozenset):
            remedy = "pass model.parameters(), or a list, whose order is the same in every run"
            raise TypeError(f"{type(self).__name__}: params = a {type(params).__name__}: {remedy}")
        params = params if isinstance(params, torch.Tensor) else cast("Params", list(params))
        if isinstance(params, list) and not params:
            raise ValueError(
                f"{type(self).__name__}: params is empty, so there is nothing to train: an iterator such as "
                "model.parameters() gives its parameters once; make it anew, or pass a list"
            )
        config = OffloadConfig.of(offload)
        self.config = config if config.offload is None else CANDIDATES[0].applied(config)
        if unread := unread_text(self.config, type(self).__name__, BY_OPTIMIZER):
            warn_user(unread, ConfigWarning)
        self._meter = Meter()
        opened = partial(open_durability, self.config, self.rule)
        self.store = store = StateStore(self.config, self._meter, self.rule, type(self).__name__, opened, StateParts)
        """The state itself, for those who save, load and fill it: see `StateBody`."""
        durability = store.durability
        self._commits = Commits(store, durability, norm_group) if isinstance(durability, DurableState) else None
        self._engines = EnginesOfRun(store)
        self._wear = Wear(self.config.zero_optimization.offload_optimizer, store, self._engines)
        self._stepper = Stepper(self.store, self.rule, self._meter, norm_group, self._commits)
        self._plain_modules = PlainModules(self.store)
        self._record = RunRecord(self.store.run_directory, self.config.run_log)
        self._complete = False
        try:
            super().__init__(params, {**self.rule.torch_keys, **(torch_arguments or {}), **defaults})
            self._complete = True
            self._note_groups()
        except BaseException:
            self.store.close()
            raise
        if not any(group["params"] for group in self.param_groups):
            name = type(self).__name__
            warn_user(
                f"{name}: no parameter group has a parameter: nothing is trained before add_param_group adds some"
            )
        elif config.offload is not None and self.store.plan.units:
            CANDIDATES[0].tell(self.store.plan)

    @property  # type: ignore[override]
    def state(self) -> StateView:
        """State by parameter, read from its tier on access and written through; see `StateView`."""
        self._follow()
        return StateView(self.store)

    @state.setter
    def state(self, value: Mapping[torch.Tensor, Any]) -> None:
        if not self._complete:
            return  # torch's constructor, whose dict nobody fills
        if value:
            raise TypeError(
                "optimizer.state cannot be exchanged: the state is on its tier. Assign to the entries of a parameter, "
                "or use load_state_dict"
            )
        self.state.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, also after training has begun; they start with fresh state.

        One that was taken out of ``param_groups`` and comes back goes on with the state it had, as in torch.

        Raises:
            ValueError: a hyperparameter or a parameter cannot be used; names it.
            OutOfSpaceError: the paths cannot hold their state. After either, nothing was added.
        """
        with self.store.at_rest():
            self._follow()
            self._add_param_group(param_group)

    def _add_param_group(self, param_group: dict[str, Any]) -> None:
        number, first = len(self.param_groups), len(self.store.table)
        if isinstance(param_group, dict) and isinstance(param_group.get("params"), frozenset):
            param_group = {**param_group, "params": set(param_group["params"])}  # which torch refuses in words
        try:
            super().add_param_group(param_group)
            self.param_groups[-1]["params"] = shards_of(self.param_groups[-1]["params"])
            added = take_on(self.store, self.rule, self.param_groups[-1], number)
            if self.store.is_placed:
                self._stepper.schedules.forget()
                self.store.place_trainable(added)
            if self._complete:
                self._note_groups()
        except BaseException:
            if not self.store.slots_of(range(first, len(self.store.table))):  # else all is done, and stays
                del self.param_groups[number:]
                self.store.table.drop(first)
            raise

    def place(self) -> None:
        """Give the state its place now, not in the first step, and reserve all of its space.

        After that the parameters cannot be exchanged any more.

        Raises:
            OutOfSpaceError: the paths cannot hold it; names bytes needed and free.
            ConfigError: the host budget does not hold what must be in host memory.
            SwapIOError: state that goes to a tier at once could not be written.
            ValueError: a parameter that was put into the groups cannot be used; names it.
        """
        with self.store.at_rest():
            self._follow()
            self.store.place_trainable()
            self._stepper.watch(self.param_groups)

    def _note_groups(self) -> None:
        """Look at groups that are new: what has no place yet must find one, what has is watched."""
        if not self.store.is_placed:
            self.store.foresee()
        if self.store.is_placed:
            self._stepper.watch(self.param_groups)

    def _follow(self) -> None:
        self.store.check_process()
        follow(self.store, self.rule, self.param_groups)

    @not_compiled
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Writes go on behind it; see `synchronize`.

        Args:
            closure: reevaluates the model and returns the loss.

        Raises:
            StateError: the step before stopped halfway; see `finish_step`.
            SwapIOError: a read or write failed, perhaps one that ran behind the step before. A note says what is done.
            ValueError: a gradient cannot be used, or somebody exchanged the parameters; nothing has changed.
            KeyboardInterrupt: between two subgroups, or when all is done. A note says which.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # torch.amp.GradScaler.step leaves these two on the optimizer while it calls us.
        loss_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        try:
            self._follow()
            self._stepper.step(
                self.param_groups,
                None if loss_scale is None else float(loss_scale),
                None if found_inf is None else float(found_inf) > 0,
            )
        except BaseException:
            # GradScaler removes these after a step that returned. Left behind, they would scale the next one too.
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            raise
        self._end_step()
        return loss

    def _end_step(self) -> None:
        """Sum up the iteration of a step that was taken, have it last, and note how the run is."""
        self._meter.end_iteration(self._moved())
        self._wear.note_step()
        commits = self._commits
        if commits is not None and commits.engines_model is None:  # else the engine does it, when its part is done
            commits.end_step(self.param_groups, commits.step + 1)
        self._record.note(self._said)

    def try_step(self, loss_scale: float | None = None) -> bool:
        """`step` for a training engine, which has to know whether it was taken.

        Args:
            loss_scale: what the loss was multiplied by. Gradients are divided by it in registers, and a step that is
                skipped draws no warning: that is the loss scaler's ordinary business. None: not scaled.

        Returns:
            False where the step was skipped because a gradient is not finite, on any rank.

        Raises:
            StateError, SwapIOError, ValueError: see `step`.
        """
        skipped_before = self._meter.skipped_steps
        if loss_scale is not None:
            self.__dict__.update(grad_scale=loss_scale, found_inf=0.0)  # as GradScaler hands them over
        try:
            self.step()
        finally:
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
        return self._meter.skipped_steps == skipped_before

    @not_compiled
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip all gradients together, wherever they are: the next step multiplies them by one factor, in registers.

        ``torch.nn.utils.clip_grad_norm_`` for gradients on a tier, where ``p.grad`` is a stand-in. The gradients
        themselves stay as they are until then; `zero_grad` forgets the factor. With shards it is collective.

        Args:
            max_norm: largest norm, more than 0.

        Returns:
            The norm over all ranks before clipping, fp64 on the CPU, of gradients as stored.

        Raises:
            ValueError: `max_norm` is not more than 0.
        """
        if not max_norm > 0:
            what = f"max_norm is {max_norm} and has to be more than 0; zero_grad drops gradients"
            raise ValueError(f"clip_grad_norm_: {what}")
        self._follow()
        return torch.tensor(self._stepper.clip_grads(self.param_groups, max_norm), dtype=torch.float64, device="cpu")

    def expect_step(self, after_next_backward: bool, *, by_turns: bool = False) -> None:
        """Say whether `step` follows the next backward, or others come before it that add to the same gradients.

        Only an ``overlap_step`` that begins in backward needs it, and the engine calls it. In a loop without an engine
        every backward counts as the last one if ``gradient_accumulation_steps`` of the section is 1 or left
        out; else none does. In a durable run on several ranks none does: every rank calls this before the last
        backward of each step. In it the ranks agree that the step before is safe on all of them.

        Args:
            after_next_backward: whether `step` follows.
            by_turns: backward goes block by block, and `catch_up` is called after each block.

        Raises:
            SwapIOError, CorruptionError, StateError: what stopped the updates of the step before.
        """
        self.store.check_process()
        self._stepper.expect_step(after_next_backward, by_turns=by_turns)

    def catch_up(self) -> None:
        """Update what is final of parameters on a tier, between two blocks of a backward `by_turns`; else do nothing.

        Raises:
            SwapIOError, CorruptionError: it cannot be read, or not be written. Where something is updated already a
                checkpoint leads on.
        """
        self.store.check_process()
        self._stepper.final.catch_up()

    def overlap_with(self, model: nn.Module, blocks: Iterable[str] | None = None) -> None:
        """Let the updates of a plain module's parameters overlap with its passes, as ``overlap_step`` says.

        From then on `step` may return before they are updated. Every forward waits for the parameters that it uses. So
        does other code that reads or sets one (``p.data``, ``copy.deepcopy``, an average of weights): until its update
        is done, a parameter has a subclass of ``nn.Parameter`` that waits. Code that reads memory directly cannot wait.
        So call `synchronize` before you use a view, a detached alias or a NumPy array from before the step, and before
        you hand a parameter to C++ code, or to ``grad``, ``vjp`` or ``functionalize`` of ``torch.func``.

        It does nothing with ``overlap_step = "off"``, nor for parameters that are updated inside `step` in any case:
        those on a CUDA device, those of a class of their own, whole ones of a rule, and shards of FSDP.

        Args:
            model: any module with some of the parameters. Call this before ``torch.compile``; calling it once more
                takes back what the call before did.
            blocks: class names or qualified names of modules that wait for their own parameters, each when it is
                called. By default the repeated layers. For all other parameters the model waits when it is called.

        Raises:
            ValueError: no parameter in `model` is the optimizer's, a block names nothing, or a module is compiled.
        """
        with self.store.at_rest():
            self._follow()
            if self.config.overlap.hides:
                self._stepper.schedules.forget()
                self._plain_modules.watch(model, blocks)
                self._stepper.schedules.decide()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or with ``set_to_none=False`` make them zero, wherever they are.

        Updates behind a step keep the gradients that they need. Zeroing them in place waits for these updates.

        Raises:
            SwapIOError: gradients on a tier, or (zeroing in place) what stopped the updates.
        """
        self.store.check_process()
        if not set_to_none:
            self.store.wait_for_updates()
        self._stepper.clip_first = 1.0
        self._stepper.final.drop_begun()
        if self.store.is_whole and isinstance(self.store.worker.failure, ValueError):  # of a gradient that goes now
            self.store.worker.note_failure(None)
        super().zero_grad(set_to_none)

    @property
    def total_norm(self) -> float:
        """Norm of all gradients of the latest step over all ranks, unscaled, before clipping; NaN before the first."""
        return self._stepper.total_norm

    @property
    def had_gradients(self) -> bool:
        """Whether any parameter had a gradient in the latest step, on this rank or another one whose norm is counted.

        Without one a step does nothing, and says nothing, as torch's optimizers do.
        """
        return self._stepper.had_gradients

    @property
    def num_steps(self) -> int:
        """Steps taken since the optimizer was made."""
        return self._meter.steps

    @property
    def num_skipped_steps(self) -> int:
        """Steps skipped since construction, because a gradient was not finite."""
        return self._meter.skipped_steps

    @property
    def has_unfinished_step(self) -> bool:
        """Whether the latest step stopped halfway; see `finish_step`."""
        return self.store.has_unfinished_step

    @not_compiled
    @torch.no_grad()
    def finish_step(self) -> None:
        """Complete a step that stopped halfway, exactly as if it had not: gradients must not have changed since.

        Raises:
            StateError: there is nothing to finish, or it cannot be finished any more; says what to do.
            SwapIOError: it failed again.
        """
        if self.store.has_unfinished_step and self.store.condition.refuses(Need.REST_OF_STEP):
            self.store.wait_for_updates()  # says what cut it off, where nobody has heard it
        has_returned = self.store.record_in(StepPhase.STOPPED) is not None
        with self.store.at_rest(forgiving=True):
            self._stepper.finish()
        if not has_returned:
            self._end_step()
        elif self._commits is not None:
            self._commits.begin_pending()

    def synchronize(self) -> None:
        """Wait for the updates, writes and reads that still run behind the latest step.

        After it every reader finds the parameters as that step leaves them.

        Raises:
            SwapIOError: a write failed. The bytes are still in memory; calling again writes them again.
        """
        self.store.wait_until_quiet()
        with self.store.at_rest(parked=True):
            self.store.pipeline.synchronize()
            self.store.blocks.synchronize()

    def park(self) -> None:
        """Give memory back between two steps, while somebody else needs it: of devices, staging buffers, threads, heap.

        State and parameters with a place on NVMe are there alone then; those that the section keeps in host memory
        stay. State and shards in parts on a device go to host memory; their tensors stay the same objects. A plain
        module, and gradients in ``p.grad``, are yours and stay where they are. A durable run waits until its latest
        step lasts on this rank. Whoever uses any of it takes memory again, with the same bits. After an exception call
        it again, or go on.

        Raises:
            SwapIOError: something could not be written; it is still in memory.
            StateError: a step or a load stopped halfway.
        """
        self.synchronize()
        if self._commits is not None:
            self._commits.wait()
        gc.collect()
        self.store.park()
        free_unused(self.store.table.device)
        trim_heap()

    def wake(self) -> None:
        """Take memory again, now. Without it the first step or forward does.

        Raises:
            OutOfMemoryError: a device has no room for what was there. Nothing is lost: call it again when it has.
        """
        self.store.wake()

    def close(self) -> None:
        """Wait for what is under way, free the memory, delete the swap files but those of a durable run. Idempotent."""
        if self._commits is not None:
            self._commits.close()
        self._record.close(self._said)
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def weights(self, model: nn.Module, dtype: str = "own", *, since: str) -> WeightPatch:
        """Return what has changed of a model's weights since a version; see `OffloadEngine.weights`.

        Args:
            model: the module whose parameters these are. Its names are those of the patch.
            dtype: ``own``, as the parameters are, or ``bf16``, ``fp16`` or ``fp32``.
            since: a `weights_version`; for one that is not known (any more) the patch has all weights.
        """
        self._follow()
        return patch_of(model, self.store, since, dtype, {}, None)

    @property
    def weights_version(self) -> str:
        """The version of the parameters as they are; see `OffloadEngine.weights_version`."""
        self._follow()
        return version_of(self.store, {}, None)

    @property
    def is_durable(self) -> bool:
        """Whether each step is committed, so that a killed run goes on from there."""
        return self._commits is not None

    @property
    def durable(self) -> Durable:
        """The durable run of the state: commits, snapshots, ways back.

        Raises:
            StateError: the section does not say ``durable``.
        """
        if self._commits is None:
            name = type(self).__name__
            durable = 'a durable run ("durable": true in zero_optimization.offload_optimizer of the section)'
            raise StateError(name, durable, "one whose state ends with the process")
        return Durable(self._commits, self)

    @property
    def client_state(self) -> dict[str, Any]:
        """See `Durable.client_state`."""
        return self.durable.client_state

    @client_state.setter
    def client_state(self, value: Mapping[str, Any]) -> None:
        self.durable.client_state = dict(value)

    def commit(self) -> None:
        """See `Durable.commit`."""
        self.durable.commit()

    def resume(self, snapshot: str | None = None) -> tuple[int, dict[str, Any]] | None:
        """See `Durable.resume`."""
        return self.durable.resume(snapshot)

    def snapshot(self, name: str) -> int:
        """See `Durable.snapshot`."""
        return self.durable.snapshot(name)

    def remove_snapshot(self, name: str) -> None:
        """See `Durable.remove_snapshot`."""
        self.durable.remove_snapshot(name)

    def rewind(self, steps: int = 1) -> tuple[int, dict[str, Any]]:
        """See `Durable.rewind`."""
        return self.durable.rewind(steps)

    @not_compiled
    def state_dict(self) -> dict[str, Any]:
        """The whole state as ordinary fp32 tensors in host memory (4 bytes per parameter and state).

        The layout is torch's, with ``master`` beside the rule's states for 16-bit parameters.
        """
        with self.store.at_rest():
            self.store.check(Need.STATE)
            before, after = state_dict_hooks(self)
            for hook in before:
                hook(self)
            if not self.store.has_let_go:
                self._follow()
            packed = packed_state(self.store, self.param_groups)
            for hook in after:
                packed = packed if (changed := hook(self, packed)) is None else changed
            return packed

    @door
    @not_compiled
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of this class, or of torch's optimizer of that name, for the same parameters.

        If it holds ``master``, parameters get its rounded value. If not, masters start from the parameters as they
        are, with all parts of split ones. State that it does not hold starts afresh, as in torch.

        Raises:
            ValueError: it does not fit; names what. Nothing was changed.
            SwapIOError: part of the state is old and part is new; load again.
        """
        # The last of these hooks: it gets what the user's have made of the state dict.
        with self.store.at_rest(forgiving=True), running_last_before_load(self, OffloadOptimizer._take_over):
            super().load_state_dict(state_dict)
            self.store.be_whole()

    def _take_over(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Bring a state dict to the tiers; return what is left of it for torch: the groups."""
        store = self.store
        self._follow()
        store.table.members(self.param_groups)  # else a parameter that came late would be a KeyError
        saved = [without_torch_switches(group) for group in state_dict["param_groups"]]
        groups = with_own_states(self.rule, self.param_groups, saved)

        def check(group: Mapping[str, Any], number: int) -> None:
            self.check_group({**self.defaults, **group}, number)

        given = matched_state(store, self.param_groups, {**state_dict, "param_groups": groups}, check)
        entries = prepare_entries(store, given)
        store.pipeline.forget_failures()
        store.begin_load()
        write_entries(store, entries)
        return {"state": {}, "param_groups": groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's load_state_dict hands over groups and state; the state has gone to its tier already.
        self.param_groups = [{**self.defaults, **group} for group in state["param_groups"]]
        self._note_groups()

    def __getstate__(self) -> dict[str, Any]:
        name = type(self).__name__
        raise TypeError(f"{name} cannot be pickled or copied: its state is on a tier. Use state_dict()")

    def stats(self) -> OptimizerStats:
        """Counters since the optimizer was made, and figures of the latest step."""
        store, moved = self.store, self._moved()
        engine = store.tier.stats() if store.tier else None
        return OptimizerStats(
            **self._meter.stats,
            bytes_read=engine.bytes_read if engine else 0,
            bytes_written=engine.bytes_written if engine else 0,
            achieved_depth=engine.achieved_depth if engine else 0.0,
            engine=store.tier.name if store.tier else "host memory",
            engine_reason=store.tier.opened.reason if store.tier else "the state is in host memory",
            num_subgroups=len(store.slots),
            staging_bytes=store.staging_bytes,
            state_bytes=sum(slot.subgroup.size_bytes for slot in store.slots),
            host_state_bytes=store.host_state_bytes,
            device_state_bytes=store.device_state_bytes,
            total_norm=self._stepper.total_norm,
            clip_coef=self._stepper.clip_coef,
            overlap_wait_seconds=store.worker.wait_seconds,
            **self._wear.stats,
            **(self._commits.stats if self._commits is not None else {}),
            drive_busy_seconds=moved.busy_seconds,
            **store.blocks.stats(),
        )

    def __repr__(self) -> str:
        name, groups = super().__repr__().split("\n", 1)
        place = place_in_words(self.tier_plan, self.config, self.store.tier.name if self.store.tier else "")
        return f"{name}\n    rule: {self.rule.name}; {place}\n{groups}"

    def _said(self) -> dict[str, Any]:
        kept = self._engines.activations.stats() if self._engines.activations is not None else None
        return said(type(self).__name__, self.stats(), self.tier_plan, self.config, kept)

    @property
    def tier_plan(self) -> TierPlan:
        """Which subgroups live where, and what that moves in a step. ``print`` shows it as a table."""
        return self.store.plan

    def count_activations(self, activations: ActivationSwapper) -> None:
        """Count their bytes and waits with those of this optimizer: in ``stats().iteration``, wear and its record.

        A training engine does this.
        """
        self._engines.count(activations)

    def _moved(self) -> DriveTotals:
        self.store.check_process()
        counted, blocks, activations = self._engines.stats(), self.store.blocks.stats(), self._engines.activations
        waits = [blocks.get(f"{kind}_wait_seconds", 0.0) for kind in ("param", "grad")]
        waits += [activations.stats().seconds_waiting] if activations is not None else []
        return DriveTotals(
            sum(engine.bytes_read + engine.bytes_written for engine in counted),
            sum(engine.busy_ns for engine in counted) / 1e9 / self.config.aio.rings,
            sum(waits),
        )

    def timeline(self) -> list[Span]:
        """Return what the latest iteration did and when, and what has followed it; by time.

        It begins with the end of the step before. Work that the latest step left to do is in it as far as it is done:
        call `synchronize` first to have all of it. Forward and backward are in it if a training engine runs them, or
        if your loop marks them with `passing`.
        """
        return self._meter.timeline()

    def begin_iteration(self) -> None:
        """Leave the time since the latest step (an evaluation, a pause) out of `timeline` and ``stats().iteration``."""
        self._meter.begin_iteration(self._moved())

    def passing(self, kind: Literal["forward", "backward"]) -> AbstractContextManager[None]:
        """Put the block's time on the timeline as a pass of a micro-batch: ``with optimizer.passing("forward"):``."""
        return self._meter.passing(kind)

    def check_group(self, group: Mapping[str, Any], number: int) -> None:
        """Check hyperparameters that are to take the place of a group's.

        Raises:
            ValueError: one cannot be used, or asks for other states than the group has.
        """
        self._follow()
        records = [self.store.table.of(param) for param in self.param_groups[number]["params"]]
        check_group(self.rule, group, number, records, type(self).__name__)

    def _check_torch_arguments(self, arguments: Mapping[str, Any], known: Iterable[str]) -> None:
        """Raise TypeError for an argument that is not supported, or that torch's optimizer has not either.

        ``fused`` and ``foreach`` choose among torch's implementations; there is one here, so either value will do.
        """
        own = type(self).__name__
        for name, value in arguments.items():
            if name not in ("fused", "foreach", *self.rule.refused):
                raise TypeError(f"{own} has no argument {name!r}; its hyperparameters are {', '.join(known)}")
            if value and name in self.rule.refused:
                raise TypeError(f"{own}: {name} = {value!r} is not supported; leave it out")
