"""DeepSpeed's learning-rate schedules, with its names, arguments and rates; ``deepspeed.runtime.lr_schedules``.

A schedule sets the least rate when it is made. Its first step comes after the first step of training, and sets the rate
of index 0. So step n of training has the rate of index n - 1, and the first two steps often have the same rate.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch.optim import Optimizer

from nvme_offload.offload.errors import ConfigError, ConfigWarning
from nvme_offload.offload.warn import warn_user

Rates = float | Sequence[float]
"""One number for all parameter groups, or one for each."""


class Schedule:
    """A counter that is one behind the steps of training, and what each group's rate is at an index of it."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None
        if last_batch_iteration == -1:
            self._set()

    def rates_at(self, index: int) -> list[float]:
        """Return the learning rate of each parameter group at an index; at -1 before the first step."""
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group, from the formula."""
        return self.rates_at(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """Return the learning rates that were set last. Raises AssertionError before there are any."""
        assert self._last_lr is not None, "need to call step() first"
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next index, or to the one that is given, and set the learning rates."""
        self.last_batch_iteration += 1
        if last_batch_iteration is not None:
            self.last_batch_iteration = last_batch_iteration
        self._set()

    def _set(self) -> None:
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=False):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Return the index."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the index over; the rates are those of the optimizer's groups until the next step."""
        self.last_batch_iteration = state_dict["last_batch_iteration"]

    def _of_groups(self, value: Rates, name: str) -> list[float]:
        count = len(self.optimizer.param_groups)
        if isinstance(value, Sequence):
            if len(value) != count:
                raise ValueError(f"expected {count} value for {name}, got {len(value)}")
            return [float(each) for each in value]
        return [float(value)] * count


class LRRangeTest(Schedule):
    """Rates that grow by the same amount every `lr_range_test_step_size` steps, to see how large they may be."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        self.min_lr = self._of_groups(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = _at_least_one(lr_range_test_step_size, "lr_range_test_step_size")
        self.step_rate, self.staircase = lr_range_test_step_rate, lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rates_at(self, index: int) -> list[float]:
        """See `Schedule`."""
        intervals = float(index + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(intervals) if self.staircase else intervals)
        return [low * increase for low in self.min_lr]


class OneCycle(Schedule):
    """Up and down once, then a decay; the first beta goes the other way, unless `cycle_momentum` is false."""

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        first, second = cycle_first_step_size, cycle_second_step_size
        second = first if second is None else second
        if first <= 0:
            raise ValueError(f"cycle_first_step_size must be positive, got {first}")
        if second < 0:
            raise ValueError(f"cycle_second_step_size must be non-negative, got {second}")
        self.optimizer = optimizer
        self.sizes = float(first), float(second)
        stairs = cycle_second_stair_count
        self.stairs = cycle_first_stair_count, cycle_first_stair_count if stairs is None else stairs
        self.min_lrs = self._of_groups(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._of_groups(cycle_max_lr, "cycle_max_lr")
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        self._moms = self._of_groups(cycle_min_mom, "cycle_min_mom"), self._of_groups(cycle_max_mom, "cycle_max_mom")
        self._decay = float(decay_step_size), decay_lr_rate, decay_mom_rate
        super().__init__(optimizer, last_batch_iteration)

    @property
    def total_size(self) -> float:
        """The steps of the cycle."""
        return sum(self.sizes)

    @property
    def step_ratio(self) -> float:
        """The part of the cycle in which rates grow."""
        return self.sizes[0] / self.total_size

    def rates_at(self, index: int) -> list[float]:
        """See `Schedule`."""
        if index < self.total_size:
            share = self._share(index + 1)
            return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        shrink = self._grown(index, self._decay[1])
        return [low / shrink for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each parameter group, from the formula; None where they are left alone."""
        if not self.cycle_momentum:
            return None
        low, high = self._moms
        if self.last_batch_iteration < self.total_size:
            share = self._share(self.last_batch_iteration + 1)
            return [(top - (top - bottom) * share, 0.99) for bottom, top in zip(low, high, strict=True)]
        growth = self._grown(self.last_batch_iteration, self._decay[2])
        return [(top * growth, 0.99) for top in high]

    def _set(self) -> None:
        super()._set()
        moms = self.get_mom()
        if moms is not None and self.last_batch_iteration < 0:
            moms = [(bottom, 0.99) for bottom in self._moms[0]]  # as DeepSpeed begins, though its cycle begins above
        for group, mom in zip(self.optimizer.param_groups, moms or (), strict=False):
            group["betas"] = mom

    def _share(self, iteration: int) -> float:
        """Return how far up the cycle is: 0 at its ends, 1 at the end of its first part."""
        total, (first, second) = self.total_size, self.sizes
        x = 1.0 + iteration / total - math.floor(1 + iteration / total)
        peak = self.step_ratio
        is_up = x <= peak
        count = self.stairs[0 if is_up else 1]
        if count <= 0:
            return x / peak if is_up else (x - 1) / (peak - 1)
        place = iteration % total  # stairs are counted from the whole number: a rounded one may be a stair too low
        steps = place * count / first if place <= first else (total - place) * count / second
        return math.floor(steps) / count

    def _grown(self, index: int, rate: float) -> float:
        size = self._decay[0]
        return 1.0 if size == 0 or rate == 0 else 1 + rate * ((index - self.total_size + 1) / size)


class WarmupLR(Schedule):
    """From a least rate to the full one, which stays."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        own = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = self._of_groups(warmup_min_lr, "min_lr")
        self.max_lrs = self._of_groups(own if warmup_max_lr is None else warmup_max_lr, "max_lr")
        self.warmup_num_steps = max(2, _at_least_one(warmup_num_steps, "warmup_num_steps"))
        self.warmup_type = _shape(warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def rates_at(self, index: int) -> list[float]:
        """See `Schedule`."""
        share = self._share(index) if index >= 0 else 0.0
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _share(self, index: int) -> float:
        return _warmed(index, self.warmup_num_steps, self.warmup_type) if index < self.warmup_num_steps else 1.0


class WarmupDecayLR(WarmupLR):
    """From a least rate to the full one, and in a line to 0 at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _share(self, index: int) -> float:
        if index < self.warmup_num_steps:
            return super()._share(index)
        return max(0.0, float(self.total_num_steps - index) / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(Schedule):
    """From a part of each group's own rate to the whole, and along half a cosine to `cos_min_ratio` of it."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.warmup_num_steps = max(2, _at_least_one(warmup_num_steps, "warmup_num_steps"))
        self.warmup_type = _shape(warmup_type)
        self.org_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, last_batch_iteration)

    def rates_at(self, index: int) -> list[float]:
        """See `Schedule`."""
        ratio = self._ratio(index)
        return [own * ratio for own in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """Return what each group's own rate is multiplied by."""
        return self._ratio(self.last_batch_iteration)

    def _ratio(self, index: int) -> float:
        if index < 0:
            return 0.0
        if index < self.warmup_num_steps:
            share = _warmed(index, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + share * (1.0 - self.warmup_min_ratio)
        after = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (index - self.warmup_num_steps + 1) / after)
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * ((1 + math.cos(math.pi * progress)) / 2))


SCHEDULES: Mapping[str, Callable[..., Any]] = {
    each.__name__: each for each in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def schedule_of(section: Any) -> Callable[[Optimizer], Any] | None:
    """Return what makes the schedule of a ``scheduler`` section, of DeepSpeed or of torch; None without one.

    Raises:
        ConfigError: there is no such type, or no such parameter of it, or one is missing.
    """
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise ConfigError([f'scheduler = {section!r}: is not a section; write {{"type": ..., "params": ...}}'])
    kind, given = section.get("type"), section.get("params") or {}
    if kind is None:
        return None
    made = SCHEDULES.get(str(kind), getattr(torch.optim.lr_scheduler, str(kind), None))
    if made is None:
        raise ConfigError([f'scheduler.type = "{kind}": write one of {", ".join(SCHEDULES)}, or a class of torch\'s'])
    takes = inspect.signature(made).parameters
    problems = []
    for name in given:
        if name not in takes or name == "optimizer":
            near = get_close_matches(name, takes, n=1) or [", ".join(each for each in takes if each != "optimizer")]
            problems.append(f"scheduler.params.{name} = {given[name]!r}: {kind} has no such parameter; write {near[0]}")
    autos = [name for name in given if given[name] == "auto"]
    params = {name: value for name, value in given.items() if name not in autos}
    for name, of in takes.items():
        if of.default is of.empty and of.kind is of.POSITIONAL_OR_KEYWORD and name not in ("optimizer", *params):
            problems.append(f'scheduler.params.{name} = missing: type = "{kind}" needs it')
    if problems:
        raise ConfigError(problems)
    if autos:
        what = ", ".join(f"scheduler.params.{name}" for name in autos)
        warn_user(f'config: {what}: "auto", and nobody to resolve it, so the default', ConfigWarning)
    return lambda optimizer: made(optimizer, **params)


def _warmed(index: int, num_steps: int, kind: str) -> float:
    """Return the part of the way to the full rate."""
    return index / num_steps if kind == "linear" else (1.0 / math.log(num_steps)) * math.log(index + 1)


def _shape(kind: str) -> str:
    """Return a shape of a warm-up; what is none is logarithmic, as DeepSpeed has it."""
    if kind not in ("log", "linear"):
        warn_user(f'scheduler: warmup_type = "{kind}": there are "log" and "linear"; DeepSpeed takes "log", too')
        return "log"
    return kind


def _at_least_one(value: float, name: str) -> int:
    if not isinstance(value, int | float) or not value == int(value) > 0:
        raise ValueError(f"{name} must be a positive integer, got {value}")
    return int(value)
