"""Plain modules whose forwards wait for updates behind a step: the same bits, whoever uses which part of them."""

import contextlib
import copy
import functools
import gc
import threading
import time
import weakref
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nvme_offload import OffloadAdamW, StateError, SwapIOError
from tests.support.failing_drive import Failing, Op
from tests.support.ranks import be_alone
from tests.support.tiers import Model, loss_of, section, slow_updates
from tests.support.training import assert_same_bits, snapshot

LAYERS = 4


def config_of(path, mode, **more):
    config = section(path, state="nvme", accumulation=1)
    del config["bf16"], config["optimizer"]
    exact = {"gradient_clipping": 0.0, "skip_non_finite": False} if mode == "backward" else {}
    if mode == "speculate":
        config["zero_optimization"]["offload_optimizer"]["durable"], exact = "run", {"gradient_clipping": 1e9}
    return {**config, "overlap_step": mode, **exact, **more}


def make(path, mode, dtype=torch.bfloat16, *, clip=0.5, **more):
    clips = {"gradient_clipping": clip} if mode in ("off", None) else {}
    return made(config_of(path, mode, **clips), dtype, **more)


def made(config, dtype=torch.bfloat16, **more):
    torch.manual_seed(0)
    model = Model(num_layers=LAYERS, width=129, **more).to(dtype)
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, offload=config)
    optimizer.overlap_with(model)
    return model, optimizer


def train_step(model, optimizer, step, micro_batches=1, change=None):
    for micro in range(micro_batches):
        optimizer.expect_step(micro == micro_batches - 1)
        loss_of(model, step, micro).backward()
    optimizer.step()
    for param in model.parameters() if change else ():
        change(torch.ones(1) if param.grad is None else param.grad)
    optimizer.zero_grad()


def trained(path, mode, *, uses=None, micro_batches=1, change=None, **model):
    module, optimizer = make(path, mode, **model)
    slow_updates(optimizer)
    release = optimizer.store.pipeline.release  # whoever looks from time to time does so within the last update, too
    if mode != "off":
        optimizer.store.pipeline.release = lambda it: (optimizer.store.record.pending or time.sleep(0.11), release(it))[
            1
        ]
    with optimizer:
        norms = []
        for step in range(4):
            del optimizer.param_groups[0]["params"][: step == 2]  # the first one is in no group from there on
            module.uses = uses[step % len(uses)] if uses else list(range(LAYERS))
            train_step(module, optimizer, step, micro_batches, change)
            norms.append(optimizer.total_norm)
        stats = optimizer.stats()
        return {**snapshot(optimizer), "norms": torch.tensor(norms), "model": module.state_dict()}, stats


USES = [[0, 1], [3, 2], [0, 0, 1, 2, 3]], [[3, 2, 1, 0], [1], []]
CASES = {  # `change`: what becomes of each gradient right after the step
    "bf16": {"dtype": torch.bfloat16, "clip": 0.5, "tied": True, "change": torch.Tensor.zero_},
    "fp32": {"micro_batches": 2, "checkpointing": True, "uses": USES[0], "change": lambda grad: grad.data.mul_(2)},
    "fp16": {"dtype": torch.float16, "clip": 1e9, "uses": USES[1], "change": lambda grad: grad.numpy().fill(1)},
}


@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_updates_inside_the_step(tmp_path, case):
    how = {"dtype": torch.float32, "clip": 0.0, "tied": False, **CASES[case]}
    plain, _ = trained(tmp_path, "off", **how)
    lazy, stats = trained(tmp_path, None, **how)
    assert stats.updates_behind > 0
    assert_same_bits({**lazy, "param_groups": 0}, {**plain, "param_groups": 0})
    plain, _ = trained(tmp_path, "off", **{**how, "clip": 0.0})
    early, stats = trained(tmp_path, "backward", **how)
    assert stats.updates_in_backward + stats.updates_behind > 0
    assert_same_bits(early, plain)


class Attention(nn.Module):
    """Uses the weights of a part of it that is never called."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(64, 4, batch_first=True) for _ in range(2))
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
        self.recurrent = nn.LSTM(64, 64)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = hidden + layer(hidden, hidden, hidden)[0]
        return self.recurrent(nn.functional.linear(hidden, self.norm.weight))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_that_are_used_without_being_called(tmp_path, dtype):
    ends = []
    for mode in ("off", "forward"):
        torch.manual_seed(0)
        model = Attention().to(dtype)
        with OffloadAdamW(model.parameters(), offload=config_of(tmp_path, mode)) as optimizer:
            optimizer.overlap_with(model)
            for step in range(4):
                torch.manual_seed(step)
                with optimizer.store.worker.kept_away():  # nothing is updated before somebody asks for it
                    if step:
                        optimizer.step()
                        optimizer.zero_grad()
                model(torch.randn(2, 3, 64, dtype=dtype)).square().mean().backward()
            optimizer.step()
            ends.append(snapshot(optimizer))
    assert_same_bits(*ends)


def test_a_copy_of_the_model_waits_for_nobody(tmp_path):
    model, optimizer = make(tmp_path, "forward")
    twin = copy.deepcopy(model)
    train_step(model, optimizer, 0)
    with optimizer.store.worker.kept_away():
        train_step(twin, Mock(), 0)
    optimizer.close()


@pytest.mark.parametrize("mode", ["off", "forward"])
def test_a_graph_from_before_the_step_is_refused_at_once(tmp_path, mode):
    model, optimizer = make(tmp_path, mode)
    with optimizer:
        old = loss_of(model, 0)
        loss_of(model, 1).backward()
        with optimizer.store.worker.kept_away():
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                old.backward()


def test_an_optimizer_that_is_dropped_finishes_its_step_first(tmp_path):
    plain, off = make(tmp_path, "off")
    model, optimizer = make(tmp_path, "forward")
    for one, its in ((plain, off), (model, optimizer)):
        loss_of(one, 0).backward()
        if one is model:
            slow_updates(its)
        its.step()
    gone = weakref.ref(optimizer.store)
    del optimizer, its
    assert_same_bits(model.state_dict(), plain.state_dict())
    off.close()
    assert gone() is None or gone().is_whole


def test_an_optimizer_that_is_dropped_before_its_step_is_gone(tmp_path):
    model, optimizer = make(tmp_path, "backward")
    train_step(model, optimizer, 0)
    loss_of(model, 1).backward()
    store = optimizer.store
    store.worker.wait_until(lambda store=store: store.record.done)
    gone = weakref.ref(store.worker)
    del optimizer, store
    for _ in range(100):
        gc.collect()
        if gone() is None:
            return
        threading.Event().wait(0.05)
    raise AssertionError("its thread holds it")


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE], ids=lambda op: op.name)
def test_an_error_behind_a_step_is_raised_in_the_forward_and_can_be_made_good(tmp_path, monkeypatch, op):
    ends = []
    for mode in ("off", "forward"):
        model, optimizer = make(tmp_path, mode)
        with optimizer:
            train_step(model, optimizer, 0)
            optimizer.synchronize()
            if mode == "off":
                train_step(model, optimizer, 1)
            else:
                drive = Failing(optimizer.store.tier, monkeypatch, op)
                train_step(model, optimizer, 1)
                with pytest.raises(SwapIOError, match="optimizer state of subgroup"):
                    loss_of(model, 2)
                with pytest.raises(StateError, match="finish_step"):
                    loss_of(model, 2)
                with pytest.raises(StateError, match="finish_step"):
                    [param.sum() for param in model.parameters()]
                drive.healthy = True
                optimizer.finish_step()
            train_step(model, optimizer, 2)
            ends.append(snapshot(optimizer))
    assert_same_bits(*ends)


class Other(nn.Parameter):
    """A class of its own, which has to stay what it is."""


def test_a_parameter_of_another_class_is_updated_inside_the_step(tmp_path):
    layer = nn.Linear(64, 64)
    layer.weight = Other(layer.weight.data)
    with OffloadAdamW(layer.parameters(), offload=config_of(tmp_path, "forward")) as optimizer:
        optimizer.overlap_with(layer)
        layer(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        assert type(layer.weight) is Other
        assert optimizer.stats().updates_behind == 0


def test_what_says_nothing_of_values_waits_for_nothing(tmp_path):
    model, optimizer = make(tmp_path, "forward")
    with optimizer:
        loss_of(model, 0).backward()
        with optimizer.store.worker.kept_away():  # who waits in here waits for ever
            optimizer.step()
            for param in model.parameters():
                assert param.grad.shape == param.shape
                assert (param.dtype, param.device.type, param.is_leaf) == (torch.bfloat16, "cpu", True)
                param.requires_grad_(False).requires_grad = True
                assert param.numel() == param.nelement()
                assert isinstance(param, nn.Parameter)
            optimizer.zero_grad()
            model.zero_grad()
            assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("mode", ["backward", "speculate"])
def test_who_reads_between_backward_and_step_gets_an_error_or_what_was(tmp_path, eager, mode):
    model, optimizer = make(tmp_path, mode)
    with optimizer:
        for step in range(3):
            train_step(model, optimizer, step)
        before = [param.detach().clone() for param in model.parameters()]
        loss_of(model, 3).backward()
        store = optimizer.store
        store.worker.wait_until(lambda: store.record.done > 0)
        if mode == "backward":
            with pytest.raises(StateError, match="used once more before step"):
                model.head.weight.sum()
        else:
            assert_same_bits([param.detach().clone() for param in model.parameters()], before)
        optimizer.step()


def test_what_cannot_wait_is_updated_inside_the_step(tmp_path):
    model, optimizer = make(tmp_path, "forward")
    with optimizer:
        other = nn.Parameter(torch.ones(64, 64))
        optimizer.add_param_group({"params": [other]})
        loss_of(model, 0).backward()
        other.grad = torch.ones(64, 64)
        with optimizer.store.worker.kept_away():
            optimizer.step()
            assert not torch.equal(other, torch.ones(64, 64))
            assert optimizer.stats().updates_behind == 0
        optimizer.overlap_with(nn.ParameterList([other]))  # and no longer with the model
        loss_of(model, 1).backward()
        before = optimizer.stats().updates_behind
        optimizer.step()
        optimizer.synchronize()
        assert optimizer.stats().updates_behind == before + 1


def counted(graphs, graph, _):
    """A backend that compiles nothing, and keeps what it was given."""
    graphs.append(graph)
    return graph.forward


@pytest.mark.parametrize("in_place", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_model_that_is_compiled_later_waits_and_one_that_is_compiled_already_is_refused(tmp_path, in_place):
    ends = []
    for mode in ("off", "forward"):
        torch.compiler.reset()
        graphs, first = [], 0
        count = functools.partial(counted, graphs)
        model, optimizer = make(tmp_path, mode)
        with optimizer:
            call = model
            if in_place:
                model.layers[0].compile(backend=count)
            else:
                call = torch.compile(model, backend=count)
            for step in range(4):
                with optimizer.store.worker.kept_away() if step else contextlib.nullcontext():
                    if step:
                        optimizer.step()
                        optimizer.zero_grad()
                loss_of(call, step).backward()
                first = first or len(graphs)
            assert 0 < len(graphs) == first, "nothing is compiled again because updates are under way"
            ends.append(snapshot(optimizer))
            if mode == "forward":
                with pytest.raises(ValueError, match=r"is compiled: call optimizer\.overlap_with"):
                    optimizer.overlap_with(call)
    assert_same_bits({**ends[0], "param_groups": 0}, {**ends[1], "param_groups": 0})


def test_copies_of_a_model_in_a_process_group_wait_from_the_first_step_on(alone, tmp_path):
    """Until then such an optimizer holds no parameter: somebody may shard the model."""
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    be_alone()
    with OffloadAdamW(model.parameters(), lr=1e-2, offload=config_of(tmp_path, None)) as optimizer:
        optimizer.overlap_with(model)
        for _ in range(2):
            model(torch.ones(2, 300)).square().mean().backward()
            optimizer.step()
        optimizer.synchronize()
        assert optimizer.stats().updates_behind > 0


def test_a_model_of_other_parameters_is_refused(tmp_path):
    model, optimizer = make(tmp_path, "forward")
    with optimizer:
        with pytest.raises(ValueError, match="none of the parameters of this Linear"):
            optimizer.overlap_with(nn.Linear(2, 2))
        with pytest.raises(ValueError, match="names no module"):
            optimizer.overlap_with(model, blocks=["Lair"])


def checkpointed(layer, hidden):
    return checkpoint(layer, hidden, use_reentrant=True)


def test_a_gradient_that_comes_in_two_parts_is_an_error_with_backward(tmp_path):
    """Reentrant checkpoints differentiate each use of a layer by itself, so that its gradient is final twice."""
    torch.manual_seed(0)
    layer = nn.Linear(300, 300)
    optimizer = OffloadAdamW(layer.parameters(), offload=config_of(tmp_path, "backward"))
    optimizer.overlap_with(layer)
    hidden = torch.randn(2, 300, requires_grad=True)
    layer(hidden).sum().backward()  # in the first step the state gets its place, and nothing begins before it
    optimizer.step()
    optimizer.zero_grad()
    found = r"another gradient after the one|used once more|gradients that have changed since"
    with pytest.raises(StateError, match=found):  # noqa: PT012 - in backward; or, where an update was quicker, in step
        checkpointed(layer, checkpointed(layer, hidden)).sum().backward()
        optimizer.step()
    with contextlib.suppress(StateError):  # what an update found at the same time
        optimizer.close()


class Waiting(torch.autograd.Function):
    """Nothing in forward; backward goes on when `condition` holds."""

    @staticmethod
    def forward(ctx, hidden, worker, condition):
        ctx.wait = lambda: worker.wait_until(condition)
        return hidden.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.wait()
        return grad, None, None


def shared_subgroup_run(path, mode):
    """Two layers whose parameters have a subgroup in common, the second one's gradients taken in before the first's."""
    torch.manual_seed(0)
    first, second = nn.Linear(37, 300), nn.Linear(300, 300)
    params = [*second.parameters(), *first.parameters()]
    config = config_of(path, mode, gradient_clipping=0.0)
    config["zero_optimization"]["sub_group_size"] = 65536
    with OffloadAdamW(params, lr=1e-2, offload=config) as optimizer:
        optimizer.overlap_with(nn.ModuleList([first, second]))
        store = optimizer.store

        def one_is_updated():
            return mode == "off" or not store.slots or store.record is None or store.record.done > 0

        for step in range(3):
            optimizer.synchronize()
            hidden = torch.randn(4, 37, generator=torch.Generator().manual_seed(step))
            second(Waiting.apply(first(hidden), store.worker, one_is_updated)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            early = optimizer.stats().updates_in_backward
        optimizer.synchronize()
        shared = [slot for slot in store.slots if len({run.param for run in slot.subgroup.runs}) > 1]
        ends = [value.detach().clone() for param in params for value in (param, *moments(optimizer, param))]
        return ends, shared, early


def moments(optimizer, param):
    return [optimizer.state[param][name] for name in ("exp_avg", "exp_avg_sq")]


def test_a_gradient_is_kept_until_every_part_of_its_parameter_is_updated(tmp_path):
    """Also of the part that waits for another parameter's gradient, which comes after the first part was updated."""
    expected, shared, _ = shared_subgroup_run(tmp_path, "off")
    found, _, early = shared_subgroup_run(tmp_path, "backward")
    assert shared
    assert early > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
