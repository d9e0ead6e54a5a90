"""Say in which condition an optimizer's state is: whole, in a step, in a load, or beside a run that was found."""

import enum
from abc import ABC, abstractmethod

from nvme_offload.offload.errors import StateError

_CHECKPOINT = "load a checkpoint with load_state_dict, "
_MODEL_FIRST = "the model's before the optimizer's (fp32 parameters are in no other)"
_MODEL_LAST = "the optimizer's, then the model's (split parameters cannot be written before)"


class Need(enum.Enum):
    """Something that not every condition can give. The value is what an error expects."""

    NEXT_STEP = "a finished step"
    STATE = "whole state"
    PARAMS = "whole parameters"
    REST_OF_STEP = "a step that can be finished"


class StepPhase(enum.Enum):
    """The phase of a step.

    The record keeps a gradient from the moment it is handed in until all parts of its parameter are updated.
    """

    NONE = "no step"
    """No step is under way, or it is a load."""
    BEGUN = "begun in backward"
    """Updates go on in backward, with gradients that are final. Nobody may use a parameter whose gradient is. `step()`
    leads on; where the updates were guessed, they can be taken back instead."""
    RUNNING = "running"
    """`step()` updates, or an exception came out of it. Parameters can be read, and may be of two steps.
    `finish_step()` leads on."""
    BEHIND = "behind the step"
    """`step()` has returned, and the worker updates what is pending. Who reads a parameter waits for its update."""
    STOPPED = "stopped"
    """An error ended the updates behind `step()`. Parameters that are pending cannot be read. `finish_step()` leads
    on."""
    SPOILT = "spoilt"
    """An update was cut off, or needed gradients or parameters are gone. Only a load or `resume()` leads on."""
    DONE = "done"
    """All is updated."""


class Condition(ABC):
    """The condition of an optimizer's state."""

    phase = StepPhase.NONE

    def __init__(self, owner: str) -> None:
        self._owner = owner

    @property
    @abstractmethod
    def lacks(self) -> frozenset[Need]:
        """Return all that nobody can have in this condition."""

    def refuses(self, need: Need) -> StateError | None:
        """Return the error for whoever needs this; None if it can be had."""
        return self.refusal(need.value) if need in self.lacks else None

    def refusal(self, expected: str) -> StateError:
        """Return the error for whoever wants something that needs `expected`."""
        return StateError(self._owner, expected, f"{self.situation}. {self.way_on}")

    @property
    @abstractmethod
    def situation(self) -> str:
        """Say in words what state the optimizer is in."""

    @property
    @abstractmethod
    def way_on(self) -> str:
        """Say in words what can be done about the situation."""


class WholeState(Condition):
    """All state and all parameters are of the same step."""

    lacks = frozenset({Need.REST_OF_STEP})
    situation = "no such step"
    way_on = "The latest one is complete: go on"


class LoadingState(Condition):
    """A load is under way, or was interrupted: part of the state is new and part is old."""

    lacks = frozenset({Need.NEXT_STEP, Need.STATE, Need.REST_OF_STEP})
    situation = "a load stopped halfway: part of the state is new and part is old"

    def __init__(self, owner: str, way_back: str) -> None:
        super().__init__(owner)
        self._way_back = way_back

    @property
    def way_on(self) -> str:
        """Say in words what can be done about the situation."""
        return f"It cannot be finished: {self._way_back}"


class UnresumedRun(Condition):
    """The durable run `name` was found and not taken up: what is in memory will not be its state."""

    lacks = frozenset({Need.NEXT_STEP, Need.STATE, Need.REST_OF_STEP})

    def __init__(self, owner: str, name: str) -> None:
        super().__init__(owner)
        self._name = name

    def refusal(self, expected: str) -> StateError:
        """Return the error for whoever needs the state of the run."""
        return super().refusal("a run that was resumed")

    @property
    def situation(self) -> str:
        """Say in words what state the optimizer is in."""
        return f"nvme_path holds the durable run {self._name!r}, which has not been resumed"

    @property
    def way_on(self) -> str:
        """Say in words what can be done about the situation."""
        return (
            "Call resume() to go on from its latest step, load a checkpoint to go on from there, or begin anew under "
            "another name"
        )


def take_back_notes(error: BaseException, way_on: str) -> None:
    """Take notes off an error that end with a way on which does not lead on any more."""
    notes: list[str] = getattr(error, "__notes__", [])
    notes[:] = [note for note in notes if not note.endswith(way_on)]


def way_back_text(*, split: bool, is_durable: bool) -> str:
    """Say what brings whole state back; `split`: there are split parameters, of which the state has a half."""
    resume = "call resume() to go on from the latest committed step, or " if is_durable else ""
    return f"{resume}{_CHECKPOINT}{_MODEL_LAST if split else _MODEL_FIRST}"
