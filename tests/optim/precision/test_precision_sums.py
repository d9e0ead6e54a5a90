"""What goes over the wire, in which dtype: seen, not believed."""

import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nvme_offload import initialize
from tests.support.precision import PIPELINES_REDUCE_ONCE
from tests.support.ranks import run_ranks

BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 1.0}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bf16"}}


class Collectives(TorchDispatchMode):
    """Notes the dtype and the number of elements of what is gathered, and of what goes into a reduction."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("send", "recv_"):  # of two ranks that gather, each sends its half
            self._note("gather", args[0][0])
        elif name in ("_allgather_base_", "_reduce_scatter_base_"):
            is_gather = name == "_allgather_base_"
            self._note("gather" if is_gather else "reduce", args[0 if is_gather else 1])
        return func(*args, **(kwargs or {}))

    def _note(self, kind, tensor):
        self.seen[kind, tensor.dtype] = self.seen.get((kind, tensor.dtype), 0) + tensor.numel()


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
        numels[is_low(name)] += -(-param.shape[0] // world_size) * world_size * param[0].numel()
    return numels[True], numels[False]


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
    """At stages 1 and 2, and at stage 3 in the first wires, each of which has another dtype or another reduction."""
    stages = [(1, 2, 3) if number < 3 else (1, 2) for number in range(len(WIRES))]
    return [{stage: collectives_of(keys, stage) for stage in of} for (keys, *_), of in zip(WIRES, stages, strict=True)]


@pytest.fixture(scope="module")
def seen(once):
    return once("sums", lambda _: run_ranks(look, 2))


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
    safe = re.compile(r"head|blocks\.\d\.[03]\." if low is not None else "(?!)")
    numels = padded_numels(lambda name: everything_low or safe.match(name) is not None, 2)
    every, waiting = {}, {}
    for numel, gather, (reduce, waits) in zip(numels, (low, FP32), kinds, strict=True):
        for wire in (every, waiting):
            add(wire, "gather", gather, numel)
        add(every, "reduce", reduce, numel)
        add(waiting, "reduce", reduce, 0 if waits else numel)
    for results in seen:
        by_stage = results[number]
        assert by_stage[2] == [every, every]
        assert by_stage[1] == [waiting, every], "what is added up as it is reduced waits for the last micro-batch"


def bytes_of(phase, kind):
    return sum(numel * dtype.itemsize for (name, dtype), numel in phase.items() if name == kind)


def test_stage_3_gathers_again_for_backward_and_bf16_reduction_moves_half_the_bytes(seen):
    for results in seen:
        for by_stage in results[:3]:
            assert bytes_of(by_stage[3][0], "gather") > bytes_of(by_stage[2][0], "gather")
            assert by_stage[3][0].keys() == by_stage[2][0].keys()
            assert bytes_of(by_stage[3][0], "reduce") == bytes_of(by_stage[2][0], "reduce")
        wires = [by_stage[2][0] for by_stage in results]
        assert bytes_of(wires[1], "reduce") * 2 == bytes_of(wires[2], "reduce") == bytes_of(wires[0], "reduce")
        assert bytes_of(wires[7], "reduce") * 2 == bytes_of(wires[6], "reduce")
        assert bytes_of(wires[1], "gather") * 2 == bytes_of(wires[0], "gather")
