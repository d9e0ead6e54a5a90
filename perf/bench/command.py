"""`offload bench`: how fast bytes move here, at which cost, and beside fio."""

import json
import os
import shutil
import subprocess
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Literal, get_args

import typer
from rich.console import Console

from nvme_offload.aio_native.registry import REGISTRY
from nvme_offload.offload.progress import progress, say
from nvme_offload.offload.storage.run_directory import FIO_NAME, RunDirectory
from nvme_offload.offload.storage.swap_file import DirectPolicy
from nvme_offload.offload.units import GiB, format_bytes
from ..measure import command_line
from ..measure.comparison import compared
from ..measure.machine import environment
from ..measure.results import save
from ..measure.workloads import RawTarget, Sample
from .report import describe_latest, markdown, show, summarized, summary

_RW = {"read": "read", "write": "write", "mixed": "rw"}
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Makes fio's buffers transparent huge pages (glibc 2.35 and later; ignored by others)."""


class FioError(RuntimeError):
    """fio is missing or failed; the message says what to do."""


def find_fio() -> str:
    """The path of fio."""
    path = shutil.which("fio")
    if path is None:
        raise FioError("fio is not installed (Debian: apt-get install fio; Fedora: dnf install fio)")
    return path


class Fio(AbstractContextManager["Fio"]):
    """fio on a file of its own, which is written once before anything is measured and removed at the end.

    It gets what our engine has, too: huge pages, registered buffers, registered files. Without them its speed depends
    on how scattered the pages are that it happens to get, up to a factor of two.
    """

    def __init__(self, settings: command_line.Settings) -> None:
        self._fio = find_fio()
        said = subprocess.run([self._fio, "--version"], capture_output=True, text=True, check=True)
        self.version = said.stdout.strip()
        self._settings = settings
        self._directory = RunDirectory(settings.paths[0])
        try:
            self.run("write", settings.size)
        except BaseException:
            self._directory.remove()
            raise

    def __exit__(self, *exception: object) -> None:
        self._directory.remove()

    def run(self, rw: command_line.Rw, size_bytes: int) -> float:
        """Move `size_bytes` and give the bytes per second, by fio's own clock: its start-up does not count."""
        command, variables = self.command(rw, size_bytes), {**os.environ, **_HUGE_PAGES}
        done = subprocess.run(command, capture_output=True, text=True, env=variables)
        if done.returncode:
            raise FioError(f"fio failed: {(done.stderr or done.stdout).strip()}")
        return bandwidth(json.loads(done.stdout))

    def command(self, rw: command_line.Rw, size_bytes: int) -> list[str]:
        """The command line that is run."""
        settings = self._settings
        offset_increment = self._share(settings.size) if settings.numjobs > 1 else 0
        options = {
            "name": "offload-bench",
            "filename": str(self._directory.path / FIO_NAME).replace(":", "\\:"),
            "filesize": settings.size,
            "io_size": self._share(size_bytes),
            "bs": settings.bs,
            "iodepth": settings.iodepth,
            "numjobs": settings.numjobs,
            "offset_increment": offset_increment,
            "ioengine": "io_uring",
            "direct": int(settings.direct != "disabled"),
            "rw": _RW[rw],
            "fixedbufs": 1,
            "registerfiles": 1,
            "group_reporting": 1,
            "output-format": "json",
        }
        return [self._fio, *(f"--{name}={value}" for name, value in options.items())]

    def _share(self, size_bytes: int) -> int:
        """Bytes that one job gets, in whole blocks, as direct I/O needs them; rounded up, so that all is written."""
        block = self._settings.bs
        return -(-size_bytes // (self._settings.numjobs * block)) * block


def bandwidth(report: dict[str, Any]) -> float:
    """Bytes per second, read and written together, of fio's report on one job group.

    fio gives runtimes in whole milliseconds, rounded up: on average it took half of one less.
    """
    directions = [report["jobs"][0][name] for name in ("read", "write")]
    runtime_ms = max(direction["runtime"] for direction in directions)
    if not runtime_ms:
        raise FioError("fio moved nothing; give --size more")
    return float(sum(direction["io_bytes"] for direction in directions) / ((runtime_ms - 0.5) / 1e3))


MAX_QUADS = 10_000
LONGEST_PASS = 4 * GiB  # a long run has many passes, so that a drive that becomes slow is seen


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One call of the command measures this."""

    settings: command_line.Settings
    directions: tuple[command_line.Rw, ...]
    runtime: float  # seconds of passes in each direction; at least one pass
    quads: int = 0  # quads against fio in each direction; 0 leaves fio out


def check(plan: Plan) -> None:
    """Find everything that cannot work before anything starts."""
    settings = plan.settings
    command_line.check_settings(settings)
    if not 0 <= plan.quads <= MAX_QUADS:
        raise command_line.KnobError("quads", f"{plan.quads} is out of range; choose 0 to {MAX_QUADS}")
    if not plan.runtime >= 0:  # so that nan is refused, too
        raise command_line.KnobError("runtime", f"{plan.runtime} seconds is negative, or no number")
    if plan.quads:
        if settings.ioengine == "null":
            raise command_line.KnobError("ioengine", "null moves no bytes: use it without --compare-fio")
        find_fio()
        if len(settings.paths) > 1:
            raise command_line.KnobError("path", "--compare-fio works on one path: fio does not stripe as we do")
    region, of_fio = settings.size // len(settings.paths), settings.size if plan.quads else 0
    for path in settings.paths:
        command_line.check_space(path, region + of_fio)


def run_bench(plan: Plan) -> dict[str, Any]:
    """Everything the plan asks for, as the document that ``--json`` prints."""
    check(plan)
    document: dict[str, Any] = {
        "config": {
            **asdict(plan),
            "settings": asdict(plan.settings) | {"paths": [str(p) for p in plan.settings.paths]},
        },
        "environment": environment(list(plan.settings.paths)),
        "results": {},
    }
    with RawTarget(plan.settings) as target:
        document["engine"] = {
            "name": target.engine.engine.name,
            "reason": target.engine.reason,
            "direct": target.direct,
        }
        say("writing and verifying ...")
        target.prepare()
        document["verified"] = plan.settings.ioengine != "null"
        for rw in plan.directions:
            document["results"][rw] = measured_passes(target, plan, rw)
        if plan.quads:
            document["comparison"] = compare_with_fio(target, plan)
    return document


def measured_passes(target: RawTarget, plan: Plan, rw: command_line.Rw) -> dict[str, Any]:
    """The result of one direction: passes over the region until the time is used up, and what they come to."""
    samples: list[Sample] = []
    size_bytes = min(plan.settings.size, LONGEST_PASS)
    target.run(rw, size_bytes)  # not counted: the first pass in a direction also warms up
    deadline = time.monotonic() + plan.runtime
    say(f"{rw} ...")
    with progress(rw, plan.runtime) as advance:
        while not samples or time.monotonic() < deadline:
            samples.append(target.run(rw, size_bytes))
            advance(samples[-1].seconds)
    return {
        "samples": [asdict(sample) | {"bw_bytes": sample.bw_bytes} for sample in samples],
        "summary": summary(samples, plan.settings),
    }


def compare_with_fio(target: RawTarget, plan: Plan) -> dict[str, Any]:
    """Quads and controls in every direction, each said as soon as it is there."""
    document: dict[str, Any] = {}
    size_bytes = plan.settings.size  # of a pass: each byte of the region once
    with Fio(plan.settings) as fio:
        document |= {"version": fio.version, "command": fio.command("mixed", size_bytes)[1:]}
        for rw in plan.directions:

            def ours(rw: command_line.Rw = rw) -> float:
                return target.run(rw, size_bytes).bw_bytes

            comparisons = compared(rw, ours, partial(fio.run, rw, size_bytes), plan.quads)
            with progress(f"{rw} beside fio", plan.quads) as advance:
                for comparison in comparisons:
                    say(describe_latest(comparison))
                    advance(1)
            document[rw] = comparison.to_dict()
    return document


RwChoice = Literal["read", "write", "mixed", "all"]

QUADS = 20
_BLOCK: Any = format_bytes(command_line.AIO.block_size)  # shown so in the help, parsed as if typed
_SIZE: Any = format_bytes(GiB)


def bench(
    path: command_line.Paths = command_line.HERE,
    bs: Annotated[int, command_line.byte_option("--bs", text="Bytes of one request.")] = _BLOCK,
    iodepth: Annotated[int, typer.Option(help="Requests in flight on each ring.")] = command_line.AIO.queue_depth,
    size: Annotated[int, command_line.byte_option("--size", text="Bytes of the file to work on.")] = _SIZE,
    numjobs: Annotated[int, typer.Option(help="Rings, each with a thread.")] = command_line.AIO.rings,
    ioengine: Annotated[
        str, command_line.choice_option("--ioengine", choices=("auto", *REGISTRY), text="Engine that does the I/O.")
    ] = (command_line.AIO.engine),
    direct: Annotated[
        DirectPolicy, typer.Option(help="Use direct I/O always, where it works, or never.")
    ] = command_line.AIO.direct,
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
    as_json: command_line.Json = False,
    save_to: command_line.SaveTo = None,
) -> None:
    """Measure a drive: bandwidth, IOPS, latency and processor time.

    Everything is written before it is read, and verified before it is timed. Knobs are named as in fio.
    """
    wanted = Plan(
        settings=command_line.Settings(
            paths=tuple(path), size=size, bs=bs, iodepth=iodepth, numjobs=numjobs, ioengine=ioengine, direct=direct
        ),
        directions=get_args(command_line.Rw) if rw == "all" else (rw,),
        runtime=runtime,
        quads=(QUADS if quads is None else quads) if compare_fio else 0,
    )
    if quads is not None and not compare_fio:
        raise typer.BadParameter("it is about --compare-fio; give that, too", param_hint="'--quads'")
    if quads == 0:
        raise typer.BadParameter("0 rounds compare nothing; leave out --compare-fio", param_hint="'--quads'")
    with command_line.failures_in_words():
        if save_to:
            command_line.check_save(save_to)
        document = run_bench(wanted)
    if as_json:
        typer.echo(json.dumps(document))
    else:
        show(document, Console())
    if save_to:  # last: a disk that is full by now must not cost what was measured
        with command_line.failures_in_words():
            command_line.say_saved(save(save_to, "bench", summarized(document), markdown(document)))
