"""All checks of `offload verify`, one after the other, in a process that is replaced when one broke it."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from nvme_offload.perf.doctor.command import examine
from nvme_offload.perf.doctor.findings import Level
from nvme_offload.perf.measure.child import Child, ChildFailedError, Send, Work
from nvme_offload.perf.verify import engines, growth, optimizers
from nvme_offload.perf.verify.outcome import LeftOutError, Outcome, Site, WrongError

LIMIT = 480.0  # seconds after which a check counts as failed


def machine(site: Site) -> str:
    """Nothing stands in the way, as `offload doctor` finds: an error of it would stop a run when it starts."""
    report = examine([site.folder])
    if report.level is Level.ERROR:
        errors = [each for group in report.groups for each in group.findings if each.level is Level.ERROR]
        raise WrongError("; ".join(f"{each.check}: {each.found}" for each in errors))
    return report.summary()


CHECKS: dict[str, Callable[[Site], str]] = {
    check.__name__: check
    for check in (
        machine,
        *(optimizers.update, optimizers.clipping, optimizers.scaler, optimizers.swapper, optimizers.races),
        *(engines.gradients, engines.parameters, growth.growth, engines.precisions, engines.birth, engines.compiled),
        *(optimizers.process, engines.checkpoint, engines.ranks),
    )
}
"""Each returns what it found where all is as its docstring promises."""


def work(told: Iterator[Any], send: Send) -> None:
    """Make the checks that are named, after a site."""
    # torch's deterministic algorithms ask for this on CUDA, before its context is made.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    site: Site = next(told)
    for name in told:
        send("outcome", outcome_of(name, site))


WORK: Work = work  # the work of the child


def outcome_of(name: str, site: Site) -> Outcome:
    """Return what a check comes to. What it raises besides is for the caller: the process may be broken."""
    began = time.monotonic()
    try:
        found: dict[str, Any] = {"status": "ok", "found": CHECKS[name](site)}
    except (WrongError, LeftOutError) as error:
        found = {"status": "wrong" if isinstance(error, WrongError) else "left out", "found": str(error)}
    return Outcome(name=name, seconds=time.monotonic() - began, **found)


def verify(site: Site, names: Sequence[str], say: Callable[[str], None]) -> Iterator[Outcome]:
    """Make checks, and give what each came to; `say` is called with the name of a check that begins."""
    with TemporaryDirectory(prefix="verify-") as folder, ExitStack() as stack:
        log, child = Path(folder) / "log", None
        for name in names:
            say(name)
            if child is None:
                child = stack.enter_context(Child(WORK, log))
                child.tell(site)
            began = time.monotonic()
            child.tell(name)
            try:
                yield child.expect("outcome", within=LIMIT)
            except ChildFailedError as error:
                stack.close()
                child, said = None, tuple(log.read_text(errors="replace").strip().splitlines()[-12:])
                took = time.monotonic() - began
                # The file goes with its folder: its last line is in the report.
                text = ": ".join([str(error).removesuffix(f"; see {log}"), *said[-1:]])
                yield Outcome(name=name, status="failed", found=text, seconds=took, log=said)
