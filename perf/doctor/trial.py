"""A trial run in a folder: steps, a commit, a kill, a resume, an activation, a swap, and what the kernel did of it."""

import fcntl
import logging
import logging.handlers
import os
import signal
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from nvme_offload import ActivationSwapper, OffloadAdamW, TensorSwapper
from nvme_offload.offload.host.disks import disk_of
from nvme_offload.offload.host.page_cache import cached_pages
from nvme_offload.offload.host.proc import mount_of, read
from nvme_offload.offload.storage.swap_file import reported_alignment
from nvme_offload.offload.units import KiB
from ..measure.bits import values_of
from ..measure.child import Child, ChildFailedError, Send

LIMIT = 300.0  # seconds after which a trial counts as failed
_SHAPES = ((250_007,), (1000,))
_COMMITTED, _WATCHED, _LAST = 2, 4, 6  # the steps before the kill, those before the kernel is looked at, and all
_FIEMAP, _SYNC, _LAST_EXTENT = 0xC020660B, 0x1, 0x1  # linux/fiemap.h
_HEAD, _EXTENT = struct.Struct("=QQLLLL"), struct.Struct("=QQQQQLLLL")
_MOST_EXTENTS = 4096
_MOST_WARNINGS = 10_000
_UNIT = 1024  # the smallest block of the file systems that say it


@dataclass(frozen=True)
class TrialSite:
    """A run is tried there, and so."""

    folder: Path
    aio: dict[str, Any]  # the section, without an engine
    engines: Sequence[str]  # names, the one that a run takes first


@dataclass
class TrialSeen:
    """This came of a trial."""

    failures: dict[str, str] = field(default_factory=dict)  # by the name of an engine
    said: list[str] = field(default_factory=list)  # warnings of the run
    alignment: tuple[int, int] | None = None  # of direct I/O, as the kernel reports it
    num_cached: int | None = None  # pages of the swap file in memory, behind a commit
    written_bytes: int = 0  # by the watched steps
    reached_bytes: int | None = None  # of them and of others, what the drive got; None: it does not say
    moved: bool | None = None  # whether overwrites went to other blocks; None: the file system does not say


def try_folder(path: Path, aio: dict[str, Any], engines: Sequence[str]) -> TrialSeen:
    """Try a run in a folder, in a process of its own, and leave nothing there. OSError: nothing can be made there."""
    with (
        TemporaryDirectory(prefix="doctor-") as logs,
        TemporaryDirectory(prefix=".offload-doctor-", dir=path, ignore_cleanup_errors=True) as folder,
        Child(trial, Path(logs) / "log") as child,
    ):
        child.tell(TrialSite(Path(folder), aio, engines))
        try:
            seen: TrialSeen = child.expect("seen", within=LIMIT)
        except ChildFailedError as error:
            return TrialSeen(failures={engines[0]: str(error).partition("; see ")[0]})
        seen.said = [text.replace(folder, str(path)) for text in seen.said]
        seen.failures = {engine: text.replace(folder, str(path)) for engine, text in seen.failures.items()}
        return seen


def trial(told: Iterator[Any], send: Send) -> None:
    """Try the site that is told. All that is killed is forked before this process computes anything."""
    site: TrialSite = next(told)
    torch.set_num_threads(1)
    seen, warned = TrialSeen(), logging.handlers.BufferingHandler(_MOST_WARNINGS)
    warned.setLevel(logging.WARNING)
    logging.getLogger("nvme_offload").addHandler(warned)
    for engine in site.engines:
        if failure := _killed(site, engine):
            seen.failures[engine] = failure
    expected = _trained(OffloadAdamW(_params(), offload={}), 0)
    for engine in [engine for engine in site.engines if engine not in seen.failures]:
        try:
            _go_on(site, engine, expected, seen if engine == site.engines[0] else TrialSeen())
            _move_activations(site, engine)
            _move_tensor(site, engine)
        except Exception as error:
            seen.failures[engine] = f"{type(error).__name__}: {error}"
    send("seen", replace(seen, said=list(dict.fromkeys(record.getMessage() for record in warned.buffer))))


def _section(site: TrialSite, engine: str, **offload: Any) -> dict[str, Any]:
    """Everything on the drive, and every byte that comes back compared with its checksum."""
    drive = {"device": "nvme", "nvme_path": str(site.folder)}
    return {
        "zero_optimization": {"sub_group_size": 65536, "offload_optimizer": {**drive, **offload}},
        "activations": {**drive, "keep": "all", "host_budget": "64KiB", "min_bytes": "4KiB"},
        "aio": {**site.aio, "engine": engine, "checksums": True},
    }


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.linspace(-1, 1, *shape).bfloat16()) for shape in _SHAPES]


def _run(site: TrialSite, engine: str) -> OffloadAdamW:
    return OffloadAdamW(_params(), offload=_section(site, engine, durable=engine, staging_budget="16MiB"))


def _steps(optimizer: OffloadAdamW, first: int, last: int) -> None:
    for number in range(first, last):
        for param in optimizer.param_groups[0]["params"]:
            param.grad = values_of(param.shape, number, 1.0).to(param.dtype)
        optimizer.step()


def _trained(optimizer: OffloadAdamW, first: int) -> list[torch.Tensor]:
    _steps(optimizer, first, _LAST)
    states = [value for entries in optimizer.state_dict()["state"].values() for value in entries.values()]
    return [*(param.detach() for param in optimizer.param_groups[0]["params"]), *states]


def _killed(site: TrialSite, engine: str) -> str:
    """Train in a fork that is killed in the middle of a step; why it did not come so far, "" if it did."""
    reader, writer = Pipe(duplex=False)
    pid = os.fork()
    if not pid:
        try:
            optimizer = _run(site, engine)
            _steps(optimizer, 0, _COMMITTED)
            optimizer.durable.commit()
            _steps(optimizer, _COMMITTED, _COMMITTED + 1)
            writer.send("")
        except BaseException as error:
            writer.send(f"{type(error).__name__}: {error}")
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    writer.close()
    os.waitpid(pid, 0)
    try:
        said: str = reader.recv()
    except EOFError:
        return "the process ended before its first commit"
    return said


def _go_on(site: TrialSite, engine: str, expected: Sequence[torch.Tensor], seen: TrialSeen) -> None:
    """Resume, look at what two steps do, and compare the end with that of a run in memory."""
    with _run(site, engine) as optimizer:
        step, _ = optimizer.resume() or (0, {})
        if step < _COMMITTED:
            raise RuntimeError(f"step {_COMMITTED} was committed, and after a kill step {step} was found")
        _steps(optimizer, step, _WATCHED)
        optimizer.durable.commit()
        with (optimizer.durable.commits.run.folder / "swap").open("r+b", buffering=0) as swap:
            blocks, reached, written = blocks_of(swap.fileno()), bytes_at_drive(swap.fileno()), optimizer.stats()
            _steps(optimizer, _WATCHED, _LAST)
            optimizer.durable.commit()
            now, reached_now = blocks_of(swap.fileno()), bytes_at_drive(swap.fileno())
            num_cached = cached_pages(swap.fileno(), os.fstat(swap.fileno()).st_size)
            alignment = reported_alignment(swap.fileno())
        vars(seen).update(
            num_cached=num_cached,
            alignment=alignment,
            written_bytes=optimizer.stats().bytes_written - written.bytes_written,
            reached_bytes=None if reached is None or reached_now is None else reached_now - reached,
            moved=None if blocks is None or now is None else any(now.get(at) != old for at, old in blocks.items()),
        )
        _must_equal(_trained(optimizer, _LAST), expected, "parameters and state")


def _move_activations(site: TrialSite, engine: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    rows = torch.linspace(-1, 1, 256 * 64).view(256, 64)

    def gradients() -> Sequence[torch.Tensor]:
        return torch.autograd.grad(model(rows).square().mean(), [*model.parameters()])

    expected = gradients()
    with ActivationSwapper(_section(site, engine), model=model).attach() as activations:
        found = gradients()
        if not activations.stats().written_bytes:
            raise RuntimeError("no activation was moved")
    _must_equal(found, expected, "gradients behind moved activations")


def _move_tensor(site: TrialSite, engine: str) -> None:
    tensor = torch.arange(256 * KiB, dtype=torch.float32)
    with TensorSwapper(_section(site, engine)) as swapper:
        swapper.swap_out("tensor", tensor.clone()).wait()
        _must_equal([swapper.swap_in("tensor").wait()], [tensor], "a tensor")


def _must_equal(found: Sequence[Any], expected: Sequence[Any], what: str) -> None:
    if len(found) != len(expected) or not all(map(torch.equal, found, expected)):
        raise RuntimeError(f"{what}: other bits than in memory; this drive, its file system or the engine changes data")


def blocks_of(fd: int) -> dict[int, int] | None:
    """Return where on its drive an open file has each KiB, by offset; None where the file system does not say."""
    answer = array("B", _HEAD.pack(0, 2**64 - 1, _SYNC, 0, _MOST_EXTENTS, 0) + bytes(_EXTENT.size * _MOST_EXTENTS))
    try:
        fcntl.ioctl(fd, _FIEMAP, answer)
    except OSError:
        return None
    num_extents = _HEAD.unpack_from(answer)[3]
    extents = [_EXTENT.unpack_from(answer, _HEAD.size + number * _EXTENT.size) for number in range(num_extents)]
    if not extents or not extents[-1][5] & _LAST_EXTENT:
        return None
    return {offset + at: place + at for offset, place, size_bytes, *_ in extents for at in range(0, size_bytes, _UNIT)}


def bytes_at_drive(fd: int) -> int | None:
    """Return how many bytes the drive of an open file was written since it is there; None where none is known."""
    disk = disk_of(os.fstat(fd).st_dev, mount_of(fd))
    counts = (read(disk / "stat") or "").split() if disk else []
    return int(counts[6]) * 512 if len(counts) > 6 else None
