"""Update by a native kernel: all runs of a subgroup in one call."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nvme_offload.optim.kernels import GradDtype, Segment, make_segment
from nvme_offload.optim.layout.subgroup import Run, Subgroup
from nvme_offload.optim.updates.log_state import LogState
from nvme_offload.optim.updates.updater import Means, Updater
from nvme_offload.optim.updates.work import RunTensors, SubgroupStep

_MOST_MEMORIES = 16  # of a slot: more than it usually has buffers to take turns in


class NativeKernel(Updater):
    """The rule's kernel updates the state where it is. A step tells it only what is new: addresses, and the scalars."""

    def __init__(self, subgroup: Subgroup, means: Means, log: LogState | None = None) -> None:
        super().__init__(subgroup, means, log)
        self._segments: dict[int, dict[int, Segment]] = {}
        """By the address of the memory that they are for, and index of the parameter: staging buffers take turns."""

    def prepare(self, work: SubgroupStep) -> Callable[[], int]:
        """See `Updater.prepare`."""
        if len(self._segments) > _MOST_MEMORIES:
            self._segments = {}
        made = self._segments.setdefault(work.memory.view(torch.uint8, 0, 1).data_ptr(), {})
        segments = [self._segment(run, work, made) for run in self.subgroup.runs if run.param in work.grads]
        kernels = self.means.kernels
        return lambda: sum(kernels.update(segments))

    def _segment(self, run: Run, work: SubgroupStep, made: dict[int, Segment]) -> Segment:
        segment, scalars = made.get(run.param), work.scalars[run.param]
        if segment is None:
            segment = made[run.param] = self._made(work.runs[run.param])
        param, grad = work.addresses(run)
        segment.renew(param, grad, GradDtype.of(work.grads[run.param]), scalars.grad_scale, scalars.of_kernel)
        return segment

    def _made(self, run: RunTensors) -> Segment:
        return make_segment(
            param=run.param,
            grad=run.grad,
            master=run.master,
            states=run.states,
            checksums=run.checksums,
            rule=self.subgroup.rule,
            scalars=run.scalars.of_kernel,
            grad_scale=run.scalars.grad_scale,
            origin=run.origin,
            start=run.start,
        )
