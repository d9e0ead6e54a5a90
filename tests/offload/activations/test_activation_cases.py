"""Autograd gives the same bits, errors and lifetimes wherever saved tensors are."""

import contextlib
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from nvme_offload import ActivationSwapper
from tests.support.activations import (
    KEEPS,
    ROWS,
    WIDTH,
    Attending,
    Counting,
    Layers,
    assert_same_gradients,
    batch,
    gradients,
    section,
    train_once,
)
from tests.support.sandbox import run_python
from tests.support.threads import at_once

aten = torch.ops.aten


def selecting(what):
    return partial(create_selective_checkpoint_contexts, what)


MODELS = {
    "plain": Layers,
    "dropout": lambda: Layers(dropout=0.3),
    "in place": lambda: Layers(dropout=0.3, inplace=True),
    "checkpointed": lambda: Layers(dropout=0.3, checkpointed="not reentrant"),
    "checkpointed, reentrant": lambda: Layers(dropout=0.3, checkpointed="reentrant"),
    "selected": lambda: Layers(dropout=0.3, checkpointed=selecting([aten.addmm.default])),
    "selected, all": lambda: Layers(checkpointed=selecting(lambda *_, **__: CheckpointPolicy.MUST_SAVE)),
    "attention": Attending,
    "buffers": lambda: Layers(layer=Counting),
}


def compiled(make):
    """Its blocks, each by itself."""
    model = make()
    for block in model.layers if hasattr(model, "layers") else model.blocks:
        block.compile(backend="aot_eager")
    return model


@pytest.fixture(params=["nvme", "cpu"])
def place(request, tmp_path):
    """The folder on the drive; None where what is saved stays in host memory."""
    return tmp_path if request.param == "nvme" else None


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_have_the_same_bits(place, kind, keep):
    stats = assert_same_gradients(MODELS[kind], train_once, section(place, keep))
    assert stats.num_kept == stats.held_bytes == 0
    assert (stats.read_bytes > 0) == (place is not None)
    # Of several results of one region, those after the first are taken forwards.
    assert stats.num_reads == stats.num_reads_foreseen or kind == "selected, all"


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("kind", ["dropout", "attention"])
def test_gradients_of_autocast_have_the_same_bits(place, kind, keep):
    def body(model, saving):
        with torch.autocast("cpu", torch.bfloat16), saving():
            loss = model(batch()).float().square().mean()
        loss.backward()

    assert bool(assert_same_gradients(MODELS[kind], body, section(place, keep)).read_bytes) == (place is not None)


@pytest.mark.slow  # compilation
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("kind", ["plain", "attention"])
def test_gradients_of_compiled_blocks_have_the_same_bits(place, kind, keep):
    torch.compiler.reset()
    stats = assert_same_gradients(lambda: compiled(MODELS[kind]), train_once, section(place, keep))
    assert bool(stats.read_bytes) == (place is not None)


@pytest.mark.parametrize("keep", KEEPS)
def test_a_graph_is_used_twice(tmp_path, keep):
    def body(model, saving):
        with saving():
            loss = model(batch()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    for kind in ("dropout", "attention"):
        assert assert_same_gradients(MODELS[kind], body, section(tmp_path, keep)).num_kept == 0


@pytest.mark.parametrize("keep", ["all", "boundaries"])
def test_a_gradient_has_a_gradient(tmp_path, keep):
    def body(model, saving):
        x = batch().requires_grad_()
        with saving():
            [gradient] = torch.autograd.grad(model(x).exp().sum(), x, create_graph=True)
            penalty = gradient.square().mean()
        penalty.backward()

    assert assert_same_gradients(Layers, body, section(tmp_path, keep)).read_bytes


@pytest.mark.parametrize("keep", KEEPS)
def test_several_forwards_come_before_a_backward(tmp_path, keep):
    def body(model, saving):
        losses = []
        model.layers[0].eval()
        train_once(model, saving)
        model.layers[0].counts = True  # it left its buffers as they are, so far
        for seed in range(3):
            with saving():
                losses.append(model(batch(seed)).square().mean())
        for loss in losses:
            loss.backward()

    for kind in ("plain", "buffers"):
        assert assert_same_gradients(MODELS[kind], body, section(tmp_path, keep)).num_kept == 0


def test_graphs_that_are_never_used_leave_nothing(tmp_path):
    def body(model, saving):
        for seed in range(3):
            with saving():
                unused = model(batch(seed)).square().mean().exp()  # saves its result, which is small
            del unused
        train_once(model, saving)

    stats = assert_same_gradients(Layers, body, section(tmp_path))
    assert stats.num_kept == stats.held_bytes == 0
    assert stats.read_bytes < stats.written_bytes / 3


def test_an_exception_in_a_forward_leaves_nothing(tmp_path):
    def body(model, saving):
        with contextlib.suppress(KeyError), saving():
            model(batch())
            raise KeyError
        with torch.no_grad(), saving():
            model(batch())
        train_once(model, saving)

    assert assert_same_gradients(Layers, body, section(tmp_path)).num_kept == 0


def test_forwards_run_in_other_threads(tmp_path):
    def body(model, saving):
        def forward(seed):
            with saving():
                return model(batch(seed)).square().mean()

        for loss in at_once([partial(forward, seed) for seed in range(3)]):
            loss.backward()

    assert assert_same_gradients(Layers, body, section(tmp_path)).num_kept == 0


@pytest.mark.parametrize("which", ["moved", "small", "weight", "on no drive"])
def test_a_saved_tensor_that_is_changed_is_an_error(tmp_path, which):
    model, x = Layers(), batch()[: 4 if which == "small" else None].requires_grad_()
    with ActivationSwapper(section(None if which == "on no drive" else tmp_path), model=model) as swapper:
        with swapper.saving():
            saved = x.exp()
            loss = model(saved).square().mean()
        assert bool(swapper.stats().written_bytes) == (which in ("moved", "weight"))
        with torch.no_grad():
            (next(p for p in model.parameters() if p.ndim == 2) if which == "weight" else saved).mul_(2)
        with pytest.raises(RuntimeError, match=r"by an inplace operation: \[torch.float32 \[\d+, 64\]\] is at"):
            loss.backward()


def test_a_selected_result_that_is_changed_is_torchs_error(tmp_path):
    save_all = selecting(lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    changing = partial(Layers, dropout=0.3, checkpointed=save_all)  # dropout changes what it has drawn
    assert "has been mutated" in gradients(changing, train_once)[0]
    assert_same_gradients(changing, train_once, section(tmp_path))


def test_what_is_changed_before_and_after_it_is_saved_is_saved_as_it_was(tmp_path):
    """Once in each version; the first is never needed."""

    def body(model, saving):
        with saving():
            value = batch().requires_grad_().exp().clone()
            value.mul_(3)
            first = value.exp()
            with torch.no_grad():
                value.mul_(0.5)
            loss = (model(batch()) * value.detach()).square().mean() + model(value).mean()
        loss.backward()
        del first

    assert assert_same_gradients(Layers, body, section(tmp_path)).num_kept == 0


def test_views_of_one_storage_are_kept_once(tmp_path):
    with ActivationSwapper(section(tmp_path), model=Layers()) as swapper:
        whole = torch.randn(ROWS, WIDTH)
        handles = [swapper.keep(view) for view in (whole, whole.t(), whole[10:90], whole.view(-1)[::2])]
        expected = [view.clone() for view in (whole, whole.t(), whole[10:90], whole.view(-1)[::2])]
        del whole
        [swapper.keep(torch.randn(ROWS, WIDTH)) for _ in range(10)]
        assert swapper.stats().saved_bytes == 11 * ROWS * WIDTH * 4
        for handle, value in zip(handles, expected, strict=True):
            taken = handle.take()
            assert torch.equal(taken, value)
            assert taken.stride() == value.stride() or value.dim() == 1


def refilled(fill):
    def body(model, saving):
        """The gradients of each forward are those of what it was given."""
        losses = []
        for number in range(4):
            x = fill(number)
            with saving():
                losses.append(model(x).square().mean())
        sum(losses).backward()

    return body


def test_an_input_buffer_that_is_filled_again_is_an_error(tmp_path):
    buffer = torch.empty(ROWS, WIDTH)
    stats = assert_same_gradients(Layers, refilled(lambda number: buffer.copy_(batch(number))), section(tmp_path))
    assert stats.saved_bytes


@pytest.mark.parametrize("way", ["numpy", ".data"])
def test_what_no_version_tells_of_is_as_it_was_saved_once_it_is_written(tmp_path, way):
    """Nobody can see such a change. In plain torch the gradients are silently those of the last values."""
    array = np.zeros((ROWS, WIDTH), dtype=np.float32)
    tensor = torch.from_numpy(array)

    def fill(number):
        if way == "numpy":
            array[:] = batch(number).numpy()
        else:
            tensor.data.copy_(batch(number))
        return tensor.requires_grad_(False)

    expected, _ = gradients(Layers, refilled(batch))
    drained = section(tmp_path, host_budget=4096)
    actual, _ = gradients(Layers, refilled(fill), lambda model: ActivationSwapper(drained, model=model))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_budget_below_one_tensor_moves_all(tmp_path):
    stats = assert_same_gradients(Layers, train_once, section(tmp_path, host_budget=4096))
    assert stats.written_bytes == stats.read_bytes == stats.saved_bytes


def test_a_budget_above_all_moves_nothing(tmp_path):
    stats = assert_same_gradients(Layers, train_once, section(tmp_path, host_budget="1GiB"))
    assert stats.written_bytes == stats.read_bytes == 0
    assert stats.peak_held_bytes == stats.saved_bytes > 0


LIMITED = """
import contextlib, re, resource, sys, torch
from pathlib import Path
from nvme_offload import ActivationSwapper
from tests.support.activations import WIDTH, Attending, KiB, section
way, folder, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
torch.set_num_threads(1)  # stacks of others would count
model, sequence = Attending(64), torch.randn(2048, WIDTH)
with contextlib.ExitStack() as stack:
    saving = contextlib.nullcontext
    if way != "plain":
        place = section(folder if way == "nvme" else None, "boundaries", host_budget=4096 * KiB)
        saving = stack.enter_context(ActivationSwapper(place, model=model)).saving
    for x in (sequence[:64], sequence):
        if limit and x is sequence:
            held = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * KiB
            resource.setrlimit(resource.RLIMIT_DATA, (held + limit, resource.RLIM_INFINITY))
        model.zero_grad()
        with saving():
            loss = model(x).square().mean()
        loss.backward()
squares = [param.grad.double().square().sum().item() for param in model.parameters()]
print(loss.item().hex(), *map(float.hex, squares))
"""


@pytest.mark.slow
def test_a_sequence_that_does_not_fit_in_memory_trains(tmp_path, monkeypatch):
    """In 24 MiB beyond the model, of which inputs of layers take 32; the kernel refuses more (RLIMIT_DATA)."""
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):  # what is free is given back
        monkeypatch.setenv(name, "131072")
    found = {
        (way, limit): run_python(LIMITED, way, tmp_path, limit)
        for way, limit in [("plain", 0), ("plain", 24 << 20), ("checkpointing", 24 << 20), ("nvme", 24 << 20)]
    }
    for (way, limit), child in found.items():
        if limit and way != "nvme":
            assert "can't allocate memory" in child.stderr, way
        else:
            assert child.returncode == 0, child.stderr
    assert found["nvme", 24 << 20].stdout == found["plain", 0].stdout
