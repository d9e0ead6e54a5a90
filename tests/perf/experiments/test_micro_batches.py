"""Bytes of a step by the order of its micro-batches: they are counted, and are what each order promises."""

import pytest

from tests.perf.experiments.running import results


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("in_backward", [False, True], ids=["clipped", "in backward"])
def test_bytes_of_a_step_in_each_order(tmp_path, in_backward):
    small = ("--layers", 8, "--width", 64, "--tokens", 4, "--count", 3, "--steps", 2)
    found = results("micro-batches", "--path", tmp_path, *small, *(["--in-backward"] if in_backward else []))
    one_by_one, by_blocks = found["horizontal, 3"], found["vertical, 3"]
    assert by_blocks["digest"] == one_by_one["digest"]
    assert by_blocks["param_bytes_read"] < one_by_one["param_bytes_read"] - 3
    assert one_by_one["grad_bytes_written"] > 5
    assert by_blocks["grad_bytes_written"] == 0 if in_backward else by_blocks["grad_bytes_written"] < 2.3
    assert list(tmp_path.iterdir()) == []
