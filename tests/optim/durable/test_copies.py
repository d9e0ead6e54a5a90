"""A run on two drives: either may be erased, fail or lie, and the bits are those of a run on one that did not."""

import fcntl
import functools
import shutil
import struct
import subprocess
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest

from nvme_offload import ConfigError, FaultSpec, OffloadAdamW, ResumeError, SwapIOError
from tests.optim.durable.test_durable_steps import train
from tests.optim.durable.test_exported_runs import damage, exported
from tests.support.durable_engine import durable, settle, whole
from tests.support.durable_run import offload_runs
from tests.support.engine_tools import PYTHON_ENGINE
from tests.support.failing_drive import Op, fail, fail_to_sync, failing_copy, flip_bit
from tests.support.killed_steps import DTYPES, SHAPES, durable_section
from tests.support.pairs import each_value_once
from tests.support.ranks import on_ranks
from tests.support.resuming import steps_of
from tests.support.sharded_model import assert_same
from tests.support.training import assert_same_bits, faulty_drive, params_of, section, snapshot, storage_io

_SHUT_DOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN, without a flush


@pytest.fixture
def other(drive):
    """A folder on another device, which is memory."""
    if not Path("/dev/shm").is_dir() or Path("/dev/shm").stat().st_dev == drive.stat().st_dev:
        pytest.skip("there is no second device: /dev/shm is on that of the tests' folder")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def fresh(drive, other, **more):
    made = durable_section(drive, "run", other=other, **more)
    return OffloadAdamW(params_of(SHAPES, *DTYPES), lr=1e-2, offload=made)


@functools.cache
def expected(num_steps):
    params = params_of(SHAPES, *DTYPES)
    with OffloadAdamW(params, lr=1e-2, offload=section(None, sub_group_size=65536, clip=1.0)) as optimizer:
        train(optimizer, range(num_steps))
        return snapshot(optimizer)


def folder_of(path, rank=0):
    return path / f"nvme-durable-run-rank{rank}"


def erase(path):
    for folder in path.iterdir():
        shutil.rmtree(folder)


@contextmanager
def said(number=1, *, others=0):
    """So many warnings of lost copies come in here, and so many others; None: any."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        yield
    messages = [str(warning.message) for warning in caught]
    assert len([message for message in messages if "a copy of the state is lost" in message]) == number, messages
    assert others is None or len(messages) == number + others, messages


def end_alike(drive, other, first, num_steps, period):
    """A run of so many steps goes on from either drive alone, to the same bits, and is on both again."""
    for erased in (drive, other):
        erase(erased)
        with fresh(drive, other, rewrite_every=period) as optimizer, said(0):
            assert optimizer.resume() == (first, {})
            assert optimizer.durable.num_copies == 1
            train(optimizer, range(first, first + num_steps))
            optimizer.durable.commits.settle()
            assert optimizer.durable.num_copies == 2
            first += num_steps
            assert_same_bits(snapshot(optimizer), expected(first))
    _, told = offload_runs(drive, other)
    assert f"rank 0: 2 of 2 copies whole, read from {folder_of(drive)}" in told, told


@pytest.mark.parametrize("period", [1, 3])
def test_either_drive_is_erased(drive, other, period):
    with fresh(drive, other, rewrite_every=period) as optimizer, said(0):
        assert optimizer.resume() is None
        assert optimizer.durable.num_copies == 2
        train(optimizer, range(4))
    end_alike(drive, other, 4, 3, period)


def test_what_is_damaged_on_one_drive_or_gone_with_it_is_exported_from_the_other(drive, other, tmp_path):
    with fresh(drive, other, rewrite_every=3) as optimizer:
        train(optimizer, range(3))
    exported("run", tmp_path / "whole", drive, other)

    def exports_the_same(number, *paths):
        exported("run", tmp_path / str(number), *paths)
        ours, theirs = (tmp_path / name / "model.safetensors" for name in (str(number), "whole"))
        assert ours.read_bytes() == theirs.read_bytes()

    damage(folder_of(drive), "log")
    with said():
        exports_the_same(1, drive, other)
    (folder_of(drive) / "run.json").write_text("{")
    exports_the_same(2, drive, other)
    shutil.rmtree(drive)
    exports_the_same(3, other)


@pytest.mark.parametrize(
    ("failing", "engine", "period"),
    each_value_once([(0, Op.READ), (0, Op.WRITE), (1, Op.WRITE)], ["aiofiles", PYTHON_ENGINE], [3, 1]),
)
def test_a_drive_that_fails_is_one_warning_and_is_made_again(drive, other, monkeypatch, engine, failing, period):
    copy, op = failing
    with faulty_drive(FaultSpec(seed=1)):
        optimizer = fresh(drive, other, rewrite_every=period, engine=engine)
    with optimizer:
        with said():
            train(optimizer, range(3))
            with failing_copy(optimizer, copy, monkeypatch, op):
                train(optimizer, range(3, 7))
                optimizer.durable.commits.settle()
                assert optimizer.durable.num_copies == (2 if op is Op.READ else 1)
            train(optimizer, range(7, 15))
        optimizer.durable.commits.settle()
        assert (optimizer.durable.num_copies, optimizer.stats().failed_commits) == (2, 0)
        assert_same_bits(snapshot(optimizer), expected(15))
    end_alike(drive, other, 15, 2, period)


@pytest.mark.parametrize(("copy", "what"), each_value_once([0, 1], ["a sync", "a manifest", "a file cut short"]))
def test_a_drive_fails_where_a_step_is_committed(drive, other, monkeypatch, copy, what):
    with fresh(drive, other) as optimizer, said():
        train(optimizer, range(2))
        optimizer.durable.commits.settle()
        (file,) = optimizer.store.durability.run.space.copies.files[copy]
        with monkeypatch.context() as patch:
            if what == "a sync":
                fail_to_sync(file.fd, patch)
            elif what == "a manifest":
                patch.setattr(optimizer.store.durability.run._files._manifests[copy], "write", fail)
            else:
                file.path.write_bytes(b"")
            train(optimizer, [2])
            optimizer.durable.commits.settle()
            assert optimizer.durable.num_copies == (2 if what == "a file cut short" else 1)  # its drive works
        train(optimizer, range(3, 6))
        optimizer.durable.commits.settle()
        assert (optimizer.durable.num_copies, optimizer.stats().failed_commits) == (2, 0)
    end_alike(drive, other, 6, 2, 1)


@pytest.mark.parametrize(("period", "when"), each_value_once([1, 3], ["in a run", "before it goes on"]))
def test_a_drive_that_lies_is_one_warning(drive, other, period, when):
    optimizer = fresh(drive, other, rewrite_every=period, buffers=2)

    def lie():
        swap = folder_of(drive) / "swap"
        for offset in range(100, swap.stat().st_size, 4096):
            flip_bit(swap, offset)

    with said(when == "in a run"), optimizer:
        train(optimizer, range(3))
        if when == "in a run":
            lie()
            train(optimizer, range(3, 6))
    if when != "in a run":
        lie()
    with said(when != "in a run"), fresh(drive, other, rewrite_every=period, buffers=2) as optimizer:
        done, _ = optimizer.resume()
        assert done == (6 if when == "in a run" else 3)
        train(optimizer, range(done, 8))
        assert_same_bits(snapshot(optimizer), expected(8))
    end_alike(drive, other, 8, 2, period)


def test_without_a_copy_left_it_is_the_error_of_one_drive(drive, other, monkeypatch):
    with faulty_drive(FaultSpec(seed=1)):
        optimizer = fresh(drive, other, engine="aiofiles")
    with optimizer, said(others=None):
        train(optimizer, range(2))
        with (
            failing_copy(optimizer, 0, monkeypatch, Op.WRITE),
            failing_copy(optimizer, 1, monkeypatch, Op.WRITE),
            pytest.raises(SwapIOError, match="EIO"),
        ):
            train(optimizer, range(2, 6))
        optimizer.finish_step()
    erase(drive)
    erase(other)
    with fresh(drive, other) as optimizer:
        assert optimizer.resume() is None


def test_copies_that_went_on_by_themselves_are_never_mixed(drive, other, tmp_path):
    """An older copy gives way to the newer one, and of two that both went on neither does."""
    with fresh(drive, other) as optimizer:
        train(optimizer, range(2))
    shutil.copytree(other, tmp_path / "old")
    for path, to in ((drive, 4), (tmp_path / "old", 3)):
        with fresh(path, None) as optimizer:
            assert optimizer.resume() == (2, {})
            train(optimizer, range(2, to))
    with fresh(drive, other) as optimizer:
        assert optimizer.resume() == (4, {})
    erase(other)
    shutil.copytree(tmp_path / "old", other, dirs_exist_ok=True)
    for paths in ((drive, other), (other, drive)):
        with pytest.raises(ResumeError, match=r"step \d in .* and step \d in .*: move away"):
            fresh(*paths)
    shutil.rmtree(folder_of(other))
    end_alike(other, drive, 4, 2, 1)


def test_snapshots_and_steps_back_are_on_both(drive, other):
    with fresh(drive, other, rewind_steps=3) as optimizer:
        train(optimizer, range(2))
        optimizer.snapshot("kept")
        train(optimizer, range(2, 6))
        optimizer.snapshot("gone")
        optimizer.remove_snapshot("gone")
    for erased in (drive, other):
        erase(erased)
        with fresh(drive, other, rewind_steps=3) as optimizer:
            assert optimizer.resume() == (6, {})
            assert optimizer.rewind(3) == (3, {})
            train(optimizer, range(3, 6))
            assert_same_bits(snapshot(optimizer), expected(6))
            assert optimizer.durable.num_copies == 2
    erase(drive)
    with fresh(drive, other, rewind_steps=3) as optimizer:
        assert optimizer.resume("kept") == (2, {})
        with pytest.raises(KeyError, match="kept"):
            optimizer.resume("gone")
        train(optimizer, range(2, 3))
        assert_same_bits(snapshot(optimizer), expected(3))


@pytest.mark.parametrize("lost", [pytest.param((0, 0), marks=pytest.mark.slow), (0, 1)])
@on_ranks(2)
def test_ranks_lose_drives(rank, world_size, drive, other, lost):
    """Each rank loses a drive, not always the same one."""
    tiers = "state, logged"
    with durable("bf16", drive, "run", tiers, other=other) as engine:
        steps_of(engine, rank, range(2))
        settle(engine)
    shutil.rmtree(folder_of((drive, other)[lost[rank]], rank))
    with durable("bf16", drive, "run", tiers, other=other) as engine:
        assert engine.resume() == (2, {})
        steps_of(engine, rank, range(2, 4))
        settle(engine)
        assert engine.optimizer.durable.num_copies == 2
        found = whole(engine)
    with durable("bf16", drive, None, tiers) as engine:
        steps_of(engine, rank, range(4))
        plain = whole(engine)
    assert_same(found[0], plain[0])
    assert found[1] == plain[1]


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_what_cannot_have_copies_is_refused(drive, other, lost):
    key = "zero_optimization.offload_optimizer"
    cases = {
        "is of a durable run, and this is none; write durable = true": {"durable": False},
        "nvme_path has 1; name those of one copy and then those of the other": {"nvme_path": str(drive)},
        "nvme_path has 3; name those of one copy": {"nvme_path": [str(drive), str(other), str(drive / "b")]},
        "are on one device, and copies": {"nvme_path": [str(drive), str(drive.parent)]},
        "should be less than or equal to 2; write 1..2": {"copies": 3},
    }
    for words, wrong in cases.items():
        made = durable_section(drive, "run", other=other)
        made["zero_optimization"]["offload_optimizer"] |= wrong
        with pytest.raises(ConfigError) as caught:
            OffloadAdamW(params_of(SHAPES, *DTYPES), offload=made)
        assert f"{key}.copies = " in str(caught.value)
        assert words in str(caught.value)
    if lost is not None:  # a folder that is not there is an error before the first step, and a warning later
        paths = [drive, other]
        paths[lost] = drive.parent / "missing"
        with pytest.raises(SwapIOError, match="missing"):
            fresh(*paths)
        with fresh(drive, other) as optimizer:
            train(optimizer, range(2))
        with pytest.warns(RuntimeWarning, match="a copy of the durable run 'run' cannot be opened: .*missing"):
            optimizer = fresh(*paths)
        with optimizer:
            assert optimizer.resume() == (2, {})
            assert optimizer.durable.num_copies == 1


@pytest.fixture
def loop(tmp_path):
    """A folder on another block device, so that the kernel counts what is written to it."""
    image, folder = tmp_path / "image", tmp_path / "loop"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(512 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", image], capture_output=True)
    mounted = made.returncode == 0 and subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True)
    if not mounted or mounted.returncode:
        pytest.skip("loop devices cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)  # the kernel closes rings behind close()


@pytest.mark.parametrize("first", [True, False])
def test_a_file_system_that_is_gone_for_good_is_one_warning(drive, loop, first):
    """It answers everything with EIO, as that of a drive that was pulled out."""
    paths = (loop, drive) if first else (drive, loop)
    with fresh(*paths, rewrite_every=3, buffers=2) as optimizer, said():
        train(optimizer, range(3))
        lost = optimizer.store.durability.run.space.copies.files[0 if first else 1]
        fcntl.ioctl(lost[0].fd, _SHUT_DOWN, struct.pack("I", 2))
        train(optimizer, range(3, 9))
        optimizer.snapshot("kept")
        optimizer.durable.commits.settle()
        assert (optimizer.durable.num_copies, optimizer.stats().failed_commits) == (1, 0)
        assert_same_bits(snapshot(optimizer), expected(9))
    with pytest.warns(RuntimeWarning, match="cannot be opened"):
        optimizer = fresh(*paths, rewrite_every=3, buffers=2)
    with optimizer:
        assert optimizer.resume("kept") == (9, {})


@pytest.mark.parametrize(
    ("copies", "period", "least", "most_read"),
    [
        (1, 0, 10, 10), (1, 1, 12, 10), (1, 3, 16 / 3, 13.4),
        pytest.param(2, 1, 24, 10, marks=pytest.mark.slow), (2, 3, 32 / 3, 13.4),
    ],
)  # fmt: skip
def test_the_kernel_counts_as_many_bytes_as_said(drive, loop, copies, period, least, most_read):
    """Bytes per bf16 parameter and step; a period of 0 is a step in place, which lasts for nobody."""
    numel, num_steps = 4 << 20, 3
    params = params_of([(numel,)], *DTYPES[:1])
    made = durable_section(drive, "run" if period else None, other=loop if copies > 1 else None, rewrite_every=period)
    made["zero_optimization"]["sub_group_size"] = 1 << 19
    made["zero_optimization"]["offload_optimizer"]["staging_budget"] = "64MiB"

    def end(optimizer):
        optimizer.synchronize()
        if period:
            optimizer.durable.commits.settle()

    with OffloadAdamW(params, offload=made) as optimizer:
        train(optimizer, range(max(period, 1)))
        end(optimizer)
        before, counted = storage_io(), optimizer.stats().bytes_written
        train(optimizer, range(period, period + num_steps))
        end(optimizer)
        read, written = ((now - then) / numel / num_steps for now, then in zip(storage_io(), before, strict=True))
        own = (optimizer.stats().bytes_written - counted) / numel / num_steps
    assert own <= written <= 1.02 * least, (own, written)
    assert least <= written
    assert read <= most_read
