"""A step guesses what it will multiply its gradients by before its norm is known, where a wrong guess can be undone.

Clipping, and skipping what is not finite, need all gradients before the first update. Most steps of a long run do
neither: their factor is 1, or what undoes the loss scale, as in the step before. So where the state is durable a step
begins in backward with that factor. If it turns out to be another one, what has been updated is brought back from the
latest commit, which no step writes over, and done again.
"""

import math

import torch

from nvme_offload.optim.state.body import StepState
from nvme_offload.optim.state.slots import SlotRecord
from nvme_offload.optim.step.norm import clip_coefficient

_LEAST_RUN, _LONGEST_RUN = 4, 1024


class Guesses:
    """Guesses the factor of the next step once enough steps in a row had the same one.

    Each wrong guess doubles how many are needed, and each right one takes one off, so right guesses outnumber wrong
    ones. Where most steps clip, nothing is guessed.
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
        """Note the factor of a step (None: skipped), and whether the guess was right (None: there was no guess)."""
        self._run = 0 if factor is None else self._run + 1 if factor == self._factor else 1
        self._factor = factor
        if is_right is not None:
            needed = self._needed - 1 if is_right else 2 * self._needed
            self._needed = min(max(needed, _LEAST_RUN), _LONGEST_RUN)


class Guess:
    """The guess of one step of durable state, and what its gradients say of it.

    Args:
        factor: multiplies the stored gradients.
        max_norm: the largest norm that is not clipped; 0: none is.
    """

    def __init__(self, store: StepState, factor: float, max_norm: float) -> None:
        self.factor = factor
        self.is_off = False
        """Whether it is certainly wrong: nothing more is updated with it."""
        self.updated: dict[SlotRecord, None] = {}
        """Subgroups whose update was allowed: these are taken back, with their parameters."""
        self._store = store
        self._max_norm = max_norm
        self._sq_sum = 0.0
        self._refused: set[SlotRecord] = set()

    def see(self, sums: torch.Tensor) -> None:
        """Note a gradient's tile sums. The norm is at least that of all seen, and finite only if they are."""
        self._sq_sum += float(sums.sum())
        norm = math.sqrt(self._sq_sum) * self.factor if self._sq_sum >= 0 else math.nan
        self.is_off |= not math.isfinite(norm) or clip_coefficient(norm, self._max_norm) < 1

    def allows(self, slot: SlotRecord) -> bool:
        """Return whether a subgroup may be updated; from then on it counts as updated."""
        if self.is_off or slot in self._refused:
            return False
        if not self._store.durability.is_as_committed(slot):  # a parameter was changed since, or the commit failed
            self._refused.add(slot)
            return False
        self.updated[slot] = None
        return True
