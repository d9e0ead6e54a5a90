"""The process in which checks are made: one that breaks the device, or ends its process, costs itself alone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from nvme_offload.perf.measure.child import Send
from nvme_offload.perf.verify.outcome import Check, Found, LeftOutError, Outcome, Site, WrongError

_WITHOUT_RANDOM_ORDER = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""What torch's deterministic algorithms ask for on CUDA, before its context is made."""


def work(told: Iterator[Any], send: Send) -> None:
    """Make the checks that are named, after a site."""
    os.environ.update(_WITHOUT_RANDOM_ORDER)
    import torch  # seconds, in which SIGTERM already works

    from nvme_offload.perf.verify.checks import CHECKS

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
