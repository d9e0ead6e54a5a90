"""All checks, in their order: first what costs little and says most."""

from __future__ import annotations

from nvme_offload.perf.doctor.command import examine
from nvme_offload.perf.doctor.findings import Level
from nvme_offload.perf.verify import process, races, ranks, rates, training, updates
from nvme_offload.perf.verify.outcome import Check, Found, Site, WrongError


def machine(site: Site) -> Found:
    """What `offload doctor` finds: an error of it would stop a run when it starts."""
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
        Check("races", "whoever must wait waits", races.races, 240),
        Check("gradients", "off the device, runs have the CPU's bits", training.gradients, 300),
        Check("parameters", "off the device, they are gathered with the CPU's bits", training.parameters, 300),
        Check("precisions", "NVMe and memory have the same bits", training.precisions, 300),
        Check("birth", "from meta, weights are those of a construction", training.birth, 180),
        Check("compiled", "blocks are compiled, and have the same bits", process.compiled, 480),
        Check("process", "default devices, forks and refusals change nothing", process.process, 180),
        Check("checkpoint", "what is saved goes on, on the CPU too", training.checkpoint, 240),
        Check("ranks", "several have the bits of one", ranks.ranks, ranks.LIMIT + 30),
        Check("copies", "between host and device", rates.copies, 120, measures=True),
        Check("drive", "the drive, by offload bench", rates.drive, 300, measures=True),
        Check("iteration", "the step beside forward and backward", rates.iteration, 600, measures=True),
    )
}
