"""Children that need not import anything: forked from a process that has imported what takes seconds to import."""

import faulthandler
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import patch

import torch
import torch.multiprocessing as mp

ROOT = Path(__file__).parent.parent.parent

FORKED = mp.get_context("forkserver")  # forks from a process that has done nothing else
FORKED.set_forkserver_preload(["tests.support.preloaded"])


def fork_here() -> None:
    """Have children forked from what this process is now, in place of one that imports everything once more."""
    resource_tracker.ensure_running()
    with patch.object(util, "spawnv_passfds", _serve):
        forkserver.ensure_running()


def _serve(path: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Do in a fork of this process what Python would do with the arguments ``-c CODE``; return its number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        forkserver._forkserver.__init__()  # its lock is held; children may want a server of their own
        faulthandler.disable()  # it writes into what is not ours here
        inherited = {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, *descriptors}
        nothing = os.open(os.devnull, os.O_RDWR)
        for each in inherited - {nothing}:
            os.dup2(nothing, each, inheritable=False)  # not closed: objects that we have still write there
        for handler in filter(None, (reference() for reference in logging._handlerList)):
            if type(handler) is logging.StreamHandler:  # what it was made with was pytest's
                handler.setStream(sys.stderr)
        code = arguments.index("-c") + 1
        sys.argv = ["-c", *arguments[code + 1 :]]  # from CPython 3.14 on some follow
        exec(arguments[code], {})
    finally:
        os._exit(0)


def say_into(out: Path | str, err: Path | str | None = None) -> None:
    """From here on this process writes what it says to files; all of it to one, where there is no other."""
    for number, path in ((1, out), (2, err or out)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)


def take_over(environment: dict[str, str]) -> None:
    """The process that forks was started at another time, with another environment."""
    os.environ.clear()
    os.environ.update(environment)


def run_code(
    code: str,
    arguments: Sequence[str],
    timeout: float,
    prepare: Callable[[], object] = int,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `prepare`, then `code` with ``sys.argv[1:] == arguments``, in a child below the repository.

    It computes with as many threads as this process, so that bits can be compared.
    """
    num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        given = {**os.environ, **(environment or {})}
        child = FORKED.Process(target=_run, args=(folder, given, num_threads, prepare, code, arguments))
        child.start()
        child.join(timeout)
        if child.is_alive():
            child.kill()
            child.join()
            raise subprocess.TimeoutExpired(code, timeout)
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(code, child.exitcode, out, err)


@contextmanager
def lines_of(code: str, *arguments: object) -> Iterator[tuple[Any, IO[str]]]:
    """Run code in a child as `run_code` does; yield the process and what it prints. It is killed in the end."""
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(f"{folder}/out")
        given = (folder, dict(os.environ), torch.get_num_threads(), int, code, [*map(str, arguments)])
        child = FORKED.Process(target=_run, args=given)
        child.start()
        try:
            with open(f"{folder}/out", encoding="utf-8") as lines:
                yield child, lines
        finally:
            child.kill()
            child.join()


def printed(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a child printed that ended well; otherwise what it said is in the failure."""
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def output_of(*command: object, **options: Any) -> str:
    """Run a command; return what it prints."""
    return printed(subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options))


class ForkedChild:
    """It stands for the `subprocess.Popen` of `perf.measure.child`, and serves in a fork, which has imported all."""

    def __init__(self, command: Sequence[str], *, stdout: Any, env: dict[str, str], **unused: object) -> None:
        with Connection(os.dup(int(command[-1]))) as channel:
            self._process = FORKED.Process(target=_serve_channel, args=(channel, stdout.name, env))
            self._process.start()
        self.pid, self.terminate, self.kill = self._process.pid, self._process.terminate, self._process.kill

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked child", seconds or 0.0)
        return self._process.exitcode


def forked_children() -> AbstractContextManager[object]:
    """Return a block in which children of experiments and of checks are forked."""
    forking = SimpleNamespace(**vars(subprocess) | {"Popen": ForkedChild})
    return patch("nvme_offload.perf.measure.child.subprocess", forking)


def _serve_channel(channel: Connection, log: str, environment: dict[str, str]) -> None:
    os.setpgid(0, 0)
    say_into(log)
    take_over(environment)
    sys.exit(import_module("nvme_offload.perf.measure.child").serve(channel))


def run_launched(code: str, *arguments: object, timeout: float = 240) -> list[subprocess.CompletedProcess[str]]:
    """Run `code` on two ranks, with what a launcher says in their environment; rank 0 first."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    places = [{**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    given = [*map(str, arguments)]
    with ThreadPoolExecutor(2) as ranks:
        return [*ranks.map(lambda place: run_code(code, given, timeout, environment=place), places)]


def _run(
    folder: str,
    environment: dict[str, str],
    num_threads: int,
    prepare: Callable[[], object],
    code: str,
    arguments: Sequence[str],
) -> None:
    say_into(f"{folder}/out", f"{folder}/err")
    take_over(environment)
    os.chdir(ROOT)
    sys.argv = ["-c", *arguments]
    torch.set_num_threads(num_threads)
    prepare()
    exec(compile(code, "<child>", "exec"), {"__name__": "__main__"})
