"""When the updates of a step are done: each schedule says what it does and what it asks for, and others ask it."""

from dataclasses import dataclass
from typing import Literal

OverlapStep = Literal["off", "forward", "backward", "speculate"]
"""The name of a schedule, as in the section's ``overlap_step``."""


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """A schedule of the updates of a step."""

    name: OverlapStep
    hides: bool = True
    """Updates go on behind `step()`, as far as who reads the parameters can wait for them."""
    begins_in_backward: bool = False
    """Updates begin as gradients become final, before the norm of all is known."""
    needs_durable: bool = False
    """They begin with a guess, and a wrong one is taken back from what a durable run has committed."""
    forbids_clipping: bool = False
    """They begin for good: nothing may need all gradients before."""

    def __str__(self) -> str:
        return f'overlap_step = "{self.name}"'


OFF = Overlap(name="off", hides=False)
FORWARD = Overlap(name="forward")
BACKWARD = Overlap(name="backward", begins_in_backward=True, forbids_clipping=True)
SPECULATE = Overlap(name="speculate", begins_in_backward=True, needs_durable=True)
OVERLAPS: dict[OverlapStep, Overlap] = {each.name: each for each in (OFF, FORWARD, BACKWARD, SPECULATE)}
