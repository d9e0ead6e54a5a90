"""Checkpoints of runs on the CPU and on the stand-in, in a process of its own: see `engine.py` beside it."""

import hashlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from nvme_offload import get_full_optimizer_state, get_full_param, initialize
from tests.support.late_device.module import install, late_device

WIDTH, LAYERS = 256, 6  # each layer is a subgroup and a piece of the next one


def run(device: str, folder: Path, section: dict[str, Any], start: Path | None) -> dict[str, Any]:
    """Two steps, or those that the checkpoint in `start` has; save; another step.

    DRIVE in the section is the folder. Returns digests of each file of the checkpoint and of all that was trained at
    the end, and where the state was.
    """
    (folder / "drive").mkdir(parents=True)
    section = json.loads(json.dumps(section).replace("DRIVE", str(folder / "drive")))
    is_background = section["zero_optimization"]["offload_optimizer"].get("durable", False)
    if device == "cpu":
        section.pop("device_budget", None)
    torch.manual_seed(0 if start is None else 1)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(device)
    with initialize(model, section) as engine:
        if start is None:
            _step(engine, device, 2)
        else:
            engine.load_checkpoint(start)
        engine.save_checkpoint(folder / "saved", background=is_background)
        _step(engine, device, 1)  # behind the save, where that is in the background
        engine.wait_for_checkpoint()
        stats = engine.optimizer.stats()
        digest = hashlib.sha256()
        for parameter in engine.module.parameters():
            for values in (get_full_param(parameter), get_full_optimizer_state(parameter, "exp_avg_sq")):
                digest.update(values.numpy().tobytes())
    files = {
        str(path.relative_to(folder / "saved")): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((folder / "saved").rglob("*"))
        if path.is_file()
    }
    kept = (stats.device_state_bytes, stats.host_state_bytes, stats.state_bytes)
    return {"files": files, "digest": digest.hexdigest(), "kept": kept}


def _step(engine: Any, device: str, count: int) -> None:
    for _ in range(count):
        values = torch.Generator().manual_seed(engine.global_steps)
        loss = engine(torch.randn(8, WIDTH, generator=values).to(device)).float().square().mean()
        engine.backward(loss)
        engine.step()


def main(folder: str, sections: list[dict[str, Any]]) -> None:
    """Print what each section gives on either device, and on either with the checkpoint of the other."""
    install()
    found = []
    for number, section in enumerate(sections):
        results: dict[str, Any] = {}
        for device, origin in (("cpu", None), ("late", None), ("cpu", "late"), ("late", "cpu")):
            at = Path(folder, str(number))
            start = at / f"{origin} from None" / "saved" if origin else None
            with late_device() if device == "late" else nullcontext():
                name = f"{device} from {origin}"
                results[name] = run(device, at / name, section, start)
        found.append(results)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
