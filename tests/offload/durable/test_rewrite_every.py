"""What a period of rewriting costs, and which one suits a machine."""

import pytest

from nvme_offload.offload.config.section import MAX_PERIOD
from nvme_offload.offload.durable.chain import num_needed
from nvme_offload.offload.durable.rewrite_every import (
    SECONDS_PER_DAY,
    USUAL_PERIOD,
    DurableBytes,
    DurableRates,
    auto_period,
    costs_of,
)
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


@pytest.mark.parametrize(("rates", "periods"), [
    ({"read": 6.5, "write": 2.6}, (3, 4)), ({"read": 1, "write": 4}, (1,)),
    ({"read": 60, "write": 24, "update": 1}, (1,)),
], ids=["writes slowly", "reads slowly", "a slow kernel wants few replays"])  # fmt: skip
def test_what_is_slow_decides(rates, periods):
    in_bytes = {name: rate * GB for name, rate in rates.items()}
    assert auto_period(BILLION, DurableRates(**in_bytes), None) in periods


def test_the_longer_of_moving_and_updating_is_a_step():
    rates = DurableRates(read=60 * GB, write=24 * GB, update=1e9)
    assert rates.seconds_of(costs_of(BILLION, 4), BILLION.numel) == pytest.approx(2.5)
    drive = DurableRates(read=2 * GB, write=2 * GB, mixed=3.5 * GB)
    costs = costs_of(BILLION, 2)  # 12 and 7 GB: 14 both ways, 5 of reading alone
    assert drive.seconds_of(costs, BILLION.numel) == pytest.approx(14 / 3.5 + 5 / 2)


@pytest.mark.parametrize(("text", "size_bytes"), [("1TB/day", TB), ("500 GB / day", 500 * GB), ("1.5TB/day", 1.5 * TB)])
def test_limits_of_wear_as_people_write_them(text, size_bytes):
    assert parse_bytes_per_day(text) == size_bytes


@pytest.mark.parametrize("text", ["1TB", "1TB/week", "TB/day", "1T/day", "", "0GB/day", None])
def test_other_words_are_refused(text):
    with pytest.raises(ValueError, match=r"no limit of wear|not a number of bytes"):
        parse_bytes_per_day(text)


def test_auto_keeps_a_limit_at_the_highest_pace_as_fast_as_it_can_and_else_writes_least():
    rates = DurableRates(read=2 * GB, write=2 * GB)
    free = auto_period(BILLION, rates, None)
    assert free <= USUAL_PERIOD
    for period in range(free, MAX_PERIOD + 1):
        costs = costs_of(BILLION, period)
        limit = costs.written * SECONDS_PER_DAY / rates.seconds_of(costs, BILLION.numel)
        assert auto_period(BILLION, rates, limit * 1.001) == period
    assert auto_period(BILLION, rates, 1.0) == MAX_PERIOD
