"""A plug-in of pytest that puts our optimizers into `torch.optim`, so that files of torch's own cases run with them.

python -m pytest -c /dev/null -p tests.support.torch_optim PATH/test_lrscheduler.py PATH/test_swa_utils.py
"""

import tempfile
from collections import Counter

import torch

import nvme_offload
from tests.support.training import section

made: Counter[str] = Counter()
folder = tempfile.TemporaryDirectory(prefix="torch-optim-")


def replaced(name):
    """A class of the same name, which pickle finds in the same module, with its state on NVMe."""
    ours = getattr(nvme_offload, f"Offload{name}")

    def init(self, *args, **options):
        made[name] += 1
        ours.__init__(self, *args, **options, offload=section(folder.name))

    return type(name, (ours,), {"__init__": init, "__module__": "torch.optim"})


for name in ("Adagrad", "Adam", "AdamW", "Muon", "SGD"):
    setattr(torch.optim, name, replaced(name))


def pytest_terminal_summary(terminalreporter):
    terminalreporter.line(f"optimizers of ours that were made: {dict(made)}")
    folder.cleanup()
