"""A durable run in a power loss at any moment: the newest manifest is whole, and what was committed is there."""

import itertools
import os
import random
import shutil

import pytest

from nvme_offload import CorruptionError, ResumeError
from nvme_offload.aio_native.descriptor import Descriptor
from nvme_offload.offload.durable import manifest as manifests
from nvme_offload.offload.durable import run as runs
from nvme_offload.offload.durable.identity import Encoded
from nvme_offload.offload.durable.manifest import ManifestFiles
from nvme_offload.offload.durable.run import DurableRun
from nvme_offload.offload.storage import swap_space as spaces
from tests.support.durable_run import IDENTITY, LAYOUTS, live, name_of, read_past_the_tier
from tests.support.power_loss import Recording


@pytest.fixture(params=[1, 2], ids=["one path", "two paths"])
def paths(request, in_memory):
    made = [in_memory / "drives" / name for name in "ab"[: request.param]]
    for path in made:
        path.mkdir(parents=True)
    return made


def recorded(paths):
    with Recording(paths[0].parent) as recording:
        truth = live(paths, recording.mark)
    return recording.history(), truth


def problem(crash, truth, paths, folder, monkeypatch):
    """What is wrong with what the next process finds; None: nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    crash.restore(folder)
    here = [folder / path.name for path in paths]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(os, "fdatasync", lambda descriptor: None)
        run = DurableRun(here, name="small", rank=0, direct="optional")
        try:
            return _problem(run, crash.committed(), "pinned 6" in crash.marks, truth)
        except (CorruptionError, KeyError, ValueError) as error:
            return str(error)
        finally:
            run.close()


def _problem(run, names, pinned, truth):
    if pinned:
        manifest = run.snapshots["kept"]
    found = name_of(run.found[0]) if run.found else None
    if found not in names:
        return f"{found} was found, and may be {names}"
    if found is not None:
        if run.differences(run.found[0], Encoded.of(IDENTITY)):
            return f"{found} was found with another identity"
        run.adopt(run.found[0], LAYOUTS)
        if read_past_the_tier(run) != truth[found]:
            return f"{found} was found with other values"
    if pinned:
        run.adopt(manifest, LAYOUTS)
        if read_past_the_tier(run) != truth["6"]:
            return "the snapshot has other values"
    return None


def problems(paths, monkeypatch, *, every=False, num_random=60, seed=0):
    """List what is wrong after crashes: at every third moment, and drawn ones.

    `every`: at each moment, also with any change alone, and all but any, lost.
    """
    history, truth = recorded(paths)
    folder = paths[0].parent.with_name("after")
    kills, losses = history.kills(seed), history.power_losses(at_most=2, num_random=num_random, seed=seed)
    if not every:
        chance, kills = random.Random(seed), itertools.islice(kills, 0, None, 3)
        losses = (history.some_crash(chance) for _ in range(num_random))
    for crash in itertools.chain(kills, losses):
        if found := problem(crash, truth, paths, folder, monkeypatch):
            yield f"{crash}: {found}"


def test_whatever_is_lost_the_latest_commit_is_there(paths, monkeypatch):
    assert not list(problems(paths, monkeypatch))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_ten_thousand_random_subsets(paths, monkeypatch, seed):
    assert not list(problems(paths, monkeypatch, every=True, num_random=1000, seed=seed))


def newest_by_step(files):
    return sorted((held for held in files._held if held), key=lambda held: (held.step, held.sequence), reverse=True)


def opened_unsynced(at, name, direct):
    return Descriptor(os.open, at / name, os.O_RDWR)


WRONG = {
    "no sync of the data": (spaces, "sync_data", lambda fd: None),
    "manifests ordered by step": (ManifestFiles, "newest_first", newest_by_step),
    "stale manifests left alive": (ManifestFiles, "destroy", lambda files, manifest: None),
    "manifests that do not last": (manifests, "open_synced", opened_unsynced),
    "torn manifests taken for whole": (manifests, "_digest", lambda header, body: bytes(32)),
    "one extent for each slot": (runs.ExtentRing, "_is_kept", lambda ring, record, extent: False),
    "snapshots that pin nothing": (runs.ExtentRing, "pin", lambda ring, name, tables: None),
}
QUICK = ("no sync of the data", "one extent for each slot", "snapshots that pin nothing")


@pytest.mark.parametrize(
    "wrong", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in WRONG]
)
@pytest.mark.parametrize("paths", [1], indirect=True, ids=["one path"])
def test_what_is_known_to_be_wrong_is_found(paths, monkeypatch, wrong):
    monkeypatch.setattr(*WRONG[wrong])
    try:
        found = next(problems(paths, monkeypatch, num_random=600), None)
    except (CorruptionError, ResumeError) as error:  # without any crash
        found = str(error)
    assert found
