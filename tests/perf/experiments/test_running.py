"""Experiments as they run: what is saved at once, and at the pace of a drive."""

import json

import pytest
import torch
import typer

from nvme_offload import OffloadAdamW, OffloadConfig
from nvme_offload.perf import cli
from nvme_offload.perf.experiments.__main__ import EXPERIMENTS
from nvme_offload.perf.experiments.experiment import Row, run_experiment
from nvme_offload.perf.experiments.paced import SCHEDULES
from nvme_offload.perf.experiments.paced_drive import STANDS_IN_FOR, paced_drive
from nvme_offload.perf.experiments.training import SleepingModel
from tests.perf.experiments.running import results, said


def test_a_run_that_is_cut_short_has_saved_what_it_knows(tmp_path):
    def rounds():
        for count in (1, 2):
            yield Row({"": "durable", "ratio": "0.800", "quads": str(count)}, {"quads": [0.8] * count})
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as ended:
        run_experiment("durable-steps", "Durable steps", rounds(), path=tmp_path, save_to=tmp_path / "results")
    assert ended.value.exit_code == 130
    [page] = (tmp_path / "results").glob("*-durable-steps.md")
    [document] = (tmp_path / "results").glob("*-durable-steps.json")
    assert "| durable | 0.800 | 2 |" in page.read_text()
    [outcome] = json.loads(document.read_text())["results"]
    assert len(outcome["quads"]) == 2
    assert str(tmp_path) not in document.read_text()


def test_a_table_that_is_too_wide_either_way_has_cells_of_several_lines(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    rows = [Row({"what": f"a long operation {n}", "ratio": "0.93 (0.90 to 0.97)"}, {}) for n in range(9)]
    run_experiment("costs", "Costs", rows)
    assert "what ratio" in [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_help_that_is_known_up_front_is_that_of_the_experiment():
    for name, experiment in EXPERIMENTS.items():
        loaded = cli.load(name, EXPERIMENTS)
        assert " ".join(loaded.help.split("\n\n")[0].split()) == experiment.help
        assert loaded.epilog == f"Example: {experiment.example}"


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
