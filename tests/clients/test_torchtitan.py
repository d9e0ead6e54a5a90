"""torchtitan's own Trainer, on two ranks, with hidden steps: shards and pipeline stages train as with torch's AdamW."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from nvme_offload import OffloadAdamW, split_parameters
from tests.support.clients import WITH_A_LINE, client
from tests.support.ranks import run_ranks
from tests.support.training import section

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("torchtitan") is None, reason="make clients installs it")]

STEPS, VOCABULARY = 4, 2048
LINE = "a subclass of `OptimizersContainer` that knows the name; `split_parameters` in it hides the steps"


def on_the_cpu():
    """Answer what torchtitan asks a GPU and a later torch for. Call it before anything else of it is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    from torchtitan.tools import utils

    memory = SimpleNamespace(total_memory=1)
    utils.device_module = SimpleNamespace(**vars(torch.cpu))
    utils.device_module.__dict__.update(
        current_device=lambda: 0,
        memory_stats=lambda device: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        get_device_name=lambda device: "CPU",
        get_device_properties=lambda device: memory,
    )
    dist.set_timeout = lambda timeout, group: None


def whole_batches(schedule):
    """Pipelines of torch 2.13 take a batch and cut it; this torchtitan hands over what is cut."""
    step = schedule.step

    def of_parts(arg_mbs=None, kwarg_mbs=(), target_mbs=None, **more):
        assert not any(kwarg_mbs)
        whole = [torch.cat(parts) for parts in zip(*arg_mbs or (), strict=True)]
        return step(*whole, target=target_mbs and torch.cat(target_mbs), **more)

    schedule.step = of_parts


class Tokens:
    def __init__(self, dp_rank, local_batch_size, seq_len, **given):
        self.number, self.shape = 1000 * dp_rank, (local_batch_size, seq_len + 1)

    def __iter__(self):
        while True:
            self.number += 1
            tokens = torch.randint(VOCABULARY, self.shape, generator=torch.Generator().manual_seed(self.number))
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]


def model():
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:  # the attention that it has otherwise has no backward on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def train(optimizer, folder, degrees):
    from torchtitan import trainer as titan
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    class Container(OptimizersContainer):
        @dataclass(kw_only=True, slots=True)
        class Config(OptimizersContainer.Config):
            """Its own, so that it is built."""

        def __init__(self, config, *, model_parts):
            for part in model_parts:
                split_parameters(part, fp32_too=True)
            super().__init__(config, model_parts=model_parts)

        @staticmethod
        def _resolve_optimizer_factory(name):
            return OffloadAdamW

    state = {}

    class Trainer(titan.Trainer):
        def init_distributed(self):
            return titan.ParallelDims.from_config(self.config.parallelism, dist.get_world_size())

        def train_step(self, data):
            super().train_step(data)
            state.update(self.optimizers.state_dict())
            self.optimizers.load_state_dict(state)

    def group(pattern, decay):
        arguments = {"lr": 1e-2, "weight_decay": decay}
        return ParamGroupConfig(pattern=pattern, optimizer_name=optimizer, optimizer_kwargs=arguments)

    container = Container if optimizer == "OffloadAdamW" else OptimizersContainer
    torch.manual_seed(0)  # the trainer takes its own from it: some have a difference by rounding of just over 1e-5
    config = titan.Trainer.Config(
        model_spec=model(),
        dump_folder=folder,
        tokenizer=SimpleNamespace(build=lambda tokenizer_path: None),
        dataloader=SimpleNamespace(build=Tokens),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        metrics=MetricsProcessor.Config(log_freq=1),
        optimizer=container.Config(
            implementation="for-loop",
            param_groups=[group("norm", 0.0), group(".*", 0.1)],
            optimizer_factory_kwargs_by_name={"OffloadAdamW": {"offload": section(folder, buffers=2)}},
        ),
        parallelism=titan.ParallelismConfig(spmd_backend="partial_dtensor", **degrees),
        training=titan.TrainingConfig(
            local_batch_size=4, seq_len=32, steps=STEPS, disable_cuda_graphs=True, mixed_precision_param="float32"
        ),
    )
    trainer = Trainer(config)
    for module in (module for part in trainer.model_parts for module in part.modules()):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo does not multiply
    if trainer.parallel_dims.pp_enabled:
        whole_batches(trainer.pp_schedule)
    logged = []
    trainer.metrics_processor.log = lambda step, mean, most, norm, **more: logged.append([float(mean), norm])
    trainer.train()
    params = {name: p.full_tensor() for part in trainer.model_parts for name, p in part.named_parameters()}
    for made in trainer.optimizers if container is Container else ():
        made.synchronize()
        assert made.stats().updates_behind == STEPS * made.stats().num_subgroups > 0
        dist.barrier()
        made.close()
    return logged, params, {name for name in state if name.startswith("state.")}


def with_both(rank, world_size, folder, degrees):
    os.environ.update(LOCAL_RANK="0")
    on_the_cpu()
    return [train(optimizer, folder, degrees) for optimizer in ("AdamW", "OffloadAdamW")]


@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param(degrees, marks=client("torchtitan", what, WITH_A_LINE, LINE), id=what)
        for what, degrees in {
            "`Trainer`: shards, parameter groups, clipping, schedule, state dicts": {"data_parallel_shard_degree": 2},
            "`Trainer`: a pipeline of two stages": {"pipeline_parallel_degree": 2},
        }.items()
    ],
)
def test_trainer(tmp_path, degrees):
    for theirs, ours in run_ranks(with_both, 2, str(tmp_path), degrees):
        torch.testing.assert_close(ours[:2], theirs[:2], rtol=0, atol=1e-5)
        assert ours[2] >= theirs[2] > set()
        assert len(ours[0]) == STEPS
