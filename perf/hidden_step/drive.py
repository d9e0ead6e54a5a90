"""Two schedules in turn on a real drive: how much shorter an iteration is behind `step()` than inside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from nvme_offload.perf.bench.comparison import Comparison, Quad, compare, comparison_of
from nvme_offload.perf.hidden_step.training import Iteration, Setup, Training, section
from nvme_offload.perf.planning.schedule import OverlapStep

TOLERANCE = 0.1
"""Share by which an iteration in memory may differ from what was asked for, in a quad that counts."""
ITERATIONS = 2
"""Measured each time, after one that is not."""
HEAD = ("overlap_step", "over off (95 %)", "control", "quads", "compute s", "off s", "its own s")
REAL_WIDTH, REAL_LAYERS = 2048, 8
"""269 million parameters."""
REAL_TOKENS = 256
"""With which two processors compute about as long as a drive of 5 GB/s moves the state."""


@dataclass(frozen=True)
class Round:
    """One quad and its control, and whether computing alone took what it should."""

    quad: Quad
    control: Quad
    compute: float
    """Seconds of an iteration with the state in memory."""
    wanted: float
    """Seconds that this should have been."""

    @property
    def counts(self) -> bool:
        """Whether computing was undisturbed."""
        return abs(self.compute / self.wanted - 1) <= TOLERANCE


@dataclass(frozen=True)
class Outcome:
    """Rounds of one schedule beside ``off``."""

    overlap_step: OverlapStep
    rounds: tuple[Round, ...]

    @property
    def counted(self) -> list[Round]:
        """The rounds in which computing was undisturbed; all, where that was none."""
        return [one for one in self.rounds if one.counts] or list(self.rounds)

    @property
    def comparison(self) -> Comparison:
        """Seconds of this schedule over those of ``off``."""
        return comparison_of([(one.quad, one.control) for one in self.counted])

    def to_dict(self) -> dict[str, Any]:
        """The outcome in plain types, for JSON."""
        return {"overlap_step": self.overlap_step, "rounds": [asdict(one) for one in self.rounds]} | (
            self.comparison.as_dict()
        )

    def row(self) -> list[str]:
        """The outcome as a row of the table."""
        found, counted = self.comparison, self.counted
        low, high = found.interval
        times = [one.quad.rates for one in counted]
        reference = median(mean(rates[1:3]) for rates in times)
        own = median((rates[0] + rates[3]) / 2 for rates in times)
        compute = median(one.compute for one in counted)
        return [
            self.overlap_step,
            f"{found.quotient:.3f} ({low:.3f} to {high:.3f})",
            f"{found.control:.3f}",
            f"{len(counted)} of {len(self.rounds)}",
            *(f"{seconds:.2f}" for seconds in (compute, reference, own)),
        ]


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.down(torch.relu(self.up(self.norm(hidden))))
        return hidden + changed


def real_model() -> nn.Module:
    """A model that really computes, with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(_Block(REAL_WIDTH) for _ in range(REAL_LAYERS)))


def sleeping(setup: Setup, overlap_step: OverlapStep, quads: int, path: Path) -> Iterator[Round]:
    """Quads of a model that computes for as long as the drive moves its state, measured anew in each round.

    That is how long ``step()`` takes with ``off``. What ``speculate`` is compared with is durable, too.
    """
    kept = overlap_step == "speculate"
    with ExitStack() as stack:
        path = Path(stack.enter_context(TemporaryDirectory(prefix="nvme-offload-hidden-step-", dir=path)))
        models = {name: setup.model() for name in ("ours", "off", "memory")}
        sections = {
            "ours": section(
                overlap_step, path, sub_group_size=setup.width**2, buffers=setup.buffers, durable=kept and "ours"
            ),
            "off": section("off", path, sub_group_size=setup.width**2, buffers=setup.buffers, durable=kept and "off"),
            "memory": section("off", None, sub_group_size=setup.width**2, buffers=setup.buffers),
        }
        trainings = {
            name: stack.enter_context(Training(model, model.sample, sections[name])) for name, model in models.items()
        }
        for _ in range(quads):
            for model in models.values():
                model.compute_for(0.0)
            own, wanted = _seconds(trainings["memory"]), mean(one.step for one in _iterations(trainings["off"]))
            for model in models.values():
                model.compute_for(max(0.0, wanted - own))
            yield _round(trainings, wanted)


def real(overlap_step: OverlapStep, tokens: int, buffers: int, quads: int, path: Path) -> Iterator[Round]:
    """Quads of a model that computes on the processors, which also update."""
    batch, kept = torch.randn(tokens, REAL_WIDTH), overlap_step == "speculate"
    size = REAL_WIDTH**2 * 2
    with ExitStack() as stack:
        path = Path(stack.enter_context(TemporaryDirectory(prefix="nvme-offload-hidden-step-", dir=path)))
        sections = {
            "ours": section(overlap_step, path, sub_group_size=size, buffers=buffers, durable=kept and "ours"),
            "off": section("off", path, sub_group_size=size, buffers=buffers, durable=kept and "off"),
            "memory": section("off", None, sub_group_size=size, buffers=buffers),
        }
        trainings = {name: stack.enter_context(Training(real_model(), batch, its)) for name, its in sections.items()}
        wanted = median(_seconds(trainings["memory"]) for _ in range(3))
        for _ in range(quads):
            yield _round(trainings, wanted)


def _round(trainings: dict[str, Training], wanted: float) -> Round:
    compute = _seconds(trainings["memory"])
    [(quad, control)] = compare(lambda: _seconds(trainings["ours"]), lambda: _seconds(trainings["off"]), 1)
    return Round(quad, control, compute, wanted)


def _seconds(training: Training) -> float:
    """Mean seconds of an iteration."""
    return mean(one.seconds for one in _iterations(training))


def _iterations(training: Training) -> list[Iteration]:
    """Iterations before and after which nothing runs: `Training.iterations` waits for all."""
    return training.iterations(1 + ITERATIONS)[1:]
