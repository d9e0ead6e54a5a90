"""Runs whose configuration is drawn end with the bits of the same run in memory, killed or not.

To run others: ``python -m tests.support.drawn_runs FOLDER --runs 1500 --kills 400 --seed 7``.
"""

import json

import pytest

from tests.support.drawn_runs import IN_MEMORY
from tests.support.engine_tools import PYTHON_ENGINE
from tests.support.sharded_model import SHARDS_CODES
from tests.support.training import run_child

CHILD = "import sys; from tests.support.drawn_runs import main; sys.exit(main(sys.argv[1:]))"
FROZEN_AND_TRAINED = IN_MEMORY | {"rule": "Muon", "precision": "bf16", "base": "frozen", "count": 1, "clip": 0.0}
FROZEN_AND_TRAINED |= {"ranks": 2, "params": "nvme", "schedule": "backward", "order": "vertical", "buffers": 3}
FROZEN_AND_TRAINED |= {"stage": 3, "uses": None, "checkpointing": False, "overflows": False}
FROZEN_AND_TRAINED |= {"aio": (PYTHON_ENGINE, 1, "64KiB")}


SOME = [
    pytest.param(1, 6, 1, 600, {}, marks=pytest.mark.timeout(600)),
    pytest.param(3, 0, 1, 600, {"in_place": True}, marks=pytest.mark.timeout(600)),
]
ALL = pytest.param(7, 1500, 400, 14400, {}, marks=[pytest.mark.slow, pytest.mark.timeout(14400)])


@SHARDS_CODES
@pytest.mark.parametrize(("seed", "runs", "kills", "patience", "fixed"), [*SOME, ALL])
def test_drawn_runs_have_the_bits_of_a_run_in_memory(drive, seed, runs, kills, patience, fixed):
    how = ("--runs", runs, "--kills", kills, "--seed", seed, "--fixed", fixed)
    said = run_child(CHILD, drive, *how, timeout=patience)
    report = json.loads(said.splitlines()[-1])
    assert report["kills"] >= kills, said
    assert report["refused"] <= report["runs"] // 10, said


def test_drawn_runs_find_a_buffer_that_is_given_away_while_a_view_of_it_is_out(drive):
    with pytest.raises(AssertionError, match="of which a view is out"):
        run_child(CHILD, drive, "--mistake", "--case", FROZEN_AND_TRAINED, timeout=280)
