"""What keeping activations on a drive saves and costs: figures of each way, and the same bits."""

import pytest

from tests.perf.experiments.running import results


@pytest.mark.slow  # a process for each
def test_memory_of_each_way(tmp_path):
    found = results("activations", "memory", "--path", tmp_path, "--width", 64, "--context", 64, "--depth", 2)
    assert list(found) == ["plain", "checkpointing", "boundaries", "attention", "all"]
    assert len({tuple(each["digests"]) for each in found.values()}) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_with_boundaries_on_the_drive_memory_does_not_grow_with_depth(tmp_path):
    found = results("activations", "memory", "--path", tmp_path, "--width", 256, "--depth", 8, "--depth", 32)
    plain, boundaries = (found[way]["peaks"] for way in ("plain", "boundaries"))
    assert boundaries[1] <= 1.1 * boundaries[0]
    assert plain[1] > 2 * plain[0]


def test_iterations_by_turns(tmp_path):
    size = ("--width", 64, "--context", 64, "--layers", 2)
    found = results("activations", "iterations", "--path", tmp_path, *size, "--quads", 1)
    assert list(found) == ["boundaries", "attention", "all"]
    assert all(each["quotient"] > 0 for each in found.values())
    assert list(tmp_path.iterdir()) == []
