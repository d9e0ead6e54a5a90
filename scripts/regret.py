"""Compare what `"offload": "auto"` chooses with sections that somebody might write by hand, over a paced drive.

python -m scripts.regret --memory 1.2 --memory 0.6 [--save perf/results]

The model's layers sleep for as long as those of a real one would compute, and the drive is a model of an exact rate:
what is measured is the section, not the machine. Each section that fits into the memory by the account of `offload
plan` is trained in turn, in every other round in the opposite order.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer

from nvme_offload import OffloadConfig
from nvme_offload.offload.units import MiB, format_bytes
from nvme_offload.optim.state import placement
from nvme_offload.optim.zero import block_checks
from nvme_offload.perf.experiments.experiment import Row, run_experiment
from nvme_offload.perf.experiments.paced_drive import STANDS_IN_FOR, Pace, paced_drive
from nvme_offload.perf.experiments.training import SleepingModel, Training
from nvme_offload.perf.measure.command_line import SaveTo
from nvme_offload.perf.measure.sections import MODES, section
from nvme_offload.perf.plan.machine import Machine
from nvme_offload.perf.plan.placing import Job
from nvme_offload.perf.plan.prediction import fits
from nvme_offload.perf.plan.shape import ModelShape

WIDTH, LAYERS = 768, 32
NUMEL = LAYERS * WIDTH**2
EVERYTHING = 16 * NUMEL  # bytes of parameters and state in bf16, and of gradients in fp32
COMPUTE, ALL_STATE = 4.0, 8.0
"""Seconds of an iteration that computes, and of moving the whole state there and back: so many that Python's time for
each subgroup, some 0.1 s an iteration, is as little beside them as it is beside the minutes of a large model."""
LEAST = 4 * MiB  # the least budget: the model is some hundred times smaller than those that need a drive
GRAIN = MiB  # of the budgets by hand
BY_HAND: dict[str, dict[str, Any]] = {
    "state": {},
    "state, 4 MiB of staging": {"state": {"staging_budget": "4MiB"}},
    "state, 8 buffers": {"state": {"buffer_count": 8}},
    "state, 2 buffers": {"state": {"buffer_count": 2}},
    "state, subgroups of 128 Ki": {"sub_group_size": 2**17},
    "state, overlap_step off": {"overlap_step": "off"},
    "state, no budget": {"share": 0.0},
    "state, half the budget": {"share": 0.5},
    "state and parameters": {"params": 4},
    "state and gradients": {"grads": 4},
    "everything": {"params": 4, "grads": 4},
    "everything, 2 buffers": {"state": {"buffer_count": 2}, "params": 2, "grads": 2},
}
"""Changes to the section with state on NVMe; its budget is what is left, of which `share` is a share."""


def by_hand(path: Path, memory: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the sections that fit into so many bytes, by name."""
    shape, machine = ModelShape.of_layers(model(), "layers", WIDTH), Machine(host_memory=memory)

    def has_room(made: dict[str, Any]) -> bool:
        config = OffloadConfig.of(made).completed_for(1)
        return fits(Job(shape=shape, config=config, tokens=2, checkpointing=False, baseline_bytes=0), machine)

    for name, options in BY_HAND.items():
        made = section(path, **COMMON, **{key: value for key, value in options.items() if key != "share"})
        budgets = (made | {"host_budget": size} for size in range(memory // GRAIN * GRAIN, GRAIN, -GRAIN))
        if (share := options.get("share", 1.0)) and (most := next(filter(has_room, budgets), None)):
            made = most | {"host_budget": int(share * most["host_budget"])}
        if has_room(made):
            yield name, made


COMMON: dict[str, Any] = {"gradient_clipping": 1.0, "aio": {"engine": STANDS_IN_FOR}, **MODES["bf16"]}
COMMON["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-4}}


@contextmanager
def small_machine(memory: int) -> Iterator[Pace]:
    """Let training find so many bytes of memory, with the least budget of so small a machine, and a paced drive."""
    with ExitStack() as patches:
        for module in (block_checks, placement):
            patches.enter_context(patch.object(module, "LEAST_BUDGET", LEAST))
        patches.enter_context(patch.object(block_checks, "auto_host_budget", lambda: memory))
        yield patches.enter_context(paced_drive())


def model() -> SleepingModel:
    """Make the model on meta, so that all it will take of memory is still to come; it sleeps for no time yet."""
    torch.manual_seed(0)
    with torch.device("meta"):
        return SleepingModel(WIDTH, LAYERS)


def measured(made: dict[str, Any], pace: Pace, iterations: int) -> tuple[float, float]:
    """Train with a section; give the mean seconds of iterations at the pace, behind a first one, and bytes of all.

    A mean, because what one leaves to the next makes one longer and the other shorter.
    """
    pace.rate, sleeping = float("inf"), model()
    with Training(sleeping, torch.randn(2, WIDTH), made, 2) as training:
        sleeping.compute_for(COMPUTE)
        pace.rate = 20 * NUMEL / ALL_STATE
        before = sum(training.moved().values())
        seconds = training.seconds(iterations)
        return seconds, (sum(training.moved().values()) - before) / (1 + iterations)


def outcomes(path: Path, share: float, rounds: int, iterations: int) -> Iterator[Row]:
    """Measure in a memory of this share of everything; give the row of it."""
    memory = int(share * EVERYTHING)
    found = dict[str, tuple[float, float]]()
    with small_machine(memory) as pace:
        made = {"auto": section(path, offload="auto", **COMMON), **dict(by_hand(path, memory))}
        for number in range(rounds):
            for name in list(made)[:: -1 if number % 2 else 1]:
                once = measured(made[name], pace, iterations)
                found[name] = min(once, found.get(name, once))
    hand = {name: one for name, one in found.items() if name != "auto"}
    best, least = (min(hand, key=lambda name, which=which: hand[name][which]) for which in (0, 1))  # type: ignore[misc]
    regret = found["auto"][0] / hand[best][0]
    shown = {
        "memory": format_bytes(memory),
        "auto": f"{found['auto'][0]:.2f} s",
        "best by hand": f"{hand[best][0]:.2f} s ({best})",
        "auto over best": f"{regret:.3f}",
        "auto moves": f"{found['auto'][1] / NUMEL:.2f} B",
        "least by hand": f"{hand[least][1] / NUMEL:.2f} B ({least})",
        "sections": str(len(hand)),
    }
    yield Row(shown, {"memory": memory, "regret": regret, "seconds_and_bytes": found})


def regret(
    memory: Annotated[list[float], typer.Option(help="Memory, as a share of all that a rank has; repeat it.")],
    rounds: Annotated[int, typer.Option(min=1, help="Times that each section is trained.")] = 2,
    iterations: Annotated[int, typer.Option(min=1, help="Iterations that count each time.")] = 2,
    save_to: SaveTo = None,
) -> None:
    """Compare what "auto" chooses with sections by hand, over a paced drive."""
    notes = [
        f"{NUMEL:,} parameters in {LAYERS} layers that sleep {COMPUTE:g} s an iteration, "
        f"{format_bytes(EVERYTHING)} of parameters, gradients and state; a drive of {20 * NUMEL / ALL_STATE / 1e9:.2f} "
        f"GB/s; {rounds} x {iterations} iterations of each section; B: bytes per parameter "
        f"and iteration; sections: those of {len(BY_HAND)} that fit"
    ]
    with TemporaryDirectory() as folder:
        found = (row for share in memory for row in outcomes(Path(folder), share, rounds, iterations))
        run_experiment("regret", '"auto" beside sections by hand', found, lambda known: notes, save_to=save_to)


if __name__ == "__main__":
    typer.run(regret)
