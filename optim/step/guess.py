"""A step guesses what it will multiply its gradients by before its norm is known, where a wrong guess can be undone.

Clipping, and skipping what is not finite, need all gradients before the first update. Most steps of a long run do
neither: their factor is 1, or what undoes the loss scale, as in the step before. So where the state is durable a step
begins in backward with that factor. If it turns out to be another one, what has been updated is brought back from the
latest commit, which no step writes over, and done again.
"""

from __future__ import annotations

import math

import torch

from nvme_offload.optim.state.body import StepState
from nvme_offload.optim.state.slots import SlotRecord
from nvme_offload.optim.step.norm import clip_coefficient

_LEAST_RUN, _LONGEST_RUN = 4, 1024


class Guesses:
    """Says when a factor can be guessed: when the latest steps had the same one, the more of them the more went wrong.

    As many are asked for as make right guesses outnumber wrong ones: twice as many after each wrong guess, one fewer
    after each that is right. Where most steps clip, nothing is guessed.
    """

    def __init__(self) -> None:
        self._factor: float | None = None
        self._run = 0
        self._needed = _LEAST_RUN

    @property
    def factor(self) -> float | None:
        """The factor of the next step; None where nobody knows."""
        return self._factor if self._run >= self._needed else None

    def note(self, factor: float | None, *, is_right: bool | None) -> None:
        """Take note of a step.

        Args:
            factor: of the step; None: it was skipped.
            is_right: whether its factor was guessed; None: nothing was.
        """
        self._run = 0 if factor is None else self._run + 1 if factor == self._factor else 1
        self._factor = factor
        if is_right is not None:
            needed = self._needed - 1 if is_right else 2 * self._needed
            self._needed = min(max(needed, _LEAST_RUN), _LONGEST_RUN)


class Guess:
    """The guess of one step, and what its gradients say of it.

    Args:
        store: the optimizer's state, durable.
        factor: what stored gradients will be multiplied by.
        max_norm: the largest norm that is not clipped; 0: none is.
    """

    def __init__(self, store: StepState, factor: float, max_norm: float) -> None:
        self.factor = factor
        self.is_off = False
        """Whether it is wrong for certain: nothing more is updated with it."""
        self.updated: dict[SlotRecord, None] = {}
        """Subgroups whose update was allowed: with parameters, they can be taken back."""
        self._store = store
        self._max_norm = max_norm
        self._sq_sum = 0.0
        self._refused: set[SlotRecord] = set()

    def see(self, sums: torch.Tensor) -> None:
        """Take note of a gradient: the norm is at least that of all which were seen, and finite only if they are.

        Args:
            sums: of squares, fp64 [tiles].
        """
        self._sq_sum += float(sums.sum())
        norm = math.sqrt(self._sq_sum) * self.factor if self._sq_sum >= 0 else math.nan
        self.is_off |= not math.isfinite(norm) or clip_coefficient(norm, self._max_norm) < 1

    def allows(self, slot: SlotRecord) -> bool:
        """Whether a subgroup may be updated now, which counts as done: what is in the latest commit alone may."""
        if self.is_off or slot in self._refused:
            return False
        if not self._store.durability.is_as_committed(slot):  # a parameter was changed since, or the commit failed
            self._refused.add(slot)
            return False
        self.updated[slot] = None
        return True
