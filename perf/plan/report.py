"""A prediction in words and tables."""

import json
from collections.abc import Iterable, Iterator
from math import inf

from rich.console import Console
from rich.table import Table

from nvme_offload.offload.durable.rewrite_every import SECONDS_PER_DAY
from nvme_offload.offload.storage.tier_plan import TIERS, Tier
from nvme_offload.offload.units import TB, format_bytes
from nvme_offload.optim.rules.registry import rule_of
from nvme_offload.optim.state.account import GATHERED
from ..measure.results import figures
from .choosing import ChosenSection
from .prediction import MAX_LAYERS, Prediction, faster_order
from .shape import ModelShape

TOKENS = 10**9
"""A training is counted in billions of tokens."""


def show(
    prediction: Prediction,
    chosen: ChosenSection | None,
    largest: ModelShape | None,
    console: Console,
    changes: Iterable[str] = (),
) -> None:
    """Say all of it in tables and sentences.

    Args:
        prediction: memory, traffic, time and wear.
        chosen: the section, where it was chosen for that.
        largest: the largest model that fits.
        console: takes it.
        changes: each lets a model fit that does not.
    """
    job, machine = prediction.job, prediction.machine
    shape = job.shape
    if chosen is not None:
        console.print(f"As offload init chooses: {chosen.why}", highlight=False, soft_wrap=True)
        console.print(json.dumps(chosen.section, indent=2), highlight=False, soft_wrap=True)
    console.print(
        f"{shape.name}: {shape.numel:,} parameters, {shape.num_layers} layers{_adapters(shape)}; "
        f"{machine.ranks} rank(s), {machine.ranks_per_node} on a node; "
        f"{job.tokens:,} tokens x {job.micro_batches} micro-batches on each",
        highlight=False,
    )
    rule = rule_of(job.config.optimizer)
    kept = [f"{state.name} ({str(state.dtype).removeprefix('torch.')})" for state in rule.states]
    console.print(f"{rule.name} keeps {', '.join(kept) or 'no state'}", highlight=False)
    console.print(_memory(prediction))
    if prediction.traffic:
        console.print(_traffic(prediction))
    for line in _sentences(prediction, largest):
        console.print(line, highlight=False, soft_wrap=True)
    for change in changes:
        console.print(f"It fits with {change}", highlight=False, soft_wrap=True)


def _memory(prediction: Prediction) -> Table:
    table = figures("one rank holds", *TIERS, title="Memory", title_justify="left")
    tiers = prediction.tiers
    for kind in dict.fromkeys(unit.kind for unit in tiers.units):
        sizes = [tiers.bytes_on(tier, kind) for tier in TIERS]
        table.add_row(kind, *(format_bytes(size) if size else "" for size in sizes))
    table.add_section()
    table.add_row("together", *(format_bytes(tiers.bytes_on(tier)) for tier in TIERS))
    budgets = [format_bytes(tiers.budgets[tier]) if tier in tiers.budgets else "" for tier in TIERS]
    table.add_row("there is", *budgets)
    return table


def _traffic(prediction: Prediction) -> Table:
    table = figures("one rank and step", "read", "written", title="To and from NVMe", title_justify="left")
    rows = {kind: moved.total for kind, moved in prediction.traffic.items()}
    for kind, moved in (*rows.items(), ("together", prediction.total_traffic)):
        if kind == "together":
            table.add_section()
        table.add_row(kind, format_bytes(round(moved.read)), format_bytes(round(moved.written)))
    return table


def _sentences(prediction: Prediction, largest: ModelShape | None) -> Iterator[str]:
    time, machine = prediction.time, prediction.machine
    if time is None:
        needed = "--flops and, for what is on NVMe, --bench or --read-bw and --write-bw"
        yield f"Time of an iteration: not known; it needs {needed}"
    else:
        parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in time.parts.items())
        yield f"Time of an iteration: {time.seconds:.3g} s, limited by: {time.limit}; {parts}"
        work = time.work
        ideal = f"computing {work.compute:.3g} s, NVMe {work.nvme:.3g} s, updating {work.update:.3g} s"
        if machine.pcie is not None:
            ideal += f", PCIe {work.pcie:.3g} s"
        if machine.network is not None:
            ideal += f", network {work.network:.3g} s"
        yield f"That is {time.share_of_ideal:.0%} of the ideal, the longest of: {ideal}"
        others = ", ".join(f"{name} {other.seconds:.3g} s" for name, other in prediction.times.items())
        yield f"With each overlap_step (this section has {prediction.overlap_step}): {others}"
    if prediction.job.config.activations.device != "none":
        yield from _activations(prediction)
    yield from _orders(prediction)
    if machine.device_memory is not None and machine.pcie is None:
        yield "Copies between GPU and host are not counted: they need --pcie"
    if machine.num_nodes > 1 and machine.network is None:
        yield "Gathers and reductions between nodes are not counted: they need --network"
    yield from _of_tokens(prediction)
    if prediction.kept is not None:
        yield f"Every step survives; the state is rewritten every {prediction.kept.period} step(s)"
    if prediction.written_per_day:
        wear = f"Wear: {prediction.written_per_day / TB:.3g} TB written per node and day"
        days = prediction.days_of_life
        yield f"{wear}; the drives' endurance lasts {days:.3g} days" if days else f"{wear} (--tbw: for how long)"
    for tier, missing in prediction.tiers.missing.items():
        yield f"DOES NOT FIT: {tier} is {format_bytes(missing)} too small for each rank"
        yield from _of_any_number_of_ranks(prediction, tier)
    if largest is not None:
        found = f"{largest.numel:,} parameters in {largest.num_layers} layers"
        deep = largest.num_layers > MAX_LAYERS
        yield f"Largest model of such layers that fits: {f'more than {MAX_LAYERS} layers' if deep else found}"
    elif machine.capacity is None:
        yield "Largest model that fits: not known; it needs --capacity"
    else:
        yield f"Not even one such layer fits on {machine.ranks} rank(s)"


def _adapters(shape: ModelShape) -> str:
    if not shape.adapters:
        return ""
    trained = sum(map(sum, shape.adapters))
    return f", frozen, of {shape.base_bits:.3g} bits each; adapters of {trained:,} parameters are trained"


def _of_tokens(prediction: Prediction) -> Iterator[str]:
    """Say what a billion tokens take of days and of the drives, and what halves the latter."""
    job, machine, time = prediction.job, prediction.machine, prediction.time
    if time is None:
        return
    rate = prediction.tokens_per_second(time)
    days = TOKENS / rate / SECONDS_PER_DAY
    said = f"{rate:,.0f} tokens/s; a billion tokens take {days:.3g} days"
    if not (written := prediction.written_per_token):
        yield said
        return
    said += f" and write {written * TOKENS / TB:.3g} TB"
    if machine.drives is not None and machine.drives.endurance is not None:
        said += f", {written * TOKENS / machine.drives.endurance:.2%} of what the drives may have written"
    yield said
    more = 2 * job.micro_batches
    other = prediction.with_keys(gradient_accumulation_steps=more).written_per_token
    yield f"{more} micro-batches of a step write {1 - other / written:.0%} less for each token"


def _activations(prediction: Prediction) -> Iterator[str]:
    """Say what is kept of each token and layer, and which way of keeping is the fastest."""
    job, section = prediction.job, prediction.job.config.activations
    size = job.kept_bytes / (job.shape.num_layers * job.tokens) * job.config.rounds / job.micro_batches
    yield f"Activations: {section.keep}, {size:,.0f} bytes for each token and layer"
    if prediction.time is not None:
        times = {}
        for keep in ("boundaries", "attention", "all") if job.sequence else ("boundaries", "all"):
            other = prediction.with_keys(activations=section.model_copy(update={"keep": keep})).time
            times[keep] = other.seconds if other is not None else inf
        said = ", ".join(f"{keep} {seconds:.3g} s" for keep, seconds in times.items())
        yield f"By activations.keep: {said}; fastest: {min(times, key=lambda keep: times[keep])}"


def _orders(prediction: Prediction) -> Iterator[str]:
    """Say what an iteration comes to in each order of its micro-batches, and which one is the faster."""
    job = prediction.job
    if job.micro_batches == 1 or not job.config.has_block_tiers:
        return  # there is one order
    orders = {order: prediction.with_keys(micro_batch_order=order) for order in ("horizontal", "vertical")}
    moved = {order: found.total_traffic for order, found in orders.items()}
    said = {order: f"{format_bytes(round(each.read + each.written))} moved" for order, each in moved.items()}
    if faster := faster_order(orders):
        said |= {order: f"{found.time.seconds:.3g} s" for order, found in orders.items() if found.time is not None}
    ways = ", ".join(f"{order} {each}" for order, each in said.items())
    yield f"By micro_batch_order: {ways}; " + (f"faster: {faster}" if faster else "rates say which is faster")
    if job.config.goes_by_blocks:
        yield "Block by block goes engine.accumulate; a loop of backward and step is horizontal, whatever the key says"


def _of_any_number_of_ranks(prediction: Prediction, tier: Tier) -> Iterator[str]:
    """Say what is too large on a tier however many ranks share the model, and what makes it smaller."""
    tiers, shape = prediction.tiers, prediction.job.shape
    sizes = {kind: tiers.bytes_on(tier, kind) for kind in (GATHERED, "activations")}
    if sum(sizes.values()) <= tiers.budgets[tier]:
        return
    largest = max(shape.groups, key=sum)
    name = "layer" if largest in shape.layers else "embedding or head"
    held = " and ".join(f"{format_bytes(size)} {kind}" for kind, size in sizes.items())
    yield (
        f"No number of ranks makes it fit: {held}; the largest {name} has {sum(largest):,} parameters. Split it (a "
        "mesh with tp, or blocks= of initialize), or take fewer --tokens"
    )
