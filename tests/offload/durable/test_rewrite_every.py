"""What a period of rewriting costs, and which one suits a machine."""

import pytest

from nvme_offload.offload.durable.rewrite_every import (
    MAX_PERIOD,
    USUAL_PERIOD,
    DurableBytes,
    DurableRates,
    auto_period,
    choices,
    choose,
    costs_of,
)
from nvme_offload.offload.durable.turns import num_needed
from nvme_offload.offload.units import GB, TB, parse_bytes_per_day

BF16 = DurableBytes(state=10, tail=2, grad=2)  # a bf16 parameter under AdamW
BILLION = DurableBytes(state=10 * GB, tail=2 * GB, grad=2 * GB, numel=1e9)


@pytest.mark.parametrize(
    ("period", "read", "written", "space", "updates"),
    [(1, 10, 12, 24, 1), (2, 12, 7, 20, 1.5), (3, 40 / 3, 16 / 3, 58 / 3, 2), (4, 14.5, 4.5, 19.5, 2.5)],
)
def test_bytes_of_a_bf16_parameter(period, read, written, space, updates):
    costs = costs_of(BF16, period)
    figures = (costs.read, costs.written, costs.space, costs.updates)
    assert figures == pytest.approx((read, written, space, updates))


@pytest.mark.parametrize("period", [1, 2, 3, 5, 16])
def test_space_is_what_the_ring_takes(period):
    bases, entries = num_needed(240, period)
    assert costs_of(BF16, period).space == pytest.approx((12 * bases + 2 * entries) / 240)


def test_other_parameters_have_other_bytes():
    fp16, fp32 = DurableBytes(state=12, tail=0, grad=2), DurableBytes(state=8, tail=4, grad=4)
    assert (costs_of(fp16, 2).read, costs_of(fp16, 2).written) == (13, 7)
    assert (costs_of(fp32, 3).read, costs_of(fp32, 3).written) == pytest.approx((44 / 3, 20 / 3))
    both = costs_of(fp16 + fp32, 3)
    assert both.written == pytest.approx(costs_of(fp16, 3).written + costs_of(fp32, 3).written)


def test_a_drive_that_writes_slowly_is_rewritten_seldom_and_one_that_reads_slowly_often():
    slow_writes = DurableRates(read=6.5 * GB, write=2.6 * GB)
    slow_reads = DurableRates(read=1 * GB, write=4 * GB)
    assert choose(choices(BILLION, slow_writes)).period in (3, 4)
    assert choose(choices(BILLION, slow_reads)).period == 1
    mixed = choices(BILLION, DurableRates(read=2 * GB, write=2 * GB, mixed=3.5 * GB))
    assert choose(mixed).step_seconds == min(each.step_seconds for each in mixed[:USUAL_PERIOD])


def test_a_slow_kernel_wants_few_replays():
    rates = DurableRates(read=60 * GB, write=24 * GB, update=1e9)
    chosen = choose(choices(BILLION, rates))
    assert chosen.period == 1
    assert chosen.step_seconds == pytest.approx(1.0)
    assert choices(BILLION, rates)[3].step_seconds == pytest.approx(2.5)


def test_where_computing_hides_it_the_one_that_writes_least_is_taken():
    rates = DurableRates(read=6 * GB, write=3 * GB)
    chosen = choose(choices(BILLION, rates, compute_seconds=100))
    assert chosen.period == USUAL_PERIOD
    assert chosen.iteration_seconds == 100
    assert chosen.written_per_day == pytest.approx(chosen.costs.written * 864)


def test_a_limit_of_wear_lengthens_the_period_and_life():
    rates = DurableRates(read=2 * GB, write=2 * GB)
    found = choices(BILLION, rates, compute_seconds=3)
    free = choose(found)
    limit = free.written_per_day * 0.7
    kept = choose(found, limit)
    assert kept.period > free.period
    assert kept.written_per_day <= limit
    assert kept.iteration_seconds == min(each.iteration_seconds for each in found if each.written_per_day <= limit)
    assert kept.days_of_life(600 * TB) > free.days_of_life(600 * TB) / 0.7
    assert kept.days_of_life(600 * TB) == pytest.approx(600 * TB / kept.written_per_day)


def test_a_low_limit_takes_the_longest_periods():
    found = choices(BILLION, DurableRates(read=2 * GB, write=2 * GB), compute_seconds=100)
    kept = choose(found, found[MAX_PERIOD - 1].written_per_day * 1.01)
    assert USUAL_PERIOD < kept.period <= MAX_PERIOD


def test_a_limit_that_no_period_keeps_is_refused_in_words():
    with pytest.raises(ValueError, match=r"wear_limit of 1 GiB a day is too low: rewritten every 16 steps, the state"):
        choose(choices(BILLION, DurableRates(read=2 * GB, write=2 * GB)), 2**30)


def test_what_is_in_memory_is_written_and_never_read():
    rates = DurableRates(read=2 * GB, write=1 * GB)
    half = DurableBytes(state=5 * GB, tail=1 * GB, grad=1 * GB, numel=5e8)
    [whole] = choices(BILLION, rates, periods=[3])
    [shared] = choices(half, rates, resident=half, periods=[3])
    assert shared.costs.read == pytest.approx(whole.costs.read / 2)
    assert shared.costs.written == pytest.approx(whole.costs.written)
    assert shared.step_seconds < 0.75 * whole.step_seconds
    slow_kernel = DurableRates(read=60 * GB, write=60 * GB, update=1e9)
    [shared] = choices(half, slow_kernel, resident=half, periods=[3])
    assert shared.step_seconds == pytest.approx(0.5 * 2 + 0.5)


@pytest.mark.parametrize(("text", "size_bytes"), [("1TB/day", TB), ("500 GB / day", 500 * GB), ("1.5TB/day", 1.5 * TB)])
def test_limits_of_wear_as_people_write_them(text, size_bytes):
    assert parse_bytes_per_day(text) == size_bytes


@pytest.mark.parametrize("text", ["1TB", "1TB/week", "TB/day", "1T/day", "", "0GB/day", None])
def test_other_words_are_refused(text):
    with pytest.raises(ValueError, match=r"no limit of wear|not a number of bytes"):
        parse_bytes_per_day(text)


def test_auto_keeps_a_limit_at_the_highest_pace_as_fast_as_it_can_and_else_writes_least():
    rates = DurableRates(read=2 * GB, write=2 * GB)
    found = choices(BILLION, rates)
    free = auto_period(BILLION, rates, None)
    assert free == choose(found).period
    for each in found[free - 1 :]:
        assert auto_period(BILLION, rates, each.written_per_day * 1.001) == each.period
    assert auto_period(BILLION, rates, 1.0) == MAX_PERIOD
