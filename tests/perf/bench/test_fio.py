"""fio beside us: its command line, its report, its files."""

from dataclasses import replace

import pytest

from nvme_offload.perf.bench.fio import Fio, FioError, bandwidth, find_fio
from nvme_offload.perf.measure.command_line import Settings


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
    with Fio(three) as fio:
        command = dict(option.removeprefix("--").split("=", 1) for option in fio.command("mixed", three.size)[1:])
        assert int(command["offset_increment"]) % three.bs == int(command["io_size"]) % three.bs == 0
        (file,) = tmp_path.glob("*/fio")
        assert file.stat().st_blocks * 512 >= three.size
        assert fio.run("mixed", three.size) > 0


@pytest.mark.usefixtures("needs_fio")
def test_fio_works_on_a_written_file_and_leaves_nothing(settings, tmp_path):
    with Fio(settings) as fio:
        (file,) = tmp_path.glob("*/fio")
        assert file.stat().st_blocks * 512 >= settings.size
        assert fio.run("mixed", settings.size) > 0
        assert "--fixedbufs=1" in fio.command("mixed", settings.size)
    assert not list(tmp_path.iterdir())
