"""`offload runs` lists durable runs without touching them, and removes those that nobody is in."""

import errno
import json
import os
import re
import shutil
import time

import pytest

from nvme_offload.offload.durable import inventory
from nvme_offload.offload.durable.inventory import find_runs
from tests.perf.test_malformed import FILES
from tests.support.durable_run import IDENTITY, SmallRun, committed, offload_runs
from tests.support.failing_drive import dead


@pytest.fixture
def paths(in_memory):
    made = [in_memory / name for name in "ab"]
    for path in made:
        path.mkdir()
    return made


@pytest.fixture
def small(paths):
    run = committed(paths, 0, 7, snapshot="kept")
    yield run
    run.close()


def lines(*arguments):
    code, output = offload_runs(*arguments)
    assert code == 0, output
    return [re.split(r"  +", line.strip()) for line in output.splitlines()]


def test_a_run_that_is_alive(small, paths):
    headings, run, snapshots = lines(*paths)
    shown = dict(zip(headings, run, strict=True))
    assert shown.pop("BYTES").endswith("MiB")
    assert re.fullmatch(r"\d+ s", shown.pop("AGE"))
    state = f"alive (process {os.getpid()} on {os.uname().nodename})"
    assert shown == {"NAME": "small", "MODEL": "three slots", "STEP": "7", "RANKS": "1", "STATE": state}
    assert snapshots == ["snapshots: kept"]
    small.commit("2", 8)  # nobody was disturbed
    assert lines("list", *paths)[1][2] == "8"


def test_one_that_is_not(small, paths):
    small.close()
    os.utime(small.run.folder / "manifest.0", (0, time.time() - 7300))
    os.utime(small.run.folder / "manifest.1", (0, time.time() - 7300))
    _, run, _ = lines(*paths)
    assert (run[3], run[-1]) == ("2 h", "not alive")


def test_as_json(small, paths):
    code, output = offload_runs(*paths, "--json")
    (run,) = json.loads(output)
    assert (code, run["name"], run["step"], run["alive"]) == (0, "small", 7, True)
    (rank,) = run["ranks"]
    assert ([*rank["steps"].values()], rank["snapshots"], rank["model"]) == ([7, 0], ["kept"], "three slots")
    files = [path for folder in rank["folders"] for path in sorted(os.scandir(folder), key=lambda entry: entry.name)]
    assert run["size_bytes"] == sum(entry.stat().st_blocks * 512 for entry in files)


def test_nothing_is_changed(small, paths):
    def everything():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in paths[0].parent.rglob("*")}

    small.close()
    before = everything()
    assert offload_runs(*paths)[0] == 0
    assert everything() == before


def test_ranks_resume_where_all_of_them_are(in_memory, monkeypatch):
    monkeypatch.setitem(IDENTITY, "num_ranks", 5)
    for rank, count in ((0, 2), (1, 1), (3, 2)):
        committed([in_memory], *range(count), rank=rank).close()
    assert find_runs([in_memory])[0].step == 0
    _, run, said = lines(in_memory)
    assert (run[2], run[5]) == ("0", "0..3 of 5")
    assert said == ["no directory of ranks 2, 4 (host there) is here"]
    listings = [in_memory / "on a.json", in_memory / "on b.json"]
    listings[0].write_text(offload_runs("--json", in_memory)[1])
    shutil.move(in_memory / "nvme-durable-small-rank3", in_memory / "nvme-durable-small-rank4")
    listings[1].write_text(offload_runs("--json", in_memory)[1])
    for listed in (listings, [in_memory, listings[0]]):
        _, run, said = lines(*listed)
        assert (run[2], run[5], said) == ("0", "0..4 of 5", ["no directory of ranks 2 is here"])
    listings[0].write_text("[{}]")
    code, output = offload_runs(*listings)
    assert (code, "is not of `offload runs --json`" in output) == (2, True), output


def test_a_path_that_was_not_looked_at(small, paths):
    small.close()
    _, _, said, _ = lines(paths[0])
    assert said == ["rank 0: 1 of its 2 paths were not looked at"]


def test_damage_is_said(small, paths):
    small.close()
    for name in ("manifest.0", "manifest.1"):
        (small.run.folder / name).write_bytes(bytes(100))
    (small.run.folder / "run.json").write_text("{")
    _, run, damaged, nothing, _ = lines(*paths)
    assert run[2] == "-"
    assert "run.json cannot be read" in damaged[0]
    assert nothing == ["nothing was committed"]


def test_removing(small, paths):
    code, output = offload_runs("remove", "small", *paths)
    assert code == 1
    assert f"process {os.getpid()} on " in output
    assert small.read() == small.truth["1"]
    small.close()
    (small.run.folder / "record.json").write_text("what offload top shows")
    code, output = offload_runs("remove", "small", paths[1])
    assert code == 2
    assert "has 2 paths, and 1 of them" in " ".join(output.replace("│", " ").split())
    assert find_runs(paths)[0].step == 7
    code, output = offload_runs("remove", "small", *paths)
    assert (code, output.startswith("removed small: ")) == (0, True)
    assert [list(path.iterdir()) for path in paths] == [[], []]
    assert offload_runs(*paths) == (0, "no durable runs\n")


@pytest.mark.parametrize("number", [1, 2])
def test_who_looks_while_another_removes_it_finds_what_is_left(small, paths, monkeypatch, number):
    small.close()
    read = inventory.read_about

    def read_late(folder):
        for path in paths[:number]:
            shutil.rmtree(path / small.run.folder.name, ignore_errors=True)
        return read(folder)

    monkeypatch.setattr(inventory, "read_about", read_late)
    assert [run.ranks[0].problem[:5] for run in find_runs(paths)] == ["1 of "] * (2 - number)


def test_removing_a_snapshot(small, paths):
    small.commit("2", 8)
    assert offload_runs("remove", "small", *paths, "--snapshot", "kept")[0] == 1  # it is alive
    truth = small.truth
    small.close()
    code, output = offload_runs("remove", "small", *paths, "--snapshot", "others")
    assert (code, "there are: kept" in " ".join(output.replace("│", " ").split())) == (2, True)
    assert offload_runs("remove", "small", *paths, "--snapshot", "kept")[0] == 0
    (run,) = find_runs(paths)
    assert (run.step, run.ranks[0].snapshots) == (8, ())
    again = SmallRun(paths)
    assert again.run.snapshots == {}
    again.adopt(again.run.found[0])
    assert again.read() == truth["2"]
    again.close()


def test_what_others_put_there_stays_and_nothing_can_be_resumed(small, paths):
    small.close()
    (small.run.folder / "notes.txt").write_text("mine")
    code, output = offload_runs("remove", "small", *paths)
    assert (code, "not empty" in output.lower()) == (1, True)
    assert [path.name for path in small.run.folder.iterdir()] == ["notes.txt"]


def test_one_path_of_a_run_whose_other_is_lost(small, paths):
    small.close()
    assert offload_runs("remove", "small", paths[1], "--partly")[0] == 0
    assert list(paths[1].iterdir()) == []


@pytest.mark.parametrize("arguments", [[], ["remove", "none", "{a}"], ["{a}/missing"]])
def test_words_that_lead_nowhere(paths, arguments):
    code, output = offload_runs(*(argument.format(a=paths[0]) for argument in arguments))
    assert code == 2, output
    assert "Errno" not in output


@pytest.mark.parametrize("place", ["", "run.json", "swap", "manifest.1", "owner", "snapshot.kept", "identity"])
def test_one_bad_run_takes_no_other_along(paths, place):
    """Whatever is in its place, the others are listed."""
    folders = {}
    for name in ("good", *FILES):
        run = committed(paths, 0, snapshot="kept", name=name.replace(" ", "-"))
        folders[name] = run.run.folder
        run.close()
    for kind in FILES.keys() - {"longer than any"} if place else FILES:
        [file] = folders[kind].glob(f"{place}*") if place else [folders[kind]]
        shutil.rmtree(file) if file.is_dir() else file.unlink()
        FILES[kind](file)
    code, output = offload_runs(*paths)
    assert code == 0, output
    assert re.search(r"^good .* 0 ", output, re.MULTILINE), output
    assert not set(output) & {"\x1b", "\x07"}


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ENOTCONN])
def test_of_two_folders_the_one_on_a_dead_drive_is_left_out_and_named(small, paths, tmp_path, code):
    with dead(tmp_path, code):
        status, output = offload_runs(*paths, tmp_path)
    assert status == 0
    assert f"left out: {tmp_path} cannot be used: {errno.errorcode[code]}" in output
    assert re.search(r"^small ", output, re.MULTILINE)
