"""io_uring forbidden or limited for real: by a seccomp filter, by RLIMIT_MEMLOCK. The numbers stay the same."""

import json
import logging
import os
import re

import pytest
import torch

from nvme_offload import EngineLostError, OffloadConfig, TensorSwapper
from nvme_offload.aio_native import _native
from nvme_offload.offload.staging.block_cache import BlockCache
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from tests.support.engine_tools import HAS_BINDING, needs_binding
from tests.support.ranks import run_ranks
from tests.support.sandbox import IO_URING_CALLS, can_filter, forbid, needs_mounts, run_python
from tests.support.small_training import train

KERNEL = tuple(int(re.match(r"\d+", part)[0]) for part in os.uname().release.split(".")[:2])
needs_filter = pytest.mark.skipif(not can_filter(), reason="no seccomp filter is written for this architecture")

CHILD = """
import json, logging, sys
from nvme_offload.aio_native.engine import EngineUnavailable
from tests.support.small_training import train

records = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: records.append([record.name, record.getMessage()])
logging.getLogger().addHandler(handler)

runs = []
for engine in sys.argv[2:]:
    try:
        runs.append(train(sys.argv[1], engine))
    except EngineUnavailable as error:
        runs.append({"refusal": str(error)})
json.dump({"runs": runs, "records": records}, sys.stdout)
"""


def run_confined(path, *engines, **confinement):
    """Train with each engine in one child; returns the runs and the warnings that were logged."""
    path.chmod(0o777)
    done = run_python(CHILD, path, *engines, **confinement)
    assert (done.returncode, done.stderr) == (0, "")
    assert not os.listdir(path), "something was left behind"
    outcome = json.loads(done.stdout)
    return outcome["runs"], outcome["records"]


@pytest.fixture(scope="module")
def unconfined(tmp_path_factory):
    """What comes out where nothing is forbidden: with io_uring, unless this very machine forbids it."""
    return train(tmp_path_factory.mktemp("unconfined"), "auto")


@pytest.fixture(scope="module")
def _needs_io_uring(unconfined):
    if unconfined["engine"] != "io_uring":
        pytest.skip(f"io_uring is not available here, {unconfined['engine']} is")


@pytest.fixture(scope="module")
def blocked(tmp_path_factory):
    path = tmp_path_factory.mktemp("blocked")
    return run_confined(path, "auto", "auto", "io_uring", "pyuring", forbid=list(IO_URING_CALLS))


@needs_filter
@pytest.mark.skipif(not hasattr(_native, "UringEngine"), reason="built without liburing: that is the reason given")
class TestBlockedBySeccomp:
    def test_auto_works_with_another_engine_and_gives_the_same_bits(self, blocked, unconfined):
        (first, second, *_), _ = blocked
        assert first["engine"] == "aiofiles"
        assert first["digest"] == second["digest"] == unconfined["digest"]

    def test_the_choice_is_said_once_with_its_reason(self, blocked):
        _, records = blocked
        said = [message for name, message in records if name == "nvme_offload.aio_native.registry"]
        assert len(said) == 1, said
        both = "io_uring and pyuring are" if HAS_BINDING else "io_uring is"
        assert f"engine aiofiles does the I/O ({both} not available: " in said[0]
        assert said[0].count("seccomp=unconfined") == 1

    @pytest.mark.parametrize("place", [2, pytest.param(3, marks=needs_binding)])
    def test_an_engine_asked_for_by_name_is_an_error_that_names_seccomp(self, blocked, place):
        runs, _ = blocked
        refusal = runs[place]["refusal"]
        asked = f"aio.engine = '{('io_uring', 'pyuring')[place - 2]}'"
        assert all(words in refusal for words in (asked, "EPERM", "seccomp", "set aio.engine to auto")), refusal
        assert ".." not in refusal


@needs_filter
@pytest.mark.usefixtures("_needs_io_uring")
def test_a_filter_that_refuses_only_registering_is_no_error(tmp_path, unconfined):
    (run,), records = run_confined(tmp_path, "io_uring", forbid=["register"])
    assert (run["engine"], run["registered"], run["digest"]) == ("io_uring", False, unconfined["digest"])
    messages = " ".join(message for _, message in records)
    assert "registered buffers refused (Operation not permitted)" in messages
    assert "seccomp filter that allows io_uring_register" in messages
    assert "RLIMIT_MEMLOCK" not in messages, "raising it would not help"


@needs_filter
@pytest.mark.usefixtures("_needs_io_uring")
def test_a_filter_that_refuses_only_entering_is_found_before_the_first_transfer(tmp_path, unconfined):
    (chosen, named), _ = run_confined(tmp_path, "auto", "io_uring", forbid=["enter"])
    assert chosen["digest"] == unconfined["digest"]
    assert chosen["engine"] != "io_uring"
    assert "seccomp" in named["refusal"]


def run_on_after_forbidding(rank, world_size, path, engine):
    """Train, swap and use a cache while io_uring_enter is forbidden on all threads; what came of each, and was said."""
    offload = {"device": "nvme", "nvme_path": str(path), "staging_budget": "64MiB"}
    section = {"zero_optimization": {"offload_optimizer": offload}, "aio": {"engine": engine}}
    said, value, tensor = [], torch.arange(4 << 20), torch.arange(100_000)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("nvme_offload").addHandler(handler)
    swapper, cache = TensorSwapper(section), BlockCache(NvmeTier(OffloadConfig.from_dict(section)), "blocks", 2)
    swapper.swap_out("large", value).wait()
    swapper.swap_out("small", tensor).wait()
    cache.add([(f"blocks {number}", 1 << 20) for number in range(4)])
    reads = []

    def fill(number):
        with cache.holding(cache.blocks[number], change=True, load=False) as buffer:
            buffer.view(torch.uint8, 0, 1 << 20).fill_(number)

    def forbid_now(step):
        if step == 2:
            reads.append(swapper.swap_in("large"))
            fill(1)
            forbid(["enter"], all_threads=True)

    def content():
        for number in (2, 3):
            fill(number)
        for number in (1, 2, 3):
            with cache.holding(cache.blocks[number]) as buffer:
                assert buffer.view(torch.uint8, 0, 1 << 20).unique().tolist() == [number]
        cache.synchronize()
        return cache.tier.name

    def swapped():
        assert torch.equal(reads[0].wait(), value)
        assert torch.equal(swapper.swap_in("small").wait(), tensor)
        return swapper.stats().engine

    outcome = [_outcome(lambda: train(path, engine, before_step=forbid_now)), _outcome(swapped), _outcome(content)]
    swapper.close()
    cache.close()
    assert not os.listdir(path), "something was left behind"
    return outcome, said


def _outcome(call):
    try:
        return call()
    except EngineLostError as error:
        return str(error)


@needs_filter
@pytest.mark.usefixtures("_needs_io_uring")
class TestForbiddenAfterTheStart:
    """A filter on all threads refuses io_uring_enter while rings are in use, and transfers are under way."""

    def test_auto_goes_on_with_another_engine_and_loses_nothing(self, tmp_path, unconfined):
        [((trained, *others), said)] = run_ranks(run_on_after_forbidding, 1, tmp_path, "auto")
        assert (trained["engine"], *others) == ("aiofiles",) * 3
        assert trained["digest"] == unconfined["digest"]
        (message,) = said
        assert message.startswith("engine aiofiles does the I/O from now on (io_uring has stopped working: Operation")
        assert "pyuring is not available" in message

    @pytest.mark.parametrize("engine", ["io_uring", pytest.param("pyuring", marks=needs_binding)])
    def test_an_engine_asked_for_by_name_is_said_to_be_dead(self, tmp_path, engine):
        [(errors, _)] = run_ranks(run_on_after_forbidding, 1, tmp_path, engine)
        dead = f"the {engine} engine is dead, and no other takes its place: it was asked for by name"
        why = ("EPERM", "not the drive", "seccomp filter that refuses io_uring_enter", 'aio.engine = "auto"')
        assert all(words in error for error in errors for words in (str(tmp_path), dead, *why)), errors


@pytest.fixture(scope="module")
def limited(tmp_path_factory):
    path = tmp_path_factory.mktemp("limited")
    return run_confined(path, "auto", "io_uring", ordinary_user=True, memlock_bytes=64 * 1024)


@pytest.mark.quiet
@pytest.mark.usefixtures("_needs_io_uring")
@pytest.mark.skipif(KERNEL < (5, 12), reason="it charges rings to RLIMIT_MEMLOCK, too")
class TestLittleLockedMemory:
    """64 KiB for an ordinary user. Since Linux 5.12 the ring itself does not count, registered buffers do.

    They are counted per user, so that another test's would count, too.
    """

    def test_plain_requests_serve_whichever_way_the_engine_was_chosen(self, limited, unconfined):
        runs, _ = limited
        assert [run["engine"] for run in runs] == ["io_uring", "io_uring"]
        assert [run["registered"] for run in runs] == [False, False]
        assert {run["digest"] for run in runs} == {unconfined["digest"]}

    def test_the_refusal_is_said_once_with_its_remedy(self, limited):
        _, records = limited
        of_registry = [message for name, message in records if name == "nvme_offload.aio_native.registry"]
        said = [message for message in of_registry if "registered buffers" in message]
        assert len(said) == 1, records
        assert "RLIMIT_MEMLOCK (ulimit -l)" in said[0]

    def test_without_the_limit_they_are_registered(self, tmp_path):
        (run,), records = run_confined(tmp_path, "io_uring", memlock_bytes=None)
        if os.geteuid() != 0 and not run["registered"]:
            pytest.skip("this user's own RLIMIT_MEMLOCK is too small")
        assert run["registered"], records


@needs_mounts
def test_a_file_system_that_counts_no_blocks_is_not_taken_for_full(tmp_path, unconfined):
    (run,), records = run_confined(tmp_path, "auto", mounts={tmp_path: "ramfs"})
    assert run["digest"] == unconfined["digest"]
    assert len([message for _, message in records if "no direct I/O" in message]) == 1, records
