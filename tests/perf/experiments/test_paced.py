"""Iterations over drives: a drive of an exact rate keeps its bytes and its pace, and figures are what they promise."""

import pytest
import torch

from nvme_offload import OffloadAdamW, OffloadConfig
from nvme_offload.perf.experiments.paced import SCHEDULES
from nvme_offload.perf.experiments.paced_drive import STANDS_IN_FOR, paced_drive
from nvme_offload.perf.experiments.training import SleepingModel
from tests.perf.experiments.running import results, said

RATE = 2e9
BY_BLOCKS = '{"micro_batch_order": "vertical"}'
ONE_BY_ONE = '{"micro_batch_order": "horizontal"}'
IN_BACKWARD = BY_BLOCKS[:-1] + ', "overlap_step": "backward", "gradient_clipping": 0, "skip_non_finite": false}'


def trained(offload):
    """A parameter after five steps, the seconds of its transfers, and their bytes."""
    param = torch.nn.Parameter(torch.linspace(-1, 1, 1 << 20).bfloat16())
    seconds = 0.0
    with OffloadAdamW([param], lr=1e-2, offload=offload) as optimizer:
        for _ in range(5):
            param.grad = param.detach().clone()
            optimizer.step()
            optimizer.synchronize()
            moving = [span for span in optimizer.timeline() if span.kind in ("read", "write")]
            seconds += sum(span.end_ns - span.start_ns for span in moving) / 1e9
        stats = optimizer.stats()
        return param.detach(), seconds, stats.bytes_read + stats.bytes_written, stats.engine


def test_a_paced_drive_keeps_bytes_and_pace(tmp_path):
    state = {"device": "nvme", "nvme_path": str(tmp_path), "staging_budget": "8MiB"}
    section = {"zero_optimization": {"offload_optimizer": state}, "aio": {"engine": STANDS_IN_FOR}}
    offload = OffloadConfig.from_dict(section)
    expected, *_ = trained({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
    with paced_drive() as pace:
        pace.rate = RATE
        found, seconds, moved, engine = trained(offload)
    assert engine == "paced"
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    assert moved > 5 * 10 * found.numel()
    assert seconds > 0.95 * moved / RATE  # never quicker; how much slower is the machine's business
    assert trained(offload)[3] == STANDS_IN_FOR


def test_a_sleeping_model_has_a_matrix_for_each_subgroup():
    model = SleepingModel(64, 16)
    assert sum(param.numel() for param in model.parameters()) == 16 * 64**2
    model.compute_for(0.016)
    assert sum(layer.seconds for layer in model.layers) == pytest.approx(0.016)
    model(torch.randn(2, 64)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("ratios", [[1], pytest.param([0.5, 2], marks=pytest.mark.slow)])
def test_every_schedule_beside_its_plan(ratios):
    small = ["--layers", 8, "--width", 64, "--compute", 0.05, "--iterations", 2, "--buffers", 2]
    found = results("paced", *small, *(word for ratio in ratios for word in ("--ratio", ratio)))
    assert list(found) == [f"{name}, {ratio:g}" for name in SCHEDULES for ratio in ratios]
    for each in found.values():
        assert each["quotient"] == pytest.approx(each["seconds"] / each["plan"])
        assert min(each["seconds"], each["computing"], each["plan_of_ideal"]) > 0
    assert all(found[f"off, {ratio:g}"]["of_first"] == 1 for ratio in ratios)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("case", [pytest.param(BY_BLOCKS, marks=pytest.mark.slow), IN_BACKWARD])
def test_bytes_of_a_step_in_each_order_on_a_real_drive(tmp_path, case):
    small = ("--layers", 8, "--width", 64, "--tokens", 4, "--count", 3, "--iterations", 2, "--everything")
    found = results("paced", "--path", tmp_path, *small, "--buffers", 2, "--case", ONE_BY_ONE, "--case", case)
    one_by_one, by_blocks = found[ONE_BY_ONE], found[case]
    assert by_blocks["digest"] == one_by_one["digest"]
    assert by_blocks["param_bytes_read"] < one_by_one["param_bytes_read"] - 3
    assert one_by_one["grad_bytes_written"] > 5
    assert by_blocks["grad_bytes_written"] == 0 if case == IN_BACKWARD else by_blocks["grad_bytes_written"] < 2.3
    assert min(each[key] for each in found.values() for key in ("seconds", "cpu_ns", "peak_bytes")) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_case_that_is_no_section_is_refused():
    assert "'nope' is neither off, forward," in said("paced", "--case", "nope", status=2)
