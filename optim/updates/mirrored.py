"""Update parameters on a device whose state is not: copies of one subgroup at a time are updated in host memory."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch

from nvme_offload.offload.devices.device import CopyQueue, Event, is_host
from nvme_offload.offload.host.page_locks import PageLocks
from nvme_offload.offload.host.region import HostRegion
from nvme_offload.offload.shards.stand_in import StandIn
from ..layout.flat import flat_view
from ..layout.subgroup import Run, Subgroup
from ..telemetry.stats import Meter
from .work import SubgroupStep, Updater

_MAX_ITEMSIZE = 4  # of a parameter and of a gradient
_NUM_MIRRORS = 3  # one arrives, one is worked on, one leaves

Grads = Mapping[int, torch.Tensor]
ParamOf = Callable[[int], torch.Tensor]
"""It gives what is in this process's memory of a parameter, by its index."""


class MirroredRun(NamedTuple):
    """Copies of one run's parameter and gradient, 1D [numel]; None for what is in host memory by itself."""

    param: torch.Tensor | None
    grad: torch.Tensor | None
    there: torch.Tensor | None
    """On the device: `param` is a copy of it."""


class MirroredRuns:
    """A place in pinned memory for the parameters and gradients of one subgroup, up to `numel` elements."""

    def __init__(self, region: HostRegion, place: int, numel: int) -> None:
        self._region = region
        self._params_at = 2 * _MAX_ITEMSIZE * numel * place
        self._grads_at = self._params_at + _MAX_ITEMSIZE * numel
        self.copies: dict[int, MirroredRun] = {}
        """The runs that were copied last, by index of the parameter."""
        self.arrived: Event | None = None
        """Behind the copies from the device."""
        self.left: Event | None = None
        """Behind the copies to the device."""

    def arrive(self, queue: CopyQueue, runs: Sequence[Run], param_of: ParamOf, grads: Grads) -> None:
        """Start copies from the device, of those runs that have a gradient."""
        pairs = []
        self.copies = {}
        for run in runs:
            if (grad := grads.get(run.param)) is None:
                continue
            param, own, there, own_grad = param_of(run.param), None, None, None
            if _is_there(param):
                own, there = self._view(run, param.dtype, self._params_at), run.part(flat_view(param))
                pairs.append((own, there))
            if _is_there(grad):
                own_grad = self._view(run, grad.dtype, self._grads_at)
                pairs.append((own_grad, run.part(grad)))
            self.copies[run.param] = MirroredRun(own, own_grad, there)
        self.arrived = queue.copy_all(pairs)

    def leave(self, queue: CopyQueue) -> None:
        """Start copies of the parameters to the device."""
        pairs = [(copy.there, copy.param) for copy in self.copies.values()]
        self.left = queue.copy_all((there, own) for there, own in pairs if there is not None and own is not None)

    def _view(self, run: Run, dtype: torch.dtype, start: int) -> torch.Tensor:
        return self._region.view(dtype, start + run.at * dtype.itemsize, run.numel)


class DeviceMirror:
    """Three mirrors in turn: while the kernel works on one subgroup, the next one's bytes arrive and the last one's go.

    Each direction has a queue of its own, so that neither waits for the other's bytes. Copies begin after what
    computed the gradients, and what computes next begins after them. A mirror is filled again after its bytes have
    gone, which the device sees to; the host waits only for what the kernel is about to read. Before `fit` there is
    nothing to mirror, and nothing happens.
    """

    BYTES_PER_ELEMENT = _NUM_MIRRORS * 2 * _MAX_ITEMSIZE
    """Host memory of all mirrors, for one element of the largest subgroup."""

    def __init__(self, meter: Meter, locks: PageLocks) -> None:
        self._meter = meter
        self._locks = locks
        self._region: HostRegion | None = None
        self._mirrors: list[MirroredRuns] = []
        self._down: CopyQueue
        self._up: CopyQueue
        self._ready: dict[int, MirroredRuns] = {}
        """Mirrors that were filled and not taken yet, by the subgroup's index; the one filled first comes first."""
        self._is_parked = False

    def fit(self, device: torch.device, max_numel: int) -> None:
        """Make room for `max_numel` padded elements, between two steps. After an error all is as before."""
        region = HostRegion(self.BYTES_PER_ELEMENT * max_numel)
        queues = CopyQueue(device), CopyQueue(device)
        self._lock(region, device)
        self.close()
        self._down, self._up = queues
        self._region, self._ready = region, {}
        self._mirrors = [MirroredRuns(region, place, max_numel) for place in range(_NUM_MIRRORS)]

    def _lock(self, region: HostRegion, device: torch.device) -> None:
        self._locks.lock(region, device, "lower zero_optimization.sub_group_size")

    @property
    def size_bytes(self) -> int:
        """Pinned host memory of all mirrors."""
        return 0 if self._region is None else self._region.size_bytes

    def begin_step(self) -> None:
        """Let the copies of this step come after the gradients, and after whatever still reads the parameters.

        What goes up comes after what came down, for which the host waits.
        """
        self.wake()
        self._ready.clear()
        if self._mirrors:
            self._down.come_after()

    def end_step(self) -> None:
        """Let what this thread queues next on the device come after the copies to it: it reads the parameters."""
        if self._mirrors:
            self._up.let_current_come_after()

    def come_after(self, mark: Event) -> AbstractContextManager[object]:
        """Let copies of this step, and operators in the context returned, come after a gradient's mark."""
        if self._mirrors:
            self._down.come_after(mark)
        else:  # all state is on the device: what looks is queued on this thread's own stream
            mark.synchronize()
        return self.looking()

    def looking(self) -> AbstractContextManager[object]:
        """Return a context in which parameters are read behind the copies of this step, and not behind all backward."""
        return self._down.computing() if self._mirrors else nullcontext()

    def fetch(self, subgroup: Subgroup, param_of: ParamOf, grads: Grads) -> None:
        """Start copying the parameters and gradients of a subgroup to the host, unless they are there already.

        Fetch the subgroup that is taken next, then at most one further. Where that one does not come next, others are
        fetched beside it; where no mirror is free, what was fetched first is given up, and fetched again when it comes.
        """
        if subgroup.index in self._ready:
            return
        mirror = self._unused()
        if mirror.left is not None:
            self._down.come_after(mirror.left)
        mirror.arrive(self._down, subgroup.runs, param_of, grads)
        self._ready[subgroup.index] = mirror

    def _unused(self) -> MirroredRuns:
        """Return the free mirror that was filled the longest ago: its bytes have probably left."""
        if len(self._ready) == _NUM_MIRRORS:
            del self._ready[next(iter(self._ready))]
        mirror = next(each for each in self._mirrors if each not in self._ready.values())
        self._mirrors.remove(mirror)
        self._mirrors.append(mirror)
        return mirror

    def take(self, subgroup: Subgroup) -> MirroredRuns:
        """Return the mirror that `fetch` filled, when its bytes have arrived."""
        mirror = self._ready.pop(subgroup.index)
        if mirror.arrived is not None:
            with self._meter.waiting("device"):
                mirror.arrived.synchronize()
        return mirror

    def copy_back(self, mirror: MirroredRuns) -> None:
        """Start copying the updated parameters back to the device; the mirror is free after it."""
        mirror.leave(self._up)

    def close(self) -> None:
        """Wait for the copies under way and unpin. Idempotent."""
        if self._region is not None:
            self._down.wait()
            self._up.wait()
            self._region.unpin()
        self._region, self._mirrors, self._is_parked = None, [], False

    def park(self) -> None:
        """Wait for the copies under way and give the pages back; the next step takes them again, as `wake` does."""
        if self._region is not None:
            self._down.wait()
            self._up.wait()
            self._is_parked = True  # first: whoever comes from here on locks them again
            self._region.discard()

    def wake(self) -> None:
        """Page-lock what `park` gave back; no-op without that."""
        if self._is_parked and self._region is not None:
            self._lock(self._region, self._down.device)
            self._is_parked = False


class Mirrored(Updater):
    """Brings parameters and gradients on a device to the host for another updater, and parameters back."""

    def __init__(self, updater: Updater, mirror: DeviceMirror) -> None:
        super().__init__(updater.subgroup, updater.means)
        self.inside = updater.inside
        self._updater = updater
        self._mirror = mirror

    def expect(self, grads: Grads) -> None:
        """Start to copy parameters and gradients to the host."""
        self._mirror.fetch(self.subgroup, self.means.param_of, grads)

    def prepare(self, work: SubgroupStep) -> Callable[[], int]:
        """See `Updater.prepare`. It waits for the copies that `expect` has begun."""
        mirror = self._mirror.take(self.subgroup)
        on_host = {}
        for run in self.subgroup.runs:
            if (copy := mirror.copies.get(run.param)) is not None:
                param = work.places.view(run) if copy.param is None else copy.param
                grad = run.part(work.grads[run.param]) if copy.grad is None else copy.grad
                on_host[run.param] = param, grad
        update = cache(self._updater.prepare(replace(work, copies=on_host)))  # done once, however often it is copied

        def update_and_copy_back() -> int:
            changed_tiles = update()
            self._mirror.copy_back(mirror)
            return changed_tiles

        return update_and_copy_back


def _is_there(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has its bytes on a device."""
    return not (isinstance(tensor, StandIn) or is_host(tensor.device))
