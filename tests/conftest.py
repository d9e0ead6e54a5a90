"""Settings for every test."""

import atexit
import fcntl
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A busy machine takes as long as it takes: no test is about time.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")

# Tests that run side by side (`pytest -n 2`) share the processors: one thread each, unless a test asks for more. With
# more, a child that is forked from a worker waits in OpenMP for threads that only the worker has.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

# Before torch is imported: its idle threads sleep instead of spinning, which on a busy two-core machine is the
# difference between seconds and minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Hundreds of children import the same modules: each is compiled once, also where the environment keeps no bytecode.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# To look for garbage in all of torch takes a long time: not while it is imported, and later in what tests make alone.
gc.disable()

# A shell that starts the suite in the background has it ignore Ctrl-C, and children inherit that. Tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

_GATE, _TURN = (os.open(Path(__file__).with_name(name), os.O_RDONLY) for name in ("__init__.py", "conftest.py"))
"""Files to lock, so that workers take turns. Who waits for a turn holds the gate: nobody overtakes."""


def pytest_configure(config: pytest.Config) -> None:
    """A GPU is for tests that are marked so, which are run by `-m gpu`; all others compare with the CPU.

    Where none is seen, Triton's kernels run on tensors of the CPU. Torch and Triton ask when they are imported.
    """
    if "gpu" not in config.getoption("markexpr"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With workers, what needs a quiet machine comes first: at the end there is other work to share out."""
    if _is_worker(config):
        items.sort(key=_needs_quiet, reverse=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[object]:
    """A worker has imported all that its children need, and pytest does not yet look at what is said: fork here.

    Where there are no workers, torch may have several threads already, which a fork would not have.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # Triton's binding would list all that it still has as leaked
    gc.enable()
    if _is_worker(session.config):
        from tests.support.forked import fork_here  # not before OMP_WAIT_POLICY is set

        fork_here()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test of a worker waits for its turn, before its own time runs; one marked `quiet` has no other beside it."""
    if not _is_worker(item.config):
        return (yield)
    fcntl.flock(_GATE, fcntl.LOCK_EX)
    fcntl.flock(_TURN, fcntl.LOCK_EX if _needs_quiet(item) else fcntl.LOCK_SH)
    fcntl.flock(_GATE, fcntl.LOCK_UN)
    try:
        return (yield)
    finally:
        fcntl.flock(_TURN, fcntl.LOCK_UN)


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _needs_quiet(item: pytest.Item) -> bool:
    """Slow tests do, too: they are large."""
    return any(item.get_closest_marker(name) is not None for name in ("quiet", "slow"))


@pytest.fixture(scope="module", autouse=True)
def _files_before_leave_no_garbage() -> None:
    """Tests that collect again and again look at what their own file has made."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``once(name, make)``: what `make(folder)` returns and leaves in its folder, made once for all workers."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if _is_worker(request.config) else own

    def made(name: str, make: Callable[[Path], Any]) -> Any:
        import torch  # not before OMP_WAIT_POLICY is set

        folder = shared / f"once-{name}"
        folder.mkdir(exist_ok=True)
        written = folder / "made"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not written.exists():
                (folder / "kept").mkdir()
                result = make(folder / "kept")
                torch.save(result, folder / "part")
                (folder / "part").rename(written)
        return torch.load(written, weights_only=False)

    return made


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder for thousands of small files that nobody needs to keep: in memory, where there is such a file system."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def late() -> Iterator[Any]:
    """A device that is as late as the rules allow: device type "late"."""
    from tests.support.late_device.module import late_device  # not before OMP_WAIT_POLICY is set

    with late_device() as device:
        yield device


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """An optimizer that is made in a process group waits until its model is sharded: it is the next test's, too."""
    yield
    dist = sys.modules.get("torch.distributed")  # not imported before OMP_WAIT_POLICY is set
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process without a launcher."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    """A folder for swap files."""
    path = tmp_path / "drive"
    path.mkdir()
    return path
