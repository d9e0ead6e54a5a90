"""Several hosts: drives stay where they are, ranks move. More of these tests: `make hosts`."""

import errno
import functools
import hashlib
import itertools
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nvme_offload import CheckpointError, PeerError, ResumeError, SwapIOError
from tests.support.durable_engine import durable, settle, whole
from tests.support.failing_drive import Failing, Op
from tests.support.forked import ROOT, output_of
from tests.support.hosts import Place, run_on_hosts, why_not
from tests.support.ranks import run_ranks
from tests.support.resuming import fresh_engine, section, steps_of

on_hosts = pytest.mark.skipif(bool(reason := why_not()), reason=reason)

STOPPED, ALL = 2, 4
AX, BY = ("a", "x", "nvme"), ("b", "y", "nvme")
RESTARTS = {
    "the other way round": ([AX, BY], [BY, AX]),
    "a host has another name": ([AX, BY], [BY, ("c", "x", "nvme")]),
    "a drive is mounted elsewhere": ([AX, BY], [BY, ("a", "x", "other")]),
    "drives in each other's hosts": ([AX, BY], [("a", "y", "nvme"), ("b", "x", "nvme")]),
    "one host with both drives": ([AX, BY], [("a", "y", "other"), AX]),
    "1 + 3 as 3 + 1": ([AX, BY, BY, BY], [BY, BY, BY, AX]),
}
"""Host, drive and where that is mounted, in the order in which a launcher gives the ranks: before, and afterwards."""


@pytest.fixture
def places(tmp_path):
    """Give places, on hosts with drives that are called x and y."""
    for name in ("x", "y", "nvme", "other"):
        (tmp_path / name).mkdir()

    def made(processes):
        return [Place(host, {tmp_path / point: tmp_path / drive}) for host, drive, point in processes]

    return made


def digest_of(engine):
    state, scalars = whole(engine)
    digest = hashlib.sha256(repr(scalars).encode())
    for name in sorted(state):
        digest.update(name.encode() + state[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def life(rank, world_size, paths, tiers, upto, num_paths=1):
    """Each rank has data and random numbers of its own."""
    second = paths[rank] / "second" if num_paths > 1 else None
    if second is not None:
        second.mkdir(exist_ok=True)
    with durable("bf16", paths[rank], "run", tiers, other=second, copies=1) as engine:
        found = engine.resume()
        assert found is not None or upto == STOPPED
        steps_of(engine, dist.get_rank(), range(found[0] if found else 0, upto))
        return dist.get_rank(), found and found[0], digest_of(engine)


def not_stopped(rank, world_size, path, tiers):
    with durable("bf16", path, None, tiers) as engine:
        steps_of(engine, rank, range(ALL))
        return digest_of(engine)


@functools.cache
def expected(num_ranks, tiers):
    with tempfile.TemporaryDirectory() as path:
        return run_ranks(not_stopped, num_ranks, Path(path), tiers)[0]


ORDINARY = ("the other way round", "parameters, logged", 2)


@on_hosts
@pytest.mark.parametrize(
    ("restart", "tiers", "num_paths"),
    [
        pytest.param(*case, marks=[] if case == ORDINARY else pytest.mark.slow)
        for case in itertools.product(RESTARTS, ("state", "state, logged", "parameters", "parameters, logged"), (1, 2))
    ],
)
def test_ranks_follow_their_drives_with_the_bits_of_the_run_that_was_not_stopped(
    tmp_path, places, restart, tiers, num_paths
):
    before, after = RESTARTS[restart]

    def live(processes, upto):
        paths = [tmp_path / point for *_, point in processes]
        return run_on_hosts(life, places(processes), paths, tiers, upto, num_paths)

    live(before, STOPPED)
    ranks, found, digests = zip(*live(after, ALL), strict=True)
    assert [after[ranks.index(rank)][1] for rank in range(len(before))] == [drive for _, drive, _ in before]
    assert set(found) == {STOPPED}
    assert set(digests) == {expected(len(before), tiers)}


def refused(rank, world_size, path):
    with durable("bf16", path, "run") as engine:
        with pytest.raises(ResumeError) as caught:
            engine.resume()
        return caught.value.problem


@on_hosts
def test_where_no_ranks_serve_all_are_told_what_is_where(tmp_path, places):
    """Three ranks as 2 + 1, whose drives are those of 1 + 2."""
    path = tmp_path / "nvme"
    run_on_hosts(life, places([AX, BY, BY]), [path] * 3, "state", STOPPED)
    first, *others = run_on_hosts(refused, places([AX, AX, BY]), path)
    assert others == [first] * 2
    assert f"that of rank 1 is in {path}/nvme-durable-run-rank1 on host b, where rank 2 looks" in first, first
    assert "Start ranks 0 on host a; 1, 2 on host b" in first


def without_a_drive(rank, world_size, paths):
    with pytest.raises((SwapIOError, ResumeError, PeerError)) as caught, durable("bf16", paths[rank], "run") as engine:
        engine.resume()
    return "; ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


@pytest.mark.slow
@on_hosts
@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_of_three_hosts_one_has_lost_its_drive_and_all_say_the_same(tmp_path, places, folder):
    """Its folder is not there, or it is the empty one that the drive was mounted on."""
    cz, path = ("c", "z", "nvme"), tmp_path / "nvme"
    (tmp_path / "z").mkdir()
    run_on_hosts(life, places([AX, BY, cz]), [path] * 3, "state", STOPPED)
    if folder == "empty":
        shutil.rmtree(tmp_path / "z" / "nvme-durable-run-rank2")
    paths = [path, path, path if folder == "empty" else tmp_path / "missing"]
    said = run_on_hosts(without_a_drive, places([AX, BY, cz]), paths)
    assert len({words.partition(": ")[2] for words in said}) == 1, said
    parts = ["rank 2 has nothing", "host c"] if folder == "empty" else [str(paths[2]), "on rank 2, host c"]
    assert all(words in said[0] for words in parts), said


def with_an_error(rank, world_size, path, call, failing):
    """On the failing rank reads fail, or no snapshot can be written."""
    with durable("bf16", path, "run", "state" if call == "snapshot behind a step" else "off") as engine:
        steps_of(engine, rank, range(2))
        settle(engine)
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing and call == "snapshot":
                (path / f"nvme-durable-run-rank{rank}" / "prepared.kept.new").mkdir()
            elif rank == failing:
                Failing(engine.optimizer.store.tier, patch, Op.READ, code=errno.EIO)
            with pytest.raises((SwapIOError, PeerError)) as caught:
                go_on(engine, rank, call)
    dist.destroy_process_group()  # as if this process had ended
    return "; ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def go_on(engine, rank, call):
    if call != "snapshot":
        steps_of(engine, rank, [2])
    if call != "step":
        engine.snapshot("kept")
    steps_of(engine, rank, [3])


@on_hosts
@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("call", [
    "step", "snapshot behind a step",
    *(pytest.param(call, marks=pytest.mark.slow) for call in ("snapshot", "snapshot after a step")),
])  # fmt: skip
def test_an_error_in_a_step_or_a_snapshot_ends_the_other_host_too_which_says_whose_it_is(
    tmp_path, places, call, failing
):
    """Also where the host keeps the store of the process group, which ends with it."""
    said = run_on_hosts(with_an_error, places([AX, BY]), tmp_path / "nvme", call, failing)
    own, other = said[failing], said[1 - failing]
    what = "prepared.kept.new is no file" if call == "snapshot" else "read of"
    assert what in own, said
    assert all(words in other for words in (what, f"rank {failing}, host {'ab'[failing]}", f"{tmp_path}/nvme")), said


SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch.distributed as dist
from tests.support.durable_engine import durable
from tests.support.resuming import fresh_engine, section, steps_of
from tests.test_hosts import ALL, STOPPED, digest_of

with durable("bf16", Path(sys.argv[1]), "run", "state, logged") as engine:
    found = engine.resume()
    for step in range(found[0] if found else 0, ALL):
        if step == STOPPED and found is None and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        steps_of(engine, dist.get_rank(), [step])
    print(dist.get_rank(), found[0], digest_of(engine))
"""


def agent(rank, world_size, folder):
    """Run torchrun on this host; what its process printed."""
    end = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "a:29400", "--max-restarts", "3"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", *end, "script.py", folder / "nvme"]
    place = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return output_of(*command, cwd=folder, env=place).split()


@on_hosts
@pytest.mark.slow
def test_torchrun_starts_all_again_when_one_is_killed(tmp_path, places):
    (tmp_path / "script.py").write_text(SCRIPT)
    digest = expected(2, "state, logged")
    found = run_on_hosts(agent, places([AX, BY]), tmp_path)
    step = found[0][1]
    assert int(step) in (STOPPED - 1, STOPPED), "the latest one may not have been committed"
    assert sorted(found) == [[rank, step, digest] for rank in "01"]


def with_own_folders(path, name=None):
    zero = section("bf16", path / "nvme")["zero_optimization"]
    if name:
        zero["offload_optimizer"]["durable"] = name
    return fresh_engine("bf16", zero_optimization=zero, checkpoint={"use_node_local_storage": True})


def save(rank, world_size, path, background):
    with with_own_folders(path, "run" if background else None) as engine:
        engine.save_checkpoint(path / "other", "before")
        steps_of(engine, rank, range(STOPPED))
        engine.save_checkpoint(path / "other", client_state={"from": rank}, background=background)
        if background:
            steps_of(engine, rank, range(STOPPED, STOPPED + 1))


def load(rank, world_size, path):
    with with_own_folders(path) as engine:
        found, client_state = engine.load_checkpoint(path / "other")
        steps_of(engine, rank, range(engine.global_steps, ALL))
        engine.save_16bit_model(path / "other" / "weights")
        return found, client_state, digest_of(engine)


def load_shared(rank, world_size, path):
    with fresh_engine("bf16") as engine:
        engine.load_checkpoint(path)
        steps_of(engine, rank, range(engine.global_steps, ALL))
        return digest_of(engine)


def load_fails(rank, world_size, path, *tag):
    with with_own_folders(path) as engine:
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(path / "other", *tag)
        return str(caught.value)


@pytest.fixture
def own_folders(tmp_path, places):
    """Places of two hosts with a drive each and a folder of its own for checkpoints, in any order."""
    for host in "ab":
        (tmp_path / f"saved on {host}").mkdir()

    def made(hosts):
        drives = places([{"a": AX, "b": BY}[host] for host in hosts])
        return [
            place._replace(mounts=place.mounts | {tmp_path / "other": tmp_path / f"saved on {place.host}"})
            for place in drives
        ]

    return made


@on_hosts
@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_checkpoints_of_hosts_with_own_folders_load_in_any_order(tmp_path, own_folders, background):
    run_on_hosts(save, own_folders("ab"), tmp_path, background)
    for number, host in enumerate("ab"):
        names = {path.name for path in (tmp_path / f"saved on {host}" / f"global_step{STOPPED}").iterdir()}
        assert {name for name in names if name.endswith(".distcp")} == {f"__{number}_0.distcp"}
    digest = expected(2, "state")
    for found, client_state, ended in run_on_hosts(load, own_folders("ba"), tmp_path):
        assert found == str(tmp_path / "other" / f"global_step{STOPPED}")
        assert client_state == {"from": 0}
        assert ended == digest
    weights = [(tmp_path / f"saved on {host}" / "weights" / "model.safetensors").read_bytes() for host in "ab"]
    assert weights[0] == weights[1]
    for host in "ab":
        shutil.copytree(tmp_path / f"saved on {host}", tmp_path / "both", dirs_exist_ok=True)
    assert run_ranks(load_shared, 2, tmp_path / "both") == [digest] * 2


@on_hosts
@pytest.mark.slow
def test_a_host_that_lacks_its_part_or_did_not_name_it(tmp_path, own_folders):
    run_on_hosts(save, own_folders("ab"), tmp_path, False)
    on_b = tmp_path / "saved on b"
    newest, partial = on_b / f"global_step{STOPPED}", on_b / f"global_step{STOPPED}.partial"
    newest.rename(partial)  # as if it had been stopped before it did this, and the next
    (on_b / "latest").write_text("before")
    found = run_on_hosts(load, own_folders("ba"), tmp_path)
    assert {(path.split("/")[-1], ended) for path, _, ended in found} == {
        (newest.name, expected(2, "state")),
        (partial.name, expected(2, "state")),
    }
    (partial / "__1_0.distcp").unlink()
    first, second = run_on_hosts(load_fails, own_folders("ba"), tmp_path)
    assert first.replace(".partial", "") == second.replace(".partial", "")
    assert "lacks __1_0.distcp, which host b had" in first
    shutil.rmtree(partial)
    first, second = run_on_hosts(load_fails, own_folders("ba"), tmp_path, newest.name)
    assert "lacks __1_0.distcp, which host b had" in first
    assert first == second
