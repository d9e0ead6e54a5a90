"""What the commands that measure have in common: their options, and their failures in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.storage.swap_file import DirectPolicy
from nvme_offload.offload.units import GiB, format_bytes, parse_bytes
from nvme_offload.perf.measure.knobs import KnobError

HERE = [Path()]
DEFAULT_SIZE: Any = format_bytes(GiB)
"""Default size of a measurement: shown in the help as it stands here, and parsed as if typed."""


def to_bytes(text: str) -> int:
    """The value of an option that is a number of bytes, such as 1GiB."""
    try:
        return parse_bytes(int(text) if text.isdigit() else text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def byte_option(*names: str, text: str, parser: Callable[[str], int] = to_bytes) -> Any:
    """An option that is a number of bytes."""
    return typer.Option(*names, parser=parser, metavar="BYTES", help=text)


def choice_option(*names: str, choices: Sequence[str], text: str) -> Any:
    """An option with one of these words, which are known only when the program runs."""

    def chosen(word: str) -> str:
        if word not in choices:
            raise typer.BadParameter(f"{word!r} is not one of {', '.join(map(repr, choices))}")
        return word

    return typer.Option(*names, parser=chosen, metavar="|".join(choices), help=text)


Paths = Annotated[list[Path], typer.Option("--path", "--directory", help="Folder on the drive; several are striped.")]
Size = Annotated[int, byte_option("--size", text="Bytes of the region that is worked on.")]
Direct = Annotated[DirectPolicy, typer.Option(help="Direct I/O: needed, tried, or left out.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Folder = Annotated[
    Path, typer.Option("--path", exists=True, file_okay=False, writable=True, help="Folder on the drive.")
]
Quads = Annotated[int, typer.Option(min=1, help="Rounds of ours, reference, reference, ours, each with its control.")]
SaveTo = Annotated[Path | None, typer.Option("--save", help="Folder for the results: JSON and Markdown.")]


def say_saved(files: Sequence[Path]) -> None:
    """Name the files, on standard error."""
    for file in files:
        typer.echo(f"saved {file}", err=True)


@contextmanager
def failures_in_words() -> Iterator[None]:
    """Exit status 2 for a bad value, 1 for what failed, 130 for Ctrl-C; by then everything has been removed."""
    try:
        yield
    except KnobError as error:
        raise typer.BadParameter(str(error), param_hint=f"'--{error.knob}'") from None
    except (OSError, ConfigError, RuntimeError, MemoryError) as error:
        typer.echo(f"offload: {str(error) or type(error).__name__}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("offload: interrupted, nothing is left behind", err=True)
        raise typer.Exit(130) from None
