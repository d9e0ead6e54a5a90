"""Iterations with each schedule are measured beside the ideal and the bound of `offload plan`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Annotated, Any, cast

import torch
import typer
from torch import nn

from nvme_offload.optim.step.schedule import OverlapStep
from nvme_offload.perf.measure.command_line import Folder, Quads, SaveTo
from nvme_offload.perf.measure.comparison import Case, Comparison
from nvme_offload.perf.measure.experiment import Row, run_experiment
from nvme_offload.perf.measure.paced import STANDS_IN_FOR, paced_drive
from nvme_offload.perf.measure.sections import MODES, section
from nvme_offload.perf.measure.training import BACKWARD_SHARE, Iteration, Shape, SleepingModel, Training, layered_model
from nvme_offload.perf.plan.iteration import OVERLAPS, GroupTime, IterationTime, SubgroupTime, Work
from nvme_offload.perf.plan.schedule import iteration_time

READ_PER_PARAMETER, WRITTEN_PER_PARAMETER = 10, 10  # bytes in one step with AdamW in bf16
DURABLE_PER_PARAMETER = 2  # bytes that a durable run writes besides
CLIPPING = 1e3  # norm from which on gradients are clipped: far above that of these models
RATIOS = (0.5, 1.0, 2.0)  # seconds of the drive over those of computing
LIMIT = 1.05  # most that an iteration may take over what the model of `offload plan` says
TOLERANCE = 0.1  # share by which computing alone may differ from what was asked for
ATTEMPTS = 3  # times that a cell is measured, as long as computing is disturbed
REAL_WIDTH, REAL_LAYERS, REAL_TOKENS = 2048, 8, 256
"""269 million parameters; with so many tokens two processors compute as long as a drive of 5 GB/s moves the state."""
ITERATIONS = 2  # iterations that count each time on a real drive, after one that does not

hidden_step = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Measure how much of a step each schedule hides."
)
Buffers = Annotated[int, typer.Option(min=2, help="Staging buffers.")]
Taken = Sequence[Iteration]
Schedule = Annotated[OverlapStep | None, typer.Option(help="One schedule; by default each in turn.")]
Width = Annotated[int, typer.Option(min=64, help="Width of the matrices, each of which is a subgroup.")]
Subgroups = Annotated[int, typer.Option(min=8, help="Number of matrices.")]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The model, and the staging buffers that it has."""

    width: int = 512
    subgroups: int = 48
    buffers: int = 4
    shape: Shape = "layers"
    tokens: int | None = None
    """Tokens of a batch of a model of 269 million parameters that computes; None: layers sleep."""

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

    def training(
        self, overlap_step: OverlapStep, path: Path | None, *, engine: str = "auto", durable: bool | str = False
    ) -> Training:
        """Train the model, with the same weights each time, and with state in host memory where there is no path.

        Clipping is on, but with ``backward``, which allows none. `durable`: whether the state outlives the run, or its
        name; ``speculate`` needs it.
        """
        torch.manual_seed(0)
        if self.tokens is None:
            sleeping = SleepingModel(self.width, self.subgroups, self.shape)
            model, batch, size = cast(nn.Module, sleeping), sleeping.sample, self.width**2
        else:
            model, batch = layered_model(REAL_LAYERS, REAL_WIDTH), torch.randn(self.tokens, REAL_WIDTH)
            size = 2 * REAL_WIDTH**2
        unclipped: dict[str, Any] = {"gradient_clipping": 0.0, "skip_non_finite": False}
        its = section(
            path,
            state={"buffer_count": self.buffers, "durable": durable},
            sub_group_size=size,
            overlap_step=overlap_step,
            optimizer={"type": "AdamW", "params": {"lr": 1e-4}},
            aio={"engine": engine},
            **MODES["bf16"],
            **(unclipped if overlap_step == "backward" else {"gradient_clipping": CLIPPING}),
        )
        return Training(model, batch, its)


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
    overlap_step: Schedule = None,
    buffers: Buffers = 4,
    width: Width = 512,
    subgroups: Subgroups = 48,
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
        cells = _cells(
            setup, OVERLAPS if overlap_step is None else [overlap_step], io_seconds, iterations, Path(folder)
        )
        title = "Iterations over a paced drive"
        run_experiment(f"hidden-step-{shape}", title, cells, with_verdict, save_to=save_to)


def _cells(setup: Setup, overlaps: Sequence[OverlapStep], nvme: float, count: int, path: Path) -> Iterator[Row]:
    """Measure each schedule at each ratio, `count` iterations each: even, since directions of ``off`` alternate."""
    for overlap_step in overlaps:
        durable = overlap_step == "speculate"
        with (
            paced_drive() as pace,
            setup.training(overlap_step, path, engine=STANDS_IN_FOR, durable=durable) as training,
        ):
            own = min(one.seconds for one in training.iterations(3))
            for ratio in RATIOS:
                for _ in range(ATTEMPTS):
                    pace.rate = math.inf
                    compute_for(training, max(0.0, nvme / ratio - own))
                    compute = median(one.seconds for one in training.iterations(3))
                    pace.rate = setup.bytes_moved(overlap_step) / nvme
                    taken, bound = training.iterations(1 + count)[1:], setup.bound(overlap_step, compute, nvme)
                    row = row_of(overlap_step, ratio, nvme, compute, bound.seconds, taken)
                    if not row.figures["is_disturbed"]:
                        break
                yield row


@hidden_step.command()
def drive(
    path: Folder,
    overlap_step: Schedule = None,
    quads: Quads = 10,
    real: Annotated[bool, typer.Option(help="269 million parameters that compute; else layers that sleep.")] = False,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a batch of the model that computes.")] = REAL_TOKENS,
    buffers: Buffers = 4,
    width: Width = 1024,
    save_to: SaveTo = None,
) -> None:
    """Measure on a real drive each schedule beside off; layers sleep for as long as the drive moves the state."""
    setup = Setup(width=width, buffers=buffers, tokens=tokens if real else None)
    what = f"{setup.numel:,} parameters, layers sleep as long as the I/O"
    notes = [
        f"{f'269 million parameters, computed for {tokens} tokens' if real else what}; {buffers} staging buffers; "
        f"{ITERATIONS} iterations each time, and all waited for between",
        f"left out: rounds in which an iteration in memory was off by more than {TOLERANCE:.0%}",
    ]
    title = "Iterations on a drive, beside the plain order"
    name = f"hidden-step-{'real' if real else 'sleeping'}"
    schedules = OVERLAPS[1:] if overlap_step is None else [overlap_step]
    with TemporaryDirectory(prefix="nvme-offload-hidden-step-", dir=path) as folder:
        compared = (found for schedule in schedules for found in on_drive(setup, schedule, quads, Path(folder)))
        run_experiment(name, title, compared, lambda found: notes, path=path, save_to=save_to)


def on_drive(setup: Setup, overlap_step: OverlapStep, quads: int, path: Path) -> Iterator[Comparison]:
    """Measure a schedule beside ``off``. What ``speculate`` is compared with is durable, too.

    Layers that sleep do so for as long as `step()` takes with ``off``, measured anew in each round.
    """
    kept = overlap_step == "speculate"
    with ExitStack() as stack:
        trainings = [
            stack.enter_context(setup.training(overlap_step, path, durable=kept and "ours")),
            stack.enter_context(setup.training("off", path, durable=kept and "off")),
            stack.enter_context(setup.training("off", None)),
        ]
        ours, off, memory = trainings
        asked = None if setup.tokens is None else median(memory.seconds(ITERATIONS) for _ in range(3))

        def before() -> tuple[Mapping[str, float], bool]:
            wanted = asked
            if wanted is None:
                for training in trainings:
                    compute_for(training, 0.0)
                own, wanted = memory.seconds(ITERATIONS), mean(one.step for one in off.iterations(1 + ITERATIONS)[1:])
                for training in trainings:
                    compute_for(training, max(0.0, wanted - own))
            compute = memory.seconds(ITERATIONS)
            return {"compute": compute, "wanted": wanted}, abs(compute / wanted - 1) <= TOLERANCE

        yield from Case(
            name=overlap_step,
            ours=partial(ours.seconds, ITERATIONS),
            reference=partial(off.seconds, ITERATIONS),
            before=before,
        ).measure(quads)


def compute_for(training: Training, seconds: float) -> None:
    """Let forward and backward of a model that sleeps take so long; another one computes as before."""
    for module in training.engine.module.modules():
        if isinstance(module, SleepingModel):
            module.compute_for(seconds)
