"""The scripts of docs/examples, each as its user starts it: through the launcher, or without."""

import json
import os
import re
import sys

import pytest

from tests.support.forked import ROOT, output_of, run_launched
from tests.support.training import run_child

EXAMPLES = ROOT / "docs" / "examples"
RUNNER = ROOT / "tests" / "support" / "script.py"
LAUNCHER = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
CODE = """
import os, runpy, sys
os.chdir(sys.argv[1])
sys.argv[:2] = []
runpy.run_path(sys.argv[0], run_name="__main__")
"""
STATE = re.compile(r"state on (\w+): .*\b(\d+) bytes written")
SIZES = {
    "train_with_torchrun.py": ("--width", "64"),
    "train_with_fsdp2.py": ("--width", "64"),
    "train_with_trainer.py": ("--width", "64"),
}
STEPS = 8


def run(script, *arguments, folder):
    """Return what the script printed, without a launcher; it must end with 0."""
    return run_child(CODE, folder, EXAMPLES / script, *arguments)


def launched(script, *arguments, folder):
    """Return what the script printed on two ranks, as behind a launcher; both must end with 0."""
    done = run_launched(CODE, folder, EXAMPLES / script, *arguments)
    assert [rank.returncode for rank in done] == [0, 0], "".join(rank.stdout + rank.stderr for rank in done)
    return "".join(rank.stdout for rank in done)


def by_torchrun(script, *arguments, folder):
    """The same through torch's own launcher, in processes that have imported nothing."""
    command = (sys.executable, *LAUNCHER, RUNNER, EXAMPLES / script, *arguments)
    return output_of(*command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})


def losses(output):
    return [float(loss) for loss in re.findall(r"\bloss'?:? '?(\d+\.\d+)", output)]


def assert_trained(output):
    """One line of each step on one rank only, a loss that falls, and state that went to the drive."""
    found = losses(output)
    assert len(found) == STEPS, output
    assert found[-1] < found[0] - 0.05, output
    assert [int(written) > 0 for _, written in STATE.findall(output)] == [True], output


@pytest.mark.parametrize(("script", "how"), [
    ("train_with_torchrun.py", launched), pytest.param("train_with_fsdp2.py", launched, marks=pytest.mark.slow),
    pytest.param("train_with_trainer.py", launched, marks=pytest.mark.slow),
    *(pytest.param(script, by_torchrun, marks=pytest.mark.slow) for script in SIZES),
])  # fmt: skip
def test_an_example_trains_on_two_ranks(script, how, drive, tmp_path):
    arguments = ("--nvme-path", drive, "--steps", STEPS, *SIZES[script])
    assert_trained(how(script, *arguments, folder=tmp_path))
    assert not list(drive.iterdir())


def test_it_runs_without_a_launcher(drive, tmp_path):
    """And takes its section from a file, here of fp32 training."""
    offload = {"device": "nvme", "nvme_path": str(drive)}
    section = {"zero_optimization": {"stage": 2, "offload_optimizer": offload}, "gradient_accumulation_steps": 1}
    section["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
    config = tmp_path / "offload.json"
    config.write_text(json.dumps(section))
    arguments = ("--config", config, "--steps", STEPS, *SIZES["train_with_torchrun.py"])
    assert_trained(run("train_with_torchrun.py", *arguments, folder=tmp_path))
    assert not list(drive.iterdir())


def test_trainer_goes_on_from_its_checkpoint(drive, tmp_path):
    arguments = ("--nvme-path", drive, *SIZES["train_with_trainer.py"])
    first = losses(run("train_with_trainer.py", *arguments, "--steps", 4, folder=tmp_path))
    rest = losses(run("train_with_trainer.py", *arguments, "--steps", 6, "--resume", folder=tmp_path))
    assert (tmp_path / "trainer-out" / "checkpoint-6" / "optimizer.pt").exists()
    assert (len(first), len(rest)) == (4, 2)
    assert max(rest) < first[0]


def test_a_sampler_that_gets_patches_writes_the_same_tokens(drive, tmp_path):
    arguments = ("--nvme-path", drive, "--steps", 4, "--width", 32)
    patches, whole = (run("grpo.py", *arguments, *more, folder=tmp_path) for more in ((), ("--whole",)))
    (few, tokens), (all_bytes, expected) = (
        re.findall(r"(\d+) bytes sent, tokens (\w+)", each)[0] for each in (patches, whole)
    )
    assert tokens == expected
    assert int(few) < int(all_bytes)
    assert re.findall("reward .*", patches) == re.findall("reward .*", whole)


def test_a_cell_of_the_notebook_runs_again(drive, capsys):
    """The one that makes the optimizer, whose last one something else still holds, on the same drive."""
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    begin, make, train, end = (cell.replace("/mnt/nvme0", str(drive)) for cell in code)
    names, held = {}, []
    for cell in (begin, make, train, make, train, end, make, train, end):
        exec(cell, names)
        held.append(names.get("optimizer"))
    lines = re.findall(r"step 5: loss (\S+), (\d+) bytes written", capsys.readouterr().out)
    assert [int(written) > 0 for _, written in lines] == [True] * 3
    assert len(set(lines)) == 1
    assert not list(drive.iterdir())


def test_every_example_is_listed_and_short():
    scripts = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))
    assert scripts == sorted([*SIZES, "grpo.py", "lora_large.py", "notebook.ipynb", "train_large.py"])
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for name in scripts:
        assert f"]({name})" in index
    for name in SIZES:
        assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) <= 80
