"""The `offload` command: which commands there are. Each is loaded when it is called, so that the help comes at once."""

from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

import nvme_offload
from .measure.loading import nothing_to_collect

PLAIN: dict[str, Any] = {"rich_markup_mode": None, "context_settings": {"help_option_names": ["-h", "--help"]}}
"""Help without boxes, which fits 80 columns and names no type behind a flag."""


class Command(NamedTuple):
    """A command that is not loaded yet: a function of that name in a module, or an app with commands of its own."""

    module: str
    help: str  # the first paragraph of its docstring
    example: str = ""


_ABOUT = {
    "doctor": ("Say what stands in the way of NVMe offload on this machine.", "/mnt/nvme0 --config offload.json"),
    "init": (
        "Write the fastest section that fits this machine and a model.",
        "--model llama-7b/config.json --path /mnt/nvme0",
    ),
    "plan": (
        "Predict memory, traffic, time and wear of a training step.",
        "--params 7e9 --layers 32 --hidden 4096 --host-memory 64GiB --read-bw 7GB --write-bw 1.5GB --flops 1e14",
    ),
    "bench": ("Measure a drive: bandwidth, IOPS, latency and processor time.", "--path /mnt/nvme0 --size 4GiB"),
    "report": ("Write an HTML page about a run: timeline, bytes, waits, wear.", "run.jsonl"),
    "runs": ("List durable runs, export what they committed, remove them.", "/mnt/nvme0"),
    "top": ("Watch a run: its bytes, rates and waits.", "/mnt/nvme0"),
    "verify": ("Verify the bits of training on this machine's GPU or CPU.", "--path /mnt/nvme0"),
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
    with nothing_to_collect():
        found = getattr(import_module(commands[name].module), name.replace("-", "_"))
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False, **PLAIN)
        alone.command(name, context_settings=PLAIN["context_settings"])(found)
        found = alone
    command = typer.main.get_command(found)
    if example := commands[name].example:
        command.epilog = f"Example: {example}"
    return command


app = typer.Typer(name="offload", cls=group_of(COMMANDS), no_args_is_help=True, **PLAIN)


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
