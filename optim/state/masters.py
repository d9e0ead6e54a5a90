"""One subgroup's update: state from a staging buffer, parameters and gradients from where they live."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.autograd.graph import increment_version

from nvme_offload.offload.shards.param_tier import TieredUpper
from nvme_offload.optim.kernels import KernelPool, make_segment
from nvme_offload.optim.layout.flat import Layout, flat_view, storage_of
from nvme_offload.optim.layout.master import BLOCK_NUMEL, MasterForm
from nvme_offload.optim.layout.subgroup import Run, Subgroup
from nvme_offload.optim.rules.rule import UpdateRule
from nvme_offload.optim.state.device_mirror import DeviceMirror
from nvme_offload.optim.state.pipeline import Memory
from nvme_offload.optim.state.slots import SlotRecord
from nvme_offload.optim.tiers.grad_tier import PartitionStandIn
from nvme_offload.optim.tiles import RunTensors, StepScalars, update_in_torch, update_whole
from nvme_offload.optim.whole_params import WholeParams


@dataclass
class ParamTable:
    """The optimizer's parameters, flat and in order, and the checksums of what the kernel last wrote to them."""

    leaves: list[torch.Tensor] = field(default_factory=list)
    """As the user knows them: they carry the gradients."""
    params: list[torch.Tensor] = field(default_factory=list)
    """What of them is in this process's memory: see `storage_of`."""
    names: list[str] = field(default_factory=list)
    checksums: list[torch.Tensor | None] = field(default_factory=list)
    """int64 per block of 65536 elements; None for fp32 parameters, which are their own master."""
    layouts: list[Layout] = field(default_factory=list)
    first_lower: dict[int, torch.Tensor] = field(default_factory=dict)
    """Lower halves, uint16, of split shards whose subgroups are not born yet, by index."""
    uppers: dict[int, TieredUpper] = field(default_factory=dict)
    """Where on the parameter tier a parameter is, by index; of the others there is nothing."""

    @contextmanager
    def reaching(self, run: Run, *, change: bool) -> Iterator[torch.Tensor]:
        """A run of a parameter, 1D [run.numel], outside the step; what is done to it with `change` is kept.

        Raises:
            SwapIOError: it is on a tier and cannot be read.
        """
        upper = self.uppers.get(run.param)
        with upper.held(change=change) if upper is not None else nullcontext():
            yield self.run_of(run)

    def copy_of(self, run: Run) -> torch.Tensor:
        """The same, to be read on the CPU: a copy, unless it is in host memory for good."""
        with self.reaching(run, change=False) as param:
            # A staging buffer may be another block's right after this.
            return param.clone() if run.param in self.uppers else param.cpu()

    def run_of(self, run: Run) -> torch.Tensor:
        """The same inside the step, which holds the block of a parameter on a tier."""
        upper = self.uppers.get(run.param)
        if upper is not None:
            return upper.view()[run.start : run.stop]
        return flat_view(self.params[run.param])[run.start : run.stop]

    def check_layouts(self) -> None:
        """Look where parameters are now; raise ValueError for one that no longer lies in memory as it did."""
        self.params[:] = [storage_of(leaf) for leaf in self.leaves]
        for leaf, name, layout in zip(self.leaves, self.names, self.layouts, strict=True):
            if (found := Layout.of(leaf)) != layout:
                raise ValueError(f"{name} was {layout} and is now {found}: make the optimizer after converting a model")

    def checksums_of(self, run: Run) -> torch.Tensor | None:
        """The part of the table that belongs to a run."""
        table = self.checksums[run.param]
        if table is None:
            return None
        return table[run.start // BLOCK_NUMEL : -(-run.stop // BLOCK_NUMEL)]


@dataclass(frozen=True)
class StepInputs:
    """What a step needs besides the state; fixed when the step begins."""

    grads: Mapping[int, torch.Tensor]
    """Flat gradient by parameter index; parameters without a gradient are absent."""
    scalars: Mapping[int, StepScalars]
    """By parameter index: the bias corrections follow each parameter's own step."""
    whole: WholeParams
    """Those that their rule needs whole."""


def _flat(grad: torch.Tensor) -> torch.Tensor:
    """A gradient in memory, 1D. Where it is on a tier, its block must be held."""
    return grad.flat if isinstance(grad, PartitionStandIn) else grad


def section_view(subgroup: Subgroup, memory: Memory, name: str, run: Run) -> torch.Tensor | None:
    """A run's part of the section ``master`` or of a state; None where there is no such section."""
    section = subgroup.sections.get(name)
    if section is None:
        return None
    dtype, offset = section
    return memory.view(dtype, offset + run.at * dtype.itemsize, run.numel)


def state_views(subgroup: Subgroup, memory: Memory, run: Run) -> list[torch.Tensor]:
    """A run's part of every state of the rule, in the rule's order."""
    places = [subgroup.sections[state.name] for state in subgroup.rule.states]
    return [memory.view(dtype, offset + run.at * dtype.itemsize, run.numel) for dtype, offset in places]


def give_birth(slot: SlotRecord, memory: Memory, table: ParamTable, pool: KernelPool) -> None:
    """First state of a subgroup: as its rule begins, and masters equal to the parameters as they are now."""
    subgroup = slot.subgroup
    memory.view(torch.uint8, 0, subgroup.size_bytes).zero_()
    for state in subgroup.rule.states:
        if state.birth:
            dtype, offset = subgroup.sections[state.name]
            memory.view(dtype, offset, subgroup.padded_numel).fill_(state.birth)
    for run in subgroup.runs:
        checksums = table.checksums_of(run)
        if checksums is not None:
            host = table.copy_of(run)
            pool.block_checksums(host, out=checksums)
            if subgroup.form is MasterForm.FULL:
                master = section_view(subgroup, memory, "master", run)
                assert master is not None
                master.copy_(pool.fp16_to_fp32(host))
            elif run.param in table.first_lower:
                master = section_view(subgroup, memory, "master", run)
                assert master is not None
                master.copy_(table.first_lower[run.param][run.start : run.stop])


def update_subgroup(
    slot: SlotRecord,
    memory: Memory,
    inputs: StepInputs,
    table: ParamTable,
    pool: KernelPool,
    mirror: DeviceMirror | None,
) -> int:
    """Update the state in `memory` and the parameters it belongs to.

    Returns:
        Blocks of 65536 elements that somebody else had changed since the last update.
    """
    subgroup = slot.subgroup
    copies = mirror.take(subgroup) if mirror else None
    rule = subgroup.rule
    work: dict[int, RunTensors] = {}
    for run in subgroup.runs:
        if run.param not in inputs.grads:
            continue
        param = table.run_of(run)
        grad = _flat(inputs.grads[run.param])[run.start : run.stop]
        if copies is not None:
            param, grad = copies.param(run, param.dtype), copies.grad(run, grad.dtype)
        master, states = section_view(subgroup, memory, "master", run), state_views(subgroup, memory, run)
        scalars = inputs.scalars[run.param]
        work[run.param] = RunTensors(param, grad, master, states, table.checksums_of(run), scalars)
    if rule.whole:
        changed_blocks = sum(
            update_whole(rule, run, table.params[index], pool, partial(inputs.whole.through, index))
            for index, run in work.items()
        )
    elif rule.kernel:
        changed_blocks = _update_natively(rule, list(work.values()), pool)
    else:
        changed_blocks = sum(update_in_torch(rule, run, pool) for run in work.values())
    if mirror and copies is not None:
        mirror.store(subgroup, copies, table.params, inputs.grads)
    # The kernel writes by address: without this, a graph kept from before the step would use the new values unnoticed.
    increment_version([table.leaves[run.param] for run in subgroup.runs if run.param in inputs.grads])
    return changed_blocks


def _update_natively(rule: UpdateRule, work: Sequence[RunTensors], pool: KernelPool) -> int:
    segments = [
        make_segment(
            param=run.param,
            grad=run.grad,
            master=run.master,
            states=run.states,
            checksums=run.checksums,
            rule=rule,
            scalars=run.scalars.of_rule,
            grad_scale=run.scalars.grad_scale,
        )
        for run in work
    ]
    return sum(pool.update(segments))


def write_master(
    run: Run, values: torch.Tensor, subgroup: Subgroup, memory: Memory, table: ParamTable, pool: KernelPool
) -> None:
    """Set master weights: the parameter gets their rounded value, the state the rest.

    Args:
        run: which elements.
        values: fp32 [run.numel] on the CPU.
        subgroup: where the run belongs.
        memory: the subgroup's state.
        table: the parameter itself and its checksums.
        pool: kernels.
    """
    master = section_view(subgroup, memory, "master", run)
    if subgroup.form is MasterForm.ITSELF:
        table.run_of(run).copy_(values)
        return
    assert master is not None
    if subgroup.form is MasterForm.SPLIT:
        rounded, _ = pool.split(values, out=(torch.empty(run.numel, dtype=torch.bfloat16), master))
    else:
        rounded = pool.fp32_to_fp16(values)
        master.copy_(values)
    with table.reaching(run, change=True) as param:
        param.copy_(rounded)
    checksums = table.checksums_of(run)
    if checksums is not None:
        pool.block_checksums(rounded, out=checksums)


def read_master(run: Run, subgroup: Subgroup, memory: Memory, table: ParamTable, pool: KernelPool) -> torch.Tensor:
    """Master weights of a run, fp32 [run.numel] on the CPU.

    Where somebody changed the parameter since the last update, the parameter is the truth: see `update_subgroup`.
    """
    param = table.copy_of(run)
    if subgroup.form is MasterForm.ITSELF:
        return param.clone()
    master = section_view(subgroup, memory, "master", run)
    assert master is not None
    joined = pool.join(param, master) if subgroup.form is MasterForm.SPLIT else master.clone()
    known = table.checksums_of(run)
    assert known is not None
    changed = (pool.block_checksums(param) != known).nonzero().flatten().tolist()
    for block in changed:
        part = slice(block * BLOCK_NUMEL, (block + 1) * BLOCK_NUMEL)
        joined[part] = param[part].float()
    return joined
