"""The comparison with others: both sides train by turns, weights are compared, who cannot train says why."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from nvme_offload.offload.devices.device import current_of, default_device_type
from nvme_offload.perf.experiments import compare
from nvme_offload.perf.experiments.compare import OURS, Contender, distance, same_bits
from nvme_offload.perf.experiments.peers.worker import Order, model_of, work
from nvme_offload.perf.measure.on_device import copied_bytes
from nvme_offload.perf.plan.machine import Drives, Machine
from scripts import card
from scripts import readme_comparison as readme
from tests.perf.experiments.running import found, said
from tests.support.late_device.module import late_device

SIZE = "1x64"


def compared(*options, folder, status=0):
    small = ("--path", folder, "--size", SIZE, "--tokens", 128, "--quads", 1)
    return said("compare", *small, *options, status=status)


@pytest.mark.slow
def test_ours_beside_a_run_in_memory(tmp_path):
    compared("--with", "memory", "--save", tmp_path / "saved", folder=tmp_path)
    file = next((tmp_path / "saved").glob("*.json"))
    ours, memory = json.loads(file.read_text())["results"]
    assert (ours["contender"]["name"], memory["contender"]["name"]) == ("ours", "memory")
    assert memory["distance"] == 0
    assert 0 < ours["distance"] < 0.05, "both round once, in another order"
    assert ours["losses"] == pytest.approx(memory["losses"], rel=1e-3)
    assert len(memory["quads"]) == 1
    assert len(memory["seconds"]) == len(ours["seconds"]) == 4
    numel = sum(param.numel() for param in model_of(SIZE).parameters())
    assert ours["numel"] == numel
    assert ours["ended"]["moved"][1] / numel / 4 == pytest.approx(10, rel=0.2), "lower half and moments"
    assert memory["ended"]["moved"][1] / numel < 1
    assert not memory["bits_of_ours"], "torch rounds in another order"
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    read = readme.Result.of_file(file)
    assert json.loads(json.dumps([found.to_dict() for found in read.found])) == [ours, memory]
    written = file.with_suffix(".md").read_text(encoding="utf-8")
    for line in readme.block(read, file.stem).splitlines():
        if line.startswith("| "):
            assert line in written


def test_a_peer_without_its_package_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "CONTENDERS", (OURS, Contender("nobody", "a peer", "no_such_package")))
    assert "no_such_package is not installed" in compared(folder=tmp_path)


@pytest.mark.slow
def test_a_peer_that_fails_says_why_and_the_others_go_on(tmp_path, monkeypatch):
    broken = Contender("torchao", "torchao's CPUOffloadOptimizer", "json")  # there, but torchao itself is not
    monkeypatch.setattr(compare, "CONTENDERS", (OURS, broken))
    assert broken.python() == sys.executable
    assert "ModuleNotFoundError: No module named 'torchao'" in compared(folder=tmp_path)


def test_an_unknown_peer_is_refused(tmp_path):
    assert "'nobody' is not one of" in compared("--with", "nobody", folder=tmp_path, status=2)


def test_distances(tmp_path):
    """A run that came half as far in the same direction is half of the way apart."""
    start = {name: param.detach() for name, param in model_of(SIZE).named_parameters()}
    torch.manual_seed(1)
    moves = {name: torch.randn_like(value) for name, value in start.items()}
    for name, part in (("end", 1.0), ("half", 0.5)):
        torch.save({key: value + part * moves[key] for key, value in start.items()}, tmp_path / name)
    assert same_bits(tmp_path / "end", tmp_path / "end")
    assert not same_bits(tmp_path / "end", tmp_path / "half")
    assert distance(tmp_path / "end", tmp_path / "end", SIZE) == 0
    assert distance(tmp_path / "half", tmp_path / "end", SIZE) == pytest.approx(0.5, rel=1e-5)


def test_the_readme_has_the_latest_result_and_its_picture():
    """`python -m scripts.readme_comparison` writes both."""
    path = readme.newest()
    said = readme.README.read_text(encoding="utf-8").partition(readme.BEGIN)[2].partition(readme.END)[0]
    assert said.strip() == readme.block(readme.Result.of_file(path), path.stem)
    assert path.stem.encode() in readme.PICTURE.read_bytes()


@pytest.mark.slow
def test_adapters_over_a_base_in_place_are_those_over_a_copy_and_a_block_is_read_twice(tmp_path):
    small = ("--path", tmp_path, "--layers", 6, "--width", 256, "--quads", 1, "--with", "copied")
    in_place, copied = found("lora", *small)["results"]
    assert in_place["ended"]["digests"] == copied["ended"]["digests"]
    assert len(in_place["ended"]["digests"]) == 2 * 6
    read, written = (count / in_place["numel"] / 2 for count in in_place["ended"]["moved"])
    assert read < 2.1, "twice a step, however many micro-batches; what a buffer still holds is not read"
    assert written < 0.2, "a few adapters alone"
    assert copied["ended"]["moved"][0] > 3 * in_place["ended"]["moved"][0]


@pytest.mark.slow
@pytest.mark.parametrize("contender", ["ours-memory", "ours-backward", "ours-device"])
def test_a_contender_on_a_device_says_what_it_took_there(contender, tmp_path):
    """As ours on NVMe, which has the same bits but where it cannot clip."""
    with late_device():
        there = [of_one(each, tmp_path / each, device="late:0") for each in ("ours", contender)]
    (ours, of_ours), (other, of_other) = there
    assert other["ended"].device_peak_bytes > 4 * sum(value.numel() for value in of_other.values()), (
        "masters, gradients"
    )
    assert ours["ended"].copied is None, "the profiler sees no copies of a stand-in"
    if contender != "ours-backward":
        assert all(torch.equal(value, of_other[name]) for name, value in of_ours.items())
        assert other["turn"][1] == ours["turn"][1]


def of_one(contender, folder, **more):
    """Return what one contender's process says, by its kind, and its weights."""
    folder.mkdir()
    order = {"package": None, "size": SIZE, "tokens": 128, "threads": 1, "swap": str(folder), **more}
    said, weights = {}, folder / "weights"
    work(iter([Order(contender=contender, weights=str(weights), **order), 2]), said.__setitem__)
    return said, torch.load(weights)


def test_copies_of_a_trace_are_summed_by_their_way():
    events = [
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 3}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": 5}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "args": {"bytes": 7}},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "args": {"bytes": 11}},
        {"cat": "kernel", "name": "HtoD", "args": {}},
        {"name": "process_name"},
    ]
    assert copied_bytes(events) == (14, 5)


@pytest.mark.slow
def test_large_layers_train_on_a_small_card_beside_their_plan(tmp_path):
    """On the stand-in with a machine that is made up: what a card decides is tried in every line but its rates."""
    memory = {"host_memory": 2**30, "device_memory": 2**28}
    machine = Machine(drives=Drives.of_rates(1e9, 1e9), flops=1e12, pcie=1e10, **memory)
    sizes = {"width": 128, "vocabulary": 256, "layers": 2, "tokens": 16, "steps": 2}
    with late_device():
        found = card.dense(tmp_path, machine, current_of(default_device_type()), SimpleNamespace(**sizes))
    assert found["plan"] > 0
    assert 0 < found["device_peak_bytes"] < 2**28
    base = {"fake": "tiny", "fake_layers": 1, "sequence": 8, "steps": 2}
    assert "of the drive's rate" in card.shown(
        card.lora(tmp_path, machine, torch.device("cpu"), SimpleNamespace(**base))
    )
