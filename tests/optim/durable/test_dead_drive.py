"""A drive that is mounted and dead is named by whatever meets it, with a way on; the run goes on from what is there."""

import errno
import shutil
import warnings
from contextlib import contextmanager, nullcontext

import pytest

from nvme_offload import OffloadError, SwapIOError
from tests.optim.durable.test_copies import other as other
from tests.support.durable_engine import assert_goes_on_to, durable, settle
from tests.support.durable_run import offload_runs
from tests.support.failing_drive import dead
from tests.support.pairs import slow_but
from tests.support.resuming import next_loss, steps_of

CODES = {name: getattr(errno, name) for name in ("EIO", "ESTALE", "ENOTCONN", "EMFILE")}
REMEDIES = {"EIO": "smartctl", "ESTALE": "umount -l", "ENOTCONN": "umount -l", "EMFILE": "ulimit -n"}
TIERS = "everything"


def make(drive, other=None):
    return durable("bf16", drive, "run", TIERS, other=other)


def steps_until_settled(engine, first, end):
    steps_of(engine, 0, range(first, end))
    settle(engine)


VERBS = {
    "forward": lambda drive, engine, folder: next_loss(engine),
    "step": lambda drive, engine, folder: steps_of(engine, 0, range(3, 5)),
    "synchronize": lambda drive, engine, folder: engine.optimizer.synchronize(),
    "commit": lambda drive, engine, folder: engine.durable.commit(),
    "rewind": lambda drive, engine, folder: engine.durable.rewind(),
    "snapshot": lambda drive, engine, folder: engine.durable.snapshot("new"),
    "remove_snapshot": lambda drive, engine, folder: engine.durable.remove_snapshot("kept"),
    "save": lambda drive, engine, folder: engine.save_checkpoint(folder / "saved"),
    "load": lambda drive, engine, folder: engine.load_checkpoint(folder / "checkpoint"),
    "close": lambda drive, engine, folder: engine.close(),
}
"""They are called on an engine after three steps; each of its tiers is on the drive."""


@contextmanager
def in_words(drive, code, where=None):
    """Whatever is raised or warned of names the drive, the code and a way on; nobody sees a raw OSError."""
    said = []
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            yield said
        except (SwapIOError, OffloadError) as error:
            said.append(str(error))
    said += [str(each.message) for each in caught if each.category is RuntimeWarning]
    for words in said:
        lacking = [part for part in (code, REMEDIES[code], str(where or drive.parent)) if part not in words]
        assert not lacking, words


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of three steps with a snapshot, and a checkpoint beside it."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "drive").mkdir()
    with make(folder / "drive") as engine:
        engine.durable.resume()
        steps_of(engine, 0, range(2))
        engine.save_checkpoint(folder / "checkpoint")
        engine.durable.snapshot("kept")
        steps_of(engine, 0, range(2, 3))
    return folder


OF_DRIVES = [code for code in CODES if code != "EMFILE"]
IN_EVERY_RUN = [(verb, OF_DRIVES[number % 3]) for number, verb in enumerate(VERBS)]
IN_EVERY_RUN += [(verb, "EMFILE") for verb in ("commit", "rewind", "snapshot", "save", "load")]  # they open files
BEGINNING = [*(("runs", code) for code in CODES), ("construct", "EIO"), ("construct", "EMFILE")]
BEGINNING += [("resume", "ESTALE"), ("resume", "EMFILE")]


@pytest.mark.parametrize(("verb", "code"), slow_but(IN_EVERY_RUN, VERBS, CODES))
def test_every_verb_names_a_dead_drive_and_the_run_goes_on_when_it_is_back(verb, code, trained, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    drive = folder / "drive"
    engine = make(drive)
    assert engine.durable.resume()[0] == 3
    with dead(drive, CODES[code]), in_words(drive, code):
        VERBS[verb](drive, engine, folder)
        if verb != "close":
            settle(engine)
    with warnings.catch_warnings(action="ignore"):
        engine.close()
    with make(drive) as engine:
        step, _ = engine.durable.resume()
        assert step in ({2, 3} if verb in ("rewind", "load") else {3, 4, 5})
        assert_goes_on_to(engine, "bf16", step, step + 2, TIERS)


@pytest.mark.parametrize(("verb", "code"), slow_but(BEGINNING, ["construct", "resume", "runs"], CODES))
def test_who_begins_on_a_dead_drive_is_told(verb, code, trained, tmp_path):
    drive = tmp_path / "drive"
    shutil.copytree(trained / "drive", drive)
    if verb == "runs":
        with dead(drive, CODES[code]):
            assert code in offload_runs(drive)[1]
        return
    engine = make(drive) if verb == "resume" else None
    with dead(drive, CODES[code]), in_words(drive, code) as said:
        make(drive).close() if engine is None else engine.durable.resume()
    assert said
    if engine is not None:
        engine.close()
    with make(drive) as engine:
        assert engine.durable.resume()[0] == 3


WHEN = ["before it begins", "between two steps"]
OF_TWO = [(WHEN[0], "ESTALE"), (WHEN[1], "ENOTCONN"), *((when, "EMFILE") for when in WHEN)]


@pytest.mark.parametrize(("when", "code"), slow_but(OF_TWO, WHEN, CODES))
def test_one_of_two_drives_is_dead(when, code, drive, other, tmp_path):
    """A process without descriptors has lost no drive: that is an error, and both copies stay."""
    with durable("bf16", drive, "run", other=other) as engine:
        engine.durable.resume()
        steps_of(engine, 0, range(3))
    begins, where = when == "before it begins", drive if code == "EMFILE" else other

    def go_on():
        with durable("bf16", drive, "run", other=other) as engine:
            assert engine.durable.resume()[0] == 3
            with nullcontext() if begins else dead(other, CODES[code]):
                steps_until_settled(engine, 3, 5)
                assert engine.optimizer.stats().failed_commits == 0
                assert engine.durable.num_copies == (2 if code == "EMFILE" else 1)

    with dead(other, CODES[code]) if begins else nullcontext(), in_words(tmp_path, code, where) as said:
        go_on()
    assert len(said) == (begins or code != "EMFILE")
    with durable("bf16", drive, "run", other=other) as engine:
        assert engine.durable.resume()[0] == (3 if begins and code == "EMFILE" else 5)


def names_of(folder):
    """List what a run needs: the record of how it goes is written now and then."""
    return sorted(each.name for each in folder.iterdir() if each.name != "record.json")


@pytest.mark.parametrize("gone", ["all", "moved", "swap", "manifest.1"])
def test_a_commit_into_files_that_are_gone_fails_with_a_way_on(gone, drive, tmp_path):
    folder, aside = drive / "nvme-durable-run-rank0", tmp_path / "aside"
    with durable("bf16", drive, "run", "state") as engine:
        engine.durable.resume()
        steps_until_settled(engine, 0, 2)
        if gone in ("all", "moved"):
            folder.rename(aside)
        else:
            (folder / gone).rename(aside)
        with pytest.warns(RuntimeWarning, match="could not be committed.* move them back.*save a checkpoint") as caught:
            steps_until_settled(engine, 2, 5)
        assert len([each for each in caught if "could not be committed" in str(each.message)]) == 1
        stats = engine.optimizer.stats()
        assert (stats.failed_commits, stats.committed_step) == (3, 2)
        assert str(folder) in stats.commit_failure
        with pytest.raises(SwapIOError, match="move them back"):
            engine.durable.commit()
        if gone == "all":
            shutil.rmtree(aside)
            engine.save_checkpoint(tmp_path / "saved")
        else:
            aside.rename(folder if gone == "moved" else folder / gone)
            engine.durable.commit()
    with durable("bf16", drive, "run", "state") as engine:
        if gone == "all":
            assert engine.durable.resume() is None
            engine.load_checkpoint(tmp_path / "saved")
        else:
            assert engine.durable.resume()[0] == 5
        assert_goes_on_to(engine, "bf16", 5, 7)


def test_of_two_drives_the_one_whose_files_are_gone_is_lost_and_made_again_when_it_is_there(drive, other):
    folder = other / "nvme-durable-run-rank0"
    with durable("bf16", drive, "run", other=other) as engine:
        engine.durable.resume()
        steps_of(engine, 0, range(2))
        folder.rename(other / "aside")
        with pytest.warns(RuntimeWarning, match="a copy of the state is lost .*its swap, manifest.0, manifest.1"):
            steps_until_settled(engine, 2, 4)
        assert (engine.durable.num_copies, engine.optimizer.stats().failed_commits) == (1, 0)
        (other / "aside").rename(folder)
        steps_until_settled(engine, 4, 8)
        assert engine.durable.num_copies == 2


@pytest.mark.parametrize("when", ["while it goes on", "between two processes"])
@pytest.mark.parametrize("copies", [1, 2])
def test_what_only_says_which_run_it_is_is_made_again(when, copies, drive, other, tmp_path):
    folder, other = drive / "nvme-durable-run-rank0", other if copies == 2 else None
    engine = durable("bf16", drive, "run", other=other)
    engine.durable.resume()
    steps_until_settled(engine, 0, 2)
    before = names_of(folder)
    if when == "between two processes":
        engine.close()
    removed = [folder / name for name in before if name.endswith(".json")]
    for file in removed:
        file.unlink()
    if when == "between two processes":
        paths = [drive] if other is None else [drive, other]
        assert "run.json is gone" in offload_runs(*paths)[1]
        if other is None:
            said = offload_runs("export", "run", tmp_path / "out", drive)[1]
            assert "run.json: nothing was committed, or the file is gone: the run makes it again" in said
        engine = durable("bf16", drive, "run", other=other)
        assert engine.durable.resume()[0] == 2
    steps_until_settled(engine, 2, 4)
    assert (engine.optimizer.stats().failed_commits, engine.durable.num_copies) == (0, copies)
    engine.close()
    assert len(removed) == 2
    assert names_of(folder) == before
    assert "run.json" not in offload_runs(drive)[1]


@pytest.mark.parametrize("erased", [(0,), (1,), (0, 1)])
def test_a_run_that_died_before_its_first_commit_begins_as_one_run_whichever_copies_say_which(erased, drive, other):
    folders = [path / "nvme-durable-run-rank0" for path in (drive, other)]
    for _ in range(2):
        with durable("bf16", drive, "run", other=other) as engine:
            assert engine.durable.resume() is None
            steps_until_settled(engine, 0, 1)
        manifests = [each for folder in folders for each in folder.glob("manifest*")]
        for file in [*manifests, *(folders[copy] / "run.json" for copy in erased)]:
            file.unlink()
    with durable("bf16", drive, "run", other=other) as engine:
        assert engine.durable.resume() is None
        steps_until_settled(engine, 0, 2)
    with durable("bf16", drive, "run", other=other) as engine:
        assert engine.durable.resume()[0] == 2
