"""One call of `offload bench`: what it measures, checked, and the measuring itself."""

import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nvme_offload.offload.progress import progress, say
from nvme_offload.offload.units import GiB
from nvme_offload.perf.bench.fio import Fio, find_fio
from nvme_offload.perf.bench.report import describe_latest, summary
from nvme_offload.perf.measure.command_line import KnobError, Rw, Settings, check_settings, check_space
from nvme_offload.perf.measure.comparison import compared
from nvme_offload.perf.measure.machine import environment
from nvme_offload.perf.measure.workloads import RawTarget, Sample

MAX_QUADS = 10_000
LONGEST_PASS = 4 * GiB  # a long run has many passes, so that a drive that becomes slow is seen


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One call of the command measures this."""

    settings: Settings
    directions: tuple[Rw, ...]
    runtime: float  # seconds of passes in each direction; at least one pass
    quads: int = 0  # quads against fio in each direction; 0 leaves fio out


def check(plan: Plan) -> None:
    """Find everything that cannot work before anything starts."""
    settings = plan.settings
    check_settings(settings)
    if not 0 <= plan.quads <= MAX_QUADS:
        raise KnobError("quads", f"{plan.quads} is out of range; choose 0 to {MAX_QUADS}")
    if not plan.runtime >= 0:  # so that nan is refused, too
        raise KnobError("runtime", f"{plan.runtime} seconds is negative, or no number")
    if plan.quads:
        if settings.ioengine == "null":
            raise KnobError("ioengine", "null moves no bytes: use it without --compare-fio")
        find_fio()
        if len(settings.paths) > 1:
            raise KnobError("path", "--compare-fio works on one path: fio does not stripe as we do")
    for path, needed in space_needed(plan).items():
        check_space(path, needed)


def space_needed(plan: Plan) -> dict[Path, int]:
    """Bytes on each path: the region, and fio's own file."""
    settings = plan.settings
    region = settings.size // len(settings.paths)
    return dict.fromkeys(settings.paths, region + (settings.size if plan.quads else 0))


def run_bench(plan: Plan) -> dict[str, Any]:
    """Everything the plan asks for, as the document that ``--json`` prints."""
    check(plan)
    document: dict[str, Any] = {
        "config": {
            **asdict(plan),
            "settings": asdict(plan.settings) | {"paths": [str(p) for p in plan.settings.paths]},
        },
        "environment": environment(list(plan.settings.paths)),
        "results": {},
    }
    with RawTarget(plan.settings) as target:
        document["engine"] = {
            "name": target.engine.engine.name,
            "reason": target.engine.reason,
            "direct": target.direct,
        }
        say("writing and verifying ...")
        target.prepare()
        document["verified"] = plan.settings.ioengine != "null"
        for rw in plan.directions:
            document["results"][rw] = measured_passes(target, plan, rw)
        if plan.quads:
            document["comparison"] = compare_with_fio(target, plan)
    return document


def measured_passes(target: RawTarget, plan: Plan, rw: Rw) -> dict[str, Any]:
    """The result of one direction: passes over the region until the time is used up, and what they come to."""
    samples: list[Sample] = []
    size_bytes = min(plan.settings.size, LONGEST_PASS)
    target.run(rw, size_bytes)  # not counted: the first pass in a direction also warms up
    deadline = time.monotonic() + plan.runtime
    say(f"{rw} ...")
    with progress(rw, plan.runtime) as advance:
        while not samples or time.monotonic() < deadline:
            samples.append(target.run(rw, size_bytes))
            advance(samples[-1].seconds)
    return {
        "samples": [asdict(sample) | {"bw_bytes": sample.bw_bytes} for sample in samples],
        "summary": summary(samples, plan.settings),
    }


def compare_with_fio(target: RawTarget, plan: Plan) -> dict[str, Any]:
    """Quads and controls in every direction, each said as soon as it is there."""
    document: dict[str, Any] = {}
    size_bytes = plan.settings.size  # of a pass: each byte of the region once
    with Fio(plan.settings) as fio:
        document |= {"version": fio.version, "command": fio.command("mixed", size_bytes)[1:]}
        for rw in plan.directions:

            def ours(rw: Rw = rw) -> float:
                return target.run(rw, size_bytes).bw_bytes

            comparisons = compared(rw, ours, partial(fio.run, rw, size_bytes), plan.quads)
            with progress(f"{rw} beside fio", plan.quads) as advance:
                for comparison in comparisons:
                    say(describe_latest(comparison))
                    advance(1)
            document[rw] = comparison.to_dict()
    return document
