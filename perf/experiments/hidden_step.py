"""Iterations with each schedule are measured beside the ideal and the bound of `offload plan`."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from nvme_offload.optim.step.schedule import OverlapStep
from nvme_offload.perf.measure.command_line import SaveTo
from nvme_offload.perf.measure.experiment import Row, run_experiment
from nvme_offload.perf.measure.paced import STANDS_IN_FOR, paced_drive
from nvme_offload.perf.measure.sections import MODES, section
from nvme_offload.perf.measure.training import BACKWARD_SHARE, Iteration, Shape, SleepingModel, Training
from nvme_offload.perf.plan.iteration import OVERLAPS, GroupTime, IterationTime, SubgroupTime, Work
from nvme_offload.perf.plan.schedule import iteration_time

READ_PER_PARAMETER, WRITTEN_PER_PARAMETER = 10, 10  # bytes in one step with AdamW in bf16
DURABLE_PER_PARAMETER = 2  # bytes that a durable run writes besides
CLIPPING = 1e3  # norm from which on gradients are clipped: far above that of these models
RATIOS = (0.5, 1.0, 2.0)  # seconds of the drive over those of computing
LIMIT = 1.05  # most that an iteration may take over what the model of `offload plan` says
TOLERANCE = 0.1  # share by which computing alone may differ from what was asked for
ATTEMPTS = 3  # times that a cell is measured, as long as computing is disturbed

hidden_step = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
Taken = Sequence[Iteration]


@hidden_step.callback()
def about() -> None:
    """Measure how much of a step each schedule hides."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The model, and the staging buffers that it has."""

    width: int = 512
    subgroups: int = 48
    buffers: int = 4
    shape: Shape = "layers"

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        return self.subgroups * self.width**2

    def bytes_moved(self, overlap_step: OverlapStep) -> int:
        """Bytes that move in an iteration in which every subgroup is read and written."""
        return self.numel * (READ_PER_PARAMETER + _written(overlap_step))

    def bound(self, overlap_step: OverlapStep, compute: float, nvme: float) -> IterationTime:
        """Ask the model of `offload plan` for an iteration that computes, and moves bytes, for so many seconds."""
        ends = self.subgroups // 8 if self.shape == "lm" else 0
        layers = self.subgroups - 2 * ends
        layer = GroupTime(forward=compute * (1 - BACKWARD_SHARE) / layers, backward=compute * BACKWARD_SHARE / layers)
        end = (GroupTime(forward=0.0, backward=0.0),) if ends else ()
        groups = (*end, *(layer for _ in range(layers)), *end)
        homes = [0] * ends + [number + bool(ends) for number in range(layers)] + [layers + 1] * ends
        write = nvme / self.subgroups * _written(overlap_step) / (READ_PER_PARAMETER + _written(overlap_step))
        read = nvme / self.subgroups - write
        subgroups = tuple(SubgroupTime(first=home, last=home, read=read, update=0.0, write=write) for home in homes)
        return iteration_time(Work(groups=groups, subgroups=subgroups, num_buffers=self.buffers), overlap_step)

    def training(self, overlap_step: OverlapStep, path: Path) -> Training:
        """Train the model over the paced drive, with the same weights each time.

        Clipping is on, but with ``backward``, which allows none. With ``speculate`` the run is durable, as that needs.
        """
        torch.manual_seed(0)
        model = SleepingModel(self.width, self.subgroups, self.shape)
        unclipped: dict[str, Any] = {"gradient_clipping": 0.0, "skip_non_finite": False}
        its = section(
            path,
            state={"buffer_count": self.buffers, "durable": overlap_step == "speculate"},
            sub_group_size=self.width**2,
            overlap_step=overlap_step,
            optimizer={"type": "AdamW", "params": {"lr": 1e-4}},
            aio={"engine": STANDS_IN_FOR},
            **MODES["bf16"],
            **(unclipped if overlap_step == "backward" else {"gradient_clipping": CLIPPING}),
        )
        return Training(model, model.sample, its)


def _written(overlap_step: OverlapStep) -> int:
    return WRITTEN_PER_PARAMETER + (DURABLE_PER_PARAMETER if overlap_step == "speculate" else 0)


def row_of(overlap_step: OverlapStep, ratio: float, nvme: float, compute: float, bound: float, taken: Taken) -> Row:
    """Show iterations of one schedule at one ratio, as asked for, of seconds of the drive to those of computing.

    Seconds: `nvme` of what ``off`` moves, `compute` of an iteration over a drive that takes no time, `bound` by the
    model of `offload plan`.
    """
    seconds, ideal = median(one.seconds for one in taken), max(compute, nvme)
    figures = {"ratio": ratio, "nvme": nvme, "compute": compute, "seconds": seconds, "of_ideal": seconds / ideal}
    figures |= {"bound": bound / ideal, "quotient": seconds / bound}
    is_disturbed = abs(compute * ratio / nvme - 1) > TOLERANCE
    parts = (median(getattr(one, part) for one in taken) for part in ("forward", "backward", "step"))
    shown = {
        "overlap_step, I/O : compute": f"{overlap_step}, {ratio:g}{' (disturbed)' if is_disturbed else ''}",
        "iteration s": f"{seconds:.3f}",
        "of the ideal": f"{seconds / ideal:.2f}",
        "bound": f"{bound / ideal:.2f}",
        "quotient": f"{seconds / bound:.3f}",
        "forward + backward + step": " + ".join(f"{part:.3f}" for part in parts),
    }
    more = {"overlap_step": overlap_step, "is_disturbed": is_disturbed, "iterations": [asdict(one) for one in taken]}
    return Row(shown, {**figures, **more})


@hidden_step.command()
def paced(
    shape: Annotated[Shape, typer.Option(help="lm: a quarter of the parameters in embedding and head.")] = "layers",
    overlap_step: Annotated[OverlapStep | None, typer.Option(help="One schedule; by default each in turn.")] = None,
    buffers: Annotated[int, typer.Option(min=2, help="Staging buffers.")] = 4,
    width: Annotated[int, typer.Option(min=64, help="Width of the matrices, each of which is a subgroup.")] = 512,
    subgroups: Annotated[int, typer.Option(min=8, help="Number of matrices.")] = 48,
    io_seconds: Annotated[float, typer.Option(help="Seconds that the drive takes for an iteration.")] = 1.5,
    iterations: Annotated[int, typer.Option(min=2, help="Measured in each cell; an even number.")] = 4,
    save_to: SaveTo = None,
) -> None:
    """Measure over a drive of an exact rate, whose bytes are in memory, beside the ideal and the model of the plan."""
    setup = Setup(width=width, subgroups=subgroups, buffers=buffers, shape=shape)
    notes = [
        f"{setup.numel:,} parameters ({shape}) in {subgroups} subgroups, {buffers} staging buffers; one server of an "
        f"exact rate that moves {setup.bytes_moved('off'):,} bytes in {io_seconds:g} s (a tenth more with speculate, "
        "whose state is durable); layers sleep",
        "the ideal is the longer of an iteration without a drive's time and of moving every subgroup there and back; "
        "the bound is what the model of `offload plan` says of it",
    ]

    def with_verdict(found: list[Row]) -> list[str]:
        within = sum(row.figures["quotient"] <= LIMIT for row in found)
        return [*notes, f"at most {LIMIT:g} times the bound: {within} of {len(found)}"]

    with TemporaryDirectory() as folder:
        overlaps = OVERLAPS if overlap_step is None else [overlap_step]
        cells = _cells(setup, overlaps, io_seconds, iterations, Path(folder))
        title = "Iterations over a paced drive"
        run_experiment(f"hidden-step-{shape}", title, cells, with_verdict, save_to=save_to)


def _cells(setup: Setup, overlaps: Sequence[OverlapStep], nvme: float, count: int, path: Path) -> Iterator[Row]:
    """Measure each schedule at each ratio, `count` iterations each: even, since directions of ``off`` alternate."""
    for overlap_step in overlaps:
        with paced_drive() as pace, setup.training(overlap_step, path) as training:
            model, own = training.engine.module, min(one.seconds for one in training.iterations(3))
            assert isinstance(model, SleepingModel)
            for ratio in RATIOS:
                for _ in range(ATTEMPTS):
                    pace.rate = math.inf
                    model.compute_for(max(0.0, nvme / ratio - own))
                    compute = median(one.seconds for one in training.iterations(3))
                    pace.rate = setup.bytes_moved(overlap_step) / nvme
                    taken, bound = training.iterations(1 + count)[1:], setup.bound(overlap_step, compute, nvme)
                    row = row_of(overlap_step, ratio, nvme, compute, bound.seconds, taken)
                    if not row.figures["is_disturbed"]:
                        break
                yield row
