"""With little address space or few descriptors left, a run has its bits or ends with one error in words."""

import os
import re
import resource
from functools import partial
from pathlib import Path

import pytest

from tests.support.file_systems import live, trained
from tests.support.killed_steps import be_ready_to_fork
from tests.support.training import returned_in_child

MIB = 1 << 20


def address_space(more):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return resource.RLIMIT_AS, pages * resource.getpagesize() + more * MIB


def descriptors(more):
    return resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) - 1 + more


LIMITS = {
    "address space": (
        address_space,
        [1, 8, 16, 24, 40, 64, 96, 128, 192, 512, 2048],
        "MemoryError|SwapIOError|EngineUnavailable|can't start new thread; raise what limits threads",
    ),
    "descriptors": (descriptors, [0, 1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 64], "EMFILE|Too many open files"),
}


def outcomes(name, folder):
    """Return what came of a run with each limit, and of one in memory without any."""
    be_ready_to_fork()
    limit, values, _ = LIMITS[name]

    def limited(more):
        kind, value = limit(more)
        resource.setrlimit(kind, (value, value))
        return trained(Path(folder), f"run-{more}")[0]

    return {"expected": live(partial(trained, None, None))[0]} | {more: live(partial(limited, more)) for more in values}


@pytest.mark.parametrize("name", LIMITS)
def test_a_run_with_little_left_has_its_bits_or_says_what_is_missing(name, tmp_path):
    found = returned_in_child(outcomes, name, tmp_path)
    expected = found.pop("expected")
    wrong = {more: said for more, said in found.items() if said != expected and not re.search(LIMITS[name][2], said)}
    assert not wrong
    assert expected in found.values()
