"""Choose the way in which a subgroup is updated."""

from collections.abc import Callable

from ..kernels import Segment, make_segment
from ..layout.subgroup import Run, Subgroup
from ..rules.rule import UpdateRule
from .in_torch import InTorch, OnDevice, WholeMatrix
from .kept_segments import KeptSegments
from .log_state import LogState
from .logged import LoggedKernel
from .mirrored import DeviceMirror, Mirrored
from .work import Means, RunTensors, SubgroupStep, Updater


class NativeKernel(Updater):
    """The rule's kernel updates the state where it is. A step tells it only what is new: addresses, and the scalars."""

    def __init__(self, subgroup: Subgroup, means: Means, log: LogState | None = None) -> None:
        super().__init__(subgroup, means, log)
        self._segments = KeptSegments()

    def prepare(self, work: SubgroupStep) -> Callable[[], int]:
        """See `Updater.prepare`."""
        segments, kernels = self._segments.renewed(work, self._made, False), self.means.kernels
        return lambda: sum(kernels.update(segments))

    def _made(self, tensors: RunTensors, _: Run) -> Segment:
        scalars = {"scalars": tensors.scalars.of_kernel, "grad_scale": tensors.scalars.grad_scale}
        return make_segment(rule=self.subgroup.rule, **{**tensors._asdict(), **scalars})


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
