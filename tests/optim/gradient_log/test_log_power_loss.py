"""A training from bases and a log in a power loss at any moment: what was committed last is there, bit for bit."""

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nvme_offload.offload import sync
from nvme_offload.offload.durable.directory import DurableDirectory
from nvme_offload.offload.durable.extent_pool import ExtentPool
from nvme_offload.offload.durable.manifest import Manifest, ManifestFiles
from nvme_offload.offload.durable.ring import ExtentRing
from nvme_offload.offload.errors import CorruptionError
from nvme_offload.offload.storage.swap_space import SwapSpace
from nvme_offload.optim.kernels import KernelPool
from tests.support.kernel_twins import scalars_at
from tests.support.logged_training import LoggedTraining
from tests.support.power_loss import Recording
from tests.support.rules import CASES

NUMELS, DTYPES = (700, 31, 300), (torch.bfloat16, torch.float16, torch.float32)
PERIOD = 3
Bits = list[bytes]


class Run:
    """A training with its files, and a manifest after each step."""

    def __init__(self, folder: Path) -> None:
        directories: list[DurableDirectory] = []

        def directory(path: Path) -> DurableDirectory:
            directories.append(DurableDirectory(path, "small", 0))
            return directories[-1]

        self.space = SwapSpace([folder], direct="optional", directory=directory)
        self.files = ManifestFiles(directories[0].path, direct=self.space.direct)
        found = self.files.newest_first()
        params = [torch.linspace(-1, 1, numel).to(dtype) for numel, dtype in zip(NUMELS, DTYPES, strict=True)]
        self.training = LoggedTraining(
            self.space,
            params,
            groups=[0, 0, 1],
            rule=CASES[0].rule,
            period=PERIOD,
            grad_dtypes=DTYPES,
            pool=KernelPool(1),
            incarnation=max((manifest.incarnation for manifest in found), default=0) + 1,
            sequence=max((manifest.sequence for manifest in found), default=0) + 1,
        )
        for manifest in found:
            self.training.ring.claim(manifest.tables)
        self.space.promise()

    def begin(self) -> None:
        self.training.begin()

    def adopt(self, manifest: Manifest) -> None:
        self.training.adopt(manifest.encode())
        for other in self.files.newest_first():
            if other.sequence > manifest.sequence:
                self.files.destroy(other)

    def step(self, number: int) -> None:
        """Each step has gradients of its own; the second parameter has none in every third one."""
        generator = torch.Generator().manual_seed(number)
        present = [index for index in range(3) if index != 1 or number % 3]
        grads = {index: torch.randn(NUMELS[index], generator=generator).to(DTYPES[index]) for index in present}
        self.training.step(grads, dict.fromkeys(grads, scalars_at(number)))
        for fd in self.space.fds:
            sync.sync_data(fd)
        ring = self.training.ring
        self.files.write(Manifest(number, ring.sequence, self.training.incarnation, "identity", ring.tables))
        ring.note_commit()

    def bits(self) -> Bits:
        states = itertools.chain.from_iterable(self.training.state())
        return [tensor.view(torch.uint8).numpy().tobytes() for tensor in (*self.training.params, *states)]

    def close(self) -> None:
        self.files.close()
        self.space.close()


def live(folder: Path, mark) -> dict[str, Bits]:
    """Steps, an end in between, and going back by one."""
    truth: dict[str, Bits] = {}

    def step(run: Run, number: int, name: str) -> None:
        mark(f"begin {name}")
        run.step(number)
        truth[name] = run.bits()
        mark(f"done {name}")

    run = Run(folder)
    run.begin()
    for number in range(1, 6):
        step(run, number, str(number))
    run.close()
    run = Run(folder)
    run.adopt(run.files.newest_first()[0])
    for number in (6, 7):
        step(run, number, str(number))
    mark("begin 6")
    run.adopt(run.files.newest_first()[1])
    mark("done 6")
    for number in (7, 8, 9):
        step(run, number, str(number))
    run.close()
    return truth


def allowed(marks: tuple[str, ...]) -> set[str | None]:
    committed = [mark.removeprefix("done ") for mark in marks if mark.startswith("done ")]
    begun = [mark.removeprefix("begin ") for mark in marks if mark.startswith("begin ")]
    return {committed[-1] if committed else None, begun[-1] if len(begun) > len(committed) else None} - (
        {None} if committed else set()
    )


def problem(crash, truth: dict[str, Bits], folder: Path, monkeypatch) -> str | None:
    shutil.rmtree(folder, ignore_errors=True)
    crash.restore(folder)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(os, "fdatasync", lambda descriptor: None)
        run = Run(folder)
        try:
            found = run.files.newest_first()
            name = str(found[0].step) if found else None
            if name not in allowed(crash.marks):
                return f"{name} was found, and may be {allowed(crash.marks)}"
            if found:
                run.adopt(found[0])
                if run.bits() != truth[name]:
                    return f"{name} was found with other bits"
        except (CorruptionError, KeyError, ValueError) as error:
            return str(error)
        finally:
            run.close()
    return None


def problems(folder: Path, monkeypatch, *, num_random: int, seed: int = 0) -> Iterator[str]:
    drive = folder / "drive"
    drive.mkdir()
    with Recording(drive) as recording:
        truth = live(drive, recording.mark)
    history = recording.history()
    for crash in itertools.chain(
        history.kills(seed), history.power_losses(at_most=1, num_random=num_random, seed=seed)
    ):
        if found := problem(crash, truth, folder / "after", monkeypatch):
            yield f"{crash}: {found}"


def test_whatever_is_lost_the_latest_step_is_there(in_memory, monkeypatch):
    assert not list(problems(in_memory, monkeypatch, num_random=20))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_many_random_subsets_of_sectors(in_memory, monkeypatch, seed):
    assert not list(problems(in_memory, monkeypatch, num_random=2000, seed=seed))


def no_sync_of_the_data(patch):
    patch.setattr(sync, "sync_data", lambda fd: None)


def stale_manifests_left_alive(patch):
    patch.setattr(ManifestFiles, "destroy", lambda files, manifest: None)


def extents_reused_before_the_commit(patch):
    """What a chain does not need any more is taken for the next write at once, newest first."""

    def release(ring, record, chain):
        ring._pool.give_back(
            pair for pair in record.extents(chain) if pair[1] not in {w.extent for w in record.current}
        )

    def take(pool, size):
        pool._used[size] += 1
        return pool._idle[size].pop() if pool._idle[size] else pool._space.allocate_all([size])[0]

    patch.setattr(ExtentRing, "_release", release)
    patch.setattr(ExtentRing, "note_commit", lambda ring: setattr(ring, "sequence", ring.sequence + 1))
    patch.setattr(ExtentPool, "take", take)


@pytest.mark.parametrize("wrong", [no_sync_of_the_data, stale_manifests_left_alive, extents_reused_before_the_commit])
def test_what_is_known_to_be_wrong_is_found(in_memory, monkeypatch, wrong):
    wrong(monkeypatch)
    try:
        found = next(problems(in_memory, monkeypatch, num_random=50), None)
    except CorruptionError as error:  # without any crash
        found = str(error)
    assert found
