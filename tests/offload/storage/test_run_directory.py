"""Runs that share a path: the living are left alone, the dead are cleared away, however they died."""

import fcntl
import os
import signal
from functools import partial
from pathlib import Path

from nvme_offload.offload.storage import run_directory
from nvme_offload.offload.storage.run_directory import PREFIX, RunDirectory, remove_leftovers
from tests.support.forked import FORKED
from tests.support.threads import at_once


def hold(path, channel):
    directory = RunDirectory(path)
    (directory.path / "swap").write_bytes(bytes(1 << 20))
    channel.send(directory.path)
    channel.recv()


def hold_with_a_child(path, channel):
    directory = RunDirectory(path)
    channel.send(directory.path)
    if os.fork():
        signal.pause()
    directory.remove()
    channel.send(directory.path.exists())
    channel.recv()
    os._exit(0)


class Run:
    """A process that holds a run directory until it is told to end, or killed."""

    def __init__(self, path, hold=hold):
        self.channel, theirs = FORKED.Pipe()
        self.process = FORKED.Process(target=hold, args=(path, theirs))
        self.process.start()
        self.path = self.channel.recv()

    def end(self):
        self.channel.send(None)
        self.process.join(60)

    def kill(self):
        self.process.kill()
        self.process.join()


def test_a_directory_of_its_own_for_each(tmp_path):
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    assert first.path != second.path
    for directory in (first, second):
        assert directory.path.parent == tmp_path
        assert directory.path.stat().st_mode & 0o777 == 0o700
        assert (directory.path / "lock").stat().st_mode & 0o777 == 0o600
    first.remove()
    first.remove()
    assert not first.path.exists()
    assert second.path.exists()
    second.remove()


def test_threads_that_begin_at_once_do_not_take_each_other_for_dead(tmp_path):
    directories = at_once([partial(RunDirectory, tmp_path)] * 16)
    assert len({directory.path for directory in directories}) == 16
    assert all(directory.path.exists() for directory in directories)
    for directory in directories:
        directory.remove()


def test_the_killed_is_removed_and_the_living_stays(tmp_path):
    killed, living = Run(tmp_path), Run(tmp_path)
    killed.kill()
    assert killed.path.exists()
    mine = RunDirectory(tmp_path)
    assert not killed.path.exists()
    assert living.path.exists()
    living.end()
    assert not living.path.exists()  # a run that ends cleans up after itself
    mine.remove()
    assert list(tmp_path.iterdir()) == []


def test_remove_leftovers_says_how_much_it_freed(tmp_path):
    Run(tmp_path).kill()
    assert remove_leftovers(tmp_path) >= 1 << 20
    assert remove_leftovers(tmp_path) == 0


def test_a_directory_that_was_removed_is_nobodys_when_it_is_put_back(tmp_path):
    """As from a backup of the drive, while whoever had it still lives."""
    directory = RunDirectory(tmp_path)
    directory.remove()
    directory.path.mkdir()
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_died_before_its_lock_existed_is_removed_without_a_word(tmp_path, caplog):
    """It looks like the directory of a rank that starts, and frees nothing."""
    (tmp_path / f"{PREFIX}1-0").mkdir()
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [] == caplog.records


def test_a_forked_child_neither_removes_the_directory_nor_keeps_it_alive(tmp_path):
    run = Run(tmp_path, hold_with_a_child)
    assert run.channel.recv() is True
    run.kill()
    remove_leftovers(tmp_path)  # the forked child is alive, its parent is not
    assert not run.path.exists()
    run.channel.send(None)


def test_what_only_looks_like_a_run_is_left_alone(tmp_path):
    """A folder of the user's that begins like ours, and a run directory into which somebody put something."""
    clone = tmp_path / f"{PREFIX}main" / "checkpoints"
    clone.mkdir(parents=True)
    (clone / "model.pt").write_bytes(b"weights")
    dead = tmp_path / f"{PREFIX}1-0"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "notes.txt").write_text("mine")
    linked = tmp_path / f"{PREFIX}2-0"
    linked.symlink_to(clone)
    RunDirectory(tmp_path).remove()
    assert (clone / "model.pt").read_bytes() == b"weights"
    assert (dead / "notes.txt").read_text() == "mine"
    assert linked.is_symlink()


def test_locks_that_others_hold_on_the_folder_keep_nobody_waiting(tmp_path):
    """As `flock FOLDER python train.py` does, and any reader can."""
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        run = Run(tmp_path)
        assert run.path.exists()
        run.end()
    finally:
        os.close(folder)


def make_and_remove(path, begin):
    begin.wait()
    for _ in range(400):
        directory = RunDirectory(path)
        assert (directory.path / "lock").exists()
        remove_leftovers(path)
        assert (directory.path / "lock").exists()
        directory.remove()


def look_for_the_dead(path, begin):
    begin.wait()
    for _ in range(400):
        remove_leftovers(path)


def test_directories_that_are_taken_away_before_they_are_locked_are_made_again(tmp_path):
    """Two processes make and remove directories, a third looks for dead runs all the time."""
    begin = FORKED.Barrier(3)
    roles = (make_and_remove, make_and_remove, look_for_the_dead)
    children = [FORKED.Process(target=role, args=(tmp_path, begin)) for role in roles]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_died_before_its_directory_had_a_name_is_removed(tmp_path):
    for number, lock in ((1, True), (2, False)):
        hidden = tmp_path / f".{PREFIX}{number}-0"
        hidden.mkdir()
        if lock:
            (hidden / "lock").touch()
    (tmp_path / f".{PREFIX}notes").mkdir()
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f".{PREFIX}notes"]


def test_names_that_are_taken_are_passed_over(tmp_path):
    first = RunDirectory(tmp_path)
    number = int(first.path.name.rsplit("-", 1)[1])
    for taken in (f"{PREFIX}{os.getpid()}-{number + 1}", f".{PREFIX}{os.getpid()}-{number + 2}"):
        (tmp_path / taken).mkdir()
        (tmp_path / taken / "mine").touch()
    second = RunDirectory(tmp_path)
    assert second.path.name == f"{PREFIX}{os.getpid()}-{number + 3}"
    assert len(list(tmp_path.glob("*/mine"))) == 2
    first.remove()
    second.remove()


def test_the_working_folder_may_change(tmp_path, monkeypatch):
    (tmp_path / "swap").mkdir()
    (tmp_path / "other" / "swap").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory(Path("swap"))
    assert directory.path.parent == tmp_path / "swap"
    monkeypatch.chdir("other")
    directory.remove()
    assert not list((tmp_path / "swap").iterdir())


def test_living_directories_of_this_process_are_not_looked_into_again(tmp_path, monkeypatch):
    """Otherwise a thousand swappers would take a million looks."""
    looked = []
    is_ours = run_directory._is_ours
    monkeypatch.setattr(run_directory, "_is_ours", lambda path: looked.append(path) or is_ours(path))
    directories = [RunDirectory(tmp_path) for _ in range(20)]
    assert not looked
    assert len({directory.path for directory in directories}) == 20
    for directory in directories:
        directory.remove()
