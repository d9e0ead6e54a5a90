"""Where a model is trained, and what of FSDP2's own offloading goes with it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from nvme_offload import initialize, split_parameters
from nvme_offload.optim.zero.sharding import default_mesh

CONFIG = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}

pytestmark = pytest.mark.usefixtures("alone")


def model_on(device):
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))


def test_shards_that_fsdp2_offloads_itself_are_refused_before_anything_is_changed():
    mesh, model = default_mesh("cpu"), model_on("cpu")
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(ValueError, match=r"CPUOffloadPolicy.*call fully_shard without offload_policy"):
        split_parameters(model)
    assert all(type(parameter.to_local()) is torch.Tensor for parameter in model.parameters())


def test_a_model_on_meta_goes_to_the_device_that_torch_sees(late):
    with initialize(model_on("meta"), CONFIG) as engine:
        assert {parameter.device.type for parameter in engine.module.parameters()} == {"late"}
        assert engine.mesh.device_type == "late"
        values = [parameter.full_tensor().cpu() for parameter in engine.module.parameters()]
    assert all(value.isfinite().all() for value in values)


def test_a_model_on_meta_stays_on_the_cpu_of_a_host_without_devices():
    with initialize(model_on("meta"), CONFIG) as engine:
        assert engine.mesh.device_type == "cpu"


def test_ranks_with_a_device_can_gather_in_host_memory_too(late):
    """State of parameters on a device is there: a group of NCCL alone could not gather it."""
    default_mesh("late")
    assert dist.get_backend_config() == "cpu:gloo,late:gloo"
