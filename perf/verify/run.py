"""One call of `offload verify`: checks one after the other, in a process that is replaced when one broke it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from nvme_offload.perf.measure.child import Child, ChildFailedError, Work
from nvme_offload.perf.verify.checks import CHECKS
from nvme_offload.perf.verify.child import work
from nvme_offload.perf.verify.outcome import Check, Outcome, Site

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
