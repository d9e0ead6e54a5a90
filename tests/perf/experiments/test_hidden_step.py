"""The measurements of hidden steps: a drive of an exact rate keeps its bytes and its pace, and tables are saved."""

import json

import pytest
import torch

from nvme_offload import OffloadAdamW, OffloadConfig
from nvme_offload.perf import cli
from nvme_offload.perf.experiments.__main__ import EXPERIMENTS
from nvme_offload.perf.experiments.hidden_step import Setup
from nvme_offload.perf.measure.paced import STANDS_IN_FOR, paced_drive
from nvme_offload.perf.measure.training import SleepingModel
from tests.perf.experiments.running import said

RATE = 2e9


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
    offload = OffloadConfig.from_dict(
        {"zero_optimization": {"offload_optimizer": state}, "aio": {"engine": STANDS_IN_FOR}}
    )
    expected, *_ = trained({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
    with paced_drive() as pace:
        pace.rate = RATE
        found, seconds, moved, engine = trained(offload)
    assert engine == "paced"
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    assert moved > 5 * 10 * found.numel()
    assert seconds > 0.95 * moved / RATE  # never quicker; how much slower is the machine's business
    assert trained(offload)[3] == STANDS_IN_FOR


@pytest.mark.parametrize("shape", ["layers", "lm"])
def test_a_sleeping_model_has_a_matrix_for_each_subgroup(shape):
    model = SleepingModel(64, 16, shape)
    assert sum(param.numel() for param in model.parameters()) == 16 * 64**2
    assert Setup(width=64, subgroups=16, shape=shape).numel == 16 * 64**2
    model.compute_for(0.016)
    assert sum(layer.seconds for layer in model.layers) == pytest.approx(0.016)
    model(model.sample).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize(
    ("shape", "overlap_step", "expected"),
    [("layers", "speculate", (1.00, 1.19, 1.00)), ("lm", "backward", (1.04, 1.19, 1.00))],
)
def test_bounds(shape, overlap_step, expected):
    setup = Setup(shape=shape)
    ratios = [setup.bound(overlap_step, 1.0, nvme).seconds / max(1.0, nvme) for nvme in (0.5, 1.0, 2.0)]
    assert ratios == pytest.approx(expected, abs=0.02)
    assert setup.bound("off", 1.0, 1.0).seconds == pytest.approx(1.92, abs=0.005)
    assert setup.bytes_moved("speculate") == 22 * setup.numel == 1.1 * setup.bytes_moved("backward")


@pytest.mark.parametrize("overlap_step", ["off", pytest.param("speculate", marks=pytest.mark.slow)])
def test_the_table_over_a_paced_drive(tmp_path, alone, overlap_step):
    small = f"paced --overlap-step {overlap_step} --width 64 --subgroups 8 --io-seconds 0.05 --iterations 2"
    said("hidden-step", *small.split(), "--save", tmp_path)
    [file] = tmp_path.glob("*-hidden-step-layers.json")
    document = json.loads(file.read_text())
    assert [cell["ratio"] for cell in document["results"]] == [0.5, 1.0, 2.0]
    for cell in document["results"]:
        assert len(cell["iterations"]) == 2
        assert cell["nvme"] == 0.05
        assert cell["compute"] > 0
        assert cell["of_ideal"] > 0
        assert cell["quotient"] == pytest.approx(cell["of_ideal"] / cell["bound"])
    assert str(tmp_path) not in file.read_text()
    assert f"| {overlap_step}, 0.5" in file.with_suffix(".md").read_text()


def test_help_that_is_known_up_front_is_that_of_the_experiment():
    for name, experiment in EXPERIMENTS.items():
        loaded = cli.load(name, EXPERIMENTS)
        assert " ".join(loaded.help.split("\n\n")[0].split()) == experiment.help
        assert loaded.epilog == f"Example: {experiment.example}"
