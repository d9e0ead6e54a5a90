"""What updates from a log cost beside plain ones: kernels over state in memory, measured by turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from statistics import median
from typing import Annotated, Any

import torch
import typer

from nvme_offload.offload.config.optimizer import OPTIMIZERS
from nvme_offload.offload.host.region import HostRegion
from nvme_offload.optim.kernels import ABSENT, KernelPool, LoggedStep, Segment, make_logged_step, make_segment
from nvme_offload.optim.layout.master import TILE_NUMEL
from nvme_offload.optim.rules.registry import rule_named
from nvme_offload.perf.measure.command_line import SaveTo, choice_option
from nvme_offload.perf.measure.comparison import by_turns
from nvme_offload.perf.measure.experiment import Experiment

_STEP = 10  # past the first, whose scalars are others


@dataclass(frozen=True)
class ReplayRates:
    """Parameters per second, each from the median of its rounds."""

    plain: float
    """Updates without a log that do not look for changes by others: the least there is."""
    checked: float
    """Updates as of a state that every step rewrites."""
    kept: float
    """The same, and the gradients kept for a log."""
    replayed: float
    """Logged updates alone."""
    checksummed: float
    """Checksums of the state: lower halves and the rule's states."""
    by_period: dict[int, float]
    """Steps of a state that every n-th step rewrites, by n: the mean over a period."""


@dataclass(frozen=True)
class Rate:
    """One of the rates, in parameters per second."""

    name: str
    rate: float

    def to_dict(self) -> dict[str, Any]:
        """The rate in plain types, for JSON."""
        return asdict(self)

    def cells(self) -> list[str]:
        """The rate as a row."""
        return [self.name, f"{self.rate / 1e9:.3f}"]


class _Workload:
    """One bf16 parameter with its state, and a few logged steps."""

    def __init__(self, numel: int, num_logged: int, threads: int, rule: str) -> None:
        settings = OPTIMIZERS[rule]
        self._rule = rule_named(rule).of(settings)
        self._scalars = self._rule.scalars(settings, _STEP)
        self.pool = KernelPool(threads)
        self._numel = numel
        self._param, self._grad = self._random(0.02), self._random(0.01)
        self._base, self._checksums = self._param.clone(), self.pool.tile_checksums(self._param)
        self.state = [torch.zeros(numel, dtype=torch.uint16), *(torch.full((numel,), 1e-3) for _ in self._rule.states)]
        self._offsets = torch.full((numel // TILE_NUMEL, 2), ABSENT)
        self._offsets[:, 0] = torch.arange(numel // TILE_NUMEL) * 2 * TILE_NUMEL
        self.kept_offsets, self.entry = torch.empty_like(self._offsets), self._empty_entry()
        self._entries = [self._empty_entry() for _ in range(num_logged)]
        self._log = [self._logged(entry) for entry in self._entries]

    def _random(self, scale: float) -> torch.Tensor:
        return (torch.randn(self._numel) * scale).bfloat16()

    def _empty_entry(self) -> torch.Tensor:
        return HostRegion(2 * self._numel).view(torch.uint8, 0, 2 * self._numel).zero_()

    def _logged(self, entry: torch.Tensor) -> LoggedStep:
        entry.view(torch.bfloat16).copy_(self._random(0.01))
        return make_logged_step(
            entry=entry,
            offsets=self._offsets,
            numel=self._numel,
            grad_dtype=torch.bfloat16,
            scalars=self._scalars,
            grad_scale=1.0,
        )

    def segment(self, num_logged: int = 0, *, live: bool = True, checked: bool = True, kept: bool = False) -> Segment:
        return make_segment(
            param=self._param,
            grad=self._grad if live else None,
            master=self.state[0],
            states=self.state[1:],
            checksums=self._checksums if checked else None,
            rule=self._rule,
            scalars=self._scalars,
            grad_scale=1.0,
            log=self._log[:num_logged],
            base=self._base,
            offsets=self.kept_offsets if kept else None,
        )

    def actions(self) -> dict[str, Callable[[], object]]:
        """What is measured, by name; of a step how many it replays, and whether it keeps its gradient."""
        update, keep = self.pool.update, self.pool.update_and_log
        found: dict[str, Callable[[], object]] = {
            "plain": partial(update, [self.segment(checked=False)]),
            "checksummed": lambda: [self.pool.tile_checksums(tensor) for tensor in self.state],
        }
        for replayed in range(len(self._log) + 1):
            found[f"rewriting {replayed}"] = partial(update, [self.segment(replayed)])
            found[f"keeping {replayed}"] = partial(keep, [self.segment(replayed, kept=True)], self.entry)
        for replayed in range(1, len(self._log) + 1):
            found[f"replayed {replayed}"] = partial(update, [self.segment(replayed, live=False)])
        return found


def measure(*, numel: int, max_period: int, threads: int, rounds: int, rule: str = "AdamW") -> ReplayRates:
    """Measure each thing once per round.

    Args:
        numel: elements, rounded up to whole tiles.
        max_period: the longest period, in steps; at least 1.
        threads: of the kernels.
        rounds: how many; what comes first in one comes last in the next.
        rule: an optimizer with a native kernel.
    """
    numel = -(-numel // TILE_NUMEL) * TILE_NUMEL
    workload = _Workload(numel, max_period - 1, threads, rule)
    actions = workload.actions()
    samples: dict[str, list[float]] = {name: [] for name in actions}
    for number, name in enumerate(islice(by_turns(sorted(actions)), (rounds + 1) * len(actions))):
        start = time.perf_counter()
        actions[name]()
        if number >= len(actions):  # the first round touches memory
            samples[name].append(time.perf_counter() - start)
    seconds = {name: median(each) for name, each in samples.items()}
    longest = max_period - 1
    return ReplayRates(
        plain=numel / seconds["plain"],
        checked=numel / seconds["rewriting 0"],
        kept=numel / seconds["keeping 0"],
        replayed=numel * longest / seconds[f"replayed {longest}"] if longest else numel / seconds["plain"],
        checksummed=numel / seconds["checksummed"],
        by_period={period: numel * period / _period_seconds(seconds, period) for period in range(1, max_period + 1)},
    )


def _period_seconds(seconds: Mapping[str, float], period: int) -> float:
    """All steps but the last of a period keep their gradients; each replays those that were kept before."""
    return sum(seconds[f"keeping {replayed}"] for replayed in range(period - 1)) + seconds[f"rewriting {period - 1}"]


Count = Annotated[int, typer.Option(min=1)]
Rule = Annotated[
    str,
    choice_option(
        "--rule",
        choices=[name for name in OPTIMIZERS if rule_named(name).kernel],
        text="An optimizer with a native kernel.",
    ),
]


def replay(
    numel: Count = 8 << 20,
    max_period: Count = 4,
    threads: Count = 1,
    rounds: Count = 7,
    rule: Rule = "AdamW",
    save_to: SaveTo = None,
) -> None:
    """Measure updates from a log beside plain ones, over state in memory."""
    rates = measure(numel=numel, max_period=max_period, threads=threads, rounds=rounds, rule=rule)
    alone = {name: rate for name, rate in vars(rates).items() if name != "by_period"}
    named = {**alone, **{f"period of {period}": rate for period, rate in rates.by_period.items()}}
    title = f"Updates from a log, {rule}, {numel:,} elements, {threads} thread{'s' * (threads > 1)}"
    Experiment(name="replay", title=title, head=("updates", "Gparam/s"), save_to=save_to).run(
        Rate(name, rate) for name, rate in named.items()
    )
