"""`offload init`: the section that it writes is the fastest that fits, and loads."""

import itertools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nvme_offload import OffloadConfig
from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.units import GiB, MiB
from nvme_offload.perf.cli import app
from nvme_offload.perf.init import command
from nvme_offload.perf.plan.choosing import Chooser
from nvme_offload.perf.plan.machine import Drives, Machine
from nvme_offload.perf.plan.prediction import predict
from nvme_offload.perf.plan.shape import ModelShape
from tests.perf.documents import write_bench

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 1024,
    "intermediate_size": 4096, "num_hidden_layers": 64, "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip
"""1.1 G parameters: 15 GB altogether, 11 GB of them state."""


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: False)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def init(model, tmp_path, *more):
    output = tmp_path / "offload.json"
    arguments = ["init", "--model", str(model), "--path", str(tmp_path), "-o", str(output)]
    done = CliRunner().invoke(app, [*arguments, "--tokens", "128", *more])
    return done, (json.loads(output.read_text()) if output.exists() else None)


def devices(section):
    config = OffloadConfig.from_dict(section)
    zero = config.zero_optimization
    return zero.offload_optimizer.device, zero.offload_param.device, config.offload_gradients.device


@pytest.mark.parametrize(("memory", "expected", "budget"), [
    ("64GiB", ("cpu", "none", "none"), None), ("12GiB", ("nvme", "none", "none"), "7474MiB"),
    ("4GiB", ("nvme", "none", "nvme"), "1393MiB"), ("1200MiB", ("nvme", "nvme", "nvme"), "608MiB"),
])  # fmt: skip
def test_the_less_memory_the_more_goes_to_nvme(model, tmp_path, memory, expected, budget):
    done, section = init(model, tmp_path, "--host-memory", memory)
    assert done.exit_code == 0, done.output
    assert devices(section) == expected, done.output
    assert section.get("host_budget") == budget
    output = tmp_path / "offload.json"
    assert f"offload doctor --config {output}, offload plan --model {model} --config {output}" in done.output


@pytest.mark.parametrize(("flops", "order", "said"), [
    ("1e14", "vertical", "faster: vertical"),
    pytest.param("1e10", "horizontal", "faster: horizontal", marks=pytest.mark.slow), (None, "vertical", "rates say"),
])  # fmt: skip
def test_the_faster_order_of_micro_batches_is_written_where_rates_are_known(model, tmp_path, flops, order, said):
    """Without them it is what moves fewer bytes, as "auto" decides in a run."""
    rates = ("--bench", str(write_bench(tmp_path / "bench.json")), *(("--flops", flops) if flops else ()))
    done, section = init(model, tmp_path, "--host-memory", "4GiB", "--micro-batches", "3", *rates)
    assert done.exit_code == 0, done.output
    assert (section["gradient_accumulation_steps"], section.get("micro_batch_order")) == (3, order)
    more = ("--model", str(model), "--tokens", "128", "--host-memory", "4GiB", *rates)
    words = []
    for given in ("--config", str(tmp_path / "offload.json")), ("--micro-batches", "3"):
        planned = CliRunner().invoke(app, ["plan", *more, *given]).output
        assert said in planned
        words.append([line for line in planned.splitlines() if "micro_batch_order:" in line])
    assert words[0] == words[1]
    config = OffloadConfig.from_dict(section)
    assert config.goes_by_blocks == (order != "horizontal")
    assert config.rounds == (3 if order == "horizontal" else 1)
    both = CliRunner().invoke(app, ["plan", *more, "--config", str(tmp_path / "offload.json"), "--micro-batches", "3"])
    assert both.exit_code == 2
    assert "leave out --micro-batches" in both.output


def test_what_does_not_fit_is_said_and_nothing_is_written(model, tmp_path):
    done, section = init(model, tmp_path, "--host-memory", "600MiB")
    assert (done.exit_code, section) == (1, None)
    assert "too small" in done.output


def test_a_file_that_is_there_stays(model, tmp_path):
    (tmp_path / "offload.json").write_text("{}")
    done, section = init(model, tmp_path)
    assert (done.exit_code, section) == (2, {})
    assert "exists; name another file" in " ".join(done.output.replace("│", " ").split())


def test_another_model_is_said(tmp_path):
    done, section = init(tmp_path / "nothing", tmp_path)
    assert (done.exit_code, section) == (2, None)


def test_this_machine_counts_each_drive_once(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    machine = command.this_machine([tmp_path / "a", tmp_path / "b"], 2, GiB)
    assert isinstance(machine, Machine)
    assert machine.capacity <= 1.01 * command.this_machine([tmp_path / "a"], 2, GiB).capacity
    assert machine.ranks == 2


def by_hand(memory_bytes):
    """Yield sections with the state on NVMe that somebody might write: each tier or none, budgets of all sizes."""
    drive = {"device": "nvme", "nvme_path": "/"}
    for params, grads in itertools.product(({}, {"offload_param": drive}), ({}, {"offload_gradients": drive})):
        zero = {"stage": 3, "offload_optimizer": drive, **params}
        section = {"bf16": {"enabled": True}, "gradient_clipping": 1.0, "zero_optimization": zero, **grads}
        yield section
        for share in (0.2, 0.4, 0.6, 0.75, 0.9):
            yield section | {"host_budget": f"{int(share * memory_bytes) // MiB}MiB"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "memory", "device"),
    [((7 * 10**9, 32, 4096, 32000), *sizes) for sizes in ((16, 0), (32, 0), (64, 0), (96, 0), (40, 24))]
    + [((70 * 10**9, 80, 8192, 32000), size, 0) for size in (64, 128, 256, 512)],
    ids=lambda value: f"{value}" if isinstance(value, int) else f"{value[0]:.0e}",
)
def test_no_section_by_hand_is_planned_faster_by_more_than_5_percent(numbers, memory, device):
    shape, drives = ModelShape.of_numbers(*numbers), Drives.of_rates(14.9e9, 3e9)
    on = {"host_memory": memory * GiB, "device_memory": device * GiB or None}
    machine = Machine(**on, drives=drives, capacity=4 * 10**12, flops=1e14)
    chooser = Chooser(machine, [Path("/")], tokens=2048)
    found = predict(chooser.choose(shape).job, machine)
    assert not found.tiers.missing
    others = []
    for section in by_hand(memory * GiB):
        try:
            other = predict(chooser.job(section, shape), machine)
        except ConfigError:  # the budget holds less than its staging buffers
            continue
        if not other.tiers.missing:
            others.append(other.time.seconds)
    assert others
    assert found.time.seconds <= 1.05 * min(others)


@pytest.mark.parametrize("suffix", [".toml", ".yaml"])
def test_the_suffix_says_in_what_the_section_is_written(suffix, tmp_path):
    files = [tmp_path / f"offload{each}" for each in (".json", suffix)]
    for file in files:
        assert init("qwen3-8b", tmp_path, "-o", str(file), "--host-memory", "24GiB", "--lora", "r=8")[0].exit_code == 0
    one, other = map(OffloadConfig.from_file, files)
    assert one == other != OffloadConfig()
    assert files[1].read_text().count("\n") > 6
    assert init("qwen3-8b", tmp_path, "-o", str(tmp_path / "offload.ini"))[0].exit_code == 2
