"""Ranks on CPUs gather and reduce in buffers that are kept, and without the copies that gloo makes of a gather."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from nvme_offload.offload.host.region import KeptMemory

_TAG = 0x6E76  # of our messages, which share a process group with whatever the user sends

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # as torch 2.13 names them
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _InKeptMemory:
    """Allocates for FSDP2 (``Comm.allocate``) what is gathered into, reduced from, or reduced into."""

    def __init__(self, memory: KeptMemory) -> None:
        self._memory = memory

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a 1D tensor of `size` and `dtype` on the CPU, with any values."""
        return self._memory.borrow(math.prod(size), dtype)


class RingGather(_InKeptMemory):
    """Gathers shards from rank to rank, each into its place in the output (FSDP2's ``AllGather``).

    ``ProcessGroupGloo`` gathers into memory of its own and copies from there, in a thread whose heap keeps it.
    """

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill `output_tensor` (1D) with the `input_tensor` of every rank of `group`, in their order."""
        if async_op:
            work: dist.Work = _all_gather(output_tensor, input_tensor, group=group, async_op=True)
            return work
        rank, num_ranks = group.rank(), group.size()
        parts = output_tensor.chunk(num_ranks)
        if parts[rank].data_ptr() != input_tensor.data_ptr():
            parts[rank].copy_(input_tensor)
        for step in range(num_ranks - 1):
            coming, going = parts[(rank - step - 1) % num_ranks], parts[(rank - step) % num_ranks]
            received = group.recv([coming], (rank - 1) % num_ranks, _TAG)
            sent = group.send([going], (rank + 1) % num_ranks, _TAG)
            received.wait()
            sent.wait()
        return None


class KeptReduction(_InKeptMemory):
    """Reduces as torch does, in memory that is kept (FSDP2's ``ReduceScatter``)."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor` with this rank's part of the reduced `input_tensor`."""
        work: dist.Work | None = _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return work


def gather_in_kept_memory(model: nn.Module) -> None:
    """Have all modules that FSDP2 shards over ranks on CPUs gather and reduce in memory that they share and keep."""
    memory = KeptMemory()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(RingGather(memory))  # type: ignore[arg-type]  # their base class is private
            module.set_custom_reduce_scatter(KeptReduction(memory))  # type: ignore[arg-type]
