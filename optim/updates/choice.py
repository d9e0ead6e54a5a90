"""Choose the way in which a subgroup is updated."""

from collections.abc import Callable

import torch

from ..kernels import GradDtype, Segment, make_segment, renew
from ..layout.subgroup import Subgroup
from ..rules.rule import UpdateRule
from .in_torch import InTorch, OnDevice, WholeMatrix
from .log_state import LogState
from .logged import LoggedKernel
from .mirrored import DeviceMirror, Mirrored
from .work import Means, RunTensors, SubgroupStep, Updater

_MOST_MEMORIES = 16  # of a slot: more than it usually has buffers to take turns in


class NativeKernel(Updater):
    """The rule's kernel updates the state where it is. A step tells it only what is new: addresses, and the scalars."""

    def __init__(self, subgroup: Subgroup, means: Means, log: LogState | None = None) -> None:
        super().__init__(subgroup, means, log)
        self._segments: dict[tuple[int, int], dict[int, Segment]] = {}
        """By the address of the memory that they are for, and index of the parameter: staging buffers take turns."""

    def prepare(self, work: SubgroupStep) -> Callable[[], int]:
        """See `Updater.prepare`."""
        if len(self._segments) > _MOST_MEMORIES:
            self._segments = {}
        memory = work.memory.view(torch.uint8, 0, 1).data_ptr()
        made = self._segments.setdefault((memory, work.places.num_marked), {})
        grads, scalars = work.grads, work.scalars
        runs = [run for run in self.subgroup.runs if run.param in grads]
        for run in runs:
            if run.param not in made:
                made[run.param] = self._made(work.runs[run.param])
        segments = [made[run.param] for run in runs]
        dtypes = [GradDtype.of(grads[run.param]) for run in runs]
        renew(segments, *work.addresses(runs), dtypes, [scalars[run.param] for run in runs])
        kernels = self.means.kernels
        return lambda: sum(kernels.update(segments))

    def _made(self, run: RunTensors) -> Segment:
        scalars, its = run.scalars, run._asdict()
        its |= {"scalars": scalars.of_kernel, "grad_scale": scalars.grad_scale}
        return make_segment(rule=self.subgroup.rule, **its)


def way_of(rule: UpdateRule, *, is_durable: bool, on_device: bool) -> type[Updater]:
    """Return the way in which subgroups of a rule are updated. Another way is one more class, and one line here."""
    if on_device:
        return OnDevice
    if rule.whole:
        return WholeMatrix
    if not rule.kernel:
        return InTorch
    return LoggedKernel if is_durable else NativeKernel


def updater_of(
    subgroup: Subgroup, means: Means, log: LogState | None, *, on_device: bool, mirror: DeviceMirror | None
) -> Updater:
    """Return what updates a subgroup: `log` is that of a durable run, `mirror` is for parameters on a device."""
    updater = way_of(subgroup.rule, is_durable=log is not None, on_device=on_device)(subgroup, means, log)
    return updater if mirror is None or on_device else Mirrored(updater, mirror)
