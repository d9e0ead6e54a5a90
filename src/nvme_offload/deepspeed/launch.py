"""As ``deepspeed.init_distributed`` and ``add_config_arguments``: ``torchrun`` is the launcher."""

import argparse
import os
from typing import Any

import torch.distributed as dist

from nvme_offload.offload.devices.device import default_device_type
from nvme_offload.optim.zero.meshes import default_mesh, is_launched


def init_distributed(
    dist_backend: str | None = None,
    *unused: Any,
    timeout: Any = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    rank: int = -1,
    world_size: int = -1,
    **also_unused: Any,
) -> None:
    """Make a process group of the ranks that torchrun started, or of this process alone; nothing where there is one.

    Args:
        dist_backend: of torch, as ``nccl``.
        unused: what else DeepSpeed's takes: ports, what it prints, and how it finds ranks without torchrun.
        timeout: of collectives.
        init_method: where ranks meet that torchrun has not started; with `rank` and `world_size`.
        dist_init_required: False says that there is a process group.
        rank: of this process.
        world_size: the number of ranks.
        also_unused: as `unused`.

    Raises:
        RuntimeError: there is no process group, and `dist_init_required` is False.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise RuntimeError("dist_init_required = False, and there is no process group: make one, or leave it out")
    if init_method is not None:
        dist.init_process_group(dist_backend, init_method, timeout, world_size, rank)
    elif is_launched() and (dist_backend or timeout):
        dist.init_process_group(dist_backend, timeout=timeout)
    else:
        default_mesh(default_device_type())


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config``; ``--local_rank`` gets the rank that torchrun gives."""
    group = parser.add_argument_group("DeepSpeed", "as DeepSpeed has them")
    group.add_argument("--deepspeed", action="store_true", help="train with the section of --deepspeed_config")
    group.add_argument("--deepspeed_config", help="path of the configuration section")
    if "LOCAL_RANK" in os.environ:
        parser.set_defaults(local_rank=int(os.environ["LOCAL_RANK"]))
    return parser
