"""Hand a step's tensors, cut into runs, and its scalars to an updater, which does the update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from nvme_offload.offload.storage.tier import Memory
from ..kernels import KernelPool
from ..layout.flat import Origin
from ..layout.master import MARKS_IN_WORD, TILE_NUMEL
from ..layout.subgroup import Run, Subgroup, section_view, state_views
from .log_state import LogState
from .whole_params import WholeParams


class StepScalars(NamedTuple):
    """One update of a parameter takes these besides tensors, each exactly an fp32 number."""

    of_rule: tuple[float, ...]
    grad_scale: float
    """The gradient is multiplied by this: unscaling and clipping in one factor, negative to maximize."""
    dither: tuple[float, ...] = ()
    """It is what `UpdateRule.dither` gives."""

    @property
    def of_kernel(self) -> tuple[float, ...]:
        """All that a kernel takes, and a log keeps, but for the factor."""
        return (*self.of_rule, *self.dither) if self.dither else self.of_rule


class RunTensors(NamedTuple):
    """A run of elements of one parameter with all that its update needs, 1D [numel] each."""

    param: torch.Tensor
    grad: torch.Tensor
    master: torch.Tensor | None
    """uint16 beside bf16, fp32 beside fp16, None for an fp32 parameter."""
    states: Sequence[torch.Tensor]
    """The arrays that keep the rule's states: see `UpdateRule.kept`."""
    checksums: torch.Tensor | None
    """Checksums of the parameter as the last update left it, int64 per tile; None for an fp32 parameter."""
    scalars: StepScalars
    origin: Origin | None = None
    """The origin of this rank's part of the parameter, for a rule that dithers."""
    start: int = 0
    """The run's first element in that part."""
    marks: torch.Tensor | None = None
    """Get the bit of each element that changes, int64, 64 bits each; None: nobody asked, or it is in fp32."""

    def pieces(self, numel: int) -> Iterator[RunTensors]:
        """Cut it into runs of so many elements, a multiple of `TILE_NUMEL`; the last one may be smaller."""
        for first in range(0, self.param.numel(), numel):
            part, tiles, words = (
                slice(first // each, (first + numel) // each) for each in (1, TILE_NUMEL, MARKS_IN_WORD)
            )
            yield self._replace(
                param=self.param[part],
                grad=self.grad[part],
                master=None if self.master is None else self.master[part],
                states=[_part(state, self.param.numel() // state.numel(), first, numel) for state in self.states],
                checksums=None if self.checksums is None else self.checksums[tiles],
                start=self.start + first,
                marks=None if self.marks is None else self.marks[words],
            )


def _part(items: torch.Tensor, per: int, first: int, numel: int) -> torch.Tensor:
    """Return the items of so many elements, where there is one for each `per` of them."""
    return items[first // per : (first + numel) // per]


class Places(Protocol):
    """Says where the parameters of a step are."""

    def view(self, run: Run) -> torch.Tensor:
        """Return a run of its parameter, 1D [run.numel]."""

    def addresses(self, runs: Sequence[Run]) -> list[int]:
        """Return the addresses of these, without tensors."""

    def checksums(self, run: Run) -> torch.Tensor | None:
        """Return the checksums that belong to a run; None in fp32."""

    def origin(self, run: Run) -> Origin | None:
        """Return the origin of the parameter, whose rule dithers; else None."""

    def marks(self, run: Run) -> torch.Tensor | None:
        """Return where a run notes which elements change; None if nobody asked."""

    @property
    def num_marked(self) -> int:
        """Return a number that is another one when any run notes that elsewhere."""


@dataclass(frozen=True)
class SubgroupStep:
    """One step does this to a subgroup. Tensors of its runs are made for whoever asks for them."""

    subgroup: Subgroup
    memory: Memory
    """The subgroup's state."""
    grads: Mapping[int, torch.Tensor]
    """Flat gradients of its parameters that have one, whole, by index."""
    scalars: Mapping[int, StepScalars]
    """Scalars of at least these, by index."""
    whole: WholeParams
    """Parameters that their rule needs whole."""
    places: Places
    copies: Mapping[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Runs whose parameter and gradient are copies in another place, by index of the parameter."""

    @cached_property
    def runs(self) -> dict[int, RunTensors]:
        """Its runs that have a gradient, by index of the parameter."""
        return {run.param: self._tensors_of(run) for run in self.subgroup.runs if run.param in self.grads}

    def _tensors_of(self, run: Run) -> RunTensors:
        subgroup, memory = self.subgroup, self.memory
        copy = self.copies.get(run.param)
        param, grad = copy or (self.places.view(run), run.part(self.grads[run.param]))
        return RunTensors(
            param,
            grad,
            section_view(subgroup, memory, "master", run),
            state_views(subgroup, memory, run),
            self.places.checksums(run),
            self.scalars[run.param],
            self.places.origin(run),
            run.start,
            self.places.marks(run),
        )

    def addresses(self, runs: Sequence[Run]) -> tuple[list[int], list[int]]:
        """Return the addresses of parameters and gradients of runs that have one."""
        if self.copies:
            pairs = [self.copies[run.param] for run in runs]
            return [param.data_ptr() for param, _ in pairs], [grad.data_ptr() for _, grad in pairs]
        found = [self.grads[run.param].data_ptr() + run.start * self.grads[run.param].itemsize for run in runs]
        return self.places.addresses(runs), found


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
