"""The `offload` command: which commands there are. Each is loaded when it is called, so that the help comes at once."""

from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

import nvme_offload


class Command(NamedTuple):
    """A command that is not loaded yet: a function of that name in a module, or an app with commands of its own."""

    module: str
    help: str  # the first paragraph of its docstring
    example: str = ""


_ABOUT = {
    "doctor": (
        "Examine this machine and the given folders, and say what stands in the way of NVMe offload.",
        "/mnt/nvme0 --config offload.json",
    ),
    "init": (
        "Write a section for this machine and a model: the fastest that fits, with an aio section measured here.",
        "--model llama-7b/config.json --path /mnt/nvme0",
    ),
    "plan": (
        "Predict memory, traffic, time and wear of a training step, and the largest model that fits.",
        "--params 7e9 --layers 32 --hidden 4096 --host-memory 64GiB --drive gen4-consumer --flops 1e14",
    ),
    "bench": (
        "Measure bandwidth, IOPS, latency and processor time of reading, writing and both.",
        "--path /mnt/nvme0 --size 4GiB",
    ),
    "report": (
        "Write one page of HTML about a run or a benchmark, with its pictures in it.",
        "run.jsonl --output run.html",
    ),
    "runs": (
        "List the durable runs below the given folders: model, step, age, bytes, and whether they are alive.",
        "/mnt/nvme0",
    ),
    "top": (
        "Watch a run: where its bytes are, how fast they move, what it waits for, and how its drives are.",
        "/mnt/nvme0",
    ),
    "tune": (
        "Search block size, depth, rings and engine for the best `aio` section, on a step's 1:1 pattern.",
        "--path /mnt/nvme0 --seconds 60 --output aio.json",
    ),
    "verify": (
        "Verify bits and speed of training on this machine's GPU, or on its CPU where it has none.",
        "--path /mnt/nvme0",
    ),
}
COMMANDS = {
    name: Command(f"nvme_offload.perf.{name}.command", text, f"offload {name} {arguments}")
    for name, (text, arguments) in _ABOUT.items()
}


def group_of(commands: Mapping[str, Command]) -> type[TyperGroup]:
    """Make a group that knows every command's name and help, and loads the one that is called."""

    class Commands(TyperGroup):
        def __init__(self, **attrs: Any) -> None:
            super().__init__(**attrs)
            # As the help shows them; they can do nothing.
            self.commands = {name: TyperCommand(name, help=command.help) for name, command in commands.items()}

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            name, command, rest = super().resolve_command(ctx, args)
            return name, command and load(str(name), commands), rest

    return Commands


def load(name: str, commands: Mapping[str, Command] = COMMANDS) -> Any:
    """Load the command called `name`, with its options."""
    found = getattr(import_module(commands[name].module), name.replace("-", "_"))
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False)
        alone.command(name)(found)
        found = alone
    command = typer.main.get_command(found)
    if example := commands[name].example:
        command.epilog = f"Example: {example}"
    return command


app = typer.Typer(name="offload", cls=group_of(COMMANDS), no_args_is_help=True, add_completion=False)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"offload {nvme_offload.__version__}")
        raise typer.Exit


@app.callback()
def offload(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say the version and exit.")
    ] = False,
) -> None:
    """Measure and check NVMe storage for training."""


def main() -> None:
    """Run the command."""
    app(prog_name="offload")


if __name__ == "__main__":
    main()
