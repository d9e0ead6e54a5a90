"""Read and write master weights in the memory of a subgroup, and give its state the first values."""

import torch

from nvme_offload.offload.devices.device import is_host
from nvme_offload.offload.storage.tier import Memory
from ..kernels import KernelPool
from ..layout.master import TILE_NUMEL, MasterForm
from ..layout.subgroup import Run, section_view
from .slots import SlotRecord
from .table import ParamTable


def give_birth(slot: SlotRecord, memory: Memory, table: ParamTable, pool: KernelPool) -> None:
    """Fill a subgroup's first state: as its rule begins, and masters equal to the parameters as they are now."""
    subgroup = slot.subgroup
    memory.view(torch.uint8, 0, subgroup.size_bytes).zero_()
    for state in subgroup.rule.states:
        if state.birth:
            section = subgroup.sections[state.name]
            memory.view(section.dtype, section.offset, subgroup.padded_numel).fill_(state.birth)
    for run in subgroup.runs:
        if table[run.param].checksums is not None:
            host = table[run.param].copy_of(run)
            table.note_edits(run, host, pool, on_device=slot.home.on_device)
            table[run.param].note_written(run, host, pool, on_device=slot.home.on_device)
            rest, master = table[run.param].first_rest, section_view(subgroup, memory, "master", run)
            assert master is not None
            if rest is not None:
                master.copy_(run.part(rest))
            elif subgroup.form is MasterForm.FULL:
                master.copy_(pool.fp16_to_fp32(host))


def write_master(
    run: Run, values: torch.Tensor, slot: SlotRecord, memory: Memory, table: ParamTable, pool: KernelPool
) -> None:
    """Set a run's master weights to fp32 values on the CPU: the parameter gets them rounded, the state the rest."""
    record, master = table[run.param], section_view(slot.subgroup, memory, "master", run)
    with record.reaching(run, change=True) as param:
        rounded = param if is_host(param.device) else torch.empty(run.numel, dtype=param.dtype, device="cpu")
        if master is None or not slot.home.on_device:
            pool.divide(values, rounded, master)
        else:
            there = torch.empty(run.numel, dtype=master.dtype, device="cpu")
            pool.divide(values, rounded, there)
            master.copy_(there)
        if rounded is not param:
            param.copy_(rounded)
        record.note_written(run, rounded, pool, on_device=slot.home.on_device)
    table.marks.note(run)


def read_master(run: Run, slot: SlotRecord, memory: Memory, table: ParamTable, pool: KernelPool) -> torch.Tensor:
    """Return the master weights of a run, fp32 [run.numel] on the CPU. A parameter that somebody changed counts."""
    param = table[run.param].copy_of(run)
    master = section_view(slot.subgroup, memory, "master", run)
    joined = pool.joined(param, master if master is None else master.cpu())
    for block in table[run.param].changed_tiles(run, param, pool, on_device=slot.home.on_device):
        part = slice(block * TILE_NUMEL, (block + 1) * TILE_NUMEL)
        joined[part] = param[part].float()
    return joined
