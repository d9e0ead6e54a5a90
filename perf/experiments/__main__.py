"""`python -m nvme_offload.perf.experiments`: which experiments there are. Each is loaded when it is called."""

from __future__ import annotations

import typer

from nvme_offload.perf.cli import Command, group_of

_HERE = "nvme_offload.perf.experiments"
EXPERIMENTS = {
    "activations": Command(f"{_HERE}.activations", "Measure what keeping activations on a drive saves and costs."),
    "compare": Command(
        f"{_HERE}.compare",
        "Train one model with ours and each of the others in turn: iteration time, memory, bytes and bits.",
    ),
    "demo": Command(
        f"{_HERE}.demo.command",
        "Train a byte-level GPT twice, with optimizer state on NVMe and in memory, and compare every bit.",
    ),
    "durable": Command(f"{_HERE}.durable", "Measure what durable steps and checkpoints cost."),
    "hidden-step": Command(f"{_HERE}.hidden_step", "Measure how much of a step each schedule hides."),
    "micro-batches": Command(
        f"{_HERE}.micro_batches", "Count the bytes of a step by the order of its micro-batches, everything on NVMe."
    ),
    "plan-check": Command(
        f"{_HERE}.plan_check",
        "Compare what `offload plan` predicts with measured iterations and with resident memory.",
    ),
}

app = typer.Typer(name="experiments", cls=group_of(EXPERIMENTS), no_args_is_help=True, add_completion=False)


@app.callback()
def experiments() -> None:
    """Measure this project: each experiment compares by turns, and says and saves what it finds."""


if __name__ == "__main__":
    app(prog_name="experiments")
