"""Ranks keep to the processors near their device, unless somebody has said where they run."""

import os
from types import SimpleNamespace

import pytest
import torch

from nvme_offload.offload.devices import numa
from nvme_offload.offload.devices.numa import cpus_near, num_processors_of_rank, stay_near

DEVICE = "late:1"


@pytest.fixture
def affinity(late, tmp_path, monkeypatch):
    """A host of two nodes with four processors each; device 1 hangs on the second. The processors of this thread."""
    places = {0: SimpleNamespace(pci_domain_id=0, pci_bus_id=0x18, pci_device_id=0)}
    places[1] = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xAF, pci_device_id=0)
    monkeypatch.setattr(
        torch.late, "get_device_properties", lambda device: places[torch.device(device).index], raising=False
    )
    for node, (place, cpus) in enumerate([("0000:18:00.0", "0-1,4-5"), ("0000:af:00.0", "2-3,6-7")]):
        for file, text in {
            f"bus/pci/devices/{place}/numa_node": str(node),
            f"devices/system/node/node{node}/cpulist": cpus,
        }.items():
            (tmp_path / file).parent.mkdir(parents=True)
            (tmp_path / file).write_text(text + "\n")
    monkeypatch.setattr(numa, "SYS", tmp_path)
    monkeypatch.setattr(numa, "_narrowed_from", set())
    allowed = set(range(8))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))

    def keep_to(pid, cpus):
        assert pid == 0
        allowed.clear()
        allowed.update(cpus)

    monkeypatch.setattr(os, "sched_setaffinity", keep_to)
    return allowed


def test_a_rank_keeps_to_the_processors_near_its_device(affinity):
    assert cpus_near(torch.device("late:0")) == {0, 1, 4, 5}
    assert stay_near(torch.device(DEVICE), 2)
    assert affinity == {2, 3, 6, 7}
    assert not stay_near(torch.device(DEVICE), 2)


def test_a_lone_rank_keeps_all_processors(affinity):
    assert not stay_near(torch.device(DEVICE), 1)
    assert affinity == set(range(8))


@pytest.mark.parametrize(("num_ranks", "share"), [(2, 4), (4, 2), (16, 1)])
def test_a_rank_works_with_its_share_of_the_host_and_not_of_its_node(affinity, num_ranks, share):
    stay_near(torch.device(DEVICE), num_ranks)
    assert num_processors_of_rank(num_ranks) == share


def test_who_was_bound_before_stays_where_he_is(affinity):
    affinity -= {7}
    assert not stay_near(torch.device(DEVICE), 2)
    assert affinity == set(range(7))


@pytest.mark.parametrize("text", ["-1\n", "", None])
def test_a_host_that_does_not_say_changes_nothing(affinity, text):
    place = numa.SYS / "bus/pci/devices/0000:af:00.0/numa_node"
    place.unlink() if text is None else place.write_text(text)
    assert not stay_near(torch.device(DEVICE), 2)
    assert affinity == set(range(8))


def test_a_device_that_hangs_on_no_bus_changes_nothing(affinity, monkeypatch):
    monkeypatch.setattr(torch.late, "get_device_properties", lambda device: SimpleNamespace())
    assert not stay_near(torch.device(DEVICE), 2)
