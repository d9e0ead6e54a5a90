"""SMART of recorded drives, and what doctor makes of it."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from nvme_offload.perf.doctor import drive as doctor_drive
from nvme_offload.perf.doctor.drive import check_health, judged
from nvme_offload.perf.doctor.findings import Level
from nvme_offload.perf.measure import drives
from nvme_offload.perf.measure.drives import HealthError, health_of, read_health, throttled_seconds

RECORDED = Path(__file__).parent / "smart"
KEYS = ("temperature", "percent_used", "spare", "bytes_written", "media_errors", "power_on_hours", "throttled_seconds")


def recorded(name):
    return json.loads((RECORDED / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("smartctl-970-evo-plus.json", (35.0, 0, 100, 1969459 * 512_000, 0, 3149, None)),
        ("smartctl-micron-7450.json", (33.0, 0, 100, 1248078 * 512_000, 0, 2884, None)),
        ("smartctl-970-evo-media-errors.json", (35.0, 3, 99, 65602088 * 512_000, 7, 12798, None)),
        ("nvme-worn.json", (28.0, 15, 100, 1474968593 * 512_000, 0, 38313, 0)),
        ("nvme-three-sensors.json", (34.0, 0, 100, 21210849 * 512_000, 0, 842, 0)),
    ],
)
def test_what_both_programs_print_is_understood(name, values):
    assert tuple(getattr(health_of(recorded(name)), key) for key in KEYS) == values


def test_a_warning_in_words_is_the_number_in_it():
    """`nvme smart-log --verbose` makes an object of it."""
    log = recorded("nvme-worn.json")
    assert health_of(log | {"critical_warning": {"value": 4, "reliability_degraded": 1}}).critical_warning == 4


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ({}, "no SMART log"),
        ({"smartctl": {"messages": [{"string": "Permission denied"}]}}, "Permission denied"),
        ({"ata_smart_attributes": {"table": []}}, "no SMART log of an NVMe drive"),
        ({"percent_used": 3}, "lacks what NVMe 1.0 has in it: KeyError"),
    ],
)
def test_anything_else_is_refused_in_words(document, why):
    with pytest.raises(HealthError, match=why):
        health_of(document)


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A PATH with programs that print a file, as `nvme` and `smartctl` would."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def put(name, script):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return put


def test_nvme_is_asked_first_and_smartctl_where_it_does_not_answer(programs):
    programs("smartctl", f'[ "$*" = "--json --all /dev/nvme0n1" ] && /bin/cat {RECORDED}/smartctl-micron-7450.json')
    assert read_health("nvme0n1").bytes_written == 1248078 * 512_000
    programs("nvme", "echo 'open: Permission denied' >&2; exit 1")
    assert read_health("nvme0n1").bytes_written == 1248078 * 512_000
    ours = f'[ "$*" = "smart-log --output-format=json /dev/nvme0n1" ] && /bin/cat {RECORDED}/nvme-worn.json'
    programs("nvme", ours)
    assert read_health("nvme0n1").percent_used == 15
    assert throttled_seconds(["nvme0n1", "vda"]) == 0


def test_why_nothing_is_known_is_said(programs):
    with pytest.raises(HealthError, match="neither nvme"):
        read_health("nvme0n1")
    with pytest.raises(HealthError, match="vda is no NVMe drive, or a hypervisor"):
        read_health("vda")
    programs("nvme", "echo 'open: Permission denied' >&2; exit 1")
    with pytest.raises(HealthError, match="nvme: open: Permission denied"):
        read_health("nvme0n1")
    assert throttled_seconds(["nvme0n1"]) is None


FINE = health_of(recorded("nvme-three-sensors.json"))


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({}, Level.OK, ""),
        ({"media_errors": 7}, Level.WARNING, "7 times it could not give back"),
        ({"percent_used": 90}, Level.WARNING, "may not last"),
        ({"percent_used": 89}, Level.OK, ""),
        ({"critical_warning": 4}, Level.WARNING, "not reliable"),
        ({"critical_warning": 8}, Level.WARNING, "no more writes"),
        ({"spare": 9}, Level.WARNING, "spare blocks run out"),
        ({"temperature": 75.0}, Level.NOTE, "slower when they are hot"),
        ({"throttled_seconds": 30}, Level.NOTE, "30 s slower for heat"),
        ({"throttled_seconds": None, "warm_minutes": 5}, Level.NOTE, "5 min too warm for heat"),
    ],
)
def test_what_it_means(change, level, words):
    finding = judged("nvme0n1", replace(FINE, **change))
    assert finding.level is level
    assert words in finding.meaning
    assert "10.9 TB written in 842 h" in finding.found
    assert finding.values["bytes_written"] == FINE.bytes_written
    assert bool(finding.remedy) == (level is not Level.OK)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A /sys with one NVMe drive: warm, and near two processors of its node."""
    monkeypatch.setattr(drives, "SYS", tmp_path)
    disk = tmp_path / "devices/pci/nvme/nvme0/nvme0n1"
    (disk / "queue").mkdir(parents=True)
    (tmp_path / "class/block").mkdir(parents=True)
    (tmp_path / "class/block/nvme0n1").symlink_to(disk)
    (tmp_path / "dev/block").mkdir(parents=True)
    (tmp_path / "dev/block/259:0").symlink_to(disk)
    controller = disk / "device"
    (controller / "hwmon3").mkdir(parents=True)
    (controller / "hwmon3/temp1_input").write_text("61850\n")
    (controller / "device").mkdir()
    (controller / "device/numa_node").write_text("1\n")
    (tmp_path / "devices/system/node/node1").mkdir(parents=True)
    (tmp_path / "devices/system/node/node1/cpulist").write_text("4-5,12\n")
    return drives.find_drive(os.makedev(259, 0), None)


def test_warmth_and_place_are_read_from_the_kernel(machine, monkeypatch):
    assert drives.temperature("nvme0n1") == 61.85
    assert drives.temperature("nvme9n1") is None
    assert (machine.numa_node, machine.near_cpus) == (1, {4, 5, 12})
    monkeypatch.setattr(doctor_drive, "read_health", lambda disk: FINE)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    about_health, about_node = check_health(machine)
    assert "62 °C" in about_health.found, "SMART's own is older"
    assert about_node.level is Level.NOTE
    assert "numactl --cpunodebind=1 --membind=1" in about_node.remedy
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 12})
    assert list(check_health(machine))[1].level is Level.OK


def test_where_nobody_may_ask_it_says_so_and_goes_on(machine, monkeypatch):
    def refused(disk):
        raise HealthError("nvme: open: Permission denied")

    monkeypatch.setattr(doctor_drive, "read_health", refused)
    finding = next(iter(check_health(machine)))
    assert finding.level is Level.NOTE
    assert finding.found == "nvme0n1: SMART not known (nvme: open: Permission denied); 62 °C"
    assert finding.remedy == "sudo nvme smart-log /dev/nvme0n1"
