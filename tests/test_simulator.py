"""Thousands of small worlds: one seed decides everything that happens in one. See docs/simulator.md.

To run others: ``python -m tests.support.simulator 17``, or ``20000:40000 --workers 2``.
"""

import json
import logging
import sys
from functools import partial

import pytest
import torch

from tests.support.forked import printed, run_code
from tests.support.simulator.mutations import MUTATIONS

SIMULATED = "import sys; from tests.support.simulator.__main__ import main; sys.exit(main())"
NUM_SEEDS = 20_000
NUM_SEEDS_BY_DEFAULT = 12  # as many as take a processor three seconds
FIRST_SEED_BY_DEFAULT = 1_000_000  # seeds that the long run does not have
NUM_SEEDS_OF_A_MUTATION = 2000
QUICKLY_FOUND = {
    "buffer released early": "swapper",
    "gather ended by its other half": "gathers",
}
"""Mutations that few seeds of a subject are enough for: the simulator can fail."""

logger = logging.getLogger(__name__)
pytestmark = pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="its tracer of opcodes crashes with threads")


def simulated(*arguments):
    """What came of a run in a process of its own: numbers of seeds, seconds, violations by seed."""
    done = run_code(SIMULATED, [*arguments, "--json"], 3600, partial(torch.set_num_threads, 1))
    return json.loads(printed(done).splitlines()[-1]), done.stderr


def assert_nothing_wrong(report, said, num_seeds):
    for seed, wrong in report["violations"].items():
        pytest.fail(f"seed {seed}; alone: python -m tests.support.simulator {seed}\n{wrong}\n{said[-4000:]}")
    assert report["num_seeds"] == num_seeds


def test_some_seeds():
    end = FIRST_SEED_BY_DEFAULT + NUM_SEEDS_BY_DEFAULT
    to_find = [argument for found in QUICKLY_FOUND.items() for argument in ("--find", ":".join(found))]
    report, said = simulated(f"{FIRST_SEED_BY_DEFAULT}:{end}", "--alone", "3", *to_find)
    assert_nothing_wrong(report, said, NUM_SEEDS_BY_DEFAULT)
    assert not report["differing"], "a seed that fails here could not be replayed"
    assert all(report[name] is not None for name in QUICKLY_FOUND), "a mistake was made and not found"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_seeds():
    report, said = simulated(f"0:{NUM_SEEDS}", "--workers", "2")
    assert_nothing_wrong(report, said, NUM_SEEDS)
    logger.info("%d seeds in %.0f s", report["num_seeds"], report["seconds"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mistake_is_found(name):
    report, _ = simulated(f"0:{NUM_SEEDS_OF_A_MUTATION}", "--mutation", name, "--until-first")
    (seed,) = report["violations"]
    logger.info("%s: found by seed %s, after %d seeds", name, seed, report["num_seeds"])
