"""Saved tensors of a model on the stand-in, in a process of its own: see `engine.py` beside it."""

import gc
import hashlib
import json
import sys
import tempfile
from contextlib import nullcontext
from typing import Any

import torch

from nvme_offload import ActivationSwapper
from tests.support.activations import Attending, Layers, batch, section
from tests.support.late_device.module import install, late_device
from tests.support.late_device.mutations import MUTATIONS
from tests.support.late_device.queues import LATE, run_all

MODELS = {
    "plain": Layers,
    "in place": lambda depth: Layers(depth, inplace=True),
    "checkpointed": lambda depth: Layers(depth, checkpointed="not reentrant"),
    "attention": Attending,
}


def run(device: str, path: str, case: dict[str, Any]) -> dict[str, Any]:
    """The digest of gradients of two iterations, and what was moved: nothing on the CPU.

    The second iteration is measured: waits of its forward and of its backward, the most memory that it takes on the
    device, and the most that is page-locked for it.
    """
    torch.manual_seed(0)
    kind, depth, retained = case.get("kind", "plain"), case.get("depth", 8), case.get("retained", False)
    model = MODELS[kind](depth).to(device)
    place = path if device == "late" and case["device"] == "nvme" else None
    more = {key: case[key] for key in ("keep", "host_budget") if key in case}
    digest, found, losses = hashlib.sha256(), {}, []
    with ActivationSwapper(section(place, **more), model=model) as swapper:
        for number in range(2):
            gc.collect()
            run_all()
            model.zero_grad(set_to_none=False)
            start, LATE.peak_bytes, waits = LATE.live_bytes, 0, LATE.num_waits
            x = batch(number).to(device).requires_grad_()
            with swapper.saving(), torch.autocast(device, torch.bfloat16, enabled=case.get("autocast", False)):
                loss = model(x).float().square().mean()
                if case.get("dropped"):
                    model(x)  # and no backward
            found |= {"forward waits": LATE.num_waits - waits, "copies": LATE.num_copies}
            if retained:
                loss.backward(retain_graph=True)
            loss.backward()
            found |= {"waits": LATE.num_waits - waits, "copies in backward": LATE.num_copies - found["copies"]}
            losses.append(loss.detach())
            del loss, x
            found |= {"growth": LATE.live_bytes - start, "peak": LATE.peak_bytes - start}
        for tensor in [*losses, *(param.grad for param in model.parameters())]:
            digest.update(tensor.cpu().numpy().tobytes())
        run_all()
        found["pinned"] = sum(LATE.pinned.values())
        stats = swapper.stats()
        found |= {name: getattr(stats, name) for name in ("num_kept", "held_bytes", "saved_bytes", "written_bytes")}
        found |= {name: getattr(stats, name) for name in ("num_saved", "num_reads", "num_reads_foreseen", "read_bytes")}
        with swapper.saving():
            model(batch().to(device))  # the end comes with copies under way
    return found | {"digest": digest.hexdigest()}


def main(cases: list[dict[str, Any]], mutation: str) -> None:
    """Print what each case gives on the CPU and on the stand-in."""
    install()
    gc.freeze()  # a collection looks at what cases make, and not at all of torch
    found = []
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            if case.get("kind") == "attention":  # which the stand-in computes by other operators
                with late_device():
                    expected = run("late", folder, case | {"device": "cpu", "host_budget": 4096})
            else:
                expected = run("cpu", folder, case)
            with late_device(), MUTATIONS[mutation]() if mutation else nullcontext():
                found.append([expected, run("late", folder, case)])
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
