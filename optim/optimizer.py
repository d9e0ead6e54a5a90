"""An optimizer whose state lives on a tier, whatever its update rule: what torch and a training loop see of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from nvme_offload.offload._torch_private import not_compiled, state_dict_hooks
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.errors import StateError
from nvme_offload.offload.storage.tier_plan import TierPlan
from nvme_offload.optim.grad_norm import clip_coefficient, total_norm
from nvme_offload.optim.interrupt import DeferredInterrupt
from nvme_offload.optim.layout.flat import check_no_overlap, check_no_repeats, check_param, flat_grad, storage_of
from nvme_offload.optim.rules.rule import UpdateRule, rounded, without_torch_switches
from nvme_offload.optim.state.entries import (
    StateView,
    entry_names,
    fresh_entry_of,
    prepare_entries,
    read_entries,
    write_entries,
)
from nvme_offload.optim.state.masters import StepInputs, update_subgroup
from nvme_offload.optim.state.progress import UnfinishedStep
from nvme_offload.optim.state.slots import SlotRecord
from nvme_offload.optim.state.store import StateStore
from nvme_offload.optim.stats import Meter, OptimizerStats, Span
from nvme_offload.optim.tiers.halves import split_shard
from nvme_offload.optim.tiles import StepScalars
from nvme_offload.optim.warn import warn_user
from nvme_offload.optim.whole_params import WholeParams


class OffloadOptimizer(Optimizer):
    """An optimizer with its state on NVMe or in host memory; a subclass names its rule and torch's arguments.

    Args:
        params: parameters, or dicts of parameter groups, as for any torch optimizer.
        defaults: hyperparameters by name, for groups that do not have their own.
        offload: the configuration section, as `OffloadConfig`, dict or path of a JSON or TOML file.
        norm_group: further ranks whose gradients belong to the same global norm, although their parameters are others.
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
    """Of the subclass; a group's own may differ in its states, see `UpdateRule.of`."""

    _step_supports_amp_scaling = True
    """Tells ``torch.amp.GradScaler`` to leave the unscaling to us."""

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        offload: OffloadConfig | Mapping[str, Any] | str | Path,
        norm_group: dist.ProcessGroup | None = None,
        torch_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._check_torch_arguments(torch_arguments or {})
        self.config = OffloadConfig.of(offload)
        self._meter = Meter()
        self._total_norm = float("nan")
        self._clip_coef = 1.0
        self._norm_group = norm_group
        self._clip_first = 1.0  # by clip_grad_norm_, to be done in the next step
        self._store = StateStore(self.config, self._meter, self.rule, type(self).__name__)
        self._complete = False
        try:
            super().__init__(params, defaults)
            self._complete = True
            # All groups at once: a full disk is found before the first extent is handed out.
            self._store.place_trainable()
        except BaseException:
            self._store.close()
            raise

    @property  # type: ignore[override]
    def state(self) -> StateView:
        """State by parameter, read from its tier on access and written through; see `StateView`."""
        return StateView(self._store)

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
            OutOfSpaceError: the paths cannot hold their state.
            Nothing was added then.
        """
        self._store.check_usable()
        number = len(self.param_groups)
        table = self._store.table
        first = len(table.params)
        try:
            super().add_param_group(param_group)
            group = self.param_groups[-1]
            self.rule.check(group, number)
            rule = self.rule.of(group)
            places = range(len(group["params"]))
            names = group.get("param_names") or [f"parameter {place} of group {number}" for place in places]
            check_no_repeats(group["params"], names)
            pairs = zip(group["params"], names, strict=True)
            new = {param: name for param, name in pairs if param not in self._store.indices}
            for param, name in new.items():
                check_param(storage_of(param), name)
                rule.check_param(param, name)
            check_no_overlap([*table.params, *map(storage_of, new)], [*table.names, *new.values()])
            added = self._store.add_params(number, rule, list(new), list(new.values()))
            if self._complete:
                self._store.place_trainable(added)
        except BaseException:
            del self.param_groups[number:]
            self._store.drop_params(first)
            raise

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
        self._store.check_usable()
        if self._store.unfinished is not None:
            raise self._store.unfinished.refusal("a finished step")
        number = self._meter.steps + 1
        try:
            with DeferredInterrupt() as interrupt, self._meter.stepping():
                self._step(interrupt)
        except BaseException as error:
            # GradScaler removes these after a step that returned. Left behind, they would scale the next one too.
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            error.add_note(self._where_it_stands(number))
            raise
        return loss

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

    def _step(self, interrupt: DeferredInterrupt) -> None:
        store = self._store
        self._meter.spans.clear()
        grads = self._collect_grads()
        if not grads and self._norm_group is None:
            return
        store.ensure_placed(grads)
        grad_scale = self._grad_scale(grads)
        inputs = None
        if grads and grad_scale is not None:
            inputs = StepInputs(grads, self._scalars(grads, grad_scale), self._whole_params(grads))
        if inputs is not None:
            order = self._ordered(
                [slot for slot in store.slots if any(run.param in grads for run in slot.subgroup.runs)]
            )
            counts = {index: store.steps[index] + 1 for index in grads}
            step = UnfinishedStep(
                self._meter.steps + 1, order, inputs, counts, split=store.has_split_params, owner=store.owner
            )
            # Not earlier: where a hyperparameter is refused, the step is still to come. And no call in between: whoever
            # interrupts finds the factor, or a step that has it.
            store.unfinished = step
            self._clip_first = 1.0
            self._go_on(step, inputs, interrupt)

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
        """
        self._store.check_usable()
        grads = self._collect_grads()
        norm = self._clip_first * total_norm(
            self._store.table.leaves, grads, self._store.kernels, norm_group=self._norm_group
        )
        self._clip_first *= clip_coefficient(norm, max_norm)
        return torch.tensor(norm, dtype=torch.float64)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or with ``set_to_none=False`` make them zero, wherever they are."""
        self._clip_first = 1.0
        super().zero_grad(set_to_none)

    @property
    def total_norm(self) -> float:
        """Norm of all gradients of the latest step over all ranks, unscaled, before clipping; NaN before the first."""
        return self._total_norm

    @property
    def has_unfinished_step(self) -> bool:
        """Whether the latest step stopped halfway; see `finish_step`."""
        return self._store.unfinished is not None

    @not_compiled
    @torch.no_grad()
    def finish_step(self) -> None:
        """Complete a step that stopped halfway, exactly as if it had not: gradients must not have changed since.

        Raises:
            StateError: there is nothing to finish, or it cannot be finished any more; says what to do.
            SwapIOError: it failed again.
        """
        self._store.check_usable()
        unfinished = self._store.unfinished
        if unfinished is None:
            raise StateError(type(self).__name__, "a step that stopped halfway", "no such step")
        self._store.table.check_layouts()
        inputs = unfinished.check_resumable()
        try:
            with DeferredInterrupt() as interrupt:
                self._store.pipeline.forget_failures()
                self._go_on(unfinished, inputs, interrupt)
        except BaseException as error:
            error.add_note(self._where_it_stands(unfinished.number))
            raise

    def _where_it_stands(self, number: int) -> str:
        """What has been done of a step that an exception comes out of, and the way on."""
        unfinished = self._store.unfinished
        if unfinished is not None:
            return f"{unfinished.situation}. {unfinished.way_on}"
        if self._meter.steps >= number:
            return f"Step {number} is complete."
        return f"Step {number} has updated nothing: parameters and state are as before, and step() can be called again."

    def synchronize(self) -> None:
        """Wait for the writes that still run behind the latest step.

        Raises:
            SwapIOError: a write failed. The bytes are still in memory; calling again writes them again.
        """
        self._store.check_usable()
        self._store.pipeline.synchronize()
        self._store.blocks.synchronize()

    def close(self) -> None:
        """Wait for what is under way, free the memory, delete the swap files. Idempotent. No-op in a forked child."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @not_compiled
    def state_dict(self) -> dict[str, Any]:
        """The whole state as ordinary fp32 tensors in host memory (4 bytes per parameter and state).

        The layout is torch's, with ``master`` beside the rule's states for 16-bit parameters.
        """
        self._store.check_whole()
        before, after = state_dict_hooks(self)
        for hook in before:
            hook(self)
        packed = self._packed_state()
        for hook in after:
            packed = packed if (changed := hook(self, packed)) is None else changed
        return packed

    def _packed_state(self) -> dict[str, Any]:
        """As torch packs it: parameters are numbered as they stand in the groups, what is in no group is left out."""
        store = self._store
        members = [store.indices[param] for group in self.param_groups for param in group["params"]]
        placed = {index: entry_names(store, index) for index in members if store.is_placed(index)}
        tensors = read_entries(store, placed)
        numbered = {index: number for number, index in enumerate(members)}
        return {
            "state": {
                numbered[index]: {"step": torch.tensor(float(store.steps[index])), **tensors[index]} for index in placed
            },
            "param_groups": [
                {**group, "params": [numbered[store.indices[param]] for param in group["params"]]}
                for group in self.param_groups
            ],
        }

    @not_compiled
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of this class, or of torch's optimizer of that name, for the same parameters.

        Where it holds ``master``, parameters get its rounded value; where it does not, masters start from the
        parameters as they are, split ones with both halves. What it does not hold starts afresh, as in torch.

        Raises:
            ValueError: it does not fit; names what. Nothing was changed.
            SwapIOError: part of the state is old and part is new; load again.
        """
        self._store.check_usable()
        # The last of these hooks: it gets what the user's have made of the state dict.
        last = self.register_load_state_dict_pre_hook(OffloadOptimizer._take_over)  # type: ignore[arg-type]
        try:
            super().load_state_dict(state_dict)
            self._store.unfinished = None
        finally:
            last.remove()

    def _take_over(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Bring a state dict to the tiers; returns what is left of it for torch: the groups."""
        store = self._store
        groups = [without_torch_switches(group) for group in state_dict["param_groups"]]
        entries = prepare_entries(store, self._match_state({**state_dict, "param_groups": groups}))
        store.pipeline.forget_failures()
        store.unfinished = UnfinishedStep.of_load(split=store.has_split_params, owner=store.owner)
        write_entries(store, entries)
        return {"state": {}, "param_groups": groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's load_state_dict hands over groups and state; the state has gone to its tier already.
        self.param_groups = [{**self.defaults, **group} for group in state["param_groups"]]

    def __getstate__(self) -> dict[str, Any]:
        name = type(self).__name__
        raise TypeError(f"{name} cannot be pickled or copied: its state is on a tier. Use state_dict()")

    def stats(self) -> OptimizerStats:
        """Counters since construction."""
        store, meter = self._store, self._meter
        engine = store.tier.stats() if store.tier else None
        return OptimizerStats(
            steps=meter.steps,
            skipped_steps=meter.skipped_steps,
            bytes_read=engine.bytes_read if engine else 0,
            bytes_written=engine.bytes_written if engine else 0,
            step_seconds=meter.step_seconds,
            wait_seconds=meter.wait_seconds,
            compute_seconds=meter.compute_seconds,
            achieved_depth=engine.achieved_depth if engine else 0.0,
            engine=store.tier.name if store.tier else "host memory",
            engine_reason=store.tier.engine_reason if store.tier else "the state is in host memory",
            num_subgroups=len(store.slots),
            staging_bytes=store.staging_bytes,
            state_bytes=sum(slot.subgroup.size_bytes for slot in store.slots),
            host_state_bytes=store.host_state_bytes,
            total_norm=self._total_norm,
            clip_coef=self._clip_coef,
            resplit_blocks=meter.resplit_blocks,
            **store.blocks.stats(),
        )

    @property
    def tier_plan(self) -> TierPlan:
        """Which subgroups live where, and what that moves in a step. ``print`` shows it as a table."""
        return self._store.plan

    def timeline(self) -> list[Span]:
        """What the latest step did and when; call `synchronize` first to have its last writes in it."""
        return sorted(self._meter.spans, key=lambda span: span.start_ns)

    def _collect_grads(self) -> dict[int, torch.Tensor]:
        """Flat gradient by parameter index, of those that are in a group and have one; empty where the shard is."""
        table = self._store.table
        members = self._store.members(self.param_groups)
        table.check_layouts()
        grads = {index: flat_grad(table.leaves[index], table.names[index]) for index in members}
        return {index: grad for index, grad in grads.items() if grad is not None}

    def _grad_scale(self, grads: Mapping[int, torch.Tensor]) -> float | None:
        """What stored gradients are multiplied by (inv_scale x clip_coef), or None when the step must be skipped."""
        # torch.amp.GradScaler.step leaves these two on the optimizer while it calls us.
        scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        inv_scale = (1.0 if scale is None else 1.0 / float(scale)) * self._clip_first
        with self._meter.computing("norm", -1):
            norm = total_norm(
                self._store.table.leaves,
                grads,
                self._store.kernels,
                norm_group=self._norm_group,
                found_inf=found_inf is not None and float(found_inf) > 0,
            )
        self._total_norm = norm * inv_scale
        if not math.isfinite(self._total_norm):
            self._meter.skipped_steps += 1
            self._clip_first = 1.0
            if found_inf is None:
                warn_user(
                    f"gradient norm is {self._total_norm}: step skipped, parameters and state are as before "
                    "(counted in stats().skipped_steps)"
                )
            return None
        self._clip_coef = clip_coefficient(self._total_norm, self.config.gradient_clipping)
        return inv_scale * self._clip_coef

    def _scalars(self, grads: Mapping[int, torch.Tensor], grad_scale: float) -> dict[int, StepScalars]:
        scalars = {}
        by_step: dict[tuple[int, int], StepScalars] = {}  # most parameters of a group are at the same step
        for number, group in enumerate(self.param_groups):
            self.check_group(group, number)  # schedulers write to them
            rule = self.rule.of(group)
            for param in group["params"]:
                index = self._store.indices[param]
                if index not in grads:
                    continue
                key = number, self._store.steps[index] + 1
                if key not in by_step:
                    [scale] = rounded(-grad_scale if group.get("maximize") else grad_scale)
                    by_step[key] = StepScalars(rule.scalars(group, key[1]), scale)
                scalars[index] = by_step[key]
        return scalars

    def _ordered(self, slots: list[SlotRecord]) -> list[SlotRecord]:
        """Subgroups in the order of this step, which is the same on every rank as far as whole parameters go."""
        if self.rule.whole:
            slots = sorted(slots, key=lambda slot: slot.subgroup.runs[0].param)
        slots = self._store.blocks.in_order(slots)
        return slots if self._meter.steps % 2 == 0 else slots[::-1]

    def _whole_params(self, grads: Mapping[int, torch.Tensor]) -> WholeParams:
        """Those that will be updated whole, in the order of `_ordered`; on ranks that have nothing of one, too."""
        store = self._store
        indices = sorted(index for index in grads if store.rule_of(index).whole)
        if store.blocks.exist:
            indices.sort(key=lambda index: store.blocks.number_of(store.table.leaves[index]))
        order = indices if self._meter.steps % 2 == 0 else indices[::-1]
        return WholeParams(store.table.leaves, order, self.rule.gathered_dtype)

    def _go_on(self, step: UnfinishedStep, inputs: StepInputs, interrupt: DeferredInterrupt) -> None:
        """Do what is left of a step. Ctrl-C is honoured between subgroups, so that the step can be finished later."""

        def on_pause() -> None:
            interrupt.deliver()
            self._store.blocks.advance()

        self._update_subgroups(step, inputs, on_pause)
        # Set and not counted on, so that it may be cut short and done once more.
        for index, count in step.counts.items():
            self._store.steps[index] = count
        self._meter.steps = step.number
        self._store.blocks.end_step(step.order)
        self._store.unfinished = None
        self._store.blocks.advance()  # last: whatever stops it, the step is done
        self._report_changed(step.changed_blocks)

    def _update_subgroups(self, step: UnfinishedStep, inputs: StepInputs, on_pause: Callable[[], None]) -> None:
        store = self._store
        store.pipeline.on_pause = on_pause
        if store.mirror:
            store.mirror.begin_step()
        store.blocks.begin_step(step.order[step.done :])
        try:
            self._update_rest(step, inputs, on_pause)
        finally:
            store.pipeline.on_pause = lambda: None
            # Also after a failure: the device must not read parameters that are still on their way to it.
            if store.mirror:
                store.mirror.end_step()

    def _update_rest(self, step: UnfinishedStep, inputs: StepInputs, on_pause: Callable[[], None]) -> None:
        store, meter = self._store, self._meter
        for position in range(step.done, len(step.order)):
            on_pause()
            slot = step.order[position]
            if store.mirror:
                for ahead in step.order[position : position + 2]:
                    store.mirror.fetch(ahead.subgroup, store.table.params, inputs.grads)
            memory = store.pipeline.acquire(step.order, position)
            with store.blocks.held_for_update(slot, inputs.grads):
                step.updating = True
                store.pipeline.will_change(slot)
                with meter.computing("compute", slot.subgroup.index):
                    changed = update_subgroup(slot, memory, inputs, store.table, store.kernels, store.mirror)
                step.changed_blocks += changed
                step.done = position + 1
                step.updating = False
                store.pipeline.release(slot)
        inputs.whole.finish()

    def _report_changed(self, changed_blocks: int) -> None:
        self._meter.resplit_blocks += changed_blocks
        if changed_blocks:
            warn_user(
                f"{changed_blocks} blocks of 65536 elements were changed between steps by something other than this "
                "optimizer: their master weights now start from the changed 16-bit values (the moments are kept)"
            )

    def check_group(self, group: Mapping[str, Any], number: int) -> None:
        """Check hyperparameters that are to take the place of a group's.

        Raises:
            ValueError: one cannot be used, or asks for other states than the group has.
        """
        self.rule.check(group, number)
        other = self.rule.of(group)
        for param in self.param_groups[number]["params"]:
            if (own := self._store.rule_of(self._store.indices[param])) != other:
                asked = ", ".join(f"{key} = {group[key]!r}" for key in self.rule.shaping)
                raise ValueError(
                    f"parameter group {number}: {asked}: its state is then {_listed(other)}, and it was made with "
                    f"{_listed(own)}; make a new {type(self).__name__} for that"
                )

    def _check_torch_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Check arguments that torch's optimizer has and this one does not name.

        ``fused`` and ``foreach`` choose among torch's implementations; there is one here, so either value will do.

        Raises:
            TypeError: it asks for what is not supported, or torch has no such argument either.
        """
        own = type(self).__name__
        for name, value in arguments.items():
            if name not in ("fused", "foreach", *self.rule.refused):
                raise TypeError(f"{own} has no argument {name!r}")
            if value and name in self.rule.refused:
                raise TypeError(f"{own}: {name} = {value!r} is not supported; leave it out")

    def _match_state(self, state_dict: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """The entries of a state dict by parameter index.

        Raises:
            ValueError: groups or entries do not fit this optimizer.
        """
        groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        own_sizes = [len(group["params"]) for group in self.param_groups]
        if sizes != own_sizes:
            raise ValueError(
                f"the state dict has parameter groups of {sizes} parameters, this optimizer of {own_sizes}"
            )
        for number, group in enumerate(groups):
            self.check_group({**self.defaults, **group}, number)
        saved = [key for group in groups for key in group["params"]]
        own = [self._store.indices[param] for group in self.param_groups for param in group["params"]]
        given = {}
        for index, key in zip(own, saved, strict=True):
            rule = self._store.rule_of(index)
            entries = rule.adopted(state_dict["state"].get(key, {}))
            known = entry_names(self._store, index)
            if unknown := sorted(set(entries) - {*known, "master"}):
                name = self._store.table.names[index]
                raise ValueError(f"state of {name} holds {unknown[0]!r}; {rule.name} has {', '.join(known)}")
            if entries or self._store.is_placed(index):
                store = self._store
                # The master of a split shard is the parameter itself: not given, it stays.
                stays = {"master"} - set(entries) if split_shard(store.table.leaves[index]) is not None else set()
                given[index] = {
                    name: entries[name] if name in entries else fresh_entry_of(store, index, name)
                    for name in known
                    if name not in stays
                }
        return given


def _listed(rule: UpdateRule) -> str:
    return ", ".join(f"{state.name} (from {state.birth:g})" for state in rule.states) or "none"
