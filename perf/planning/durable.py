"""What a durable state costs on a machine, by how often it is rewritten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from nvme_offload.offload.durable.rewrite_every import (
    USUAL_PERIOD,
    Choice,
    DurableBytes,
    DurableRates,
    choices,
    choose,
)
from nvme_offload.offload.storage.tier_plan import Tier
from nvme_offload.offload.units import TB, format_bytes
from nvme_offload.optim.layout.master import DTYPE_OF_FORM, MasterForm, state_itemsize
from nvme_offload.optim.precision.plan import precision_of
from nvme_offload.optim.rules.registry import rule_of
from nvme_offload.optim.state.pipeline import KIND as STATE
from nvme_offload.perf.planning.prediction import Prediction

PERIODS = range(1, USUAL_PERIOD + 1)


def bytes_of(prediction: Prediction, tier: Tier) -> DurableBytes:
    """The state of one rank on a tier. An extent rounded up is that of a few parameters more."""
    config = prediction.job.config
    precision, rule = precision_of(config), rule_of(config.optimizer)
    state = prediction.tiers.bytes_on(tier, STATE)
    itemsize = state_itemsize(precision.master, rule.states)
    numel = state / itemsize if itemsize else 0.0
    held = 0 if precision.master is MasterForm.FULL else DTYPE_OF_FORM[precision.master].itemsize
    return DurableBytes(state=state, tail=held * numel, grad=precision.accumulate.itemsize * numel, numel=numel)


def durable_choices(prediction: Prediction) -> list[Choice]:
    """What each of a few periods comes to; empty without drives, or with no state there."""
    drives, ranks = prediction.machine.drives, prediction.machine.ranks_per_node
    size, resident = bytes_of(prediction, "nvme"), bytes_of(prediction, "host")
    if drives is None or not size.numel:
        return []
    rates = DurableRates(
        read=drives.read / ranks,
        write=drives.write / ranks,
        mixed=drives.mixed / ranks,
        update=prediction.machine.update_rate,
    )
    compute = prediction.time.work.compute if prediction.time is not None else 0.0
    held = resident if resident.numel else None
    return choices(size, rates, resident=held, compute_seconds=compute, periods=PERIODS)


def to_dict(prediction: Prediction) -> list[dict[str, Any]]:
    """The same in plain types, of one rank; wear is of a node."""
    return [
        {
            "rewrite_every": choice.period,
            "read": round(choice.costs.read),
            "written": round(choice.costs.written),
            "space": round(choice.costs.space),
            "step_seconds": choice.step_seconds,
            "written_per_node_and_day": _per_day(prediction, choice),
            "days_of_life": _days(prediction, choice),
        }
        for choice in durable_choices(prediction)
    ]


def show_durable(prediction: Prediction) -> Iterator[Table | str]:
    """A table of the periods, and which one suits this machine."""
    found = durable_choices(prediction)
    if not found:
        yield "Durable state: not known; it needs state on NVMe, and --bench or --read-bw and --write-bw"
        return
    heads = ("every", "read", "written", "space", "step", "TB a day", "days of life")
    table = Table(*heads, title="If every step survives: one rank, by rewrite_every; wear of a node")
    table.title_justify = "left"
    for choice in found:
        costs, days = choice.costs, _days(prediction, choice)
        sizes = [format_bytes(round(size)) for size in (costs.read, costs.written, costs.space)]
        wear = f"{_per_day(prediction, choice) / TB:.3g}"
        table.add_row(str(choice.period), *sizes, f"{choice.step_seconds:.3g} s", wear, f"{days:.3g}" if days else "")
    for column in table.columns:
        column.justify = "right"
    yield table
    limit = prediction.job.config.zero_optimization.offload_optimizer.wear_limit
    try:
        best = choose(found, limit and limit / prediction.machine.ranks_per_node)
    except ValueError as error:
        yield str(error)
        return
    within = f"Fastest within {limit / TB:.3g} TB a day" if limit else "Fastest here"
    yield f"{within}: rewrite_every {best.period}, an iteration of {best.iteration_seconds:.3g} s at best"


def _per_day(prediction: Prediction, choice: Choice) -> float:
    return choice.written_per_day * prediction.machine.ranks_per_node


def _days(prediction: Prediction, choice: Choice) -> float | None:
    endurance = prediction.endurance
    return None if endurance is None else endurance / _per_day(prediction, choice)
