"""Describe the runs of a subgroup to the kernels once, and tell them in each step only what is new."""

from collections.abc import Callable

import torch

from ..kernels import GradDtype, Segment, renew
from ..layout.subgroup import Run
from .work import RunTensors, SubgroupStep

_MOST_MEMORIES = 16  # of a slot: more than it usually has buffers to take turns in


class KeptSegments:
    """Keeps segments by what they are for: the address of the memory, as staging buffers take turns, and the kind."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, bool], dict[int, Segment]] = {}

    def renewed(self, work: SubgroupStep, make: Callable[[RunTensors, Run], Segment], kind: bool) -> list[Segment]:
        """Return the segments of all runs that have a gradient, with the addresses and scalars of this step.

        Args:
            work: the step.
            make: describes a run. What it makes of the memory and of the kind stays.
            kind: of the update.
        """
        if len(self._made) > _MOST_MEMORIES:
            self._made = {}
        memory = work.memory.view(torch.uint8, 0, 1).data_ptr()
        made = self._made.setdefault((memory, work.places.num_marked, kind), {})
        grads, scalars = work.grads, work.scalars
        runs = [run for run in work.subgroup.runs if run.param in grads]
        for run in runs:
            if run.param not in made:
                made[run.param] = make(work.runs[run.param], run)
        segments = [made[run.param] for run in runs]
        dtypes = [GradDtype.of(grads[run.param]) for run in runs]
        renew(segments, *work.addresses(runs), dtypes, [scalars[run.param] for run in runs])
        return segments
