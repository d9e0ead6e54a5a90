"""fio beside us: its command line, its report, its files."""

from dataclasses import replace

import pytest

from nvme_offload.perf.bench.command import Fio, FioError, bandwidth, find_fio
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


@pytest.fixture
def needs_fio():
    try:
        find_fio()
    except FioError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("needs_fio")
@pytest.mark.parametrize("numjobs", [1, 3])
def test_jobs_get_whole_blocks_of_a_written_file_and_leave_nothing(settings, tmp_path, numjobs):
    its = replace(settings, numjobs=numjobs)
    with Fio(its) as fio:
        command = dict(option.removeprefix("--").split("=", 1) for option in fio.command("mixed", its.size)[1:])
        assert int(command["offset_increment"]) % its.bs == int(command["io_size"]) % its.bs == 0
        assert command["fixedbufs"] == "1"
        (file,) = tmp_path.glob("*/fio")
        assert file.stat().st_blocks * 512 >= its.size
        assert fio.run("mixed", its.size) > 0
    assert not list(tmp_path.iterdir())
