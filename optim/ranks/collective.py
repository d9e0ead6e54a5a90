"""Do something on all ranks or on none: an error on one rank is raised on every rank."""

import pickle
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nvme_offload.offload._torch_private import local_tensor, sharded_like
from nvme_offload.offload.devices.device import HOST, current_of

T = TypeVar("T")

_PIECE_BYTES = 64 << 20


def is_alone() -> bool:
    """Return whether there is no process group at all, and this process takes no part in anything with others."""
    return not dist.is_initialized()


def this_rank() -> str:
    """Return what others call this process in an error: its rank and host."""
    return f"rank {dist.get_rank()}, host {socket.gethostname()}"


def gather(value: T, *groups: dist.ProcessGroup | None) -> dict[int, T]:
    """Gather what each rank gives, by rank, pickled. Each group is of one dimension of a mesh, or None: all ranks.

    Collective. Without a process group there is rank 0 alone.
    """
    found = {0 if is_alone() else dist.get_rank(): value}
    for group in () if is_alone() else groups:
        parts: list[dict[int, T]] = [{} for _ in range(dist.get_world_size(group))]
        if len(parts) > 1:
            dist.all_gather_object(parts, found, group=group)
            found = {rank: given for part in parts for rank, given in part.items()}
    return dict(sorted(found.items()))


def largest(numbers: Sequence[int], *groups: dist.ProcessGroup) -> list[int]:
    """Return the largest of each number over all ranks of these groups. Collective: none returns before all call it."""
    for group in groups:
        found = torch.tensor([int(number) for number in numbers], device=device_of(group))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        numbers = found.cpu().tolist()
    return list(numbers)


def on_every_rank(action: Callable[[], T], *groups: dist.ProcessGroup | None) -> T:
    """Run `action` on every rank and wait for all; return this rank's result. Without a process group, just run it.

    An error of this rank, or else of the first rank that failed, is raised on all, with a note that names that rank
    and its host. `action` may have collectives in it, if no rank can fail alone before or between them. `groups` as
    for `gather`; without any, all ranks.
    """
    if is_alone():
        return action()
    errors: list[BaseException] = []
    try:
        result = action()
    except BaseException as problem:
        errors.append(problem)
    if (raised := _first_of_all(errors, groups)) is not None:
        try:
            raise raised
        finally:
            del raised  # with a name here it would keep this frame, and all that the action had, until a collection
    return result


def _first_of_all(errors: list[BaseException], groups: tuple[dist.ProcessGroup | None, ...]) -> BaseException | None:
    """Return what this rank is to raise, from its own error, which is taken out of `errors`, and all others'."""
    error = errors.pop() if errors else None
    failures = gather((this_rank(), _sendable(error)), *(groups or (None,)))
    for _, (name, failure) in sorted(failures.items(), key=lambda found: found[0] != dist.get_rank()):
        if failure is not None:
            raised = failure if error is None else error
            if (note := f"on {name}") not in getattr(raised, "__notes__", ()):  # it may be raised again
                raised.add_note(note)
            return raised
    return None


def on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `action` on the first rank alone; return its result, or raise its error, on every rank."""
    if is_alone():
        return action()
    results: list[T] = []
    on_every_rank(lambda: results.append(action()) if dist.get_rank(group) == 0 else None, group)
    box: list[T | None] = [results[0] if results else None]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]  # type: ignore[return-value]  # what the first rank returned


def device_of(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return where tensors have to be for collectives of a group: on the CPU, unless it has no backend for that."""
    kinds = _kinds_of(group)
    return HOST if HOST.type in kinds else current_of(kinds[0])


def _kinds_of(group: dist.ProcessGroup | None) -> list[str]:
    return [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]


def take_first(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Give a contiguous tensor the bytes that it has on the first rank of a group, some MiB at a time. Collective.

    Of any other, gloo would send and overwrite whatever lies in its memory, and between its elements.
    """
    if is_alone() or dist.get_world_size(group) == 1 or not tensor.numel():
        return
    for piece in torch.split(tensor.view(-1).view(torch.uint8), _PIECE_BYTES):
        there = piece if piece.device.type in _kinds_of(group) else piece.to(device_of(group))
        dist.broadcast(there, group=group, group_src=0)
        if there is not piece:
            piece.copy_(there)


def host_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the groups of a mesh for what is on the CPU: a group of NCCL alone would wait for all that is computed."""
    gloo = partial(dist.new_group, backend="gloo", use_local_synchronization=True)
    groups = mesh.get_all_groups()
    return [each if device_of(each) == HOST else gloo(dist.get_process_group_ranks(each)) for each in groups]


def reachable(tensor: Any) -> Any:
    """Return a sharded tensor whose shards are where the groups of its mesh can gather them; itself if they are there.

    State of parameters on a device is in host memory, for which groups of NCCL alone have no backend.
    """
    local = local_tensor(tensor)
    devices = {device_of(group) for group in tensor.device_mesh.get_all_groups()}
    if HOST in devices or local.device in devices:
        return tensor
    return sharded_like(local.to(devices.pop()), tensor)


def _sendable(error: BaseException | None) -> BaseException | None:
    """Return the error, or one in its place that says the same if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class Ranks:
    """All ranks whose parameters are updated in the same steps as this one's.

    They are those of the meshes that parameters are sharded over, and of `group`, as the stages of a pipeline. Where
    nothing is sharded and there is a process group all the same, all of that: the parameters are copies, as with
    DistributedDataParallel.
    """

    def __init__(self, leaves: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
        self._groups: list[dist.ProcessGroup] = []
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        found: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for mesh in {id(leaf.device_mesh): leaf.device_mesh for leaf in leaves if isinstance(leaf, DTensor)}.values():
            for of_dim in mesh.get_all_groups():
                found[tuple(dist.get_process_group_ranks(of_dim))] = of_dim
        if not found and dist.group.WORLD is not None:
            found[()] = dist.group.WORLD
        if group is not None:
            found[tuple(dist.get_process_group_ranks(group))] = group
        self._groups = [of_ranks for of_ranks in found.values() if dist.get_world_size(of_ranks) > 1]

    @property
    def several(self) -> bool:
        """Whether there is any other."""
        return bool(self._groups)

    def all(self, value: bool) -> bool:
        """Return whether `value` is true on every rank. Collective: no rank returns before all have called."""
        return not largest([not value], *self._groups)[0]

    def gather(self, value: T) -> dict[int, T]:
        """See `collective.gather`."""
        return gather(value, *self._groups)

    def together(self, action: Callable[[], T]) -> T:
        """See `collective.on_every_rank`."""
        return on_every_rank(action, *self._groups) if self.several else action()
