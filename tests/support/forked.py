"""Children that need not import anything: forked from a process that has imported what takes seconds to import."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.multiprocessing as mp

ROOT = Path(__file__).parent.parent.parent

FORKED = mp.get_context("forkserver")  # forks from a process that has done nothing else
FORKED.set_forkserver_preload(["tests.support.preloaded"])


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
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    take_over(environment)
    os.chdir(ROOT)
    sys.argv = ["-c", *arguments]
    torch.set_num_threads(num_threads)
    prepare()
    exec(compile(code, "<child>", "exec"), {"__name__": "__main__"})
