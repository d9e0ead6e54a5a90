"""What is added up in which dtype, and what goes over the wire in which dtype: both seen, not believed."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils._python_dispatch import TorchDispatchMode

from nvme_offload import OffloadConfig, initialize
from nvme_offload.optim.precision.plan import PrecisionPlan
from nvme_offload.optim.zero.sharding import PIPELINES_REDUCE_ONCE, shard_with_precision
from tests.support.ranks import run_ranks

BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 1.0}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bf16"}}

# 1 and 63 times 2^-10. A bf16 number has 8 bits, so that 1 + 2^-10 is 1 again.
NUM_SMALL, SMALL, FP32_SUM = 63, 2.0**-10, 1.0615234375
SUMS = [
    ({**BF16, "gradient_accumulation_dtype": "fp32"}, FP32_SUM),
    ({**BF16, "gradient_accumulation_dtype": "fp32", "communication_data_type": "fp32"}, FP32_SUM),
    (BF16, 1.0),
    ({**BF16, "communication_data_type": "fp32"}, 1.0),
    ({**FP16, "gradient_accumulation_dtype": "fp32"}, FP32_SUM),
    (AUTOCAST, FP32_SUM),
    ({"communication_data_type": "bf16"}, FP32_SUM),
]


class Weighted(nn.Module):
    """A Linear without bias whose gradient is its input: each of its outputs is one input times one weight."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 3, bias=False)
        nn.init.ones_(self.linear.weight)

    def forward(self, x):
        return x + self.linear(x.detach()).sum(-1, keepdim=True).to(x.dtype)


def inputs():
    return [torch.full((1, 1), value) for value in (1.0, *[SMALL] * NUM_SMALL)]


def sum_in_engine(keys, stage):
    config = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 1 + NUM_SMALL, **keys}
    with initialize(nn.Sequential(Weighted()), config) as engine:
        for micro, x in enumerate(inputs()):
            if micro:
                engine.step()
            engine.backward(engine(x).float().sum())
        grad = engine.module[0].linear.weight.grad
        return grad.dtype, (grad.full_tensor().float() * (1 + NUM_SMALL)).unique().tolist()


class Passing(nn.Module):
    """The same on the first stage of a pipeline; the second one passes on what it gets."""

    def __init__(self, is_first):
        super().__init__()
        self.weighted = Weighted()
        self.is_first = is_first

    def forward(self, x):
        return self.weighted(x) if self.is_first else x + 0 * self.weighted(x)


def sum_in_pipeline(mesh, keys, stage, schedule):
    index = mesh.get_local_rank("pp")
    module = Passing(index == 0)
    plan = PrecisionPlan.of(OffloadConfig.from_dict(keys), module)
    shard_with_precision(module, [], mesh["dp"], plan, reshard_after_forward=stage == 3)
    pipeline = PipelineStage(module, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    run = schedule(pipeline, 1 + NUM_SMALL, loss_fn=lambda out, _: out.float().sum(), scale_grads=False)
    xs = torch.cat(inputs())
    run.step(xs) if index == 0 else run.step(target=xs)
    grad = module.weighted.linear.weight.grad
    return (grad.dtype, grad.full_tensor().float().unique().tolist()) if index == 0 else None


class Collectives(TorchDispatchMode):
    """Notes the dtype and the number of elements of what is gathered, and of what goes into a reduction."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_allgather_base_", "_reduce_scatter_base_"):
            tensor = args[0] if name == "_allgather_base_" else args[1]
            kind = ("gather" if name == "_allgather_base_" else "reduce", tensor.dtype)
            self.seen[kind] = self.seen.get(kind, 0) + tensor.numel()
        return func(*args, **(kwargs or {}))


class Model(nn.Module):
    """Blocks of safe modules and others, in sizes that two ranks do not divide."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 5), nn.LayerNorm(5))
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 11)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.norm(hidden))


def padded_numels(is_low, world_size):
    """Elements on the wire of the two kinds of parameters: FSDP2 makes the first dimension divisible."""
    numels = {True: 0, False: 0}
    for name, param in Model().named_parameters():
        rows = -(-param.shape[0] // world_size) * world_size
        numels[is_low(name)] += rows * param[0].numel()
    return numels[True], numels[False]


def is_safe(name):
    return re.match(r"head|blocks\.\d\.[03]\.", name) is not None


def collectives_of(keys, stage):
    config = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 2, **keys}
    with initialize(Model(), config) as engine:
        tokens, phases = torch.arange(11), []
        for micro in range(2):
            if micro:
                engine.step()
            with Collectives() as collectives:
                engine.backward(engine(tokens).float().square().mean())
            phases.append(collectives.seen)
        return phases


KEEP = {"fp32_modules": ["LayerNorm", "embedding"]}
FP32, LOW, HALF = torch.float32, torch.bfloat16, torch.float16
WIRES = [  # section; low dtype; per kind of parameters, low ones and others, reduce dtype, and whether stage 1 waits
    ({}, None, [(None, None), (FP32, True)]),
    (BF16, LOW, [(LOW, True), (None, None)]),
    ({**BF16, "communication_data_type": "fp32"}, LOW, [(FP32, False), (None, None)]),
    ({**BF16, **KEEP}, LOW, [(LOW, True), (FP32, True)]),
    ({**FP16, **KEEP}, HALF, [(HALF, True), (FP32, True)]),
    (AUTOCAST, LOW, [(LOW, False), (FP32, True)]),
    ({**AUTOCAST, "communication_data_type": "fp32"}, LOW, [(FP32, True), (FP32, True)]),
    ({**AUTOCAST, "communication_data_type": "bf16"}, LOW, [(LOW, False), (LOW, False)]),
]


def look(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    schedules = (Schedule1F1B, ScheduleGPipe)
    return {
        "engine": [[sum_in_engine(keys, stage) for keys, _ in SUMS] for stage in (1, 2, 3)],
        "pipeline": PIPELINES_REDUCE_ONCE
        or [
            [sum_in_pipeline(mesh, keys, stage, schedule) for keys, _ in SUMS]
            for stage, schedule in zip((1, 2, 3), (*schedules, schedules[0]), strict=True)
        ],
        "wires": [{stage: collectives_of(keys, stage) for stage in (1, 2, 3)} for keys, *_ in WIRES],
    }


@pytest.fixture(scope="module")
def seen():
    return run_ranks(look, 2)


def dtype_of_sum(keys):
    given = keys.get("gradient_accumulation_dtype")
    return torch.bfloat16 if "bf16" in keys and given is None else torch.float32


REFUSED = pytest.mark.skipif(PIPELINES_REDUCE_ONCE, reason="refused by name with this torch: see the test below")


@pytest.mark.parametrize("where", ["engine", pytest.param("pipeline", marks=REFUSED)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_1_and_63_times_a_little(seen, where, stage):
    for rank, results in enumerate(seen):
        for (keys, total), result in zip(SUMS, results[where][stage - 1], strict=True):
            if where == "pipeline" and rank == 1:
                assert result is None
            else:
                assert result == (dtype_of_sum(keys), [total]), keys


@pytest.mark.skipif(not PIPELINES_REDUCE_ONCE, reason="pipelines of this torch reduce when they are told to")
def test_what_pipelines_of_this_torch_cannot_do_is_refused_by_name(alone):
    keys = {"bf16": {"enabled": True}, "gradient_accumulation_dtype": "fp32"}
    with initialize(nn.Linear(3, 3), keys) as engine:
        with pytest.raises(RuntimeError, match=r"torch 2\..*communication_data_type and gradient_accumulation_dtype"):
            engine.module.set_manual_backward_finalization(True)
        engine.module.set_manual_backward_finalization(False)


def add(wire, kind, dtype, numel):
    if numel:
        wire[kind, dtype] = wire.get((kind, dtype), 0) + numel


@pytest.mark.parametrize("number", range(len(WIRES)), ids=[str(keys) for keys, *_ in WIRES])
def test_every_collective_has_the_dtype_and_the_size_of_the_plan(seen, number):
    _, low, kinds = WIRES[number]
    everything_low = kinds[1] == (None, None)
    numels = padded_numels(lambda name: everything_low or (low is not None and is_safe(name)), 2)
    every, waiting = {}, {}
    for numel, gather, (reduce, waits) in zip(numels, (low, FP32), kinds, strict=True):
        for wire in (every, waiting):
            add(wire, "gather", gather, numel)
        add(every, "reduce", reduce, numel)
        add(waiting, "reduce", reduce, 0 if waits else numel)
    for results in seen:
        by_stage = results["wires"][number]
        assert by_stage[2] == [every, every]
        assert by_stage[1] == [waiting, every], "what is added up as it is reduced waits for the last micro-batch"


def bytes_of(phase, kind):
    return sum(numel * dtype.itemsize for (name, dtype), numel in phase.items() if name == kind)


def test_stage_3_gathers_again_for_backward_and_bf16_reduction_moves_half_the_bytes(seen):
    for results in seen:
        for by_stage in results["wires"]:
            assert bytes_of(by_stage[3][0], "gather") > bytes_of(by_stage[2][0], "gather")
            assert by_stage[3][0].keys() == by_stage[2][0].keys()
            assert bytes_of(by_stage[3][0], "reduce") == bytes_of(by_stage[2][0], "reduce")
        wires = [by_stage[2][0] for by_stage in results["wires"]]
        assert bytes_of(wires[1], "reduce") * 2 == bytes_of(wires[2], "reduce") == bytes_of(wires[0], "reduce")
        assert bytes_of(wires[7], "reduce") * 2 == bytes_of(wires[6], "reduce")
        assert bytes_of(wires[1], "gather") * 2 == bytes_of(wires[0], "gather")
