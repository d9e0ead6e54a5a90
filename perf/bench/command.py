"""`offload bench`: how fast bytes move here, at which cost, and beside fio."""

import json
from typing import Annotated, Any, Literal, get_args

import typer
from rich.console import Console

from nvme_offload.aio_native.registry import REGISTRY
from nvme_offload.offload.storage.swap_file import DirectPolicy
from nvme_offload.offload.units import GiB, format_bytes
from nvme_offload.perf.bench.report import markdown, show, summarized
from nvme_offload.perf.bench.run import Plan, run_bench
from nvme_offload.perf.measure.command_line import (
    AIO,
    HERE,
    Json,
    Paths,
    Rw,
    SaveTo,
    Settings,
    byte_option,
    check_save,
    choice_option,
    failures_in_words,
    say_saved,
)
from nvme_offload.perf.measure.results import save

RwChoice = Literal["read", "write", "mixed", "all"]

QUADS = 20
_BLOCK: Any = format_bytes(AIO.block_size)  # shown so in the help, parsed as if typed
_SIZE: Any = format_bytes(GiB)


def bench(
    path: Paths = HERE,
    bs: Annotated[int, byte_option("--bs", text="Bytes of one request.")] = _BLOCK,
    iodepth: Annotated[int, typer.Option(help="Requests in flight on each ring.")] = AIO.queue_depth,
    size: Annotated[int, byte_option("--size", text="Bytes of the file to work on.")] = _SIZE,
    numjobs: Annotated[int, typer.Option(help="Rings, each with a thread.")] = AIO.rings,
    ioengine: Annotated[
        str, choice_option("--ioengine", choices=("auto", *REGISTRY), text="Engine that does the I/O.")
    ] = (AIO.engine),
    direct: Annotated[DirectPolicy, typer.Option(help="Use direct I/O always, where it works, or never.")] = AIO.direct,
    runtime: Annotated[
        float, typer.Option(help="Seconds for each direction; 600 shows a cache that fills, and heat.")
    ] = 5.0,
    rw: Annotated[
        RwChoice, typer.Option(help="Directions; mixed reads and writes 1:1, as an optimizer step does.")
    ] = "all",
    compare_fio: Annotated[bool, typer.Option("--compare-fio", help="Measure fio in the same minute.")] = False,
    quads: Annotated[
        int | None, typer.Option(help=f"Rounds of --compare-fio in each direction; by default {QUADS}.")
    ] = None,
    as_json: Json = False,
    save_to: SaveTo = None,
) -> None:
    """Measure a drive: bandwidth, IOPS, latency and processor time.

    Everything is written before it is read, and verified before it is timed. Knobs are named as in fio.
    """
    wanted = Plan(
        settings=Settings(
            paths=tuple(path), size=size, bs=bs, iodepth=iodepth, numjobs=numjobs, ioengine=ioengine, direct=direct
        ),
        directions=get_args(Rw) if rw == "all" else (rw,),
        runtime=runtime,
        quads=(QUADS if quads is None else quads) if compare_fio else 0,
    )
    if quads is not None and not compare_fio:
        raise typer.BadParameter("it is about --compare-fio; give that, too", param_hint="'--quads'")
    if quads == 0:
        raise typer.BadParameter("0 rounds compare nothing; leave out --compare-fio", param_hint="'--quads'")
    with failures_in_words():
        if save_to:
            check_save(save_to)
        document = run_bench(wanted)
    if as_json:
        typer.echo(json.dumps(document))
    else:
        show(document, Console())
    if save_to:  # last: a disk that is full by now must not cost what was measured
        with failures_in_words():
            say_saved(save(save_to, "bench", summarized(document), markdown(document)))
