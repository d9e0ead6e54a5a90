"""Real process groups (gloo, on loopback) for tests that need ranks."""

import inspect
import os
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from tests.support.forked import FORKED, say_into, take_over


def be_alone():
    """A process group of this process alone; the fixture `alone` ends it."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def run_ranks(function, world_size, *args):
    """Run ``function(rank, world_size, *args)`` in `world_size` processes with a process group; returns their results.

    A failure in any rank is raised here with that rank's own traceback.
    """
    return start_ranks(function, [(None, {})] * world_size, *args)


def on_ranks(size):
    """Make a test of ``function(rank, world_size, ...)``, which is called on each of so many ranks.

    `size` is their number, or the name of the argument that has it. What else the function takes are fixtures and
    parameters of the test.
    """

    def made(function):
        def test(**given):
            num_ranks = given.pop(size) if isinstance(size, str) else size
            run_ranks(_OnRank(function.__module__, function.__name__), num_ranks, given)

        rank, _, *others = inspect.signature(function).parameters.values()
        own = [inspect.Parameter(size, rank.kind)] if isinstance(size, str) else []
        test.__signature__ = inspect.Signature([*own, *others])
        test.on_rank = function
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(test, name, getattr(function, name))
        return test

    return made


class _OnRank(NamedTuple):
    """The function of a test, which other processes find by its name."""

    module: str
    name: str

    def __call__(self, rank, world_size, given):
        return getattr(import_module(self.module), self.name).on_rank(rank, world_size, **given)


def start_ranks(function, places, *args):
    """Do what `run_ranks` does; where a place says how to enter it, there, with its environment and without a group."""
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        processes = []
        for rank, (enter, more) in enumerate(places):
            given = (function, rank, len(places), folder, environment | more, enter, args)
            processes.append(FORKED.Process(target=_run_rank, args=given))
        for process in processes:
            process.start()
        for process in processes:
            process.join(240)
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        sys.stderr.writelines(path.read_text(errors="replace") for path in sorted(Path(folder).glob("*.said")))
        problems = sorted(Path(folder).glob("*.problem"))
        if problems:
            raise AssertionError("\n".join(f"{path.stem}:\n{path.read_text()}" for path in problems))
        codes = [process.exitcode for process in processes]
        assert codes == [0] * len(places), f"ranks ended with {codes}"
        return [torch.load(Path(folder) / f"rank{rank}.result", weights_only=False) for rank in range(len(places))]


def _run_rank(function, rank, world_size, folder, environment, enter, args):
    say_into(Path(folder) / f"rank{rank}.said")
    take_over(environment)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    try:
        if enter is not None:
            enter()
        else:
            store = _store_of(rank, world_size, Path(folder))
            dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
        result = function(rank, world_size, *args)
        torch.save(result, Path(folder) / f"rank{rank}.result")
        if dist.is_initialized():
            dist.barrier()
    except BaseException:
        Path(folder, f"rank{rank}.problem").write_text(traceback.format_exc())
        os._exit(1)
    # Past gloo's own teardown: now and then one of its threads aborts the process, also where torch is alone.
    os._exit(0)


def _store_of(rank, world_size, folder):
    """Rank 0 serves it on a port that it finds free and keeps; whoever runs beside this test cannot take it."""
    place, written = folder / "port", folder / "port.written"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        written.write_text(str(store.port))
        written.rename(place)
        return store
    while not place.exists():
        time.sleep(0.002)
    return dist.TCPStore("127.0.0.1", int(place.read_text()), world_size)
