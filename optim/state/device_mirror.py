"""Host copies of what the kernel needs from a CUDA device: parameters and gradients of one subgroup at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from nvme_offload.offload.host.region import HostRegion
from nvme_offload.optim.layout.flat import flat_view
from nvme_offload.optim.layout.subgroup import Run, Subgroup

_MAX_ITEMSIZE = 4  # of a parameter and of a gradient


class _Mirror:
    """Pinned memory for the parameters and gradients of one subgroup, and the event after which it is free."""

    def __init__(self, numel: int, device: torch.device, pinned: bool) -> None:
        self._region = HostRegion(2 * _MAX_ITEMSIZE * numel)
        self._grads_at = _MAX_ITEMSIZE * numel
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            if pinned:
                self._region.pin()

    @property
    def size_bytes(self) -> int:
        return self._region.size_bytes

    def param(self, run: Run, dtype: torch.dtype) -> torch.Tensor:
        return self._region.view(dtype, run.at * dtype.itemsize, run.numel)

    def grad(self, run: Run, dtype: torch.dtype) -> torch.Tensor:
        return self._region.view(dtype, self._grads_at + run.at * dtype.itemsize, run.numel)

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def close(self) -> None:
        self.wait()
        self._region.unpin()


class DeviceMirror:
    """Two mirrors in turn: while the kernel works on one subgroup, the next one's bytes arrive in the other.

    Casts never happen on the way: a copy that changes the dtype leaves the DMA path. All copies are on a stream of
    their own, which waits for the gradients and which the parameters' next use waits for.

    Args:
        device: where parameters and gradients are.
        max_numel: padded elements of the largest subgroup.
        pinned: page-lock the memory, which asynchronous copies need.
    """

    BYTES_PER_ELEMENT = 2 * 2 * _MAX_ITEMSIZE
    """Host memory of both mirrors, for one element of the largest subgroup."""

    def __init__(self, device: torch.device, max_numel: int, *, pinned: bool) -> None:
        self._mirrors: list[_Mirror] = []
        try:
            for _ in range(2):
                self._mirrors.append(_Mirror(max_numel, device, pinned))
        except BaseException:
            self.close()  # or the first would stay pinned
            raise
        self._next = 0
        self._ready: dict[int, _Mirror] = {}
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def size_bytes(self) -> int:
        """Pinned host memory of both mirrors."""
        return sum(mirror.size_bytes for mirror in self._mirrors)

    def begin_step(self) -> None:
        """Let the copies of this step wait for the gradients."""
        self._ready.clear()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def end_step(self) -> None:
        """Let what runs next on the device wait for the new parameters."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def fetch(self, subgroup: Subgroup, params: Sequence[torch.Tensor], grads: Mapping[int, torch.Tensor]) -> None:
        """Start copying the parameters and gradients of a subgroup to the host."""
        if subgroup.index in self._ready:
            return
        mirror = self._mirrors[self._next]
        self._next = 1 - self._next
        mirror.wait()
        with self._on_stream():
            for run in _runs_with_grad(subgroup, grads):
                param = flat_view(params[run.param])[run.start : run.stop]
                grad = grads[run.param][run.start : run.stop]
                mirror.param(run, param.dtype).copy_(param, non_blocking=True)
                mirror.grad(run, grad.dtype).copy_(grad, non_blocking=True)
            self._record(mirror)
        self._ready[subgroup.index] = mirror

    def take(self, subgroup: Subgroup) -> _Mirror:
        """The mirror that ``fetch`` filled, when its bytes have arrived."""
        mirror = self._ready.pop(subgroup.index)
        mirror.wait()
        return mirror

    def copy_back(
        self, subgroup: Subgroup, mirror: _Mirror, params: Sequence[torch.Tensor], grads: Mapping[int, torch.Tensor]
    ) -> None:
        """Start copying the updated parameters back to the device; the mirror is free after it."""
        with self._on_stream():
            for run in _runs_with_grad(subgroup, grads):
                param = flat_view(params[run.param])[run.start : run.stop]
                param.copy_(mirror.param(run, param.dtype), non_blocking=True)
            self._record(mirror)

    def close(self) -> None:
        """Wait for the copies under way and unpin."""
        for mirror in self._mirrors:
            mirror.close()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _record(self, mirror: _Mirror) -> None:
        if mirror.event is not None and self._stream is not None:
            mirror.event.record(self._stream)


def _runs_with_grad(subgroup: Subgroup, grads: Mapping[int, torch.Tensor]) -> list[Run]:
    return [run for run in subgroup.runs if run.param in grads]
