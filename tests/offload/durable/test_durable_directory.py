"""Who has a durable run, until its last transfer has ended; and its snapshots, which come and go in two halves."""

import errno
import itertools
import os
import signal
import socket
import stat
import threading
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch

from nvme_offload import ForeignFolderError, ResumeError, StateError, SwapIOError
from nvme_offload.offload.durable import directory, owner
from nvme_offload.offload.durable.chain import SlotLayout
from nvme_offload.offload.durable.directory import DurableDirectory, directory_of
from nvme_offload.offload.durable.identity import Encoded
from nvme_offload.offload.durable.inventory import find_runs, locked
from nvme_offload.offload.durable.run import DurableRun
from nvme_offload.offload.durable.seal import ExtentLayout
from nvme_offload.offload.host.region import HostRegion
from nvme_offload.offload.storage.run_directory import PREFIX as OTHER_PREFIX
from nvme_offload.offload.storage.run_directory import remove_leftovers
from tests.support.durable_run import UUID, SmallRun, committed, name_of, offload_runs
from tests.support.failing_drive import flip_bit
from tests.support.killed_histories import DiesAtAChange
from tests.support.killed_steps import fork
from tests.support.pairs import each_value_once

BUSY = [SlotLayout(ExtentLayout(32 << 20, 0, 4096))]


def hold(path, say):
    """Be in a run."""
    small = committed([path], 0, engine="auto")
    small.tier.register([small.pool])
    say("files" if small.tier.registration.files else "no files")
    signal.pause()


def write_without_end(path, say):
    """Commit, and have more writes in flight than can be done."""
    small = committed([path], 0, engine="auto", layouts=BUSY)
    extent, buffer = small.run.extents.to_rewrite(0), small.pool.acquire()
    buffer.view(torch.uint8, 0, buffer.size_bytes).fill_(0xDD)

    def start():
        return small.tier.write(extent, buffer, what="", kind="", size_bytes=BUSY[0].base.size_bytes)

    writes = [start() for _ in range(8)]
    say("here")
    while True:
        writes = [*writes[1:], start()]
        writes[0].wait()


def close_all_files(path, say):
    """What the kernel does first when a process was killed: its transfers go on without descriptors."""

    def close(here):
        for fd in os.listdir("/proc/self/fd"):
            where = f"/proc/self/fd/{fd}"
            if os.path.exists(where) and os.readlink(where).startswith(os.fspath(path)):
                os.close(int(fd))
        say(here)

    hold(path, close)


def die_before_a_child(path, say):
    """Be killed while a forked child lives on, as the worker of a DataLoader may for a while."""

    def fork(here):
        if (child := os.fork()) == 0:
            signal.pause()
        say(f"{child}")
        os.kill(os.getpid(), signal.SIGKILL)

    hold(path, fork)


class Process:
    """A forked process that calls a function; `said` is what that said first."""

    def __init__(self, function, path):
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            torch.set_num_threads(1)  # those of the parent are not here
            try:
                function(path, lambda text: os.write(writing, text.encode()))
            finally:
                os._exit(1)
        os.close(writing)
        self.said = os.read(reading, 100).decode()
        os.close(reading)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def end(self):
        os.waitpid(self.pid, 0)


def opened(path):
    return DurableRun([path], name="small", rank=0, direct="optional")


def test_a_run_that_is_alive_is_not_taken(tmp_path):
    process = Process(hold, tmp_path)
    with pytest.raises(StateError, match=f"process {process.pid} on "):
        opened(tmp_path)
    process.kill()
    found = opened(tmp_path)
    process.end()
    assert [manifest.step for manifest in found.found] == [0]
    found.close()


def test_other_names_and_ranks_are_other_runs(tmp_path):
    names = itertools.product(("a", "b-rank0"), (0, 1))
    runs = [DurableRun([tmp_path], name=name, rank=rank, direct="optional") for name, rank in names]
    assert len({run.folder for run in runs}) == 4
    for run in runs:
        assert run.folder.stat().st_mode & 0o777 == 0o700
        run.close()


def test_the_transfers_of_a_killed_process_have_ended_when_its_run_is_taken(tmp_path):
    """What it had in flight would land on what the next process writes."""
    mine = HostRegion(4096).view(torch.uint8, 0, 4096).fill_(0x11).numpy().data
    for _ in range(2):
        process, place = Process(write_without_end, tmp_path), DurableDirectory(tmp_path, "small", 0)
        process.kill()
        swap = place.open_swap("optional")
        places = range(0, 2 * BUSY[0].base.size_bytes, 1 << 19)  # in both extents
        for offset in places:
            os.pwrite(swap.fd, mine, offset)
        process.end()
        content = swap.path.read_bytes()
        assert {content[offset : offset + 4096] for offset in places} == {bytes(mine)}
        swap.close()
        for path in place.path.iterdir():
            path.unlink()


@pytest.mark.parametrize("taken", [opened, lambda path: locked(find_runs([path])[0])], ids=["opened", "exported"])
def test_a_process_that_has_a_run_open_itself_is_not_told_to_end(taken, tmp_path):
    held = opened(tmp_path)
    with pytest.raises(StateError, match=r", this one, is: close\(\) the .* first\. Another run"):
        taken(tmp_path)
    held.close()
    opened(tmp_path).close()


def test_a_run_belongs_to_whoever_can_still_write_to_it(tmp_path, monkeypatch):
    """The ring has the swap file when its process has it no more, and with it the lock."""
    monkeypatch.setattr(owner, "_DYING_SECONDS", 2.0)
    process = Process(close_all_files, tmp_path)
    try:
        if process.said == "no files":
            pytest.skip("no ring, or no file registered with it")
        with pytest.raises(StateError, match=f"process {process.pid} on "):
            opened(tmp_path)
    finally:
        process.kill()
    opened(tmp_path).close()
    process.end()


@pytest.mark.parametrize("closed", ["here", "in a process that goes on"])
@pytest.mark.parametrize("taken", [opened, lambda path: locked(find_runs([path])[0])], ids=["opened", "exported"])
def test_a_run_that_was_closed_is_taken_when_its_ring_is_gone(tmp_path, closed, taken):
    """On a busy machine the kernel takes a closed ring apart a second later. A socket keeps files as well."""
    ours, theirs = socket.socketpair()

    def close_run(path, say):
        small = committed([path], 0, engine="auto")
        socket.send_fds(theirs, [b"."], small.run.space.fds)
        small.tier.close()
        small.run.close()
        say("closed")

    def go_on(path, say):
        ours.close()
        close_run(path, say)
        signal.pause()

    process = Process(go_on, tmp_path) if closed != "here" else close_run(tmp_path, str)
    letting_go = threading.Timer(1.5, ours.close)
    letting_go.start()
    taken(tmp_path).close()
    letting_go.join()
    theirs.close()
    if process:
        process.kill()
        process.end()


def test_a_forked_child_does_not_keep_a_run(tmp_path):
    process = Process(die_before_a_child, tmp_path)
    process.end()
    try:
        opened(tmp_path).close()
    finally:
        os.kill(int(process.said), signal.SIGKILL)


def test_a_run_that_was_removed_meanwhile_is_made_anew(tmp_path, monkeypatch):
    """Its lock is of a file that nobody finds any more."""
    removed = []

    def lock(fd, folder, name, **more):
        if not removed:
            removed.append(folder)
            (folder / "swap").unlink()
            folder.rmdir()
        return owner_lock(fd, folder, name, **more)

    owner_lock = owner.lock
    monkeypatch.setattr(owner, "lock", lock)
    place = DurableDirectory(tmp_path, "run", 0)
    swap = place.open_swap("optional")
    assert os.path.samestat(os.stat(place.path / "swap"), os.fstat(swap.fd))
    swap.close()


def test_no_run_takes_it_for_a_leftover_and_it_clears_those_of_others_away(tmp_path):
    """Today's rule, and that of every version before: a name of this form, whatever is in it."""
    for clear in (lambda: opened(tmp_path).close(), lambda: remove_leftovers(tmp_path)):
        (tmp_path / f"{OTHER_PREFIX}1-0").mkdir()
        clear()
        assert [path.name for path in tmp_path.iterdir()] == ["nvme-durable-small-rank0"]


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b", "x" * 65, "a\n"])
def test_names_that_are_none(tmp_path, name):
    with pytest.raises(ValueError, match="cannot name a run"):
        DurableRun([tmp_path], name=name, rank=0, direct="optional")
    assert not list(tmp_path.iterdir())


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(SwapIOError, match="ENOENT"):
        opened(tmp_path / "missing")


def test_names_are_found_again(tmp_path):
    assert directory.parse_directory(directory_of(tmp_path, "my-run-rank1", 12)) == ("my-run-rank1", 12)
    assert directory.parse_directory(tmp_path / "nvme-offload-1-0") is None


def left_behind(*paths, name="small", step=0):
    """The folder of a run that has committed, and nobody is in."""
    run = committed(paths, step, name=name)
    run.close()
    return run.run.folder


def test_other_paths_are_refused(tmp_path):
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.mkdir()
    left_behind(*paths[:2])
    for others in (paths[1::-1], paths[:1], [paths[0], paths[2]]):
        with pytest.raises(ResumeError, match="give nvme_path the folders that it had, in the same order"):
            DurableRun(others, name="small", rank=0, direct="optional")
    run = DurableRun(paths[:2], name="small", rank=0, direct="optional")
    assert (run.uuid, len(run.found)) == (UUID, 1)
    run.close()


def test_another_runs_uuid_is_refused(tmp_path):
    left_behind(tmp_path)
    run = opened(tmp_path)
    with pytest.raises(ResumeError, match="other ranks have another under this name"):
        run.identify(Encoded.of({}), "another", {})
    run.close()


@pytest.mark.parametrize(("content", "said"), [("{", "cannot be read"), ('{"format": 99}', "format 99")])
def test_a_damaged_description_is_said(tmp_path, content, said):
    (left_behind(tmp_path) / "run.json").write_text(content)
    with pytest.raises(ResumeError, match=said):
        opened(tmp_path)
    with pytest.raises(ResumeError):  # nobody is left in it
        opened(tmp_path)


@contextmanager
def entered(folder, *, goes_on=True):
    run = SmallRun([folder])
    if goes_on:
        run.adopt(run.run.found[0])
    yield run
    run.close()


@pytest.fixture
def folder(in_memory):
    """With a run of two commits that nobody is in."""
    committed([in_memory], 0, 1).close()
    return in_memory


def test_a_prepared_one_that_somebody_put_beside_a_published_one_never_takes_its_place(folder):
    with entered(folder) as run:
        run.snapshot("kept")
        run.commit("2", 2)
        run.run.prepare_snapshot("other")
        where = run.run.folder
    (where / "prepared.other").rename(where / "prepared.kept")
    with entered(folder) as run:
        run.run.agree_on_snapshots({"kept"})
        assert name_of(run.run.snapshots["kept"]) == "1"


@pytest.mark.parametrize("call", ["snapshot", "remove_snapshot"])
def test_killed_at_any_change_to_the_drive_it_is_there_or_it_is_not(folder, call):
    for change in range(1, 40):

        def life(change=change):
            with entered(folder) as run:
                if call == "remove_snapshot":
                    run.snapshot("kept")
                dying = DiesAtAChange(0, change, after=False)  # what is there after one is there before the next
                dying.counts = True
                getattr(run, call)("kept")
                dying.counts = False

        status = os.waitpid(fork(life), 0)[1]
        assert status in (0, signal.SIGKILL)
        with entered(folder) as run:
            run.run.agree_on_snapshots(set(run.run.snapshots))
            assert run.run.snapshots.all == run.run.snapshots
            assert not run.run.snapshots.unreadable
            if run.run.snapshots:
                run.adopt(run.run.snapshots["kept"])
                run.remove_snapshot("kept")
            assert name_of(run.run.committed[0]) == "1"
        if not status:
            break
    assert 3 < change < 39


@pytest.mark.parametrize("place", [3, 40, 300, -1])
def test_a_flipped_bit_takes_no_snapshot_away_without_a_word_and_its_space_is_not_used_again(folder, place):
    with entered(folder) as run:
        run.snapshot("best")
        stripes = [w.extent.stripes for slot in run.run.extents.slots for w in slot.current]
        run.commit("2", 2)
        run.snapshot("other")
        run.commit("3", 3)
        where = run.run.folder
        truth = run.truth
    swap = (where / "swap").read_bytes()
    flip_bit(where / "snapshot.best", place)
    sizes = []
    for life in range(3):
        with entered(folder) as run:
            assert list(run.run.snapshots) == ["other"]
            assert list(run.run.snapshots.unreadable) == ["best"]
            for step in range(4, 8):
                run.commit(f"{life}.{step}", step)
            if life == 1:
                run.run.prepare_snapshot("best")  # the name of what nobody can read
                run.run.agree_on_snapshots(set())  # another rank could not
        assert find_runs([folder])[0].ranks[0].unreadable == ("best",)
        content = (where / "swap").read_bytes()
        for _, offset, size in (stripe for of_slot in stripes for stripe in of_slot):
            assert content[offset : offset + size] == swap[offset : offset + size]
        sizes.append(len(content))
    assert sizes[2] == sizes[1], "more is taken in each life"
    with entered(folder) as run:
        run.adopt(run.run.snapshots["other"])
        assert run.read() == truth["2"]
        run.run.delete_snapshot("best")
        for step in range(3, 6):
            run.commit(f"again {step}", step)
        run.snapshot("best")
    assert len((where / "swap").read_bytes()) == sizes[2]
    assert not list(where.glob("unreadable.*"))


# Folders that others may write in: what somebody else put there is neither used nor changed.
PRECIOUS = b"precious " * 2000


@pytest.fixture
def precious(tmp_path):
    path = tmp_path / "home" / "thesis.txt"
    path.parent.mkdir()
    path.write_bytes(PRECIOUS)
    return path


def test_a_full_disk_is_named_where_the_owner_is_noted(drive, monkeypatch):
    monkeypatch.setattr(os, "fdopen", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    with pytest.raises(SwapIOError, match=r"/owner failed: ENOSPC.* free space"):
        opened(drive)


@pytest.mark.parametrize(
    ("name", "kind"),
    each_value_once(
        ["owner", "manifest.0", "manifest.1", "manifest.7", "swap", "run.json", "snapshot.a"],
        ["link", "link to nothing", "pipe"],
    ),
)
def test_what_is_no_file_is_neither_opened_nor_followed(drive, precious, name, kind):
    folder = left_behind(drive)
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(precious if kind == "link" else precious.with_name("new"))
    with pytest.raises(ForeignFolderError, match=r"is a link|is no file") as caught:
        opened(drive).close()
    assert str(folder / name) in str(caught.value)
    assert offload_runs(drive)[0] == 0
    assert precious.read_bytes() == PRECIOUS
    assert os.listdir(precious.parent) == [precious.name]


def a_link(folder):
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


STRANGE = [
    (lambda folder: folder.chmod(0o770), "mode 0770: others may write"),
    (lambda folder: folder.chmod(0o707), "mode 0707: others may write"),
    pytest.param(
        lambda folder: os.chown(folder, 4321, -1),
        "belongs to user 4321, and this process is of 0",
        marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away"),
    ),
    (a_link, "is a link, and no folder"),
]


@pytest.mark.parametrize(("change", "words"), STRANGE)
def test_a_folder_that_is_not_this_users_alone_is_refused_listed_and_never_removed(drive, change, words):
    folder = left_behind(drive)
    left_behind(drive, name="other", step=3)
    change(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ForeignFolderError, match=words) as caught:
        opened(drive).close()
    assert str(folder) in str(caught.value)
    assert "choose another nvme_path" in str(caught.value)
    code, listed = offload_runs(drive)
    assert code == 0
    assert words in " ".join(listed.split())
    assert "other three slots 3" in " ".join(listed.split())
    code, said = offload_runs("remove", "small", drive)
    assert code == 1
    assert words in " ".join(said.split())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o277, 0o777])
def test_files_have_mode_0600_whatever_the_umask(drive, mask):
    before = os.umask(mask)
    try:
        folder = left_behind(drive)
        SmallRun([drive]).close()
    finally:
        os.umask(before)
    modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in [folder, *folder.iterdir()]}
    assert modes.pop(folder.name) == "0o700"
    assert set(modes.values()) == {"0o600"}
    assert {"owner", "run.json", "swap", "manifest.0"} < set(modes)
