"""The statistics of a comparison by turns, on drives made up for the purpose."""

import itertools
import random

import pytest

from nvme_offload.perf.measure.comparison import Comparison, Quad, compared


class MadeUpDrive:
    """Gets faster or slower by a constant factor per run, with some noise."""

    def __init__(self, drift: float = 1.0, noise: float = 0.0) -> None:
        self._rate = 1e9
        self._drift = drift
        self._noise = noise
        self._source = random.Random(3)

    def arm(self, speed: float):
        def run() -> float:
            self._rate *= self._drift
            return self._rate * speed * self._source.uniform(1 - self._noise, 1 + self._noise)

        return run


def test_a_steady_drift_cancels():
    drive = MadeUpDrive(drift=0.9)
    *_, found = compared("a case", drive.arm(0.8), drive.arm(1.0), 5)
    assert [quad.ratio for quad in found.quads] == pytest.approx([0.8] * 5)
    assert [quad.ratio for quad in found.controls] == pytest.approx([1.0] * 5)


def test_quotient_finds_the_truth_in_the_noise():
    drive = MadeUpDrive(noise=0.2)
    *_, found = compared("a case", drive.arm(0.95), drive.arm(1.0), 40)
    low, high = found.interval
    assert low < 0.95 < high
    assert high - low < 0.2
    assert low <= found.quotient <= high


def test_the_control_takes_the_luck_of_the_minute_out():
    quad = Quad((0.9, 1.0, 1.0, 0.9))
    found = Comparison("a case", (quad,) * 3, (quad,) * 3)
    assert found.ratio == found.control == pytest.approx(0.9)
    assert found.quotient == pytest.approx(1.0)


def test_arms_run_in_abba_order():
    order: list[str] = []
    rates = itertools.repeat(1.0)
    ours = lambda: order.append("ours") or next(rates)  # noqa: E731
    fio = lambda: order.append("fio") or next(rates)  # noqa: E731
    list(compared("a case", ours, fio, 1))
    assert order == ["ours", "fio", "fio", "ours", *["fio"] * 4]


def test_what_is_known_after_each_quad():
    seconds, control = iter([0.8, 1.0, 1.0, 0.8, 0.7, 1.0, 1.0, 0.7]), [1.0] * 4
    arm = itertools.chain(itertools.islice(seconds, 4), control, seconds, control).__next__
    first, found = compared("a case", arm, arm, 2)
    assert first.quotient == pytest.approx(0.8)
    assert found.interval == pytest.approx((0.7, 0.8))
    assert [quad[0] for quad in found.to_dict()["quads"]] == [0.8, 0.7]
