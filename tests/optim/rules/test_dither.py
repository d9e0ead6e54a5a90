"""Rounding by chance: right in the mean, without a pattern, and the same bits for whoever has an element."""

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.ranks import run_ranks
from tests.support.resuming import fresh_engine
from tests.support.rules import IN_BF16, IN_INT8
from tests.support.sharded_model import whole
from tests.support.training import assert_same_bits, section
from tests.support.twins import round_states

ADAMW = IN_BF16[0]


def test_a_mean_is_kept_that_rounding_to_nearest_would_lose():
    """A change of an eighth of the last place, 4000 times: chance makes 500 of it in the mean, nearest nothing."""
    value = np.full(4096, 1.0, np.float32)
    nearest = torch.from_numpy(value)
    for step in range(1, 4001):
        [value, _] = round_states(ADAMW.rule, [value + np.float32(2**-10), value], step)
        nearest = (nearest + 2**-10).bfloat16().float()
    assert float(nearest.max()) == 1.0
    assert abs(value.mean() - (1 + 4000 * 2**-10)) < 0.05


SHAPES = [(37, 24), (6, 12, 20), (300, 300), (1001,), (161, 512), (40, 4, 64)]


def train(rank, world_size, cuts, drive, case):
    """Three steps over shards; every entry whole."""
    mesh = init_device_mesh("cpu", cuts["mesh"]) if cuts else None

    def placed(tensor):
        return (
            tensor if mesh is None else distribute_tensor(tensor, mesh, [Shard(d % tensor.ndim) for d in cuts["dims"]])
        )

    generator = torch.Generator().manual_seed(0)
    params = [Parameter(placed((torch.randn(shape, generator=generator) * 0.02).bfloat16())) for shape in SHAPES]
    with case.make(params, section(drive / f"{rank}" if drive else None, sub_group_size=65536)) as optimizer:
        for _ in range(3):
            for param in params:
                param.grad = placed((torch.randn(param.shape, generator=generator) * 0.01).bfloat16())
            optimizer.step()
        names = ("master", "exp_avg", "exp_avg_sq")
        return {f"{i} {name}": whole(optimizer.state[p][name]) for i, p in enumerate(params) for name in names}


@pytest.mark.parametrize("case", [ADAMW, IN_INT8[0]], ids=str)
def test_shards_of_one_two_and_four_ranks_have_the_bits_of_the_whole(drive, case):
    for rank in range(4):
        (drive / f"{rank}").mkdir()
    expected = train(0, 1, None, None, case)
    cuts = [{"mesh": (2,), "dims": (0,)}, {"mesh": (2,), "dims": (1,)}, {"mesh": (4,), "dims": (0,)}]
    if case is ADAMW:
        cuts += [{"mesh": (2, 2), "dims": (1, 2)}]
    for cut in cuts:
        for found in run_ranks(train, int(np.prod(cut["mesh"])), cut, drive if cut["dims"] != (1,) else None, case):
            assert_same_bits(found, expected)


def refused(rank, world_size):
    mesh = init_device_mesh("cpu", (2,))
    param = Parameter(distribute_tensor(torch.zeros(64, 192), mesh, [Shard(1)]))
    with pytest.raises(ValueError, match=r"each 64 elements of a row of \(64, 192\) share an exponent, and this rank"):
        IN_INT8[0].make([param], section())


def test_a_shard_that_cuts_what_shares_an_exponent_is_refused():
    run_ranks(refused, 2)


class Copies(TorchDispatchMode):
    """Notes the dtypes from which tensors are copied."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            self.noted.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_a_state_dict_converts_moments_and_copies_them_no_more():
    param = Parameter(torch.ones(100, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    with ADAMW.make([param], section(None)) as optimizer:
        optimizer.step()
        with Copies() as copies:
            entries = optimizer.state_dict()["state"][0]
        assert copies.noted == [torch.bfloat16] * 2
        entries["exp_avg"].zero_()
        assert optimizer.state[param]["exp_avg"].all()


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_with_moments_of_the_other_dtype_loads_by_value_and_it_is_said(tmp_path):
    sections = [{"optimizer": {"type": "AdamW", "params": {"state_dtype": dtype}}} for dtype in ("bf16", "fp32")]
    for number, (saved, own) in enumerate((sections, sections[::-1])):
        with fresh_engine("bf16", **saved) as engine:
            assert saved["optimizer"]["params"]["state_dtype"] in engine.precision_plan.to_json()
            engine.save_checkpoint(tmp_path / str(number))
        with fresh_engine("bf16", **own) as engine, pytest.warns(RuntimeWarning, match="each value is converted"):
            engine.load_checkpoint(tmp_path / str(number))
