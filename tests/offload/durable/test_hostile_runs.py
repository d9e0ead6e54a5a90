"""Folders of durable runs whose files are whole and name what no run writes: refused before anything is allocated."""

import json
import os
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from nvme_offload import ResumeError
from nvme_offload.offload.durable.manifest import Manifest
from nvme_offload.offload.durable.run import DurableRun
from nvme_offload.perf.cli import app
from tests.support.durable_run import HEADER, SmallRun
from tests.support.durable_run import sealed as with_digest

FIRST_PATH, FIRST_OFFSET, FIRST_SIZE = 3, 4, 5  # columns of a row of bases


def sealed(header, body):
    """A manifest of this header and body, with the digest that belongs to it."""
    return with_digest(b"nvmerun2", SimpleNamespace(incarnation=1, **header), body)


def with_description(content, **changes):
    """The same manifest with other words in its description; None leaves one out."""
    whole = Manifest.decode(content)
    body = whole.encode()[HEADER.size :]
    (size,) = struct.unpack_from("<Q", body)
    about = json.loads(body[8 : 8 + size]) | changes
    described = json.dumps({name: value for name, value in about.items() if value is not None}).encode()
    head = struct.pack("<Q", len(described)) + described
    return with_digest(b"nvmerun2", whole, head + body[8 + size :])


def with_tables(change):
    """How to change the tables of a manifest."""

    def changed(content):
        whole = Manifest.decode(content)
        change(whole.tables)
        return whole.encode()

    return changed


def with_row(column, value):
    return with_tables(lambda tables: tables["slots"].__setitem__((0, column), value))


def with_entry(slot=0, content_bytes=64):
    return with_tables(
        lambda tables: tables.update(log=np.array([[slot, content_bytes, *tables["slots"][0]]], np.int64))
    )


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
    "one place for two slots": (
        with_tables(lambda tables: tables["slots"].__setitem__(1, tables["slots"][0])),
        "row 0 of slots and row 1 of slots at the same bytes",
    ),
    "an entry of no slot": (with_entry(slot=99), "row 0 of its table log slot 99, which has no base"),
    "an entry of more than it has": (with_entry(content_bytes=1 << 50), "bytes of content in"),
    "too few columns": (
        with_tables(lambda tables: tables.update(slots=tables["slots"][:, :-3])),
        "has 6 columns in its table slots, and one of 9 belongs to 1 paths",
    ),
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
    "a number for a truth": (lambda c: with_description(c, first=7), "its first is '7'"),
    "a description of 2^60 bytes": (
        lambda c: with_digest(b"nvmerun2", Manifest.decode(c), struct.pack("<Q", 1 << 60)),
        "its length of its description",
    ),
    "a description that is no JSON": (
        lambda c: with_digest(b"nvmerun2", Manifest.decode(c), struct.pack("<Q", 1) + b"{"),
        "its description is no JSON",
    ),
    "a description without end": (
        lambda c: with_digest(b"nvmerun2", Manifest.decode(c), struct.pack("<Q", 200_000) + b"[" * 200_000),
        "its description is no JSON",
    ),
    "a list for a description": (
        lambda c: with_digest(b"nvmerun2", Manifest.decode(c), struct.pack("<Q", 2) + b"[]"),
        r"its description is '\[\]'",
    ),
    "no body": (lambda c: with_digest(b"nvmerun2", Manifest.decode(c), b""), "its length of its description"),
    "the last sequence of all": (
        lambda c: sealed({"sequence": 2**64 - 1, "step": 0}, Manifest.decode(c).encode()[HEADER.size :]),
        "its sequence is",
    ),
    "a step below zero": (
        lambda c: sealed({"sequence": 5, "step": -1}, Manifest.decode(c).encode()[HEADER.size :]),
        "its step is '-1'",
    ),
}
ABOUT = {
    "no object": ([], "run.json"),
    "no uuid": ({"uuid": 7}, "7 for uuid"),
    "a path below zero": ({"path": -1}, "-1 for path"),
    "a path of words": ({"path": "../x"}, '"../x" for path'),
    "no number of paths": ({"num_paths": None}, "null for num_paths"),
    "10^12 paths": ({"num_paths": 10**12}, "1000000000000 for num_paths"),
}


@pytest.fixture
def folder(tmp_path):
    """A run with two commits and a snapshot, and another one beside it; nobody is in them."""
    for name in ("small", "other"):
        small = SmallRun([tmp_path], name=name)
        small.begin()
        small.commit("0", 0)
        small.commit("1", 1)
        if name == "small":
            small.snapshot("kept")
        small.close()
    return tmp_path / "nvme-durable-small-rank0"


def refused(folder, words):
    """The run is refused in these words, without a byte more of the drive; it is marked, and the other one listed."""
    before = {
        path.name: (path.stat().st_blocks, path.read_bytes()) for path in folder.iterdir() if path.name != "owner"
    }
    with pytest.raises(ResumeError, match=words) as caught:
        DurableRun([folder.parent], name="small", rank=0, direct="optional").space.close()
    assert str(folder) in str(caught.value)
    after = {path.name: (path.stat().st_blocks, path.read_bytes()) for path in folder.iterdir() if path.name != "owner"}
    assert after == before
    done = CliRunner().invoke(app, ["runs", os.fspath(folder.parent)])
    listed = " ".join(done.output.split())
    assert done.exit_code == 0, done.output
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
