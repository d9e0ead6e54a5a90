"""All checks of `offload verify`, one after the other, in a process that is replaced when one broke it."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from nvme_offload.perf.doctor.command import examine
from nvme_offload.perf.doctor.findings import Level
from nvme_offload.perf.measure.child import Child, ChildFailedError, Send, Work
from nvme_offload.perf.verify import growth, process, training, updates
from nvme_offload.perf.verify.outcome import Check, Found, LeftOutError, Outcome, Site, WrongError


def work(told: Iterator[Any], send: Send) -> None:
    """Make the checks that are named, after a site."""
    # torch's deterministic algorithms ask for this on CUDA, before its context is made.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    site: Site = next(told)
    for name in told:
        send("outcome", outcome_of(CHECKS[name], site))


def outcome_of(check: Check, site: Site) -> Outcome:
    """Return what a check comes to. What it raises besides is for the caller: the process may be broken."""
    began = time.monotonic()
    try:
        found = check.run(site)
    except WrongError as error:
        return check.outcome("wrong", str(error), began)
    except LeftOutError as error:
        return check.outcome("left out", str(error), began)
    return check.outcome("ok", found.text, began, found.values)


WORK: Work = work  # the work of the child


def verify(site: Site, names: Sequence[str], say: Callable[[str], None]) -> Iterator[Outcome]:
    """Make checks, and give what each came to; `say` is called with the name of a check that begins."""
    with tempfile.TemporaryDirectory(prefix="verify-") as folder, ExitStack() as stack:
        child: Child | None = None
        for name in names:
            say(name)
            if child is None:
                child = stack.enter_context(Child(WORK, Path(folder) / "log"))
                child.tell(site)
            outcome = _asked(child, CHECKS[name], Path(folder) / "log")
            if outcome.status == "failed":
                stack.close()
                child = None
            yield outcome


def _asked(child: Child, check: Check, log: Path) -> Outcome:
    began = time.monotonic()
    child.tell(check.name)
    try:
        outcome: Outcome = child.expect("outcome", within=check.limit)
        return outcome
    except ChildFailedError as error:
        said = log.read_text(errors="replace").strip().splitlines()[-12:]
        return check.outcome("failed", str(error), began, {"log": said})


def machine(site: Site) -> Found:
    """Return what `offload doctor` finds: an error of it would stop a run when it starts."""
    report = examine([site.folder])
    if report.level is Level.ERROR:
        errors = [each for group in report.groups for each in group.findings if each.level is Level.ERROR]
        raise WrongError("; ".join(f"{each.check}: {each.found}" for each in errors))
    return Found(report.summary(), report.as_dict())


CHECKS = {
    check.name: check
    for check in (
        Check("machine", "nothing stands in the way", machine, 120),
        Check("update", "every rule has the CPU's bits", updates.update, 240),
        Check("clipping", "one norm, one factor", updates.clipping, 180),
        Check("scaler", "GradScaler changes nothing, and skips", updates.scaler, 180),
        Check("swapper", "tensors come back as they were", updates.swapper, 120),
        Check("races", "whoever must wait waits", process.races, 240),
        Check("gradients", "off the device, runs have the CPU's bits", training.gradients, 300),
        Check("parameters", "off the device, they are gathered with the CPU's bits", training.parameters, 300),
        Check("growth", "more layers take no more of the device", growth.growth, 120),
        Check("precisions", "NVMe and memory have the same bits", training.precisions, 300),
        Check("birth", "from meta, weights are those of a construction", training.birth, 180),
        Check("compiled", "blocks are compiled, and have the same bits", process.compiled, 480),
        Check("process", "default devices, forks and refusals change nothing", process.process, 180),
        Check("checkpoint", "what is saved goes on, on the CPU too", training.checkpoint, 240),
        Check("ranks", "several have the bits of one", process.ranks, process.LIMIT + 30),
    )
}
