"""Whoever reads a parameter right after a hidden step, in whatever way: he finds the latest step, or an error."""

import copy
import ctypes
import io
import os
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_map

from nvme_offload import OffloadAdamW
from tests.support.sharded_model import whole
from tests.support.tiers import Model, loss_of, make, section, slow_updates
from tests.support.training import assert_same_bits

TOKENS = torch.arange(6).view(2, 3)


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def in_memory(param):
    """The parameter, unless it is a shard, of which nothing is at an address."""
    if not param.data_ptr():
        raise ValueError("there is no memory at 0")
    return param


def in_a_child(param):
    """What a forked process finds; only its end of the pipe, which is small, is read."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
        try:
            os.write(writing, str(param.detach().double().sum().item()).encode())
        except BaseException as error:  # the parent is told
            os.write(writing, type(error).__name__.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return float(pipe.read())  # or it is the name of an error


def averaged(model):
    average = AveragedModel(model)
    average.update_parameters(model)
    return average


def weight(model):
    return model.layers[1].up.weight


def compiled(model):
    return torch.compile(lambda held: held * 2, backend=lambda graph, _: graph.forward)(weight(model))


WAYS = {
    "data": lambda model: weight(model).data,
    "clone": lambda model: weight(model).clone(),
    "sum": lambda model: weight(model).sum(),
    "deepcopy": copy.deepcopy,
    "deepcopy of one": lambda model: copy.deepcopy(weight(model)),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
    "torch.save of a list": lambda model: saved([*model.parameters()]),
    "parameters_to_vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "_foreach_mul": lambda model: torch._foreach_mul([*model.parameters()], 2.0),
    "F.linear": lambda model: nn.functional.linear(torch.ones(1, 129), weight(model)),
    "numpy": lambda model: torch.from_numpy(weight(model).detach().numpy()),
    "state_dict": lambda model: model.state_dict(),
    "state_dict with variables": lambda model: model.state_dict(keep_vars=True),
    "load_state_dict": lambda model: model.layers[1].load_state_dict(model.layers[0].state_dict()) and model,
    "forward": lambda model: model(TOKENS),
    "forward of a part": lambda model: model.layers[1].down(torch.ones(1, 388)),
    "functional_call": lambda model: torch.func.functional_call(model, dict(model.named_parameters()), TOKENS),
    "tolist": lambda model: weight(model).tolist(),
    "item": lambda model: weight(model)[5, 7].item(),
    "repr": lambda model: repr(weight(model)),
    "format": lambda model: f"{model.layers[1].norm.weight[3]:.8e}",
    "average": lambda model: torch.zeros(388, 129).lerp_(weight(model).detach(), 0.5),
    "AveragedModel": averaged,
    "dlpack": lambda model: torch.from_dlpack(in_memory(weight(model)).detach()),
    "data_ptr": lambda model: ctypes.string_at(in_memory(weight(model)).data_ptr(), weight(model).nbytes),
    "storage": lambda model: [weight(model).untyped_storage()[place] for place in range(64)],
    "in place": lambda model: weight(model).data.mul_(1.5),
    "copy_": lambda model: torch.zeros(388, 129).copy_(weight(model)),
    "half": lambda model: copy.deepcopy(model).half(),
    "double": lambda model: weight(model).to(torch.float64),
    "vmap": lambda model: torch.vmap(torch.sum)(weight(model)),
    "compile": compiled,
    "fork": lambda model: in_a_child(weight(model)),
    "==": lambda model: weight(model) == weight(model).data,
}


def found(read, model):
    """What came of a way to read, by value, or the type of the error."""
    try:
        value = read(model)
        if isinstance(value, nn.Module):
            assert "WaitingParameter" not in [type(param).__name__ for param in value.parameters()]
            value = value.state_dict()
        return tree_map(lambda leaf: whole(leaf).detach().clone() if isinstance(leaf, torch.Tensor) else leaf, value)
    except Exception as error:  # whatever it is, it is no silence
        return type(error)


def config_of(path, mode):
    config = {**section(path, state="nvme", accumulation=1), "overlap_step": mode, "bf16": {"enabled": False}}
    if mode == "backward":
        return {**config, "gradient_clipping": 0.0, "skip_non_finite": False}
    if mode == "speculate":
        config["zero_optimization"]["offload_optimizer"] |= {"durable": "run"}
    return {**config, "gradient_clipping": 1e9}


class Training:
    """The same in every mode: plain modules, or shards of an engine."""

    def __init__(self, path, kind, mode):
        config = config_of(path, mode)
        self.engine = None
        if kind == "shards":
            self.engine = make(config, num_layers=2, width=129)
            self.model, self.optimizer = self.engine.module, self.engine.optimizer
            return
        torch.manual_seed(0)
        self.model = Model(num_layers=2, width=129)
        plain = {key: value for key, value in config.items() if key not in ("bf16", "optimizer")}
        self.optimizer = OffloadAdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1, offload=plain)
        self.optimizer.overlap_with(self.model)

    def backward(self, step):
        loss = loss_of(self.engine or self.model, step)
        self.engine.backward(loss) if self.engine else loss.backward()

    def step(self):
        if self.engine:
            self.engine.step()
            return
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self):
        (self.engine or self.optimizer).close()


def all_found(path, kind, mode):
    """What each way finds right after a step of which nothing is updated for a while; and what was counted."""
    training, results = Training(path, kind, mode), {}
    slow_updates(training.optimizer)
    for step, (name, read) in enumerate(WAYS.items()):
        training.backward(step)
        training.step()
        results[name] = found(read, training.model)
    stats = training.optimizer.stats()
    training.close()
    return results, stats


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("shards", "speculate"),
        *(pytest.param("plain", mode, marks=pytest.mark.slow) for mode in ("forward", "backward", "speculate")),
        pytest.param("shards", "backward", marks=pytest.mark.slow),
        pytest.param("shards", "forward", marks=pytest.mark.slow),
    ],
)
def test_every_way_finds_the_latest_step(request, eager, tmp_path, kind, mode):
    if kind == "shards":
        request.getfixturevalue("alone")
    expected, _ = all_found(tmp_path, kind, "off")
    results, stats = all_found(tmp_path, kind, mode)
    assert stats.updates_behind + stats.updates_in_backward >= stats.num_subgroups * (len(WAYS) - 1)
    for name, value in results.items():
        if not isinstance(value, type) and (kind, name) != ("shards", "repr"):  # which says where it is, and no values
            assert_same_bits({name: value}, {name: expected[name]})
    if kind == "plain":
        assert not [name for name, value in results.items() if isinstance(value, type)]


def test_what_was_held_before_the_step_needs_a_synchronize(tmp_path):
    training = Training(tmp_path, "plain", "forward")
    alias, array = weight(training.model).data, weight(training.model).detach().numpy()
    before = alias.clone()
    training.backward(0)
    with training.optimizer.store.worker.kept_away():
        training.step()
        assert torch.equal(alias, before)
    training.optimizer.synchronize()
    assert not torch.equal(alias, before)
    assert torch.equal(alias, weight(training.model))
    assert torch.equal(alias, torch.from_numpy(array))
    training.close()
