"""Training in given dtypes twice over: sharded or in a pipeline, and by a reference in one process."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.func import functional_call

from nvme_offload import OffloadAdamW, OffloadConfig, initialize
from nvme_offload.optim.precision.plan import PrecisionPlan
from nvme_offload.optim.zero.sharding import PIPELINES_REDUCE_ONCE as PIPELINES_REDUCE_ONCE
from nvme_offload.optim.zero.sharding import shard_with_precision
from tests.support import build
from tests.support.sharded_model import gathered
from tests.support.training import Twin

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HYPERPARAMETERS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
MICRO_BATCHES, STEPS, WIDTH, SCALE = 2, 2, 6, 64.0


class Half(nn.Module):
    """One of the two stages: two Linears, which autocast gathers in 16 bits, and a norm, which it does not."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 9)
        self.norm = nn.LayerNorm(9)
        self.down = nn.Linear(9, WIDTH)

    def forward(self, hidden):
        return hidden + self.down(nn.functional.gelu(self.norm(self.up(hidden)))).to(hidden.dtype)


def fresh_model():
    torch.manual_seed(0)
    return nn.Sequential(Half(), Half())


def batch(step, micro, rank):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


def loss_of(output, target):
    return (output.float() - target).square().mean()


def section(keys, stage, path=None):
    keys = {**keys, "fp16": {"loss_scale": SCALE, **keys.get("fp16", {})}}
    return build.section(path, stage=stage, accumulation=MICRO_BATCHES, adamw=HYPERPARAMETERS, **keys)


def train_engine(rank, keys, stage):
    """Losses of this rank, gradients of the first step, parameters at the end; whole ones."""
    losses = []
    with initialize(fresh_model(), section(keys, stage), blocks=[]) as engine:
        for step in range(STEPS):
            for micro in range(MICRO_BATCHES):
                inputs, target = batch(step, micro, rank)
                loss = loss_of(engine(inputs), target)
                engine.backward(loss)
                losses.append(loss.item())
                if step == 0 and micro == MICRO_BATCHES - 1:
                    grads = gathered({name: p.grad for name, p in engine.module.named_parameters()})
                engine.step()
        return losses, grads, gathered(dict(engine.module.named_parameters()))


def train_pipeline(mesh, keys, stage):
    """The same with the two halves on two stages of a pipeline, over a mesh of "pp" and "dp"; the last has losses."""
    index, rank = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    config = OffloadConfig.from_dict(section(keys, stage))
    module = fresh_model()[index]
    plan = PrecisionPlan.of(config, module)
    shard_with_precision(module, [], mesh["dp"], plan, reshard_after_forward=stage == 3)
    scale = SCALE if plan.loss_scaling else 1.0
    losses = []
    with OffloadAdamW(module.parameters(), offload=config, **config.optimizer.hyperparameters) as optimizer:
        pipeline = PipelineStage(module, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))

        def scaled_loss(output, target):
            return loss_of(output, target) * (scale / MICRO_BATCHES)

        schedule = Schedule1F1B(pipeline, MICRO_BATCHES, loss_fn=scaled_loss, scale_grads=False)
        for step in range(STEPS):
            inputs, targets = (torch.cat(part) for part in zip(*_micro_batches(step, rank), strict=True))
            if index == 0:
                schedule.step(inputs)
            else:
                seen = []
                schedule.step(target=targets, losses=seen)
                losses += [loss.item() * (MICRO_BATCHES / scale) for loss in seen]
            if step == 0:
                grads = gathered({f"{index}.{name}": p.grad for name, p in module.named_parameters()})
            optimizer.try_step(scale)
            optimizer.zero_grad()
        return losses, grads, gathered({f"{index}.{name}": p for name, p in module.named_parameters()})


def _micro_batches(step, rank):
    return [batch(step, micro, rank) for micro in range(MICRO_BATCHES)]


def reference_of(combination, *, waits, world_size):
    """What a combination means, without asking the plan."""
    autocast = DTYPES[combination.mode.split("-")[1]] if "-" in combination.mode else None
    compute = torch.float32 if autocast else DTYPES.get(combination.mode, torch.float32)
    low = autocast or compute
    reduce = DTYPES[combination.communication] if combination.communication else low
    rest = DTYPES[combination.communication] if combination.communication else compute
    accumulate = DTYPES[combination.accumulation] if combination.accumulation else compute
    return Reference(
        compute=compute,
        autocast=autocast,
        reduce=reduce,
        reduce_rest=rest,
        accumulate=accumulate,
        once=waits and reduce == accumulate,
        once_rest=waits and rest == accumulate,
        scaled="fp16" in combination.mode,
        world_size=world_size,
    )


def plan_and_meaning(combination):
    """The dtypes that it gives each parameter, and what it means without asking the plan; both as text."""
    plan = PrecisionPlan.of(OffloadConfig.from_dict(combination.section), fresh_model())
    meant = reference_of(combination, waits=False, world_size=1)
    return str(plan.parameters), str((meant.compute, meant.autocast, meant.reduce, meant.accumulate))


class Reference:
    """One process, plain PyTorch: fp32 masters, updated by the rule's twin, with the casts written out.

    Args:
        compute: dtype of forward and backward.
        autocast: dtype of autocast, or None.
        reduce, accumulate: dtypes of parameters that are 16-bit, under autocast of those in a Linear.
        reduce_rest: of the others.
        once: gradients are added up before they are reduced, in the reduce dtype.
        world_size: data-parallel ranks.
    """

    def __init__(self, *, compute, autocast, reduce, reduce_rest, accumulate, once, once_rest, scaled, world_size):
        self.model = fresh_model()
        self.compute, self.autocast, self.world_size = compute, autocast, world_size
        self.reduce = {name: reduce_rest if autocast and "norm" in name else reduce for name in self._params()}
        self.once = {name: once_rest if autocast and "norm" in name else once for name in self._params()}
        self.accumulate = accumulate
        self.scale = SCALE if scaled else 1.0
        self.twin = Twin(list(self.model.parameters()), HYPERPARAMETERS)

    def train(self):
        losses = [[] for _ in range(self.world_size)]
        for step in range(STEPS):
            micro_grads = []
            for micro in range(MICRO_BATCHES):
                of_ranks = [self._backward(*batch(step, micro, rank)) for rank in range(self.world_size)]
                for rank, (loss, _) in enumerate(of_ranks):
                    losses[rank].append(loss)
                micro_grads.append([grads for _, grads in of_ranks])
            total = {name: self._accumulated(name, micro_grads) for name in self._params()}
            if step == 0:
                first = total
            for name, param in self._params().items():
                param.grad = total[name].float() / self.scale
            self._update()
        return losses, first, {name: param.detach().clone() for name, param in self._params().items()}

    def _update(self):
        params = list(self._params().values())
        self.twin.step([param.grad for param in params])
        with torch.no_grad():
            for param, master in zip(params, self.twin.masters, strict=True):
                param.copy_(torch.from_numpy(master).view(param.shape))

    def _params(self):
        return dict(self.model.named_parameters())

    def _backward(self, inputs, target):
        leaves = {name: rounded(p.detach(), self.compute).requires_grad_() for name, p in self._params().items()}
        with torch.autocast("cpu", self.autocast) if self.autocast else nullcontext():
            loss = loss_of(functional_call(self.model, leaves, inputs.to(self.compute)), target)
        grads = torch.autograd.grad(loss * (self.scale / MICRO_BATCHES), list(leaves.values()))
        return loss.item(), dict(zip(leaves, grads, strict=True))

    def _accumulated(self, name, micro_grads):
        reduce = self.reduce[name]
        if self.once[name]:
            of_ranks = [sum_in(reduce, [grads[rank][name] for grads in micro_grads]) for rank in range(self.world_size)]
            return self._reduced(of_ranks, reduce).to(self.accumulate)
        parts = [self._reduced([grads[name].to(reduce) for grads in of_ranks], reduce) for of_ranks in micro_grads]
        total = parts[0].to(self.accumulate)
        for part in parts[1:]:
            total = (total.float() + part.float()).to(self.accumulate)
        return total

    def _reduced(self, of_ranks, dtype):
        return sum_in(dtype, [grad / self.world_size for grad in of_ranks])


def sum_in(dtype, tensors):
    total = tensors[0].to(dtype)
    for tensor in tensors[1:]:
        total = total + tensor.to(dtype)
    return total


def rounded(values, dtype):
    """To `dtype`; to bf16 with ties away from zero, as upper halves are."""
    if dtype is not torch.bfloat16:
        return values.to(dtype).clone()
    return ((values.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
