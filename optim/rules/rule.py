"""A rule is an optimizer to everything that keeps, moves and updates its state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

MOST_BLOCK = 128
"""The most elements that share an exponent."""


class State(NamedTuple):
    """A value that a rule keeps for each element of a parameter."""

    name: str
    """Name of the entry in ``optimizer.state``; torch's spelling, where torch has this optimizer."""
    birth: float = 0.0
    """Value of every element before the first update."""
    dtype: torch.dtype = torch.float32
    """Dtype in which the state is kept. To bf16 it is rounded by chance: see `optim.layout.dither`."""
    block: int = 0
    """Elements that share an exponent, where the state is kept in codes of 8 bits (`optim.layout.codes`); else 0."""
    is_signed: bool = True
    """Whether it may be negative: in 8 bits it is int8 then, else uint8."""

    @property
    def itemsize(self) -> float:
        """Bytes of an element, with its share of an exponent."""
        return self.dtype.itemsize + (1 / self.block if self.block else 0)

    @property
    def shown_dtype(self) -> torch.dtype:
        """The dtype that its values need."""
        return torch.float32 if self.block else self.dtype


class KeptSection(NamedTuple):
    """Memory that a rule keeps for a parameter: an item for each `per` elements."""

    name: str
    dtype: torch.dtype
    per: int


def kept_as(states: tuple[State, ...], dtype: str, block: int = MOST_BLOCK) -> tuple[State, ...]:
    """Return states as they are with this ``state_dtype`` of a parameter group."""
    if dtype == "bf16":
        return tuple(state._replace(dtype=torch.bfloat16) for state in states)
    if dtype == "int8" and block:
        coded = {True: torch.int8, False: torch.uint8}
        return tuple(state._replace(dtype=coded[state.is_signed], block=block) for state in states)
    return states


def block_of(shape: Sequence[int], order: Sequence[int]) -> int:
    """Return how many elements of a parameter share an exponent, where states have 8 bits; 0: they stay in fp32.

    The block is the largest of 128, 64 and 32 that divides a row, which is all that has one index of dimension 0.

    Args:
        shape: of the whole parameter, whatever a rank has of it.
        order: its dimensions from the slowest to the fastest in memory.
    """
    row = math.prod(shape[1:])
    if len(shape) < 2 or order[0] != 0 or row < 64 or shape[0] * row < 4096:
        return 0
    return next((block for block in (MOST_BLOCK, 64, 32) if row % block == 0), 0)


SWITCHES: Mapping[str, Any] = {"foreach": None, "fused": None, "differentiable": False}
"""Options of most of torch's optimizers that change nothing here."""

ThroughWhole = Callable[[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]
"""Takes this rank's part of a tensor and a function of the whole, and gives this rank's part of the result."""


class UpdateRule:
    """A rule knows what an optimizer does with a gradient, and what it keeps for that; everything else asks it.

    Write one in torch operators, and name it in an `OffloadOptimizer`::

        class SignMomentum(UpdateRule):
            name = "SignMomentum"
            states = (State("momentum"),)  # one fp32 number for each element, zero at first

            def scalars(self, group, step):
                return (group["lr"],)

            def update(self, master, grad, states, scalars):
                states[0].lerp_(grad, 0.1)
                master.sub_(states[0].sign(), alpha=scalars[0])

    An instance is the rule of one kind of parameter group and does not change. A rule with a native `kernel` describes
    its step in `scalars`. A rule without one runs its `update`, in torch operators; so does every rule on a device.
    """

    name: str
    """People call the rule this, and so does ``optimizer.type`` of the section."""
    states: tuple[State, ...] = ()
    """States in the order in which the update takes them. Two groups whose states differ have two rules, see `of`."""
    kernel: str = ""
    """Which native kernel does the update; empty: `update` does."""
    numbers: ClassVar[tuple[str, ...]] = ()
    """Hyperparameters that must be finite numbers, 0 or more; ``betas`` are two of them, each below 1."""
    refused: ClassVar[tuple[str, ...]] = ("capturable", "differentiable")
    """Options of torch's optimizer of that name that must be false here."""
    torch_keys: ClassVar[Mapping[str, Any]] = {}
    """Options of torch's optimizer that change nothing here, with their defaults: parameter groups have them, too."""
    counts_steps: ClassVar[bool] = True
    """Whether torch's optimizer has a ``step`` in a parameter's state."""
    shaping: ClassVar[tuple[str, ...]] = ()
    """Hyperparameters that decide which states there are: what they decided when a group was added stays."""

    whole: bool = False
    """Whether an update needs whole parameters: `update_whole` does it, and nothing is cut. Without a kernel only."""

    gathered_dtype: torch.dtype = torch.float32
    """Dtype in which `update_whole` gets to see other ranks' parts."""

    def of(self, group: Mapping[str, Any]) -> UpdateRule:
        """The rule of a parameter group, whose hyperparameters `check` has passed."""
        return self

    def of_param(self, shape: Sequence[int], order: Sequence[int]) -> UpdateRule:
        """The rule of one parameter of the group: in 8 bits it depends on the parameter, see `block_of`."""
        return self

    def is_in(self, rule: UpdateRule) -> bool:
        """Whether this is the rule of a parameter of a group with that rule."""
        return self is rule or self == rule

    @property
    def block(self) -> int:
        """Elements that share an exponent; 0: there are no exponents."""
        return max((state.block for state in self.states), default=0)

    @cached_property
    def kept(self) -> tuple[KeptSection, ...]:
        """List what keeps its states: an array of each, and behind them the exponents of those in 8 bits."""
        coded = [state for state in self.states if state.block]
        exponents = (KeptSection(f"{state.name} exponents", torch.uint8, state.block) for state in coded)
        return (*(KeptSection(state.name, state.dtype, 1) for state in self.states), *exponents)

    @property
    def dithers(self) -> bool:
        """Whether a state is rounded by chance."""
        return any(state.dtype is not torch.float32 for state in self.states)

    def dither(self, step: int) -> tuple[float, ...]:
        """Return by what the rounding of a step is dithered beside its elements: an fp32 number, or nothing."""
        return (float(step % 2**24),) if self.dithers else ()

    @property
    def widest_states(self) -> tuple[State, ...]:
        """States of the group that keeps most: what a staging buffer must have room for."""
        return self.states

    def check(self, group: Mapping[str, Any], number: int) -> None:
        """Check the hyperparameters of a parameter group.

        Raises:
            ValueError: names the group, the key, the value and what is allowed.
        """
        check_numbers(group, number, *(key for key in self.numbers if key != "betas"))
        if "betas" in self.numbers:
            _check_betas(group, number)
        for key in self.refused:
            if group.get(key):
                raise ValueError(f"{_where(number, group, key)}: is not supported; leave it out")

    def check_param(self, param: torch.Tensor, name: str) -> None:
        """Raise ValueError for a parameter that this rule has no update for."""

    def scalars(self, group: Mapping[str, Any], step: int) -> tuple[float, ...]:
        """Return what the update needs to know of a step: computed in fp64 and rounded to fp32 once.

        Args:
            group: the parameter group.
            step: number of this update of a parameter; the first is 1.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say which scalars its update takes")

    def update(
        self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor], scalars: Sequence[float]
    ) -> None:
        """Update a run of elements in place, in torch operators: without a native kernel, and on a device.

        A rule with a kernel has the same bits here; `optim.rules.operators` says how.

        Args:
            master: fp32 [numel], master weights.
            grad: fp32 [numel], unscaled and clipped, negative with ``maximize``; may be overwritten.
            states: fp32 [numel] each.
            scalars: of this step.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither a kernel nor an update of its own")

    def update_whole(
        self,
        master: torch.Tensor,
        grad: torch.Tensor,
        states: Sequence[torch.Tensor],
        scalars: Any,
        through_whole: ThroughWhole,
    ) -> None:
        """Update this rank's part of a parameter in place, in the parameter's shape; for a rule that is `whole`.

        Args:
            master: fp32, master weights.
            grad: fp32, unscaled and clipped, negative with ``maximize``; may be overwritten.
            states: fp32 each.
            scalars: of this step.
            through_whole: call it exactly once. It gathers its first argument from all ranks, gives the whole to its
                second, and returns this rank's part of what that returns. Where the parameter is not sharded, nothing
                is gathered.
        """
        raise NotImplementedError(f"{type(self).__name__} has no update of whole parameters")

    def adopted(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """State entries of one parameter as torch's optimizer saved them, in the words of this one."""
        return dict(entries)


def without_torch_switches(group: Mapping[str, Any]) -> dict[str, Any]:
    """A saved group without what chose how torch's own optimizer computes (CUDA graphs, autograd through the step).

    The state is the same with them, and nothing here reads them.
    """
    return {key: value for key, value in group.items() if key not in ("capturable", "differentiable")}


def rounded(*values: float) -> list[float]:
    """Give each of these numbers rounded to fp32."""
    return [float(np.float32(value)) for value in values]


def check_numbers(group: Mapping[str, Any], number: int, *keys: str) -> None:
    """Raise ValueError unless these hyperparameters are finite numbers, 0 or more."""
    for key in keys:
        if not 0 <= number_of(group[key]) < math.inf:
            raise ValueError(f"{_where(number, group, key)}: must be a finite number, 0 or more")


def _check_betas(group: Mapping[str, Any], number: int) -> None:
    """Raise ValueError unless ``betas`` are two numbers, each 0 or more and below 1."""
    betas = group["betas"]
    given = [number_of(beta) for beta in betas] if isinstance(betas, Iterable) else []
    if len(given) != 2 or not all(0 <= beta < 1 for beta in given):
        raise ValueError(f"{_where(number, group, 'betas')}: must be two numbers, each 0 or more and below 1")


def number_of(value: Any) -> float:
    """A hyperparameter as torch takes it, a number or a tensor that holds one; NaN for anything else."""
    if isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return float(value)
    return math.nan


def _where(number: int, group: Mapping[str, Any], key: str) -> str:
    return f"parameter group {number}: {key} = {group[key]!r}"
