"""`offload verify`: what is right is found right, what is broken is found, and a check that ends badly ends alone."""

import json
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from nvme_offload.perf.cli import app
from nvme_offload.perf.measure.bits import WrongError, differing, must_equal
from nvme_offload.perf.measure.child import Child, ChildFailedError
from nvme_offload.perf.measure.trainings import Site
from nvme_offload.perf.verify import command
from nvme_offload.perf.verify.command import CHECKS, outcome_of, summary, where
from tests.support.broken_build import broken, ends_badly
from tests.support.forked import ROOT, forked_children
from tests.support.late_device.mutations import OF_MIRROR
from tests.support.late_device.verify_child import on_late_device


def site(folder, device="cpu"):
    return Site(device=device, folder=folder, large=False)


def verified(folder, *options):
    return CliRunner().invoke(app, ["verify", "--path", str(folder), *options])


@pytest.mark.parametrize("name", ["update", "clipping", "scaler", "swapper", "races", "process", "checkpoint"])
def test_what_is_right_is_found_right(name, tmp_path):
    outcome = outcome_of(name, site(tmp_path))
    assert outcome.status == "ok", outcome.found
    assert not list(tmp_path.iterdir())


def test_a_broken_build_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "WORK", broken)
    with forked_children():
        done = verified(tmp_path, "--json", *("--only", "update"), *("--only", "checkpoint", "--only", "growth"))
    assert done.exit_code == 1, done.output
    document = json.loads(done.stdout)
    assert [check["status"] for check in document["checks"]] == ["wrong", "left out", "wrong"]
    assert "elements have other bits" in document["checks"][0]["found"]
    assert document["summary"].endswith("left out: growth; NOT: update, checkpoint")
    assert document["accelerator"] is None
    assert "No GPU: the CPU path is verified" in done.stderr


@pytest.mark.slow
def test_all_of_it_on_the_cpu(tmp_path):
    done = verified(tmp_path, "--json")
    assert done.exit_code == 0, done.output
    status = {check["name"]: check["status"] for check in json.loads(done.stdout)["checks"]}
    assert status == dict.fromkeys(CHECKS, "ok") | {"growth": "left out"}
    assert list(tmp_path.iterdir()) == []


def on_stand_in(folder, monkeypatch, names, mutation=""):
    monkeypatch.setattr(command, "WORK", partial(on_late_device, mutation))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # a child imports nothing from the working folder
    return list(command.outcomes_of(site(folder, "late"), names))


@pytest.mark.slow
def test_all_of_it_on_the_stand_in(tmp_path, monkeypatch):
    names = [name for name in CHECKS if name != "ranks"]  # which are processes that do not know it
    outcomes = on_stand_in(tmp_path, monkeypatch, names)
    assert [(each.name, each.status, each.found) for each in outcomes if each.status != "ok"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("mutation", "found_by"), [
    ("forward does not wait for the parameters", "races"), ("a mirror is filled before it has left", "update"),
    ("a buffer is written before its copy is done", "swapper"),
    ("a gradient is summed before it has landed", "gradients"),
    ("the worker does not wait for its copies", "gradients"),
    ("updates behind a step are not waited for by a gather", "gradients"),
    ("a block is written before its gradients have landed", "gradients"),
    ("what a gradient had waits for the host", "growth"), ("a thread begins with another device", "growth"),
])  # fmt: skip
def test_a_mistake_with_a_device_is_found(mutation, found_by, tmp_path, monkeypatch):
    outcomes = on_stand_in(tmp_path, monkeypatch, [found_by], mutation)
    assert outcomes[0].is_bad
    assert "No module" not in outcomes[0].found


@pytest.mark.usefixtures("late")
@pytest.mark.filterwarnings("ignore:.*were changed between steps")
def test_on_the_stand_in_a_missing_wait_is_found(tmp_path):
    assert outcome_of("scaler", site(tmp_path, "late")).status == "ok"
    with OF_MIRROR["the kernel does not wait for its copies"]():
        assert outcome_of("update", site(tmp_path, "late")).status == "wrong"


@pytest.mark.slow
@pytest.mark.usefixtures("late")
def test_on_the_stand_in_an_error_that_pinning_leaves_is_found(tmp_path, monkeypatch):
    assert outcome_of("process", site(tmp_path, "late")).status == "ok"
    monkeypatch.setattr("nvme_offload.offload.devices.device._take_latest_error", lambda device: None)
    outcome = outcome_of("process", site(tmp_path, "late"))
    assert outcome.status == "wrong"
    assert "the next kernel raised" in outcome.found


def test_a_check_that_ends_badly_ends_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "WORK", ends_badly)
    monkeypatch.setattr(command, "LIMIT", 3.0)
    names = ["update", "machine", "clipping", "swapper", "scaler", "races"]
    with forked_children():
        outcomes = list(command.outcomes_of(site(tmp_path), names))
    assert [each.status for each in outcomes] == ["ok", "ok", "failed", "ok", "failed", "ok"]
    assert outcomes[2].found.endswith("ended with code 3 and gave no outcome: what it said")  # no path that is gone
    assert outcomes[2].log == ("what it said",)
    assert "took longer than 3 s" in outcomes[4].found
    processes = [outcomes[place].found for place in (0, 1, 3, 5)]
    assert processes[0] == processes[1]
    assert len(set(processes)) == 3
    assert summary(outcomes) == "4 of 6 checks are as they should be; NOT: clipping, scaler"


def test_bad_values_are_refused(tmp_path):
    assert "choose of machine, update" in " ".join(verified(tmp_path, "--only", "updates").output.split())
    assert verified(tmp_path, "--only", "updates").exit_code == 2
    assert verified(tmp_path / "missing").exit_code == 2


def test_the_hardware_is_named():
    assert where({"name": "A GPU", "count": 2, "memory_bytes": 80 * 2**30}) == "2 x A GPU, 80 GiB"


def test_bits_are_compared():
    nan, zero = torch.tensor([float("nan"), 1.0]), torch.tensor([0.0, 1.0])
    must_equal({"a": nan}, {"a": nan.clone()}, "the same")
    assert differing(zero, -zero + torch.tensor([0.0, 2.0])) == 0
    assert differing(zero, torch.tensor([-0.0, 1.0])) == 1
    assert differing(zero, zero.bfloat16()) == 2
    with pytest.raises(WrongError, match="those: b are on one side alone"):
        must_equal({"a": nan, "b": nan}, {"a": nan}, "those")


def test_a_child_imports_nothing_from_the_working_folder(tmp_path, monkeypatch):
    """Its first imports are of these modules; `print` is all its work."""
    for name in ("multiprocessing", "traceback", "nvme_offload"):
        (tmp_path / f"{name}.py").write_text("print('the code of a stranger runs')\nraise ImportError")
    monkeypatch.chdir(tmp_path)
    with Child(print, tmp_path / "log") as child, pytest.raises(ChildFailedError, match="ended with code 0"):
        child.expect("anything", within=60)
    assert "stranger" not in (tmp_path / "log").read_text()
