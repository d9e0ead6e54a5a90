"""Updates by a native kernel: all runs of a subgroup in one call."""

from __future__ import annotations

from collections.abc import Callable

from nvme_offload.optim.kernels import make_segment
from nvme_offload.optim.updates.updater import Updater
from nvme_offload.optim.updates.work import SubgroupStep


class NativeKernel(Updater):
    """The rule's kernel updates the state where it is."""

    def prepare(self, work: SubgroupStep) -> Callable[[], int]:
        """See `Updater.prepare`."""
        kernels = self.means.kernels
        segments = [
            make_segment(
                param=run.param,
                grad=run.grad,
                master=run.master,
                states=run.states,
                checksums=run.checksums,
                rule=self.subgroup.rule,
                scalars=run.scalars.of_rule,
                grad_scale=run.scalars.grad_scale,
            )
            for run in work.runs.values()
        ]
        return lambda: sum(kernels.update(segments))
