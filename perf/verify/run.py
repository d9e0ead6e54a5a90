"""One call of `offload verify`: checks one after the other, in a process that is replaced when one broke it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from nvme_offload.perf.measure.child import Child, ChildFailedError, Send, Work
from nvme_offload.perf.verify.checks import CHECKS
from nvme_offload.perf.verify.outcome import Check, Found, LeftOutError, Outcome, Site, WrongError

_WITHOUT_RANDOM_ORDER = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""What torch's deterministic algorithms ask for on CUDA, before its context is made."""


def work(told: Iterator[Any], send: Send) -> None:
    """Make the checks that are named, after a site."""
    os.environ.update(_WITHOUT_RANDOM_ORDER)
    torch.use_deterministic_algorithms(True, warn_only=True)
    site: Site = next(told)
    for name in told:
        send("outcome", outcome_of(CHECKS[name], site))


def outcome_of(check: Check, site: Site) -> Outcome:
    """What a check comes to in this process. What it raises besides is for the caller: the process may be broken."""
    start = time.monotonic()

    def outcome(status: Any, found: str, values: Mapping[str, Any]) -> Outcome:
        seconds = time.monotonic() - start
        return Outcome(name=check.name, text=check.text, status=status, found=found, seconds=seconds, values=values)

    try:
        found: Found = check.run(site)
    except WrongError as error:
        return outcome("wrong", str(error), {})
    except LeftOutError as error:
        return outcome("left out", str(error), {})
    return outcome("ok", found.text, found.values)


WORK: Work = work
"""What the child does."""


def verify(site: Site, names: Sequence[str], say: Callable[[str], None]) -> Iterator[Outcome]:
    """Make checks, and give what each came to.

    Args:
        site: where.
        names: of the checks.
        say: called with the name of a check that begins.
    """
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
    start = time.monotonic()
    child.tell(check.name)
    try:
        outcome: Outcome = child.expect("outcome", within=check.limit)
        return outcome
    except ChildFailedError as error:
        said = log.read_text(errors="replace").strip().splitlines()[-12:]
        return Outcome(
            name=check.name,
            text=check.text,
            status="failed",
            found=str(error),
            seconds=time.monotonic() - start,
            values={"log": said},
        )
