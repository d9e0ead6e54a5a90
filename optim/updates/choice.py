"""Choose the way in which a subgroup is updated."""

from nvme_offload.optim.layout.subgroup import Subgroup
from nvme_offload.optim.rules.rule import UpdateRule
from nvme_offload.optim.updates.in_torch import InTorch, OnDevice, WholeMatrix
from nvme_offload.optim.updates.log_state import LogState
from nvme_offload.optim.updates.logged import LoggedKernel
from nvme_offload.optim.updates.mirrored import DeviceMirror, Mirrored
from nvme_offload.optim.updates.native import NativeKernel
from nvme_offload.optim.updates.updater import Means, Updater


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
