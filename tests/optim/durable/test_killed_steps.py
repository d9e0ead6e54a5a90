"""A training that is killed with SIGKILL at random instants ends with the bits of one that never was."""

import json

import pytest

from tests.support.killed_steps import KINDS
from tests.support.training import run_child

CHILD = """
import sys
from tests.support.killed_steps import main
main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
"""


QUICK = ["on-nvme", "in-memory-too", "logged-in-memory-too", "everything-logged", "two-ranks"]


def kill(path, num_kills, seed, *kinds, timeout):
    return json.loads(run_child(CHILD, path, num_kills, seed, *kinds, timeout=timeout).splitlines()[-1])


def test_killed_now_and_then_it_ends_with_the_same_bits(drive):
    outcome = kill(drive, 12, 3, *QUICK, timeout=600)
    assert sum(found["kills"] for found in outcome.values()) >= 60
    resumed = [step for found in outcome.values() for life in found["history"] for step in life]
    assert any(step > 0 for step in resumed), "no life went on from a step"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(5))
def test_killed_a_thousand_times_it_ends_with_the_same_bits(drive, seed):
    outcome = kill(drive, 20, 100 * seed, *KINDS, timeout=7200)
    assert sum(found["kills"] for found in outcome.values()) >= 200
    for name, found in outcome.items():
        assert any(step > 0 for life in found["history"] for step in life), f"{name}: no life went on from a step"
