"""A training engine on the stand-in, in a process of its own.

How many devices may run backward is fixed by the first backward of a process, so the stand-in has to be there by then.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from nvme_offload import get_full_optimizer_state, get_full_param, initialize
from tests.support.late_device.module import install, late_device
from tests.support.late_device.mutations import MUTATIONS
from tests.support.late_device.queues import LATE

WIDTH, LAYERS, STEPS = 48, 4, 3


def train(device: str, folder: str, section: dict[str, Any]) -> dict[str, Any]:
    """Losses, norms and a digest of all that was trained; bytes of the device after backward and before forward."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(device)
    losses, norms, growth, number = [], [], [], 0
    with initialize(model, json.loads(json.dumps(section).replace("DRIVE", folder))) as engine:
        for _ in range(STEPS):
            for _ in range(engine.gradient_accumulation_steps):
                batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)).to(device)
                before, number = LATE.live_bytes, number + 1
                loss = engine(batch).float().square().mean()
                engine.backward(loss)
                losses.append(loss.detach())
                del loss
                growth.append(LATE.live_bytes - before)
                with torch.no_grad():
                    losses.append(engine(batch).float().square().mean())  # somebody else reads, too
                engine.step()
            norms.append(engine.get_global_grad_norm())
        digest = hashlib.sha256()
        for parameter in engine.module.parameters():
            for values in (get_full_param(parameter), get_full_optimizer_state(parameter, "exp_avg_sq")):
                digest.update(values.numpy().tobytes())
    return {"losses": [float(each) for each in losses], "norms": norms, "digest": digest.hexdigest(), "growth": growth}


def main(sections: list[dict[str, Any]], mutation: str) -> None:
    """Print what each section gives on the CPU and on the stand-in."""
    install()
    found = []
    for section in sections:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "drive").mkdir()
            drive = str(Path(folder, "drive"))
            expected = train("cpu", drive, section)
            with late_device(), MUTATIONS[mutation]() if mutation else nullcontext():
                found.append([expected, train("late", drive, section)])
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
