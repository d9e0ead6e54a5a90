"""Define the updater: what updates one subgroup, in whatever way."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from nvme_offload.optim.kernels import KernelPool
from nvme_offload.optim.layout.subgroup import Subgroup
from nvme_offload.optim.updates.log_state import LogState
from nvme_offload.optim.updates.work import SubgroupStep

Fused = Callable[[torch.device], Any]
"""It gives `optim.fused.kernels` where those run on a device, else None."""


@dataclass(frozen=True)
class Means:
    """The means that the updaters of one optimizer share."""

    kernels: KernelPool
    param_of: Callable[[int], torch.Tensor]
    """Gives what is in this process's memory of a parameter, by index."""
    fused: Fused
    """See `fused_kernels`."""
    computing: Callable[[int], AbstractContextManager[None]]
    """Counts the time inside as that of a subgroup's update, by its index: for what `prepare` computes."""
    found_changed: list[torch.Tensor] = field(default_factory=list)
    """Gets the numbers of tiles that updates on a device found changed, int64 there: the host asks a step later."""


class Updater(ABC):
    """Updates one subgroup in one way. It is chosen when the subgroup is placed, and stays: see `updater_of`.

    `log` is that of a subgroup of a durable run.
    """

    inside = ""
    """Why the update has to be done inside `step()`, as a predicate of the optimizer; empty: it can be behind it."""

    def __init__(self, subgroup: Subgroup, means: Means, log: LogState | None = None) -> None:
        self.subgroup = subgroup
        self.means = means
        self.log = log

    def expect(self, grads: Mapping[int, torch.Tensor]) -> None:
        """Start to bring what `prepare` will wait for, before the state is there; `grads` are flat, by parameter."""
        return

    @abstractmethod
    def prepare(self, work: SubgroupStep) -> Callable[[], int]:
        """Make an update ready. Nothing changes before what it returns is called.

        Returns:
            A function that updates the state and the parameters, to be called once. It returns how many tiles of 65536
            elements somebody else had changed since the last update. If it raises OutOfMemoryError, a device refused
            memory: called once more it goes on where it was, and changes nothing of the state in `work.memory` but
            what is on that device.

        Raises:
            CorruptionError: what is to be done again first is not what was written.
            OutOfSpaceError: there is no room for what is to be written.
        """
