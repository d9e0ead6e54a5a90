"""The simulated drive of tests/support/power_loss: it finds protocols that are known to be wrong, and no right one."""

import ctypes
import io
import mmap
import os
import shutil

import pytest
import torch

from nvme_offload.aio_native.engine import EngineOptions, Op, Segment
from nvme_offload.aio_native.registry import open_engine
from tests.support.power_loss import History, RecordedEngine, Recording

OLD, NEW = b"old" * 700, b"new" * 1000


def write(path, data, *, sync=True, flags=0):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o600)
    os.write(fd, data)
    if sync:
        os.fsync(fd)
    os.close(fd)


def sync_folder(folder):
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


def renamed(folder):
    os.rename(folder / "new", folder / "file")


def removed(folder):
    os.unlink(folder / "file")


def synced_before_it_is_written(folder):
    with (folder / "new").open("wb") as file:
        os.fsync(file.fileno())
        file.write(NEW)


def written_in_place(folder):
    with (folder / "file").open("r+b", buffering=0) as file:
        file.write(NEW[:2048])
        file.write(NEW[2048:])
        os.fsync(file.fileno())


def one_durable_write_after_another_that_is_not(folder):
    fd = os.open(folder / "new", os.O_WRONLY | os.O_CREAT, 0o600)
    os.pwrite(fd, NEW[:1000], 0)
    os.close(fd)
    fd = os.open(folder / "new", os.O_WRONLY | os.O_DSYNC)
    os.pwrite(fd, NEW[1000:], 1000)
    os.close(fd)


def written(**how):
    return lambda folder: write(folder / "new", NEW, **how)


RIGHT = {
    "synced": (written(), renamed, sync_folder),
    "one durable write": (written(sync=False, flags=os.O_DSYNC), renamed, sync_folder),
}
WRONG_WHEN_KILLED = {
    "old one removed before the name is on the drive": (written(), removed, renamed, sync_folder),
    "written in place": (written_in_place,),
}
WRONG = WRONG_WHEN_KILLED | {
    "file not synced": (written(sync=False), renamed, sync_folder),
    "folder not synced": (written(), renamed),
    "synced before it is written": (synced_before_it_is_written, renamed, sync_folder),
    "a write that does not last": (one_durable_write_after_another_that_is_not, renamed, sync_folder),
}


def recorded(folder, protocol):
    folder.mkdir()
    write(folder / "file", OLD)
    with Recording(folder) as recording:
        for step in protocol:
            step(folder)
        recording.mark("done")
    return recording.history()


def is_wrong(crash):
    """Neither the old file nor the new one is there, or the old one although the new one was promised."""
    allowed = {NEW} if "done" in crash.marks else {OLD, NEW}
    return crash.image.get("file") not in allowed


@pytest.mark.parametrize("protocol", RIGHT.values(), ids=RIGHT)
def test_a_right_protocol_holds(tmp_path, protocol):
    history = recorded(tmp_path / "folder", protocol)
    crashes = [*history.kills(), *history.power_losses(num_random=300)]
    assert not [str(crash) for crash in crashes if is_wrong(crash)]
    assert {crash.image.get("file") for crash in crashes} == {OLD, NEW}


@pytest.mark.parametrize("protocol", WRONG)
def test_a_wrong_protocol_is_found(tmp_path, protocol):
    history = recorded(tmp_path / "folder", WRONG[protocol])
    assert any(map(is_wrong, history.power_losses()))
    assert any(map(is_wrong, history.kills())) == (protocol in WRONG_WHEN_KILLED)


def test_a_write_is_torn_between_sectors_and_nowhere_else(tmp_path):
    path = tmp_path / "file"
    write(path, bytes(10_000))
    with Recording(tmp_path) as recording:
        fd = os.open(path, os.O_WRONLY)
        os.pwrite(fd, b"\xff" * 8000, 100)
        os.close(fd)
    torn = set()
    for crash in recording.history().power_losses(num_random=300):
        content = crash.image["file"]
        assert len(content) == 10_000
        changes = [at for at in range(1, 10_000) if content[at] != content[at - 1]]
        assert all(at % 512 == 0 or at in (100, 8100) for at in changes), changes
        torn |= set(changes)
    assert len(torn) > 15


def test_a_durable_write_is_torn_while_it_is_made(tmp_path):
    path = tmp_path / "file"
    write(path, bytes(2048))
    with Recording(tmp_path) as recording:
        fd = os.open(path, os.O_WRONLY | os.O_DSYNC)
        os.pwrite(fd, b"\xff" * 2048, 0)
        os.close(fd)
        recording.mark("done")
    crashes = list(recording.history().power_losses(num_random=300))
    assert contents(crashes) > {bytes(2048), b"\xff" * 2048, b"\xff" * 512 + bytes(1536)}
    assert contents(crashes, "done") == {b"\xff" * 2048}


def contents(crashes, *latest):
    return {crash.image["file"] for crash in crashes if crash.marks[-1:] == latest}


def test_a_length_may_be_there_without_the_bytes(tmp_path):
    with Recording(tmp_path) as recording:
        write(tmp_path / "file", b"x" * 600, sync=False)
    found = {crash.image.get("file") for crash in recording.history().power_losses()}
    assert found == {None, b"", bytes(600), b"\xa5" * 600, b"x" * 600}


def test_what_the_file_system_promises_reads_as_zeros(tmp_path):
    with Recording(tmp_path) as recording, (tmp_path / "file").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 5)
        os.fdatasync(file.fileno())
        os.ftruncate(file.fileno(), 3)
    found = {crash.image.get("file") for crash in recording.history().power_losses()}
    assert found == {None, b"", bytes(3), bytes(5)}


def test_every_way_to_write_is_noted(tmp_path):
    (tmp_path / "there").mkdir()
    write(tmp_path / "there" / "file", OLD)
    with Recording(tmp_path) as recording:
        (tmp_path / "text").write_text("words\n")
        with (tmp_path / "text").open("a") as file:
            print("more", file=file)
        with io.open(tmp_path / "text", "r+b") as file:  # noqa: UP020 - the one that others have imported
            file.seek(2)
            file.write(b"XX")
            file.truncate(9)
        torch.save(torch.arange(5000), (tmp_path / "tensor").open("wb"))
        shutil.copytree(tmp_path / "there", tmp_path / "copy")
        os.makedirs(tmp_path / "a" / "b")
        (tmp_path / "a" / "link").symlink_to("../text")
        os.link(tmp_path / "text", tmp_path / "a" / "b" / "twin")
        fd = os.open(tmp_path / "a" / "link", os.O_RDWR)
        os.pwritev(fd, [b"12", b"34"], 7)
        os.writev(fd, [b"ab", b"cd"])
        with os.fdopen(fd, "wb") as file:
            file.write(b"!")
        (tmp_path / "there" / "file").rename(tmp_path / "moved")
        shutil.rmtree(tmp_path / "there")
        os.truncate(tmp_path / "moved", 11)
        (tmp_path / "touched").touch()
    *_, last = recording.history().kills()
    restored = last.restore(tmp_path.with_name("restored"))
    assert (restored / "a" / "b" / "twin").read_bytes() == b"abcd!\nm1234"
    assert torch.equal(torch.load(restored / "tensor"), torch.arange(5000))
    assert (restored / "moved").read_bytes() == OLD[:11]
    assert os.readlink(restored / "a" / "link") == "../text"
    assert sorted(path.name for path in restored.iterdir()) == ["a", "copy", "moved", "tensor", "text", "touched"]


def test_what_goes_past_the_recording_is_noticed(tmp_path):
    write(tmp_path / "file", OLD)
    with Recording(tmp_path) as recording, (tmp_path / "file").open("r+b") as file:
        mmap.mmap(file.fileno(), 0)[5:8] = b"???"
    with pytest.raises(AssertionError, match=r"changed past the recording.*: file"):
        recording.history()


def test_a_sync_covers_transfers_that_somebody_saw_done(tmp_path):
    memory = ctypes.create_string_buffer(b"y" * 4096, 4096)
    options = EngineOptions(queue_depth=4, block_size=4096, rings=1, alignment=4096, max_operations=4)
    with Recording(tmp_path) as recording:
        engine = RecordedEngine(open_engine("aiofiles", options).engine, recording)
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, 4096)
        sync_folder(tmp_path)
        os.fsync(fd)
        recording.mark("made")
        operation = engine.submit(Op.WRITE, [Segment(fd, 0, ctypes.addressof(memory), 4096)])
        os.fdatasync(fd)
        recording.mark("too early")
        operation.wait()
        recording.mark("done")
        os.fdatasync(fd)
        recording.mark("on the drive")
        engine.close()
        os.close(fd)
    history = recording.history()
    assert contents(history.kills(), "too early") == {bytes(4096), b"y" * 4096}
    assert contents(history.kills(), "done") == {b"y" * 4096}
    assert contents(history.power_losses(), "too early") == {bytes(4096), b"y" * 4096}
    assert contents(history.power_losses(), "done") == {bytes(4096), b"y" * 4096}
    assert contents(history.power_losses(), "on the drive") == {b"y" * 4096}


def test_recordings_of_several_processes_are_one_history(tmp_path):
    recordings = [Recording(tmp_path) for _ in range(3)]
    with recordings[2]:
        (tmp_path / "folder").mkdir()
    with recordings[0]:
        write(tmp_path / "folder" / "a", b"a")
    with recordings[1]:
        sync_folder(tmp_path)
        write(tmp_path / "folder" / "b", b"b", sync=False)
        sync_folder(tmp_path / "folder")
        recordings[1].mark("done")
    history = History.merged(tmp_path, [(recording.base, recording.events) for recording in recordings])
    assert [sync.what for sync in history.syncs] == ["folder/a", ".", "folder"]
    ends = [crash.image for crash in history.power_losses() if crash.marks]
    assert {image["folder/a"] for image in ends} == {b"a"}
    assert {image["folder/b"] for image in ends} == {b"", b"\0", b"\xa5", b"b"}
