"""`python -m nvme_offload.perf.experiments`: which experiments there are. Each is loaded when it is called."""

import typer

from nvme_offload.perf.cli import PLAIN, Command, group_of

_ABOUT = {
    "activations": ("Measure what keeping activations on a drive saves and costs.", "memory --path /mnt/nvme0"),
    "compare": (
        "Train one model with ours and each of the others in turn: iteration time, memory, bytes and bits.",
        "--path /mnt/nvme0 --with memory",
    ),
    "costs": (
        "Measure the processor time of each operation beside torch's, for each parameter, tensor, subgroup and GB.",
        "--path /mnt/nvme0",
    ),
    "demo": (
        "Train a byte-level GPT twice, with optimizer state on NVMe and in memory, and compare every bit.",
        "--size tiny --path /mnt/nvme0",
    ),
    "hidden-step": ("Measure how much of a step each schedule hides.", "paced"),
    "micro-batches": ("Measure the orders of micro-batches with everything on NVMe.", "bytes --path /mnt/nvme0"),
    "on-device": (
        "Measure iterations on this machine's GPU by where things are kept, beside `offload plan`.",
        "--path /mnt/nvme0",
    ),
    "plan-check": (
        "Compare what `offload plan` predicts with measured iterations and with resident memory.",
        "--path /mnt/nvme0 --memory-only",
    ),
}
EXPERIMENTS = {
    name: Command(
        f"nvme_offload.perf.experiments.{'demo.command' if name == 'demo' else name.replace('-', '_')}",
        text,
        f"python -m nvme_offload.perf.experiments {name} {arguments}",
    )
    for name, (text, arguments) in _ABOUT.items()
}

app = typer.Typer(name="experiments", cls=group_of(EXPERIMENTS), no_args_is_help=True, add_completion=False, **PLAIN)


@app.callback()
def experiments() -> None:
    """Measure this project: each experiment compares by turns, and says and saves what it finds."""


if __name__ == "__main__":
    app(prog_name="experiments")
