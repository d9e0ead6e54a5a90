"""The statistics of a comparison by turns, on drives made up for the purpose."""

import itertools
import random

import pytest

from nvme_offload.perf.measure.comparison import Case, Comparison, Quad, Round


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


def compared(ours, reference, num_quads, **options):
    return list(Case(name="a case", ours=ours, reference=reference, **options).measure(num_quads))[-1]


def test_a_steady_drift_cancels():
    drive = MadeUpDrive(drift=0.9)
    found = compared(drive.arm(0.8), drive.arm(1.0), 5)
    assert found.ratios == pytest.approx([0.8] * 5)
    assert found.control_ratios == pytest.approx([1.0] * 5)


def test_quotient_finds_the_truth_in_the_noise():
    drive = MadeUpDrive(noise=0.2)
    found = compared(drive.arm(0.95), drive.arm(1.0), 40)
    low, high = found.interval
    assert low < 0.95 < high
    assert high - low < 0.2
    assert low <= found.quotient <= high
    assert found.interval == found.interval


def test_the_control_takes_the_luck_of_the_minute_out():
    quad = Quad((0.9, 1.0, 1.0, 0.9))
    found = Comparison("a case", (Round(quad, quad),) * 3)
    assert found.ratio == found.control == pytest.approx(0.9)
    assert found.quotient == pytest.approx(1.0)
    assert Comparison("a case", (Round(quad),)).quotient == pytest.approx(0.9), "there is no control"


@pytest.mark.parametrize("has_control", [True, False])
def test_arms_run_in_abba_order(has_control):
    order: list[str] = []
    rates = itertools.repeat(1.0)
    ours = lambda: order.append("ours") or next(rates)  # noqa: E731
    fio = lambda: order.append("fio") or next(rates)  # noqa: E731
    compared(ours, fio, 1, has_control=has_control)
    assert order == ["ours", "fio", "fio", "ours", *["fio"] * 4 * has_control]


def test_rounds_in_which_the_machine_was_disturbed_are_left_out():
    seconds = iter([0.8, 1.0, 1.0, 0.8, 3.0, 1.0, 1.0, 3.0])
    calm = iter([True, False])

    def arm():
        return next(seconds)

    first, found = Case(
        name="a case", ours=arm, reference=arm, has_control=False, before=lambda: ({"compute": 1.0}, next(calm))
    ).measure(2)
    assert len(first.rounds) == 1
    assert found.quotient == pytest.approx(0.8)
    assert found.cells() == ["a case", "0.800 (0.800 to 0.800)", "1.000", "1 of 2", "0.800", "1.000"]
    assert [one["compute"] for one in found.to_dict()["rounds"]] == [1.0, 1.0]
    assert Comparison("a case", found.rounds[1:]).cells()[3] == "1 of 1", "all of them, where none counts"
