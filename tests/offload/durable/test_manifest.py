"""A manifest is whole or it is none, and the one before it is there until it is; commits in a thread of their own."""

import errno
import json
import os
import shutil
import struct
import threading
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from nvme_offload import ClosedError, OutOfSpaceError, ResumeError, StateError, SwapIOError
from nvme_offload.offload import sync
from nvme_offload.offload.durable import manifest as manifests
from nvme_offload.offload.durable.committer import Committer
from nvme_offload.offload.durable.manifest import NAMES, Manifest, ManifestFiles
from nvme_offload.offload.durable.run import DurableRun
from tests.support.durable_run import HEADER, committed, offload_runs
from tests.support.durable_run import sealed as with_digest
from tests.support.interrupts import Struck, every, raise_struck
from tests.support.training import run_child


def manifest(sequence, *, step=0, num_slots=3, blob=b"blob"):
    table = np.arange(num_slots * 6, dtype=np.int64).reshape(num_slots, 6) * sequence
    return Manifest(step, sequence, 1 << 61, "identity", {"slots": table, "log": np.zeros((0, 4), np.int64)}, blob)


def opened(folder):
    return ManifestFiles(folder, direct=False)


def found(folder):
    files = opened(folder)
    sequences = [each.sequence for each in files.newest_first()]
    files.close()
    return sequences


def test_all_of_it_comes_back(tmp_path):
    files, written = opened(tmp_path), manifest(7, step=1 << 40, blob=os.urandom(10_000))
    files.write(written)
    files.close()
    (read,) = opened(tmp_path).newest_first()
    assert (read.step, read.sequence, read.incarnation) == (1 << 40, 7, 1 << 61)
    assert (read.identity, read.blob) == ("identity", written.blob)
    assert read.tables.keys() == written.tables.keys()
    assert all(np.array_equal(read.tables[name], table) for name, table in written.tables.items())
    assert read.tables["log"].shape == (0, 4)


def test_they_take_turns_and_the_sequence_says_which_is_newer(tmp_path):
    files = opened(tmp_path)
    for sequence, step in ((1, 5), (2, 6), (3, 1), (9, 2)):
        files.write(manifest(sequence, step=step))
        assert found(tmp_path) == [each.sequence for each in files.newest_first()]
    assert [each.step for each in files.newest_first()] == [2, 1]
    with pytest.raises(ValueError, match="manifest 9 is not newer than 9"):
        files.write(manifest(9))


def test_after_one_was_destroyed_the_other_is_spared(tmp_path):
    """Whatever the parity of the number."""
    files = opened(tmp_path)
    for sequence in (1, 2):
        files.write(manifest(sequence))
    files.destroy(files.newest_first()[0])
    assert found(tmp_path) == [1]
    files.write(manifest(3))
    assert found(tmp_path) == [3, 1]
    for each in files.newest_first():
        files.destroy(each)
    assert found(tmp_path) == []


def test_it_is_none_with_any_bit_flipped(tmp_path):
    files = opened(tmp_path)
    files.write(manifest(1))
    files.write(manifest(2))
    path, size_bytes = tmp_path / NAMES[1], len(manifest(2).encode())
    whole = path.read_bytes()
    for bit in range(0, 8 * size_bytes, 7):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        assert Manifest.decode(bytes(flipped)) is None, bit
    flipped = bytearray(whole)
    flipped[size_bytes] ^= 1  # behind it
    assert Manifest.decode(bytes(flipped)).sequence == 2


def test_files_cut_short_are_none():
    whole = manifest(1).encode()
    assert all(Manifest.decode(whole[:size]) is None for size in range(len(whole)))


def test_one_that_is_there_in_spite_of_an_error_is_taken_away(tmp_path, monkeypatch):
    """The run goes on from the one before: what it writes next is what this one refers to."""
    files = opened(tmp_path)
    files.write(manifest(1))
    real, failures = os.pwrite, [OSError(errno.EIO, "it is there all the same")]

    def written(fd, data, offset):
        size = real(fd, data, offset)
        if failures:
            raise failures.pop()
        return size

    monkeypatch.setattr(os, "pwrite", written)
    with pytest.raises(SwapIOError):
        files.write(manifest(2))
    assert found(tmp_path) == [1]


def test_a_short_write_is_finished(tmp_path, monkeypatch):
    files, real = opened(tmp_path), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:5000], offset))
    files.write(manifest(1, blob=os.urandom(30_000)))
    assert found(tmp_path) == [1]


def test_no_room_for_the_first_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(errno.EDQUOT, "full")))
    with pytest.raises(OutOfSpaceError, match=rf"{NAMES[0]} failed: EDQUOT.* quota"):
        opened(tmp_path)


def test_the_door_to_the_drive_is_used(tmp_path, monkeypatch):
    """A place that grows is synced before it is written: its length belongs to what lasts."""
    synced = []
    monkeypatch.setattr(manifests, "sync_file", lambda fd: synced.append(os.fstat(fd).st_size) or sync.sync_file(fd))
    files = opened(tmp_path)
    synced.clear()
    files.write(manifest(1))
    assert not synced
    files.write(manifest(2, blob=bytes(2_000_000)))
    assert len(synced) == 1


@pytest.fixture
def committer():
    committer = Committer()
    yield committer
    committer.close()


def test_it_goes_on_while_nobody_waits(committer):
    go, done = threading.Event(), []
    committer.begin(lambda: (go.wait(60), done.append(threading.current_thread().name)))
    assert committer.is_busy
    with pytest.raises(StateError, match="no commit under way"):
        committer.begin(lambda: None)
    go.set()
    committer.wait()
    assert (done, committer.is_busy, committer.num_committed) == (["committer"], False, 1)
    assert committer.take_failure() is None
    assert committer.waited_seconds > 0
    assert committer.commit_seconds > 0


def test_a_failure_is_told_once_and_the_next_commit_is_made(committer):
    committer.begin(Mock(side_effect=OSError("no")))
    committer.wait()
    assert str(committer.take_failure()) == "no"
    assert committer.take_failure() is None
    committer.begin(lambda: None)
    committer.wait()
    assert (committer.num_committed, committer.num_failed) == (1, 1)


def test_closing_waits_and_ends_the_thread(committer):
    before, done = threading.active_count(), []
    committer.begin(lambda: done.append(1))
    committer.close()
    committer.close()
    assert done == [1]
    assert threading.active_count() <= before + 1  # it is about to end
    with pytest.raises(ClosedError):
        committer.begin(lambda: None)


def test_nothing_is_started_without_a_commit():
    before = threading.active_count()
    Committer().close()
    assert threading.active_count() == before


UNDER_WAY_AT_EXIT = """
import os, sys
from nvme_offload.aio_native.engine import EngineOptions, Op
from nvme_offload.aio_native.faults import FaultSpec
from nvme_offload.aio_native.registry import open_engine
from nvme_offload.offload.durable.committer import Committer
from tests.support.engine_tools import BLOCK, Memory

late = FaultSpec(seed=1, delay=1.0, max_delay_us=2_000_000)
options = EngineOptions(queue_depth=4, block_size=BLOCK, rings=1, alignment=4096, max_operations=4, faults=late)
engine, memory = open_engine("auto", options).engine, Memory(BLOCK)
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
write = engine.submit(Op.WRITE, [memory.segment(fd)])
committer = Committer()
committer.begin(lambda: (write.wait(), print("committed", flush=True)))
print("left", committer.is_busy, flush=True)
"""


def test_a_commit_that_waits_in_native_code_ends_before_the_interpreter(tmp_path):
    """Else the thread is unwound there, and C++ aborts the process: terminate called without an active exception."""
    assert run_child(UNDER_WAY_AT_EXIT, tmp_path / "file", fresh=True).split() == ["left", "True", "committed"]


def test_what_begins_a_commit_or_waits_for_it_can_be_interrupted():
    for call in ("begin", "wait"):
        for interrupt in every(1, raise_struck):
            committer, done = Committer(), []

            def begin(committer=committer, done=done):
                committer.begin(lambda: done.append(1))

            if call == "wait":
                begin()
            with suppress(Struck, RuntimeError), interrupt:  # RuntimeError: what Thread.start makes of it
                (begin if call == "begin" else committer.wait)()
            committer.wait()
            committer.close()
            assert len(done) <= 1, interrupt.place
            assert done or call == "begin", interrupt.place
            assert not committer.is_busy


# Manifests that are whole and name what no run writes: refused before anything is allocated.
FIRST_PATH, FIRST_OFFSET, FIRST_SIZE = 3, 4, 5  # columns of a row of bases


def sealed(header, body):
    """A manifest of this header and body, with the digest that belongs to it."""
    return with_digest(SimpleNamespace(incarnation=1, **header), body)


def with_description(content, **changes):
    """The same manifest with other words in its description; None leaves one out."""
    whole = Manifest.decode(content)
    body = whole.encode()[HEADER.size :]
    (size,) = struct.unpack_from("<Q", body)
    about = json.loads(body[8 : 8 + size]) | changes
    described = json.dumps({name: value for name, value in about.items() if value is not None}).encode()
    return with_digest(whole, (struct.pack("<Q", len(described)) + described) + body[8 + size :])


def with_tables(change):
    """Return a function that changes the tables of a manifest."""

    def changed(content):
        whole = Manifest.decode(content)
        change(whole.tables)
        return whole.encode()

    return changed


def with_row(column, value):
    return with_tables(lambda tables: tables["slots"].__setitem__((0, column), value))


def with_entry(slot=0, content_bytes=64):
    def add(tables):
        tables["log"] = np.array([[slot, content_bytes, *tables["slots"][0]]], np.int64)

    return with_tables(add)


MANIFESTS = {
    "an offset 8 GiB on": (with_row(FIRST_OFFSET, 8 << 30), "row 0 of its table slots offset 8589934592"),
    "an offset 60 GiB on": (with_row(FIRST_OFFSET, 60 << 30), "beyond the .* of the swap file on path 0"),
    "an offset before the file": (with_row(FIRST_OFFSET, -4096), "offset -4096"),
    "an offset that is not aligned": (with_row(FIRST_OFFSET, 512), "no multiples of 4096"),
    "an offset near the end of int64": (with_row(FIRST_OFFSET, 2**63 - 4096), "beyond the"),
    "a size of 1 TiB": (with_row(FIRST_SIZE, 1 << 40), "size 1099511627776, beyond"),
    "a size below zero": (with_row(FIRST_SIZE, -4096), "size -4096"),
    "a path too many": (with_row(FIRST_PATH, 1), "path 1, and there are 1"),
    "a path below zero": (with_row(FIRST_PATH, -1), "path -1"),
    "a write of the future": (with_row(0, 1 << 40), "sequence 1099511627776"),
    "one place for two slots": (with_tables(lambda tables: tables["slots"].__setitem__(1, tables["slots"][0])),
     "row 0 of slots and row 1 of slots at the same bytes"),
    "an entry of no slot": (with_entry(slot=99), "row 0 of its table log slot 99, which has no base"),
    "an entry of more than it has": (with_entry(content_bytes=1 << 50), "bytes of content in"),
    "too few columns": (with_tables(lambda tables: tables.update(slots=tables["slots"][:, :-3])),
     "has 6 columns in its table slots, and one of 9 belongs to 1 paths"),
    "no slots": (with_tables(lambda tables: tables.pop("slots")), "has no table slots"),
    "a table of 2^62 rows": (lambda c: with_description(c, tables={"slots": [1 << 62, 9]}), r"its tables\.slots is"),
    "a table below zero": (lambda c: with_description(c, tables={"slots": [-1, 9]}), r"its tables\.slots is"),
    "a table of one dimension": (lambda c: with_description(c, tables={"slots": [9]}), r"its tables\.slots is"),
    "a table of words": (lambda c: with_description(c, tables={"slots": ["a", "b"]}), r"its tables\.slots is"),
    "a list of tables": (lambda c: with_description(c, tables=[1]), "its tables is"),
    "no identity": (lambda c: with_description(c, identity=None), "its identity is"),
    "an identity elsewhere": (lambda c: with_description(c, identity="../../x"), "its identity is '../../x'"),
    "a blob of 2^60 bytes": (lambda c: with_description(c, blob=1 << 60), "its blob is '1152921504606846976'"),
    "a blob below zero": (lambda c: with_description(c, blob=-1), "its blob is '-1'"),
    "a commit of words": (lambda c: with_description(c, commit="the last one"), "its commit is 'the last one'"),
    "a number before it": (lambda c: with_description(c, previous=7), "its previous is '7'"),
    "no identity of the commit": (lambda c: with_description(c, commit=None), "its commit is 'None'"),
    "no identity of the one before": (lambda c: with_description(c, previous=None), "its previous is 'None'"),
    "a number for a truth": (lambda c: with_description(c, first=7), "its first is '7'"),
    "a description of 2^60 bytes": (lambda c: with_digest(Manifest.decode(c), struct.pack("<Q", 1 << 60)),
     "its length of its description"),
    "a description that is no JSON": (lambda c: with_digest(Manifest.decode(c), struct.pack("<Q", 1) + b"{"),
     "its description is no JSON"),
    "a description without end": (lambda c: with_digest(Manifest.decode(c),
     struct.pack("<Q", 200_000) + b"[" * 200_000), "its description is no JSON"),
    "a list for a description": (lambda c: with_digest(Manifest.decode(c), struct.pack("<Q", 2) + b"[]"),
     r"its description is '\[\]'"),
    "no body": (lambda c: with_digest(Manifest.decode(c), b""), "its length of its description"),
    "the last sequence of all": (lambda c: sealed({"sequence": 2**64 - 1, "step": 0},
     Manifest.decode(c).encode()[HEADER.size :]), "its sequence is"),
    "a step below zero": (lambda c: sealed({"sequence": 5, "step": -1}, Manifest.decode(c).encode()[HEADER.size :]),
     "its step is '-1'"),
}  # fmt: skip
ABOUT = {
    "no object": ([], "run.json"),
    "no uuid": ({"uuid": 7}, "7 for uuid"),
    "a path below zero": ({"path": -1}, "-1 for path"),
    "a path of words": ({"path": "../x"}, '"../x" for path'),
    "no number of paths": ({"num_paths": None}, "null for num_paths"),
    "10^12 paths": ({"num_paths": 10**12}, "1000000000000 for num_paths"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with two commits and a snapshot, and another one beside it; nobody is in them."""
    path = tmp_path_factory.mktemp("runs")
    committed([path], 0, 1, snapshot="kept").close()
    committed([path], 0, 1, name="other").close()
    return path


@pytest.fixture
def folder(runs, tmp_path):
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    return tmp_path / "nvme-durable-small-rank0"


def refused(folder, words):
    """The run is refused in these words, without a byte more of the drive; it is marked, and the other one listed."""

    def content():
        files = [path for path in folder.iterdir() if path.name != "owner"]
        return {path.name: (path.stat().st_blocks, path.read_bytes()) for path in files}

    before = content()
    with pytest.raises(ResumeError, match=words) as caught:
        DurableRun([folder.parent], name="small", rank=0, direct="optional").space.close()
    assert str(folder) in str(caught.value)
    assert content() == before
    code, output = offload_runs(folder.parent)
    listed = " ".join(output.split())
    assert code == 0, output
    assert "other three slots 1" in listed
    assert "rank 0: " in listed


@pytest.mark.parametrize(("change", "words"), MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest(folder, change, words):
    for name in ("manifest.0", "manifest.1"):
        path = folder / name
        path.write_bytes(change(path.read_bytes()))
    refused(folder, words)


@pytest.mark.parametrize(("change", "words"), ABOUT.values(), ids=ABOUT)
def test_what_a_folder_says_of_itself(folder, change, words):
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change if isinstance(change, dict) else change))
    refused(folder, words)


def test_a_snapshot(folder):
    path = folder / "snapshot.kept"
    path.write_bytes(with_row(FIRST_OFFSET, 8 << 30)(path.read_bytes()))
    with pytest.raises(ResumeError, match=r"snapshot\.kept has in row 0 of its table slots offset 8589934592"):
        DurableRun([folder.parent], name="small", rank=0, direct="optional").space.close()


def test_a_swap_file_that_was_cut_off(folder):
    os.truncate(folder / "swap", 4096)
    refused(folder, "beyond the 4096 bytes of the swap file")
