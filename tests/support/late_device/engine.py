"""A training engine on the stand-in, in a process of its own.

How many devices may run backward is fixed by the first backward of a process, so the stand-in has to be there by then.
"""

import gc
import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from nvme_offload import get_full_grad, get_full_optimizer_state, get_full_param, initialize
from nvme_offload.optim.kernels import KernelPool, tile_weights
from nvme_offload.optim.step.begin import Inbox
from nvme_offload.optim.step.job import StepJob
from nvme_offload.optim.zero.meshes import default_mesh
from tests.support.late_device.module import install, late_device
from tests.support.late_device.mutations import MUTATIONS
from tests.support.late_device.queues import LATE
from tests.support.tiers import be_eager, wait_for_guessed
from tests.support.views_out import watch

WIDTH, LAYERS, STEPS = 48, 4, 2
_COUNTED = ("device_state_bytes", "updates_behind", "updates_in_backward", "updates_taken_back")


class Model(torch.nn.Module):
    """Layers of one size; with tied ends, recomputed in backward, or slow there, where a test asks for that."""

    def __init__(
        self, num_layers: int, *, width: int = WIDTH, tied: bool = False, recomputed: bool = False, slow: bool = False
    ) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(width, width, bias=False) if tied else torch.nn.Identity()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(num_layers))
        self.head = torch.nn.Linear(width, width, bias=False) if tied else torch.nn.Identity()
        self.tied = tied
        self.recomputed = recomputed
        self.slow = slow
        self.tie()

    def tie(self) -> None:
        """Once more after ``Module.to``, which exchanges each parameter of a device that torch does not know itself."""
        if self.tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[samples, width] to the same."""
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputed else layer(x)
            if self.slow and x.requires_grad and x.device.type == "late":
                x.register_hook(lambda grad: time.sleep(0.05))  # others have time for what is final
        return self.head(x)


def train(device: str, folder: str, section: dict[str, Any]) -> dict[str, Any]:
    """Losses, norms and a digest of all that was trained; bytes of the device at several moments, and waits for it.

    DRIVE in the section is the folder; its ``model`` is for `Model`, and ``meta`` there says where it is made; if it is
    ``ahead``, the worker looks at gradients when the host has handed in all of them; if it ``parks``, the engine on the
    stand-in does after each step, and ``parked`` has the bytes that the device has of it then;
    ``refusals`` requests to page-lock memory are refused; losses of each step are multiplied by one of ``scales``.
    """
    section = json.loads(json.dumps(section).replace("DRIVE", folder))
    LATE.refusals = section.pop("refusals", 0) * (device == "late")
    LATE.size_bytes = section.pop("size_bytes", 1 << 40)
    how = {"num_layers": LAYERS, **section.pop("model", {})}
    scales, guesses = section.pop("scales", [1] * STEPS), section.get("overlap_step") == "speculate"
    by_blocks, is_ahead = section.get("micro_batch_order") == "vertical", section.pop("ahead", False)
    parked = [] if section.pop("parks", False) and device == "late" else None
    if guesses:
        be_eager(pytest.MonkeyPatch())
    if device == "cpu":
        section.pop("device_budget", None)  # it is for a device's memory
    is_born, mesh = how.pop("meta", False), None
    gc.collect()
    tile_weights.cache_clear()
    before_bytes = LATE.live_bytes  # of what was trained before
    torch.manual_seed(0)
    if is_born:
        with torch.device("meta"):
            model = Model(**how)
        mesh = default_mesh(device)
    else:
        model = Model(**how).to(device)
        model.tie()
    LATE.peak_bytes = 0
    losses, norms, growth, waits, number, summed, worked = [], [], [], [], 0, [], []
    with _noting_sums(summed), _noting_work(worked, is_ahead), initialize(model, section, mesh=mesh) as engine:
        del model
        born_bytes, LATE.peak_bytes = LATE.peak_bytes, 0
        LATE.copies_of.clear()
        for step, scale in enumerate(scales):
            waits.append(-LATE.num_waits)
            if by_blocks:
                before = LATE.live_bytes
                numbers = range(number, number := number + engine.gradient_accumulation_steps)
                batches = [torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(each)) for each in numbers]
                losses += engine.accumulate(lambda x: engine(x.to(device)).float().square().mean() * scale, batches)  # noqa: B023
                growth.append(LATE.live_bytes - before - 4 * len(batches))  # the losses stay
                engine.step()
            for _ in range(0 if by_blocks else engine.gradient_accumulation_steps):
                generator = torch.Generator().manual_seed(number)
                batch = torch.randn(8, how.get("width", WIDTH), generator=generator).to(device)
                before, number = LATE.live_bytes, number + 1
                loss = engine(batch).float().square().mean() * scale
                engine.backward(loss)
                losses.append(loss.detach())
                del loss
                growth.append(LATE.live_bytes - before)
                if guesses:
                    wait_for_guessed(engine.optimizer)
                _wait_for_an_update(worked, 10 * is_ahead)
                # Who guesses takes back for a reader, and who does not would refuse it.
                if section.get("overlap_step") != "backward" and not (guesses and step % 4):
                    with torch.no_grad():
                        losses.append(engine(batch).float().square().mean())  # somebody else reads, too
                if step == 1 and section["offload_gradients"]["device"] != "none":
                    losses.append(get_full_grad(engine.optimizer.param_groups[0]["params"][0]).float().sum())
                    summed.append("all have landed")
                engine.step()
                del batch
                summed.append("step() is over")
                worked.append("step")
            _park(engine, parked, losses, before_bytes)
            waits[-1] += LATE.num_waits
            norms.append(engine.get_global_grad_norm())
        peak_bytes = LATE.peak_bytes
        stats, num_copies = engine.optimizer.stats(), LATE.copies_of[True]
        digest = hashlib.sha256()
        for parameter in engine.module.parameters():
            for values in (get_full_param(parameter), get_full_optimizer_state(parameter, "exp_avg_sq")):
                digest.update(values.numpy().tobytes())
    found = {"losses": [float(each) for each in losses], "norms": norms, "digest": digest.hexdigest(), "growth": growth}
    found |= {"born_bytes": born_bytes - before_bytes, "peak_bytes": peak_bytes - before_bytes, "waits": waits}
    found |= {"parked": parked, "summed": summed, "worked": worked, "copies_where_it_computes": num_copies}
    return found | {"skipped": stats.skipped_steps, **{name: getattr(stats, name) for name in _COUNTED}}


def _park(engine: Any, parked: list[int] | None, losses: list[torch.Tensor], before_bytes: int) -> None:
    """Park where that is asked for; note the bytes of the device in use then, but for those before and of losses."""
    if parked is not None:
        engine.park()
        others = sum(each.untyped_storage().nbytes() for each in losses if each.device.type == "late")
        parked.append(LATE.live_bytes + LATE.waiting_bytes - before_bytes - others)


def _wait_for_an_update(names: list[str], seconds: float) -> None:
    """Wait in the first step, so long at most, until the worker has done what it can."""
    latest = time.monotonic() + seconds
    while not {"update", "step"} & {*names} and time.monotonic() < latest:
        time.sleep(0.01)


def _noting_sums(names: list[str]) -> Any:
    """Return a context in which the thread's name is noted whenever the CPU sums squares of a gradient."""
    take_sums = KernelPool.tile_sq_sums

    def noted(pool: KernelPool, *grads: torch.Tensor) -> torch.Tensor:
        names.append(threading.current_thread().name)
        return take_sums(pool, *grads)

    return patch.object(KernelPool, "tile_sq_sums", noted)


@contextmanager
def _noting_work(names: list[str], is_ahead: bool) -> Iterator[None]:
    """Note what a worker does in backward: "gradient" for one that it takes in, "update" for a subgroup."""
    take_in, update = Inbox.take_in, StepJob._update

    def taken(inbox: Inbox, record: Any, **how: Any) -> bool:
        if is_ahead and names[-1:] in ([], ["step"]) and inbox._arrived:
            time.sleep(0.3)
        names.extend(["gradient"] * (found := take_in(inbox, record, **how)))
        return found

    def updated(job: StepJob, *given: Any) -> None:
        names.append("update")
        update(job, *given)

    with patch.object(Inbox, "take_in", taken), patch.object(StepJob, "_update", updated):
        yield


def short_of_memory(section: dict[str, Any], mutation: str = "") -> dict[str, Any]:
    """Train with a device that refuses one request for memory in each step, one after the other, also of a copy.

    Requests of autograd's threads are left out, and others by a ``stride`` of the section. What failed is done once
    more. Returns digests of the weights on the CPU and on the stand-in, and how many requests were refused.
    """
    install()
    with late_device(), MUTATIONS[mutation]() if mutation else nullcontext():
        found, num_steps = _trained_short_of_memory("late", section)
    expected, _ = _trained_short_of_memory("cpu", section, num_steps)
    return {"expected": expected, "found": found, "refused": num_steps - 1}  # the last one found no more


def _trained_short_of_memory(device: str, section: dict[str, Any], num_steps: int = 0) -> tuple[str, int]:
    torch.manual_seed(0)
    stride = section.get("stride", 1)
    left_out = ("stride", "device_budget") if device == "cpu" else ("stride",)
    section = {key: value for key, value in section.items() if key not in left_out}
    with (
        tempfile.TemporaryDirectory() as folder,
        initialize(Model(3).to(device), json.loads(json.dumps(section).replace("DRIVE", folder))) as engine,
    ):
        number, was_refused = 0, True
        while was_refused if device == "late" else number < num_steps:
            batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)).to(device)
            LATE.requests_left = (1 + number * stride) * (device == "late")
            number += 1
            _once_more(engine, lambda: engine.backward(engine(batch).float().square().mean()))  # noqa: B023
            _once_more(engine, engine.step)
            _once_more(engine, engine.optimizer.synchronize)
            was_refused, LATE.requests_left = not LATE.requests_left, 0
        digest = hashlib.sha256()
        for parameter in engine.module.parameters():
            digest.update(get_full_param(parameter).numpy().tobytes())
    return digest.hexdigest(), number


def _once_more(engine: Any, work: Any) -> Any:
    """Do it, and what a refusal of memory stopped."""
    try:
        return work()
    except torch.OutOfMemoryError:
        if engine.optimizer.has_unfinished_step:
            engine.optimizer.finish_step()
        return work()


def trained_by_a_rank(
    rank: int, world_size: int, sections: list[dict[str, Any]], folder: str, mutation: str = ""
) -> list[list[dict[str, Any]]]:
    """Return what each section gives on the CPU and on the stand-in, with a drive in `folder` that ranks share.

    Several ranks get groups as `initialize` makes them; one alone has it make its own.
    """
    install()
    found, mistake = [], MUTATIONS[mutation] if mutation else nullcontext
    for number, section in enumerate(sections):
        each = []
        for device in ("cpu", "late"):
            is_late, drive = device == "late", Path(folder, f"{number}{device}")
            drive.mkdir(exist_ok=True)
            dist.destroy_process_group()
            if world_size > 1:
                store = dist.FileStore(f"{drive}.store", world_size)
                dist.init_process_group("cpu:gloo,late:gloo", rank=rank, world_size=world_size, store=store)
            else:
                os.environ.pop("RANK", None), os.environ.pop("WORLD_SIZE", None)
            with (
                late_device() if is_late else nullcontext(),
                mistake() if is_late else nullcontext(),
                pytest.MonkeyPatch.context() as patched,
            ):
                watch(patched)
                each.append(train(device, str(drive), section))
        found.append(each)
    return found
