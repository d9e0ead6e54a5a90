"""The commands that measure share knobs named as in fio, options, and failures in words."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from nvme_offload.offload.config.section import AioConfig
from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.storage.swap_file import DirectPolicy
from nvme_offload.offload.units import GiB, KiB, format_bytes, parse_bytes

Rw = Literal["read", "write", "mixed"]
AIO = AioConfig()

MAX_STAGING_BYTES = GiB  # host memory for the staging buffers of a benchmark, whatever depth was asked for
BUFFERS_PER_RING = 8
"""Transfers under way for each ring, of a quarter of its queue each: half of them fill it while the others come and go.
More memory than two full queues makes a fast drive slower, because the buffers no longer stay in the caches."""
LIMITS = {"bs": (4 * KiB, 1 << 30), "iodepth": (1, 4096), "numjobs": (1, 64)}
MIN_BLOCKS = 64  # blocks of the smallest region: one of fewer says nothing about a drive
HERE = [Path()]
Paths = Annotated[
    list[Path],
    typer.Option(
        "--path", "--directory", metavar="FOLDER", help="Folder on the drive; repeat it to stripe over several."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Folder = Annotated[
    Path,
    typer.Option("--path", metavar="FOLDER", exists=True, file_okay=False, writable=True, help="Folder on the drive."),
]
Quads = Annotated[int, typer.Option(min=1, help="Rounds of ours, reference, reference, ours.")]
SaveTo = Annotated[Path | None, typer.Option("--save", help="Folder for the results: JSON and Markdown.")]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The knobs of one target. What is left out is as in a section without `aio`."""

    paths: tuple[Path, ...]
    size: int  # bytes of the region that is worked on
    bs: int = AIO.block_size
    iodepth: int = AIO.queue_depth
    numjobs: int = AIO.rings  # number of rings: fio's jobs, without a process for each
    ioengine: str = AIO.engine
    direct: DirectPolicy = AIO.direct

    @property
    def num_buffers(self) -> int:
        """Staging buffers of the raw target."""
        return BUFFERS_PER_RING * self.numjobs

    @property
    def transfer_bytes(self) -> int:
        """Bytes of one transfer: a quarter of a full queue, but so little that every buffer is used at least twice."""
        most = min(MAX_STAGING_BYTES // self.num_buffers, self.size // (2 * self.num_buffers))
        return max(1, min(self.iodepth // 4, most // self.bs)) * self.bs


class KnobError(ValueError):
    """A knob has a value that cannot be used."""

    def __init__(self, knob: str, why: str) -> None:
        super().__init__(why)
        self.knob = knob


def check_settings(settings: Settings) -> None:
    """Find what no target could work with."""
    values = asdict(settings)
    for knob, (low, high) in LIMITS.items():
        if not low <= values[knob] <= high:
            raise KnobError(knob, f"{values[knob]} is out of range; choose {low} to {high}")
    if settings.bs % (4 * KiB):
        raise KnobError("bs", f"{settings.bs} bytes is no multiple of 4 KiB, which direct I/O needs")
    if settings.size < (least := MIN_BLOCKS * settings.bs * settings.numjobs):
        raise KnobError("size", f"{format_bytes(settings.size)} is too small for these blocks; at least {least} bytes")


def check_space(path: Path, needed: int) -> None:
    """Find out before anything is written whether `path` has room for `needed` bytes."""
    check_folder("path", path)
    system = os.statvfs(path)
    free = system.f_bavail * system.f_frsize
    if free < needed:
        what = f"{path} has {format_bytes(free)} free and {format_bytes(needed)} is needed; nothing was written"
        raise KnobError("size", what)


def check_folder(knob: str, path: Path) -> None:
    """Find out before measuring whether files can be made in `path`."""
    if not path.is_dir():
        raise KnobError(knob, f"{path} is no directory")
    if not os.access(path, os.W_OK | os.X_OK):
        raise KnobError(knob, f"{path} is not writable")


def check_save(folder: Path, knob: str = "save") -> None:
    """Find out before measuring whether `folder` takes the results; what is missing of it is made afterwards."""
    places = (folder, *folder.absolute().parents)
    check_folder(knob, next(place for place in places if os.path.lexists(place)))


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
