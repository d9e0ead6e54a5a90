"""The `offload` command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from rich.console import Console

from nvme_offload.offload.config.section import AioConfig
from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.storage.swap_file import DirectPolicy
from nvme_offload.offload.units import GiB, format_bytes, parse_bytes
from nvme_offload.perf.bench.command import EngineName, KnobError, Plan, TargetName, check_save, run_bench
from nvme_offload.perf.bench.report import Progress, markdown, save, show
from nvme_offload.perf.doctor.command import doctor
from nvme_offload.perf.measure.workloads import Rw, Settings
from nvme_offload.perf.planning.command import plan
from nvme_offload.perf.tune.command import Search, run_tune
from nvme_offload.perf.tune.command import save as save_tune
from nvme_offload.perf.tune.command import show as show_tune

app = typer.Typer(
    name="offload", help="Measure and check NVMe storage for training.", no_args_is_help=True, add_completion=False
)
app.command()(doctor)
app.command()(plan)

RwChoice = Literal["read", "write", "mixed", "all"]

QUADS = 20
_AIO = AioConfig()


def _bytes(text: str) -> int:
    try:
        return parse_bytes(int(text) if text.isdigit() else text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _byte_option(*names: str, text: str) -> Any:
    return typer.Option(*names, parser=_bytes, metavar="BYTES", help=text)


_HERE = [Path()]
_BLOCK: Any = format_bytes(_AIO.block_size)  # shown so in the help, parsed as if typed
_SIZE: Any = format_bytes(GiB)

Paths = Annotated[list[Path], typer.Option("--path", "--directory", help="Folder on the drive; several are striped.")]
Size = Annotated[int, _byte_option("--size", text="Bytes of the region that is worked on.")]
Direct = Annotated[DirectPolicy, typer.Option(help="Direct I/O: needed, tried, or left out.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command()
def bench(
    path: Paths = _HERE,
    bs: Annotated[int, _byte_option("--bs", text="Bytes of one request.")] = _BLOCK,
    iodepth: Annotated[int, typer.Option(help="Requests in flight on each ring.")] = _AIO.queue_depth,
    size: Size = _SIZE,
    numjobs: Annotated[int, typer.Option(help="Rings, each with a thread.")] = _AIO.rings,
    ioengine: Annotated[EngineName, typer.Option(help="What does the I/O.")] = _AIO.engine,
    direct: Direct = _AIO.direct,
    runtime: Annotated[float, typer.Option(help="Seconds of passes in each direction.")] = 5.0,
    rw: Annotated[RwChoice, typer.Option(help="mixed: an optimizer step's 1:1 pattern.")] = "all",
    target: Annotated[TargetName, typer.Option(help="The engine, TensorSwapper, or OffloadAdamW.step().")] = "raw",
    device: Annotated[str, typer.Option(help="Where the tensors of swapper and step are: cpu or cuda.")] = "cpu",
    compare_fio: Annotated[bool, typer.Option("--compare-fio", help="Measure fio in the same minute.")] = False,
    quads: Annotated[
        int | None, typer.Option(help="Rounds of --compare-fio in each direction.", show_default=str(QUADS))
    ] = None,
    fio_tuned: Annotated[bool, typer.Option(help="Give fio huge pages and registered buffers, too.")] = True,
    as_json: Json = False,
    save_to: Annotated[Path | None, typer.Option("--save", help="Folder for the results: JSON and Markdown.")] = None,
) -> None:
    """Measure bandwidth, IOPS, latency and processor time of reading, writing and both.

    Everything is written before it is read, and verified before it is timed. Knobs are named as in fio.
    """
    every: tuple[Rw, ...] = ("mixed",) if target == "step" else get_args(Rw)
    wanted = Plan(
        settings=Settings(
            paths=tuple(path),
            size=size,
            bs=bs,
            iodepth=iodepth,
            numjobs=numjobs,
            ioengine=ioengine,
            direct=direct,
            device=device,
        ),
        target=target,
        directions=every if rw == "all" else (rw,),
        runtime=runtime,
        quads=_rounds(compare_fio, quads),
        fio_tuned=_tuned(compare_fio, fio_tuned),
    )
    with _failures_in_words():
        if save_to:
            check_save(save_to)
        document = run_bench(wanted, Progress(Console(stderr=True)))
    if as_json:
        typer.echo(json.dumps(document))
    else:
        show(document, Console())
    if save_to:  # last: a disk that is full by now must not cost what was measured
        with _failures_in_words():
            _say_saved(save(save_to, f"bench-{target}", document, markdown(document)))


@app.command()
def tune(
    path: Paths = _HERE,
    size: Size = _SIZE,
    seconds: Annotated[float, typer.Option(help="Time to search, about.")] = 60.0,
    direct: Direct = _AIO.direct,
    output: Annotated[Path, typer.Option(help="The aio section; the picture goes beside it.")] = Path("aio.json"),
    as_json: Json = False,
) -> None:
    """Search block size, depth, rings and engine for the best `aio` section, on an optimizer step's 1:1 pattern."""
    search = Search(paths=tuple(path), size=size, seconds=seconds, direct=direct, output=output)
    with _failures_in_words():
        document = run_tune(search, Progress(Console(stderr=True)))
    if as_json:
        typer.echo(json.dumps(document))
    else:
        show_tune(document, Console())
    with _failures_in_words():
        _say_saved(save_tune(output, document))


def _say_saved(files: list[Path]) -> None:
    for file in files:
        typer.echo(f"saved {file}", err=True)


def _rounds(compare_fio: bool, quads: int | None) -> int:
    """Quads to measure; 0 leaves fio out, which is said by leaving out `--compare-fio`."""
    if quads is not None and not compare_fio:
        raise typer.BadParameter("it counts the rounds of --compare-fio; give that, too", param_hint="'--quads'")
    if quads == 0:
        raise typer.BadParameter("0 rounds compare nothing; leave out --compare-fio", param_hint="'--quads'")
    return 0 if not compare_fio else QUADS if quads is None else quads


def _tuned(compare_fio: bool, fio_tuned: bool) -> bool:
    if not fio_tuned and not compare_fio:
        raise typer.BadParameter("it is about the fio of --compare-fio; give that, too", param_hint="'--no-fio-tuned'")
    return fio_tuned


@contextmanager
def _failures_in_words() -> Iterator[None]:
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


def main() -> None:
    """Run the command."""
    app(prog_name="offload")


if __name__ == "__main__":
    main()
