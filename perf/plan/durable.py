"""What a durable state costs on a machine, by how often it is rewritten."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from nvme_offload.offload.durable.rewrite_every import (
    MAX_PERIOD,
    USUAL_PERIOD,
    Choice,
    choices,
    choose,
)
from nvme_offload.offload.units import TB, format_bytes
from nvme_offload.perf.plan.kept_state import rates_of
from nvme_offload.perf.plan.prediction import Prediction

PERIODS = range(1, USUAL_PERIOD + 1)


def durable_choices(prediction: Prediction, periods: Sequence[int] = PERIODS) -> list[Choice]:
    """What each of some periods comes to; empty without drives, or with no state there."""
    rates, size = rates_of(prediction.machine), prediction.state.get("nvme")
    if rates is None or size is None:
        return []
    compute = prediction.time.work.compute if prediction.time is not None else 0.0
    return choices(size, rates, resident=prediction.state.get("host"), compute_seconds=compute, periods=periods)


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
        among = found if limit is None else durable_choices(prediction, range(1, MAX_PERIOD + 1))
        best = choose(among, limit and limit / prediction.machine.ranks_per_node)
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
