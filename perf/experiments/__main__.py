"""`python -m nvme_offload.perf.experiments`: which experiments there are. Each is loaded when it is called."""

import typer

from ..cli import PLAIN, Command, group_of

_ABOUT = {
    "compare": (
        "Train one model with ours and each of the others in turn: iteration time, memory, bytes and bits.",
        "--path /mnt/nvme0 --with memory",
    ),
    "demo": (
        "Train a byte-level GPT twice, with optimizer state on NVMe and in memory, and compare every bit.",
        "--size tiny --path /mnt/nvme0",
    ),
    "lora": (
        "Train adapters over a frozen base on NVMe by turns: iteration time, bytes per byte of the base, memory.",
        "--path /mnt/nvme0 --with deepspeed",
    ),
    "paced": (
        "Measure iterations with several sections: over a drive of an exact rate beside the plan, or over a real one.",
        "--case forward --case backward",
    ),
}
EXPERIMENTS = {
    name: Command(
        f"nvme_offload.perf.experiments.{'demo.command' if name == 'demo' else name}",
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
