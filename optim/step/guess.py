"""A step guesses what it will multiply its gradients by before its norm is known, where a wrong guess can be undone.

Clipping, and skipping what is not finite, need all gradients before the first update. Most steps of a long run do
neither: their factor is 1, or what undoes the loss scale, as in the step before. So where the state is durable a step
begins in backward with that factor. If it turns out to be another one, what has been updated is brought back from the
latest commit, which no step writes over, and done again.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nvme_offload.offload.errors import StateError
from ..rules.rule import UpdateRule
from ..state.body import StepState
from ..state.condition import StepPhase
from ..state.phase import StepRecord
from ..state.slots import SlotRecord
from ..telemetry.stats import Meter
from .norm import clip_coefficient
from .scalars import scalars_of
from .waiting_parameter import let_read

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


class ForGood:
    """An early step stays begun: another factor, gradient or hyperparameter than it began with is an error."""

    def __init__(self, store: StepState, meter: Meter, rule: UpdateRule) -> None:
        self._store = store
        self._meter = meter
        self._rule = rule
        self._begun_with: list[dict[str, Any]] = []

    @property
    def factor(self) -> float | None:
        """The factor with which the next step begins; None: it does not begin in backward."""
        return 1.0

    def begin(self, groups: Sequence[Mapping[str, Any]], factor: float) -> Guess | None:
        """Begin a step; return its guess, if it can be taken back."""
        self._begun_with = _hyperparameters_of(groups)
        return None

    def meet_another(self, name: str) -> None:
        """Meet another gradient of a parameter whose gradient was final."""
        way_on = 'one backward before step() (write gradient_accumulation_steps, or overlap_step = "forward")'
        raise StateError(name, way_on, "another gradient after the one that was final")

    def check(self, begun: StepRecord, groups: Sequence[Mapping[str, Any]], *, are_same: bool) -> None:
        """Compare a step with what it began with; `are_same`: its gradients."""
        _check_same_hyperparameters(self._store.owner, self._begun_with, _hyperparameters_of(groups))
        if not are_same:
            raise begun.gradients_changed()

    def settle(self, begun: StepRecord | None, grad_scale: float | None) -> None:
        """Know the factor of a step; None: it is skipped."""
        if begun is not None and grad_scale != 1.0:
            way_on = 'gradients without a scale (or overlap_step = "forward")'
            raise StateError(self._store.owner, way_on, f"a scale of {grad_scale}, after updates began in backward")

    def drop(self) -> None:
        """Give up the step that has begun; where it is undone, nothing of it has happened.

        If a read fails, call it again, as whoever needs a parameter does.
        """
        store = self._store
        with store.worker.kept_away():
            if (begun := store.record_in(StepPhase.BEGUN)) is None:
                return
            store.worker.drop_job()
            store.table.marks.latest.drop()
            if self._undo(begun):
                store.be_whole()
                let_read(store.table[index] for index in begun.claims.final)
            else:
                begun.become(StepPhase.SPOILT)

    def _undo(self, begun: StepRecord) -> bool:
        return not begun.done


class Guessing(ForGood):
    """An early step is a guess. Where that is wrong, all is brought back to what the latest commit has."""

    def __init__(self, store: StepState, meter: Meter, rule: UpdateRule) -> None:
        super().__init__(store, meter, rule)
        self._guesses = Guesses()
        self._guess: Guess | None = None
        """The guess of the latest step that began in backward."""
        self._is_taken_back = False

    @property
    def factor(self) -> float | None:
        """See `ForGood.factor`."""
        return None if self._is_taken_back else self._guesses.factor

    def begin(self, groups: Sequence[Mapping[str, Any]], factor: float) -> Guess | None:
        """See `ForGood.begin`."""
        self._guess = Guess(self._store, factor, self._store.config.gradient_clipping)
        return self._guess

    def meet_another(self, name: str) -> None:
        """See `ForGood.meet_another`."""
        self.drop()

    def check(self, begun: StepRecord, groups: Sequence[Mapping[str, Any]], *, are_same: bool) -> None:
        """See `ForGood.check`."""
        used, guess = begun.inputs.scalars, self._guess
        assert guess is not None
        is_right = are_same and scalars_of(self._store, self._rule, groups, used.keys(), guess.factor) == used
        if self._is_taken_back or not is_right:
            self.drop()

    def settle(self, begun: StepRecord | None, grad_scale: float | None) -> None:
        """Note whether the factor of a step was guessed, and take back what was updated with a wrong guess."""
        guess, is_right = self._guess, None
        if guess is not None and (begun is not None or self._is_taken_back):
            is_right = grad_scale == guess.factor and not self._is_taken_back
            if not is_right:
                self.drop()
            self._meter.count_guess(is_right=is_right)
        self._is_taken_back = False
        self._guesses.note(grad_scale, is_right=is_right)

    def _undo(self, begun: StepRecord) -> bool:
        store, guess = self._store, self._guess
        assert guess is not None
        self._is_taken_back = True  # first: an exception leaves some of it to be taken back once more
        store.durability.take_back(list(guess.updated), store.pipeline)
        self._meter.count_updates(taken_back=len(guess.updated))
        if isinstance(store.worker.failure, StateError):  # of a gradient that has changed, as it may of a guess
            store.worker.note_failure(None)
        return True


def _hyperparameters_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def _check_same_hyperparameters(
    owner: str, begun: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> None:
    for number, (before, after) in enumerate(zip(begun, now, strict=False)):
        for name in sorted({*before, *after}):
            if before.get(name) != after.get(name):
                raise StateError(
                    owner,
                    f"{name} of group {number} as it was when updates began in backward, {before.get(name)!r}",
                    f"{after.get(name)!r}. Set it back and call step(); change it after step() and before backward, "
                    'or write overlap_step = "forward"',
                )
