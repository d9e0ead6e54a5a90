"""The statistics of the comparison with fio, on drives made up for the purpose."""

import itertools
import random
from dataclasses import replace

import pytest

from nvme_offload.perf.bench.comparison import Comparison, Quad, compare, comparison_of
from nvme_offload.perf.bench.fio import Fio, FioError, bandwidth, find_fio
from nvme_offload.perf.measure.settings import Settings


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
    for quad, control in compare(drive.arm(0.8), drive.arm(1.0), 5):
        assert quad.ratio == pytest.approx(0.8)
        assert control.ratio == pytest.approx(1.0)


def test_quotient_finds_the_truth_in_the_noise():
    drive = MadeUpDrive(noise=0.2)
    comparison = comparison_of(list(compare(drive.arm(0.95), drive.arm(1.0), 40)))
    low, high = comparison.interval
    assert low < 0.95 < high
    assert high - low < 0.2
    assert low <= comparison.quotient <= high


def test_the_control_takes_the_luck_of_the_minute_out():
    quads = tuple(Quad((0.9, 1.0, 1.0, 0.9)) for _ in range(3))
    controls = tuple(Quad((0.9, 1.0, 1.0, 0.9)) for _ in range(3))
    comparison = Comparison(quads, controls)
    assert comparison.ratio == comparison.control == pytest.approx(0.9)
    assert comparison.quotient == pytest.approx(1.0)


def test_same_quads_give_the_same_interval():
    drive = MadeUpDrive(noise=0.1)
    pairs = list(compare(drive.arm(1.0), drive.arm(1.0), 6))
    assert comparison_of(pairs).interval == comparison_of(pairs).interval


def test_arms_run_in_abba_order():
    order: list[str] = []
    rates = itertools.repeat(1.0)
    ours = lambda: order.append("ours") or next(rates)  # noqa: E731
    fio = lambda: order.append("fio") or next(rates)  # noqa: E731
    list(compare(ours, fio, 1))
    assert order == ["ours", "fio", "fio", "ours", "fio", "fio", "fio", "fio"]


def report(**directions):
    idle = {"io_bytes": 0, "runtime": 0}
    return {"jobs": [{"read": idle, "write": idle, **directions}]}


def test_bandwidth_of_fios_report():
    assert bandwidth(report(read={"io_bytes": 10**9, "runtime": 1000})) == pytest.approx(1e9, rel=1e-3)
    both = report(read={"io_bytes": 10**9, "runtime": 900}, write={"io_bytes": 10**9, "runtime": 1000})
    assert bandwidth(both) == pytest.approx(2e9, rel=1e-3)
    with pytest.raises(FioError, match="moved nothing"):
        bandwidth(report())


@pytest.fixture
def settings(tmp_path):
    return Settings(paths=(tmp_path,), size=8 << 20, bs=65536, iodepth=4, numjobs=1, ioengine="auto", direct="disabled")


def test_missing_fio_says_how_to_get_it(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FioError, match="apt-get install fio"):
        find_fio()


@pytest.fixture
def needs_fio():
    try:
        find_fio()
    except FioError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("needs_fio")
def test_jobs_get_whole_blocks_and_write_the_whole_file(settings, tmp_path):
    three = replace(settings, numjobs=3)
    with Fio(three, tuned=True) as fio:
        command = dict(option.removeprefix("--").split("=", 1) for option in fio.command("mixed", three.size)[1:])
        assert int(command["offset_increment"]) % three.bs == int(command["io_size"]) % three.bs == 0
        (file,) = tmp_path.glob("*/fio")
        assert file.stat().st_blocks * 512 >= three.size
        assert fio.run("mixed", three.size) > 0


@pytest.mark.usefixtures("needs_fio")
def test_fio_works_on_a_written_file_and_leaves_nothing(settings, tmp_path):
    with Fio(settings, tuned=True) as fio:
        (file,) = tmp_path.glob("*/fio")
        assert file.stat().st_blocks * 512 >= settings.size
        assert fio.run("mixed", settings.size) > 0
        assert "--fixedbufs=1" in fio.command("mixed", settings.size)
    assert not list(tmp_path.iterdir())
