"""The model of schedules: against figures worked out elsewhere, and against what can be worked out by hand."""

from dataclasses import replace

import pytest

from nvme_offload.perf.plan.iteration import OVERLAPS, GroupTime, SubgroupTime, Work, on_one_processor
from nvme_offload.perf.plan.schedule import iteration_time, reads_of

LAYERS = 48


def layers(nvme, num_buffers=4, compute=1.0, count=LAYERS, **more):
    """A model of equal layers, a subgroup each; `nvme`: seconds of all reads and writes of a step."""
    group = GroupTime(forward=compute / 3 / count, backward=compute * 2 / 3 / count)
    half = nvme / 2 / count
    subgroups = tuple(SubgroupTime(first=i, last=i, read=half, update=0.0, write=half) for i in range(count))
    return Work(groups=(group,) * count, subgroups=subgroups, num_buffers=num_buffers, **more)


@pytest.mark.parametrize(("overlap_step", "num_buffers", "expected"), [
    ("off", 4, (1.46, 1.92, 1.42)), ("forward", 4, (1.13, 1.59, 1.25)), ("forward", 16, (1.01, 1.34, 1.00)),
    ("backward", 4, (1.00, 1.19, 1.00)), ("backward", 16, (1.00, 1.02, 1.00)),
])  # fmt: skip
def test_another_model_of_the_same_schedules_says_the_same(overlap_step, num_buffers, expected):
    """Written before this one, with times in place of events and the two kinds of a step in two loops.

    It knew how many subgroups the drive gets done in backward, where a run learns that: there it said 1.16 and 1.00.
    """
    found = [1 / iteration_time(layers(nvme, num_buffers), overlap_step).share_of_ideal for nvme in (0.5, 1, 2)]
    assert [round(ratio, 2) for ratio in found] == list(expected)


def test_without_a_drive_an_iteration_is_computing():
    for overlap_step in OVERLAPS:
        found = iteration_time(layers(0.0, micro_batches=3), overlap_step)
        assert found.seconds == pytest.approx(3.0)
        assert found.limit == "compute"
        assert found.parts == pytest.approx({"forward": 1.0, "backward": 2.0, "step": 0.0})


def test_copies_beside_computing_show_where_they_are_longer():
    """Two groups, of which one gathers for longer than it computes; updates wait for copies as for the kernel."""
    quick = GroupTime(forward=1.0, backward=2.0, forward_pcie=0.5, backward_pcie=0.5)
    slow = GroupTime(forward=1.0, backward=2.0, forward_pcie=3.0, backward_pcie=2.5)
    updates = tuple(SubgroupTime(first=i, last=i, read=0.0, update=0.25, write=0.0, pcie=1.0) for i in range(2))
    work = Work(groups=(quick, slow), subgroups=updates, num_buffers=2)
    assert (work.compute, work.pcie, work.update, work.ideal) == (6.0, 8.5, 0.5, 8.5)
    found = iteration_time(work, "off")
    assert found.parts == pytest.approx({"forward": 4.0, "backward": 4.5, "step": 2.0})
    assert found.seconds == pytest.approx(10.5)
    assert found.limit == "PCIe"


def test_in_step_nothing_overlaps_but_the_last_writes():
    """Two subgroups and one buffer by hand: read, read again for the second, both written; the second stays."""
    found = iteration_time(layers(4.0, num_buffers=1, compute=3.0, count=2), "off")
    # The one that the last step ended with is there, and written once more; then the other is read.
    assert found.seconds == pytest.approx(3.0 + 1.0 + 1.0)
    assert found.waiting == pytest.approx({"forward": 0.0, "backward": 0.0, "step": 2.0})
    assert found.limit == "drive"


def test_a_forward_waits_for_its_own_subgroups_only():
    found = iteration_time(layers(1.0), "forward")
    assert found.waiting["forward"] > 0
    assert found.waiting["backward"] == found.waiting["step"] == 0
    assert found.limit == "staging buffers"
    assert iteration_time(layers(1.0, num_buffers=LAYERS // 2), "forward").seconds < found.seconds


def test_a_kernel_that_is_slower_than_all_else_limits():
    slow = layers(1.0)
    slow = replace(slow, subgroups=tuple(replace(subgroup, update=3.0 / LAYERS) for subgroup in slow.subgroups))
    for overlap_step in OVERLAPS:
        found = iteration_time(slow, overlap_step)
        assert found.seconds >= 3.0
        assert found.limit == "kernel"


def test_state_in_memory_takes_no_buffer():
    work = layers(1.0, num_buffers=2)
    resident = replace(work.subgroups[0], read=0.0, write=0.0)
    halves = tuple(replace(resident, first=i, last=i) if i % 2 else work.subgroups[i] for i in range(LAYERS))
    for overlap_step in OVERLAPS:
        half = iteration_time(replace(work, subgroups=halves), overlap_step)
        assert half.seconds < iteration_time(work, overlap_step).seconds
        assert half.seconds >= half.work.ideal * 0.99


def test_a_gather_waits_for_its_parameters_on_the_drive():
    work = layers(0.0)
    moved = replace(work, groups=tuple(replace(group, forward_nvme=1.0 / LAYERS) for group in work.groups))
    found = iteration_time(moved, "off")
    assert found.waiting["forward"] == pytest.approx(2 / 3, rel=0.05)
    assert found.seconds == pytest.approx(5 / 3, rel=0.05)


def test_what_updates_on_the_processor_that_computes_is_part_of_a_forward():
    work = layers(0.5)
    work = replace(work, subgroups=tuple(replace(subgroup, update=0.5 / LAYERS) for subgroup in work.subgroups))
    assert on_one_processor(work, "off") == work
    assert on_one_processor(work, "forward").compute == pytest.approx(1.5)
    assert on_one_processor(work, "forward").update == 0


def test_state_that_the_last_step_left_in_the_buffers_is_not_read_again():
    """Directions alternate where updates are inside the step; behind it, all of it passes through the buffers."""
    assert sum(reads_of(layers(1.0, num_buffers=4), "off").values()) == LAYERS - 4
    assert reads_of(layers(1.0, num_buffers=4), "forward") == dict.fromkeys(range(LAYERS), 1.0)
    for overlap_step in OVERLAPS:
        assert not sum(reads_of(layers(1.0, num_buffers=LAYERS), overlap_step).values())
