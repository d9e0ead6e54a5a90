"""A pure function tells what one rank will hold on each tier, what a step will move, and how long it will take.

The optimizer's own planner decides what of its state lives where (`perf.plan.placing`), and its own cache what is read
again (`perf.plan.traffic`), so a plan says what a run will do, not what it might.
"""

from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from nvme_offload.offload.config.overlap import OVERLAPS, OverlapStep
from nvme_offload.offload.durable.rewrite_every import SECONDS_PER_DAY
from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.host.available_memory import auto_budget
from nvme_offload.offload.shards.param_tier import KIND as PARAMS
from nvme_offload.offload.storage.tier_plan import TIERS, Tier, TierPlan, Unit, plan_tiers
from nvme_offload.optim.state.pipeline import KIND as STATE
from nvme_offload.optim.tiers.grad_tier import KIND as GRADS
from .iteration import IterationTime, moving_alone, on_one_processor, work_of
from .kept_state import KeptState
from .machine import Machine
from .placing import Job, PlacedJob, may_fit
from .schedule import iteration_time, reads_of
from .shape import ModelShape
from .traffic import StepTraffic, Traffic, of_gradients, of_parameters

ACTIVATIONS = "kept activations"
LEAST_GAIN = 0.97  # share of another section's time from which on one is taken for faster
MAX_LAYERS = 2048  # no deeper model is looked for: of small layers, terabytes hold millions


@dataclass(frozen=True)
class KeptActivations:
    """One rank keeps so many bytes from forward to backward on each tier."""

    device: int
    host: int
    nvme: int
    passing: int = 0
    """Bytes that go to NVMe for a while, block by block: gradients of what enters layers."""

    @classmethod
    def of(cls, placed: PlacedJob) -> Self:
        """Plan them beside all else that a rank holds; nothing where none are moved."""
        section, machine = placed.job.config.activations, placed.machine
        if section.device == "none":
            return cls(0, 0, 0)
        kept = placed.job.kept_bytes
        if section.device == "cpu" and machine.device_memory is None:
            return cls(0, kept, 0)
        if section.host_budget == "auto":
            held = sum(unit.size_bytes for unit in placed.units if unit.tiers == ("host",))
            budget = max(0, auto_budget(machine.host_memory, machine.ranks_per_node) - held)
        else:
            budget = section.host_budget
        rest = max(0, kept - budget)
        if section.device == "cpu":
            return cls(rest, kept - rest, 0)
        job, layer, passing = placed.job, placed.job.boundaries_bytes, 0
        if rest and job.waits_block_by_block:
            # Gradients of what enters a layer stay where there is room beside what is taken and what is read. Those of
            # the first two layers that backward comes to have what comes next leave in their place, a tensor early.
            passing = layer + layer // job.micro_batches + job.shape.num_layers * min(layer, max(0, 3 * layer - budget))
        return cls(0, kept - rest, rest, passing)

    def units(self) -> Iterator[Unit]:
        """Return what there is on each tier at the end of a forward."""
        sizes: tuple[tuple[Tier, int], ...] = (("device", self.device), ("host", self.host), ("nvme", self.nvme))
        return (Unit(ACTIVATIONS, ACTIVATIONS, size, tiers=(tier,)) for tier, size in sizes if size)

    def traffic(self, rounds: int) -> StepTraffic:
        """Bytes that a step moves which goes so often through all blocks: what has no room, out and back."""
        moved = self.nvme * rounds + self.passing
        return StepTraffic({"forward": Traffic(0, moved), "backward": Traffic(moved, 0)})


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """An iteration of a job needs this on a machine, for one rank: all micro-batches and the step."""

    job: Job
    machine: Machine
    tiers: TierPlan
    """The place of everything that one rank holds; units of memory that comes and goes are at their peak."""
    traffic: dict[str, StepTraffic]  # bytes that one rank moves in a step, by kind
    overlap_step: OverlapStep  # the schedule that will run
    times: dict[OverlapStep, IterationTime]
    """Time from one step to the next with each schedule; empty where the machine's rates are not known."""
    kept: KeptState | None  # the state as it outlives a kill; None where it ends with the process

    @property
    def time(self) -> IterationTime | None:
        """Time from one step to the next with the schedule that will run; None where rates are not known."""
        return self.times.get(self.overlap_step)

    @property
    def total_traffic(self) -> Traffic:
        """Bytes of all kinds that one rank moves in a step."""
        return sum((moved.total for moved in self.traffic.values()), Traffic())

    @property
    def written_per_token(self) -> float:
        """Bytes that all drives of all nodes write for each token of a step."""
        return self.total_traffic.written / (self.job.tokens * self.job.micro_batches)

    @property
    def written_per_day(self) -> float | None:
        """Bytes per node and day of steps one after another; None where their time is not known."""
        if self.time is None:
            return None
        return self.total_traffic.written * self.machine.ranks_per_node * SECONDS_PER_DAY / self.time.seconds

    @property
    def days_of_life(self) -> float | None:
        """Days until the drives' endurance is used up; None where it is not known, or nothing is written."""
        drives, per_day = self.machine.drives, self.written_per_day
        return drives.endurance / per_day if drives is not None and drives.endurance is not None and per_day else None

    def tokens_per_second(self, time: IterationTime) -> float:
        """Tokens of all ranks in a second, with steps one after another that take this time."""
        return self.job.tokens * self.job.micro_batches * self.machine.ranks / time.seconds

    def with_keys(self, **keys: Any) -> "Prediction":
        """The job with other values of these keys of its section, and the schedule that will run alone."""
        return predict(self.job.with_keys(**keys), self.machine, alone=True)

    def to_dict(self) -> dict[str, Any]:
        """The prediction in plain types, for JSON."""
        kinds, shape = dict.fromkeys(unit.kind for unit in self.tiers.units), self.job.shape
        return {
            "model": {"name": shape.name, "parameters": shape.numel, "layers": shape.num_layers},
            "ranks": self.machine.ranks,
            "bytes_per_rank": {
                kind: {tier: size for tier in TIERS if (size := self.tiers.bytes_on(tier, kind))} for kind in kinds
            },
            "available_per_rank": dict(self.tiers.budgets),
            "missing_per_rank": self.tiers.missing,
            "traffic_per_rank_and_step": {
                kind: {"read": round(moved.total.read), "written": round(moved.total.written)}
                for kind, moved in self.traffic.items()
            },
            "iteration": None if self.time is None else self.time.to_dict(),
            "rewrite_every": None if self.kept is None else self.kept.period,
            "tokens_per_second": None if self.time is None else self.tokens_per_second(self.time),
            "written_per_token": self.written_per_token,
            "written_per_node_and_day": self.written_per_day,
            "days_of_life": self.days_of_life,
        }


def predict(job: Job, machine: Machine, *, alone: bool = False) -> Prediction:
    """Plan a job on a machine. `alone`: of all schedules, only that which will run."""
    placed = PlacedJob(job, machine)
    traffic = _traffic(placed)
    kept = KeptActivations.of(placed)
    if kept.nvme:
        traffic[ACTIVATIONS] = kept.traffic(job.config.rounds)
    leaving = kept.nvme + (kept.host if placed.on_device else 0)
    work, times = work_of(placed, [moved for kind, moved in traffic.items() if kind != STATE], leaving), {}
    if work is not None:
        named = (placed.overlap_step,) if alone else OVERLAPS
        possible = [name for name in named if placed.kept is not None or not OVERLAPS[name].needs_durable]
        its_work = {name: work if placed.on_device else on_one_processor(work, name) for name in possible}
        times = {name: iteration_time(its_work[name], placed.runs_as(name)) for name in possible}
    return Prediction(
        job=job,
        machine=machine,
        tiers=tier_plan(placed),
        traffic=traffic,
        overlap_step=placed.overlap_step,
        times=times,
        kept=placed.kept,
    )


def faster_order(orders: Mapping[str, Prediction]) -> str | None:
    """Return the order in which an iteration is shorter; None where its time is not known.

    It is vertical where the drive limits, so that it is shorter by more than a few percent: it keeps what enters each
    block in all micro-batches, and draws other random numbers.
    """
    times = {order: found.time.seconds for order, found in orders.items() if found.time is not None}
    if not times:
        return None
    return "vertical" if times["vertical"] < LEAST_GAIN * times["horizontal"] else "horizontal"


def fits(job: Job, machine: Machine) -> bool:
    """Return whether everything of a job has its place."""
    try:
        return may_fit(job, machine) and not tier_plan(PlacedJob(job, machine)).missing
    except ConfigError:  # more than the section's budget holds
        return False


def largest_model(
    shape: ModelShape, may_fit: Callable[[ModelShape], bool], fits: Callable[[ModelShape], bool]
) -> ModelShape | None:
    """The deepest model of this kind of layer that fits; None where not even one layer does.

    Of many layers it may have 1 % less. One that has more than `MAX_LAYERS` need not be the deepest. `may_fit` is
    quick, and says where to begin.
    """
    most = bisect(range(1, MAX_LAYERS + 2), False, key=lambda number: not may_fit(shape.with_layers(number)))
    low, too_many, step = 0, most + 1, 1
    number = most
    while too_many - low > 1 + low // 100:
        low, too_many = (number, too_many) if fits(shape.with_layers(number)) else (low, number)
        number = (low + too_many) // 2 if low else max(1, too_many - step)
        step = 2 * step + number // 100
    return shape.with_layers(low) if low else None


def tier_plan(placed: PlacedJob) -> TierPlan:
    """The plan of everything one rank holds: what is decided already, each unit on its tier."""
    return plan_tiers([*placed.units, *KeptActivations.of(placed).units()], placed.machine.budgets)


def _traffic(placed: PlacedJob) -> dict[str, StepTraffic]:
    """Bytes that one rank moves in one step, of the kinds that are on NVMe."""
    job, config = placed.job, placed.job.config
    zero, traffic = config.zero_optimization, dict[str, StepTraffic]()
    visits = _without_repetitions([subgroup.block for subgroup in placed.subgroups])
    if written := sum(placed.on_nvme):
        sizes = [
            subgroup.size_bytes if tier == "nvme" else 0
            for subgroup, tier in zip(placed.subgroups, placed.state_on, strict=True)
        ]
        reads = reads_of(moving_alone(placed, sizes), placed.runs_as(placed.overlap_step))
        read = sum(count * sizes[i] for i, count in reads.items())
        traffic[STATE] = StepTraffic({"update": Traffic(read, written)})
    if placed.kept is not None:
        in_place = traffic.get(STATE, StepTraffic())
        traffic[STATE] = placed.kept.traffic(in_place, placed.subgroups, placed.state_on)
    for kind, buffers in (PARAMS, zero.offload_param.buffer_count), (GRADS, config.offload_gradients.buffer_count):
        if not (moving := placed.blocks_on_nvme(kind)):
            continue
        sizes = [unit.size_bytes for unit in moving.values()]
        order = {number: place for place, number in enumerate(moving)}
        steps = _without_repetitions([order[number] for number in visits if number in order])
        if kind == GRADS:
            reduces_once = zero.stage == 1 or (zero.stage == 0 and placed.machine.ranks > 1)
            rounds = 1 if reduces_once else config.rounds
            traffic[kind] = of_gradients(sizes, buffers, rounds, steps, updated_in=placed.updated_in)
            continue
        has_root, twice = bool(job.shape.rest) and 0 in moving, zero.stage == 3
        frozen = frozenset(place for number, place in order.items() if not placed.trained[number])
        traffic[kind] = of_parameters(
            sizes,
            buffers,
            config.rounds,
            steps,
            has_root=has_root,
            twice=twice,
            updated_in=placed.updated_in,
            frozen=frozen,
        )
    return traffic


def _without_repetitions(visits: list[int]) -> list[int]:
    """A block stays where it is from one of its subgroups to the next."""
    return visits[:1] + [block for before, block in pairwise(visits) if block != before]
