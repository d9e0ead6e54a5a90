"""The section that suits a model and a machine: `offload init` writes it, `offload plan` plans it if none is given.

One space is searched whole. Its axes are where optimizer state, gradients and parameters are (five residencies), what
is kept for backward and where, and the order of micro-batches. What fits is a matter of memory alone, which takes some
milliseconds each. Of what fits the fastest is taken where rates are known, and else what moves the fewest bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from nvme_offload.offload.config.section import OffloadConfig, SectionLike
from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.progress import tracked
from nvme_offload.offload.storage.tier_plan import TierPlan
from nvme_offload.offload.units import MiB, format_bytes
from nvme_offload.optim.state.choice import ALL_FITS, CANDIDATES
from nvme_offload.optim.state.placement import LEAST_BUDGET
from .machine import Machine
from .placing import Job, PlacedJob, account_of_job, may_fit, residents
from .prediction import ACTIVATIONS, LEAST_GAIN, Prediction, predict, tier_plan
from .shape import ModelShape

_RESIDENCIES = (
    "all of it in memory",
    "optimizer state on NVMe as far as memory is short",
    "optimizer state and gradients on NVMe as far as memory is short",
    "optimizer state, gradients and parameters on NVMe as far as memory is short",
    "optimizer state, gradients and parameters on NVMe",
)
"""The words for the first candidate, with everything in memory, and for `CANDIDATES`."""


_NOT_KEPT = 0.7
"""Share of what a step reads and writes that staging buffers do not spare it, at least."""
MICRO_BATCH_TOKENS = 2048
STEP_TOKENS = 65536
"""Tokens of a step where nobody says how many: what a fine-tuning of some billion parameters takes at least."""


def step_of(tokens: int | None, micro_batches: int | None, ranks: int) -> tuple[int, int]:
    """Return the tokens of a micro-batch on a rank, and the micro-batches of a step, as given.

    Where neither is, a step has `STEP_TOKENS` on all ranks together; who says the tokens alone has one micro-batch.
    """
    each = tokens or MICRO_BATCH_TOKENS
    return each, micro_batches or (1 if tokens else max(1, STEP_TOKENS // (each * ranks)))


@dataclass(frozen=True)
class ChosenSection:
    """A section, why it is this one, and where everything of one rank has its place with it."""

    section: dict[str, Any]
    point: "Point"
    job: Job
    tiers: TierPlan
    why: str = ""

    @property
    def name(self) -> str:
        """The section in words: the places of state, gradients, parameters and activations."""
        return self.point.name


@dataclass(frozen=True)
class Chooser:
    """For a machine, it finds the section that is the fastest of those that fit.

    Of what is on NVMe as much stays in memory as there is room for: `host_budget` is what is left beside all that it
    does not cover. More of it is never slower.
    """

    machine: Machine
    paths: Sequence[Path]
    tokens: int  # tokens of one micro-batch on one rank
    micro_batches: int = 1  # of a step on one rank
    checkpointing: bool = True
    sequence: int = 0  # tokens of one sequence; 0: not known
    chunked_loss: bool = False  # whether the loss is computed of some tokens at a time
    moments: str = "fp32"  # the dtype in which the sections that are tried keep moments

    def choose(self, shape: ModelShape) -> ChosenSection:
        """Return the fastest section that fits, or what moves least where rates are not known.

        Where none fits, it is the one that lacks least.
        """
        fitting, lacking = list[ChosenSection](), list[Point]()
        for point in self._worth_trying(fitting):
            choice = point.tried(self, shape) if may_fit(self.job(point.config, shape), self.machine) else None
            if choice is not None and not choice.tiers.missing:
                fitting.append(choice)
            else:
                lacking.append(point)
        tried = (choice for point in reversed(lacking) if (choice := point.tried(self, shape)) is not None)
        if not fitting:
            least = min(reversed(list(tried)), key=lambda choice: sum(choice.tiers.missing.values()))
            return _because(least, "nothing fits; this lacks least")
        return self._best(fitting, next(tried, None))

    def fits(self, shape: ModelShape) -> bool:
        """Return whether any section lets a model be trained; those that need least memory are tried first."""
        points = (point for point in reversed(self.points) if may_fit(self.job(point.config, shape), self.machine))
        return any(choice is not None and not choice.tiers.missing for choice in (p.tried(self, shape) for p in points))

    def may_fit(self, shape: ModelShape) -> bool:
        """Return False where no section can, however its parts are placed."""
        return any(may_fit(self.job(point.config, shape), self.machine) for point in reversed(self.points))

    def _worth_trying(self, fitting: "Sequence[ChosenSection]") -> "Iterator[Point]":
        """Yield points from what moves least on; leave out those that move more than one in `fitting` and gain nothing.

        For each order of micro-batches and each way of keeping activations, what follows the second residency that
        fits moves more and is no faster. For each residency, activations move no further than they have to.
        """
        for point in tracked("trying sections", self.points):
            in_memory = [one.point.keep for one in fitting if not one.point.residency]
            if point.residency == 1 and point.keep in in_memory:
                continue  # what may leave memory would stay there
            alike = [one.point for one in fitting if (one.point.order, one.point.keep) == (point.order, point.keep)]
            if len(alike) < 2 and all(one.residency != point.residency for one in alike):
                yield point

    def _best(self, fitting: list[ChosenSection], lacking: ChosenSection | None) -> ChosenSection:
        """Take the fastest of those that fit, or the first where rates are not known; say why, and what comes next."""
        timed = list[tuple[float, ChosenSection]]()
        moved = list[tuple[float, ChosenSection]]()
        for choice in tracked("timing sections", sorted(fitting, key=self._least_seconds)):
            if len(timed) > 1 and self._least_seconds(choice) > LEAST_GAIN * min(seconds for seconds, _ in timed):
                continue  # it gains too little, and a prediction takes a hundred times as long as this bound
            found = predict(choice.job, self.machine, alone=True)
            if found.time is not None:
                timed.append((found.time.seconds, choice))
            moved.append((_moved(found), choice))
        if not timed:
            best = min(moved, key=lambda pair: pair[0])[1]
            return _because(best, _first_that_fits(lacking))
        least = min(seconds for seconds, _ in timed)
        timed.sort(key=lambda pair: fitting.index(pair[1]))
        seconds, best = next((seconds, choice) for seconds, choice in timed if seconds * LEAST_GAIN <= least)
        why = _first_that_fits(lacking)
        others = sorted(((other, choice.name) for other, choice in timed if choice is not best), key=lambda it: it[0])
        if others:
            why += f"; an iteration takes {seconds:.3g} s, with {others[0][1]} {others[0][0]:.3g} s"
        return _because(best, why)

    def _least_seconds(self, choice: ChosenSection) -> float:
        """Return the seconds that drives need at least, whatever the buffers keep; 0 where rates are unknown."""
        if (drives := self.machine.drives) is None or self.machine.flops is None:
            return 0.0
        moved = sum(unit.bytes_read + unit.bytes_written for unit in choice.tiers.units_on("nvme"))
        return _NOT_KEPT * moved * self.machine.ranks_per_node / max(drives.mixed, drives.read)

    @cached_property
    def points(self) -> "tuple[Point, ...]":
        """The space, from what moves least to what needs least memory."""
        asked = self.micro_batches, self.moments
        return _points(tuple(self.paths), *asked, tuple(self._keeping()))

    def _keeping(self) -> Iterator[tuple[str, str]]:
        """Yield the ways of keeping activations, and to where: as the model does, then the host, then the drive."""
        yield "", ""
        if not self.checkpointing:
            return
        for keep in ("boundaries", "attention") if self.sequence else ("boundaries",):
            if self.machine.device_memory is not None:
                yield keep, "cpu"
            yield keep, "nvme"

    def job(self, section: SectionLike, shape: ModelShape) -> Job:
        """Return what training a model with a section is, as `initialize` completes that."""
        return Job(
            shape=shape,
            config=OffloadConfig.of(section).completed_for(self.machine.ranks),
            tokens=self.tokens,
            checkpointing=self.checkpointing,
            sequence=self.sequence,
            chunked_loss=self.chunked_loss,
        )


@lru_cache(maxsize=8)  # one for each micro_batches and keeping: what is searched for many models
def _points(
    paths: tuple[Path, ...], micro_batches: int, moments: str, keeping: tuple[tuple[str, str], ...]
) -> "tuple[Point, ...]":
    drive = {"device": "nvme", "nvme_path": [str(path.absolute()) for path in paths]}
    common: dict[str, Any] = {"bf16": {"enabled": True}, "gradient_clipping": 1.0}
    if moments != "fp32":
        common["optimizer"] = {"params": {"state_dtype": moments}}
    if micro_batches > 1:
        common["gradient_accumulation_steps"] = micro_batches
    memory = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    state = OffloadConfig.from_dict(common | {"zero_optimization": {"stage": 3, "offload_optimizer": drive}})
    places = [(common | {"zero_optimization": memory}, False)]
    for each in CANDIDATES:
        places.append((each.applied(state).model_dump(mode="json", exclude_defaults=True), each.within_budget))
    found = []
    for (number, (section, fills)), (keep, device) in product(enumerate(places), keeping):
        has_orders = micro_batches > 1 and OffloadConfig.from_dict(section).has_block_tiers
        to = {"activations": {**(drive if device == "nvme" else {"device": device}), "keep": keep}} if keep else {}
        for order in ("horizontal", "vertical") if has_orders else ("",):
            whole = section | to | ({"micro_batch_order": order} if order else {})
            found.append(Point(number, order, keep, whole, OffloadConfig.of(whole), fills))
    return tuple(found)


@dataclass(frozen=True)
class Point:
    """One point of the space."""

    residency: int
    order: str
    keep: str
    section: dict[str, Any]
    config: OffloadConfig
    fills_memory: bool = False  # what no budget covers leaves memory, which becomes the `host_budget`

    def tried(self, chooser: Chooser, shape: ModelShape) -> ChosenSection | None:
        """Return what the section comes to; None: what is left for a budget is less than the staging buffers."""
        section, job = self.section, chooser.job(self.config, shape)
        if (kept := self.config.activations).device == "nvme":
            # What is taken, what is read ahead, and gradients of it stay: see `KeptActivations`.
            room = -(-4 * job.boundaries_bytes // MiB)
            section = section | {"activations": {**section["activations"], "host_budget": f"{room}MiB"}}
            job = job.with_keys(activations=kept.model_copy(update={"host_budget": room * MiB}))
        if self.fills_memory:
            if (left := _left(job, chooser.machine) // MiB) * MiB < LEAST_BUDGET:
                return None
            section, job = section | {"host_budget": f"{left}MiB"}, job.with_keys(host_budget=left * MiB)
        try:
            tiers = tier_plan(PlacedJob(job, chooser.machine))
        except ConfigError:
            return None
        return ChosenSection(section, self, job, tiers)

    @property
    def name(self) -> str:
        """Return in words what the section says."""
        parts = [_RESIDENCIES[self.residency]]
        if kept := self.section.get("activations"):
            where = "NVMe" if kept["device"] == "nvme" else "the host"
            parts.append(
                f"the {'inputs of layers' if self.keep == 'boundaries' else 'results of attention'} on {where}"
            )
        if self.order:
            parts.append("block by block" if self.order == "vertical" else "one micro-batch after the other")
        return ", ".join(parts)


def _because(choice: ChosenSection, reason: str) -> ChosenSection:
    """Return a choice with its reason; where no byte goes to a drive, that is the reason."""
    why = f"{choice.name}: {reason}"
    if not (choice.tiers.units_on("nvme") or choice.tiers.missing):
        why = ALL_FITS + (f"; {choice.name.partition(', ')[2]}" if "activations" in choice.section else "")
    return ChosenSection(choice.section, choice.point, choice.job, choice.tiers, why)


def _first_that_fits(last: ChosenSection | None) -> str:
    """Say what the last section lacks that does not fit."""
    if last is None:
        return "it fits"
    missing = ", ".join(f"{format_bytes(size)} of {_MEMORY[tier]}" for tier, size in last.tiers.missing.items())
    return f"with {last.name} {missing} would be missing"


_MEMORY = {"device": "GPU memory", "host": "host memory", "nvme": "the drives"}


def _moved(prediction: Prediction) -> float:
    """Return the bytes that a step moves to and from the drive, and half of those that cross to the host."""
    moved = prediction.total_traffic
    kept = prediction.tiers.bytes_on("host", ACTIVATIONS) * prediction.job.config.rounds
    return moved.read + moved.written + kept / 2


def _left(job: Job, machine: Machine) -> int:
    """Bytes of host memory for one rank beside all that no budget covers."""
    held = [unit for unit in residents(job, account_of_job(job, machine)) if unit.tiers == ("host",)]
    kept = job.config.activations.host_budget if job.config.activations.device == "nvme" else 0
    assert isinstance(kept, int)
    return machine.host_memory // machine.ranks_per_node - sum(unit.size_bytes for unit in held) - kept
