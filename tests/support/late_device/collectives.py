"""Collectives of the stand-in: those of gloo on its bytes, for groups that know no other device."""

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions, ReduceScatterOptions
from torch.distributed.distributed_c10d import _resolve_process_group

c10d, functional = torch.ops.c10d, torch.ops._c10d_functional


def run(func: Any, args: tuple[Any, ...]) -> Any:
    """The result of a collective whose tensors have their values; None where it writes to its arguments."""
    if func is c10d.allgather_.default:
        outputs, inputs, group = args[:3]
        _backend(group).allgather(outputs, inputs, AllgatherOptions()).wait()
        return None
    if func is c10d._allgather_base_.default:
        output, own, group = args[:3]
        _backend(group)._allgather_base(output, own, AllgatherOptions()).wait()
        return None
    if func is c10d._reduce_scatter_base_.default:
        options = ReduceScatterOptions()
        output, whole, group = args[:3]
        # The operation comes in a box that Python cannot open; FSDP2 chooses it so (`_get_gradient_divide_factors`).
        options.reduceOp = dist.ReduceOp.SUM if whole.dtype is torch.float16 else dist.ReduceOp.AVG
        _backend(group)._reduce_scatter_base(output, whole, options).wait()
        return None
    if func is c10d.broadcast_.default:
        options = BroadcastOptions()
        tensors, group, options.rootRank = args[0], args[1], args[2]
        _backend(group).broadcast(tensors, options).wait()
        return None
    if func is c10d.allreduce_.default:
        options = AllreduceOptions()
        tensors, group = args[:2]
        options.reduceOp = dist.ReduceOp.MAX  # in a box, too; sums go by reduce_scatter here
        _backend(group).allreduce(tensors, options).wait()
        return None
    if func is functional.all_gather_into_tensor.default:
        own, size, name = args
        output = own.new_empty((own.shape[0] * size, *own.shape[1:]))
        _late(_resolve_process_group(name))._allgather_base(output, own.contiguous(), AllgatherOptions()).wait()
        return output
    raise NotImplementedError(f"{func} between ranks with the stand-in")


def _backend(group: Any) -> Any:
    return _late(dist.ProcessGroup.unbox(group))


def _late(group: Any) -> Any:
    return group._get_backend(torch.device("late"))
