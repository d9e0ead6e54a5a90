"""Describe blocks of parameters and gradients as units of the tier plan: their bytes, and what a step moves."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.shards.param_tier import KIND as PARAMS
from nvme_offload.offload.shards.param_tier import block_layout
from nvme_offload.offload.shards.stored import Padded
from nvme_offload.offload.storage.tier_plan import Tier, Unit
from nvme_offload.offload.units import round_up
from .grad_tier import KIND as GRADS

STAGING = "staging buffers"
"""This is the kind of the units that are staging buffers, whatever passes through them."""


def param_unit(
    config: OffloadConfig,
    name: str,
    forms: Iterable[Padded],
    *,
    trainable: bool,
    page: int = 4096,
    in_files: int | None = None,
) -> Unit:
    """Return the unit of a block of parameters: forward and backward gather it, an update reads and writes it.

    `name` and `forms` are of the group that FSDP2 gathers together. Extents are rounded up to `page` bytes.
    `in_files` are the bytes of a block that others wrote, in a buffer.
    """
    size_bytes = in_files or round_up(block_layout((form.numel, form.dtype) for form in forms)[1], page)
    gathers = 1 if config.zero_optimization.stage in (1, 2) else 2  # those stages keep what forward gathered
    reads = gathers * config.rounds + trainable
    choice = _choice(config, config.zero_optimization.offload_param.device)
    return Unit(f"{PARAMS} of {name}", PARAMS, size_bytes, reads * size_bytes, trainable * size_bytes, choice)


def keep_first(left: int, blocks: Iterable[tuple[Unit, Sequence[Padded]]]) -> list[Unit]:
    """Let the first blocks of parameters that would be on NVMe stay in host memory, up to `left` elements."""
    units = []
    for unit, forms in blocks:
        numel = sum(form.numel for form in forms)
        stays = unit.tiers == ("nvme",) and numel <= left
        left -= numel if stays else 0
        units.append(replace(unit, tiers=("host",)) if stays else unit)
    return units


def grad_unit(
    config: OffloadConfig, name: str, partitions: Sequence[tuple[int, torch.dtype]], *, page: int = 4096
) -> Unit:
    """Return the unit of a block of gradients, each `partition` an element count and an accumulation dtype.

    Every micro-batch writes it, all but the first read it, and so does the update.
    """
    size_bytes = round_up(block_layout(partitions)[1], page)
    moved = size_bytes * config.rounds if partitions else 0
    choice = _choice(config, config.offload_gradients.device)
    return Unit(f"{GRADS} of {name}", GRADS, size_bytes, moved, moved, choice)


def staging_unit(
    config: OffloadConfig, kind: str, blocks: Iterable[Unit], buffer_count: int, buffer_bytes: int = 0
) -> Unit:
    """Return the unit of staging buffers: as large as now, or as the largest block that may move; no more than move.

    Within a host budget `buffer_count` of them have room, so that there is some for blocks that come later.
    """
    sizes = [unit.size_bytes for unit in blocks if "nvme" in unit.tiers]
    num_buffers = buffer_count if config.host_budget is not None else min(buffer_count, len(sizes))
    return Unit(f"{STAGING} of {kind}", STAGING, num_buffers * max([buffer_bytes, *sizes]), tiers=("host",))


def _choice(config: OffloadConfig, device: str | None) -> tuple[Tier, ...]:
    if device != "nvme":
        return ("host",)
    return ("nvme",) if config.host_budget is None else ("host", "nvme")
