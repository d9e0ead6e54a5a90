"""The driver of a drive tells everybody how warm it is, and doctor notes a hot one."""

import os

import pytest

from nvme_offload.perf.doctor.drive import check_warmth
from nvme_offload.perf.doctor.findings import Level
from nvme_offload.perf.measure import drives


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """A drive in a made-up /sys, and the file that says how warm it is."""
    monkeypatch.setattr(drives, "SYS", tmp_path)
    disk = tmp_path / "devices/pci/nvme/nvme0/nvme0n1"
    (disk / "queue").mkdir(parents=True)
    for link in (tmp_path / "class/block/nvme0n1", tmp_path / "dev/block/259:0"):
        link.parent.mkdir(parents=True)
        link.symlink_to(disk)
    (disk / "device/hwmon3").mkdir(parents=True)
    return drives.find_drive(os.makedev(259, 0), None), disk / "device/hwmon3/temp1_input"


def test_it_is_read_from_the_kernel_and_noted_where_it_is_hot(drive):
    found, file = drive
    assert list(check_warmth(found)) == []
    for thousandths, words, level in (("61850", "nvme0n1: 62 °C", Level.OK), ("70000", "nvme0n1: 70 °C", Level.NOTE)):
        file.write_text(f"{thousandths}\n")
        (finding,) = check_warmth(found)
        assert (finding.found, finding.level, bool(finding.remedy)) == (words, level, level is Level.NOTE)
    assert drives.temperature("nvme9n1") is None
