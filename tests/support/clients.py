"""What works with whose package, as its tests say it: the rows of docs/clients.md, and the optimizer beside torch's."""

import pytest
import torch

from nvme_offload import FaultSpec, OffloadAdamW
from tests.support.training import faulty_drive, section

UNCHANGED, WITH_A_LINE, NOT_AT_ALL = "unchanged", "with a line", "not at all"
HIDES = "`overlap_with(model)` hides its steps"
HIDES_SHARDS = "`split_parameters(model)` hides its steps"
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


def client(package, what, works=UNCHANGED, remark=""):
    """Mark a test that shows how something of a package works, and how much has to be written for it.

    A test of what does not work at all passes where it is refused in words.
    """
    return pytest.mark.client(package, what, works, remark)


def assert_as_torch(run, folder):
    """What `run(make, folder)` returns is within rounding the same with torch's AdamW and with ours.

    `make(model)` makes the optimizer of a model. All updates of ours are behind their steps, on a drive that is late:
    whoever does not wait finds old weights.
    """
    made = []

    def ours(model):
        made.append(OffloadAdamW(model.parameters(), **SETTINGS, offload=section(folder, buffers=2)))
        made[-1].overlap_with(model)
        return made[-1]

    expected = run(lambda model: torch.optim.AdamW(model.parameters(), **SETTINGS), folder / "theirs")
    with faulty_drive(FaultSpec(seed=1, delay=1.0, max_delay_us=5_000)):
        found = run(ours, folder / "ours")
    for optimizer in made:
        optimizer.synchronize()
        stats = optimizer.stats()
        assert stats.updates_behind >= 2 * stats.num_subgroups > 0
        optimizer.close()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
