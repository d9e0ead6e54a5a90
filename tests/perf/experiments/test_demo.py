"""The demo from end to end on its smallest model, and what it does when something is wrong."""

import copy
import json
import operator
import re
import signal
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from nvme_offload.offload.host.proc import Mount
from nvme_offload.optim.telemetry.trace import TRACKS
from nvme_offload.perf.experiments import compare, gpt
from nvme_offload.perf.experiments.__main__ import app
from nvme_offload.perf.experiments.compare import Contender
from nvme_offload.perf.experiments.demo import command as demo
from nvme_offload.perf.experiments.demo.command import DemoRun
from nvme_offload.perf.experiments.gpt import CONTEXT, ByteGPT, ModelSize, parse_size
from nvme_offload.perf.experiments.peers.worker import Ended
from scripts import readme_timeline as timeline
from tests.support.forked import ROOT, forked_children

STEPS = 8
COMMAND = [sys.executable, "-m", "nvme_offload.perf.experiments", "demo", "--size", "tiny"]


@pytest.fixture(scope="module")
def finished(once):
    """Output, directory and document of one demo that ran to its end."""

    def run(out):
        with forked_children():
            done = CliRunner().invoke(app, ["demo", "--size", "tiny", "--steps", str(STEPS - 1), "--out", str(out)])
        assert done.exit_code == 0, done.output
        [file] = out.glob("*-demo.json")
        return done.output, out, json.loads(file.read_text())

    return once("demo", run)


@pytest.fixture
def runs(finished):
    """Both runs, state on NVMe and in memory, as the file has them."""
    made = []
    for saved in copy.deepcopy(finished[2]["results"]):
        its = {name: saved[name] for name in ("numel", "seconds", "losses", "figures")}
        made.append(DemoRun(contender=Contender(**saved["contender"]), ended=Ended(**saved["ended"]), **its))
    return tuple(made)


def output_of(*arguments: str) -> tuple[int, str]:
    """Exit code and text of the demo run in this process, without line breaks and frames."""
    result = CliRunner().invoke(app, ["demo", *arguments])
    return result.exit_code, re.sub(r"[\s│]+", " ", result.output)


def test_both_runs_are_bit_identical(finished, runs):
    nvme, memory = runs
    assert nvme.ended.digests == memory.ended.digests
    assert nvme.losses == memory.losses
    num_tensors = len(list(ByteGPT(gpt.PRESETS["tiny"], CONTEXT, torch.bfloat16).parameters()))
    assert len(nvme.ended.digests) == 4 * num_tensors  # the master, whose upper half the parameter is, and states
    assert f"Bit-identical: all {nvme.numel:,} parameters" in finished[0]


def test_state_was_on_the_drive_and_loss_fell(runs):
    nvme, memory = runs
    assert len(nvme.losses) == len(memory.losses) == STEPS
    assert nvme.losses[-1] < nvme.losses[0]
    assert nvme.ended.counted[1] / (nvme.numel * STEPS) == pytest.approx(10, rel=0.02)
    assert tuple(memory.ended.counted) == (0, 0)
    assert nvme.ended.moved is None or nvme.ended.moved[1] >= 0.95 * nvme.ended.counted[1]


def test_the_picture_of_the_readme_shows_something(finished, tmp_path):
    bars = timeline.bars_of(json.loads((finished[1] / "trace.json").read_text()))
    step, shown = timeline.median_iteration(bars)
    assert 0 <= min(bar.start for bar in shown if bar.kind == "forward") < step.start < step.end
    assert {"forward", "backward", "read", "compute", "write"} <= {bar.kind for bar in shown if bar.start < step.end}
    timeline.draw(bars, tmp_path / "timeline.svg", "a test")
    kinds = re.findall(r'<rect class="(\w+)"', (tmp_path / "timeline.svg").read_text(encoding="utf-8"))
    assert {"forward", "backward", "read", "compute", "write"} <= set(kinds)


def test_the_runs_trained_by_turns(finished, runs):
    """Four steps each, the order reversed each time; nothing of one lies in a turn of the other."""
    ends = [(each["ended"], name) for name, run in zip("nm", runs, strict=True) for each in run.figures]
    assert "".join(name for _, name in sorted(ends)) == "nnnnmmmmmmmmnnnn"
    assert all(0 < each["share"] <= 1 for each in runs[0].figures[1:])
    assert re.search(r"state on NVMe  8  .* s  \d+% \(\w", finished[0])


def test_the_trace_has_every_step(finished):
    events = json.loads((finished[1] / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "step" for event in events) == STEPS
    assert {"forward", "backward", "norm", "wait", "read", "compute", "write"} <= {each.get("cat") for each in events}
    named = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert named == set(TRACKS) - {"commits"}, "a run that is not durable has none"


def test_nothing_is_left_on_the_drive(finished):
    # A log stays only where something was said in it, for example which engine was passed over.
    names = {re.sub(r"^.*Z-", "", path.name) for path in finished[1].iterdir() if path.suffix != ".log"}
    assert names == {"trace.json", "demo.json", "demo.md", "run.jsonl", "report.html"}


def test_a_difference_is_an_error(runs, tmp_path, monkeypatch):
    name = "byte_embedding.weight exp_avg"
    runs[1].ended.digests[name] = "0" * 64

    def by_turns(made, order, quads, folder, out):
        for run, known in zip(made, runs, strict=True):
            vars(run).update(vars(known))
            yield run
        demo.ON_NVME.weights(folder).touch()

    monkeypatch.setattr(demo, "by_turns", by_turns)
    code, output = output_of("--size", "tiny", "--out", str(tmp_path))
    assert code == 1
    assert f"NOT bit-identical: {name}" in output
    assert "for ui.perfetto.dev" in output, "it came to its end"


def test_differences_names_losses_and_missing_digests(runs):
    nvme, memory = runs
    memory.losses[1] = 0.0
    assert demo.differences(nvme, memory) == ["loss of step 2"]
    nvme.ended.digests.clear()
    memory.ended.digests.clear()
    assert "digests, which are missing" in demo.differences(nvme, memory)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--size", "huge"], "'huge' is not tiny, small, medium or LAYERSxWIDTH"), (["--size", "2x100"], "multiples of 64"),
    (["--size", "0x64"], "1 to 96"), (["--steps", "0"], "--steps"), (["--engine", "libaio"], "'io_uring'"),
    (["--path", "/does/not/exist"], "is no directory"),
])  # fmt: skip
def test_wrong_values_are_refused(arguments, message, tmp_path):
    code, output = output_of("--size", "tiny", *arguments, "--out", str(tmp_path / "out"))
    assert code == 2
    assert message in output


def test_too_little_space_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(ModelSize, "swap_bytes", 1 << 60)
    code, output = output_of("--size", "tiny", "--out", str(tmp_path))
    assert code == 2
    assert "is needed; nothing was written" in output
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".log"]


def test_swap_in_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "mount_at", lambda path: Mount(1, "/", "/", "tmpfs", "none", ()))
    code, output = output_of("--path", str(tmp_path), "--out", str(tmp_path))
    assert (code, "memory and no drive" in output) == (2, True)
    code, output = output_of("--out", str(tmp_path))
    assert (code, "name a directory on a drive with --path" in output) == (2, True)


def test_a_failed_run_says_why_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "work", operator.add)  # which cannot add what a child is told to what it says
    with forked_children():
        code, output = output_of("--size", "tiny", "--steps", "2", "--out", str(tmp_path))
    assert code == 1
    assert "TypeError: " in output
    assert [path.suffix for path in tmp_path.iterdir()] == [".log"]


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(tmp_path):
    command, pipe = [*COMMAND, "--steps", "10000", "--out", str(tmp_path)], subprocess.PIPE
    demo_process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    try:
        assert any("state in memory  8" in line for line in demo_process.stdout)
        assert [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 2**20], "no swap file"
        demo_process.send_signal(signal.SIGINT)
        rest, _ = demo_process.communicate(timeout=60)
    finally:
        demo_process.kill()
    assert demo_process.returncode == 130
    assert "interrupted, nothing is left behind" in rest
    assert {path.suffix for path in tmp_path.iterdir()} <= {".log", ".json", ".md"}, "what was known by then stays"


@pytest.mark.parametrize("text", [*gpt.PRESETS, "1x64", "3x128"])
def test_number_of_parameters_and_subgroups(text):
    size = parse_size(text)
    with torch.device("meta"):
        module = ByteGPT(size, CONTEXT, torch.bfloat16)
    assert sum(p.numel() for p in module.parameters()) == size.num_parameters
    assert 8 <= size.num_parameters / size.sub_group_size <= 17
